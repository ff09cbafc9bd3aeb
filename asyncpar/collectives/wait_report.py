"""Reports of waits: how long an operation has waited, for which rank, and what that rank does; and where this rank is.

Sentences only.  Which rank holds an operation up is found by ``inquiry.py``.
"""

from __future__ import annotations

from typing import Final

from asyncpar.collectives.inquiry import Culprit
from asyncpar.collectives.ledger import GroupLedger
from asyncpar.collectives.operation import Group, Operation
from asyncpar.core.observe.waits import WaitNotice, describe_cycle, describe_way, find_cycle, follow_waits

_IN_IT_TOO: Final = "in that operation too"
_NOWHERE: Final = ("in no operation", "in that operation")
"""Beginnings of answers from ranks that are in no other operation."""


def describe_wait(operation: Operation, now: float) -> str:
    """Describe how long ``operation`` has waited, for which rank, and what is known of that rank."""
    me = f"rank {operation.context.links.rank}: {operation.label}"
    waited = f"{now - operation.progress_at:.1f} s"
    ranks = operation.waits_for()
    if not ranks:
        return f"{me} waited {waited} for any rank" if operation.waiter is not None else f"{me} was not waiting"
    answer = operation.answers.get(ranks[0])
    known = "not heard of since" if answer is None else f"last heard {now - answer.at:.1f} s ago, {answer.text}"
    behind = _describe_culprit(operation, operation.find_culprit(now), ranks[0])
    return f"{me} waited {waited} for rank {ranks[0]} ({known}{_describe_flow(operation, now)}){behind}"


def notice_wait(operation: Operation, now: float) -> WaitNotice:
    """Return the notice that reports the wait of ``operation``."""
    links, culprit = operation.context.links, operation.find_culprit(now)
    ranks = operation.waits_for()
    rank = culprit.rank if culprit is not None else ranks[0] if ranks else None
    group = operation.home.name
    return WaitNotice(
        operation=operation.label if group == "world" else f"{operation.label} of group {group}",
        seconds=now - operation.progress_at,
        site=operation.site,
        culprit=rank,
        host="" if rank is None else links.world.members[rank].host,
        where="" if rank is None else _describe_program(operation, rank, culprit),
        cycle=_describe_deadlock(operation),
    )


def describe_whereabouts(operation: Operation) -> str:
    """Describe where this rank is, for a rank that waits for it in ``operation``, which has been called here."""
    if not operation.has_started:
        return "it has called that operation, but does not await it yet"
    ranks = operation.waits_for()
    return _IN_IT_TOO + (f", waiting for rank {ranks[0]}{_answer_of(operation, ranks[0])}" if ranks else "")


def describe_elsewhere(group: Group | None, here: Operation | None) -> str:
    """Describe where this rank is, for a rank that waits for it in an operation of ``group`` not called here.

    ``group`` is None if there is no such group here; ``here`` is the operation that this rank awaits, if any.
    """
    unknown = ", and has made no such group" if group is None else ""
    if here is not None:
        place = "" if here.home is group else f" of group {here.home.name}"
        ranks = here.waits_for() if here.home is not group else []
        awaited = f", waiting for rank {ranks[0]}" if ranks else ""
        called = f" (called at {here.site})" if here.site else ""
        is_message = here.label.startswith((f"{here.name} from ", f"{here.name} to "))
        what = here.label if is_message else f"op {here.label.partition(' ')[2]} ({here.name})"
        return f"in {what}{place}{awaited}{unknown}{called}"
    done = group.ledger.last if group is not None and isinstance(group.ledger, GroupLedger) else 0
    return (f"in no operation, after op #{done}" if done else "in no operation") + unknown


def _answer_of(operation: Operation, rank: int) -> str:
    """Describe what ``rank`` does instead of ``operation``, or what it knows of the rank that it waits for."""
    answer = operation.answers.get(rank)
    if answer is None:
        return ""
    if not answer.text.startswith(_IN_IT_TOO):
        return f"; rank {rank} is {answer.text}"
    _, semicolon, more = answer.text.partition("; ")
    return semicolon + more


def _describe_culprit(operation: Operation, culprit: Culprit | None, awaited: int) -> str:
    """Describe the cause of the wait, in addition to the description of rank ``awaited``."""
    rank = awaited if culprit is None else culprit.rank
    does = _describe_program(operation, rank, culprit)
    deadlock = _describe_deadlock(operation)
    text = ""
    if culprit is not None and rank != awaited:
        way = follow_waits(operation.known_waits(), awaited)
        ends = [place for place, wait in enumerate(way, 1) if wait.awaited == rank]
        path = f" ({describe_way(way[: ends[0]])})" if ends and ends[0] > 1 else ""
        text = f"; behind it is rank {rank}{path}: {culprit.describe()}"
    answer = operation.answers.get(awaited)
    is_repeated = rank == awaited and answer is not None and does.removeprefix("is ") == answer.text
    is_silent = culprit is not None and culprit.silent_for is not None and rank not in _conditions_of(operation)
    if does and does not in text and not is_repeated and not is_silent:
        text += f"; rank {rank} {does}"
    return f"{text}; {deadlock}" if deadlock else text


def _describe_program(operation: Operation, rank: int, culprit: Culprit | None) -> str:
    """Describe the program of ``rank``, as in ``is in user code at train.py:57``, as far as it is known."""
    conditions = _conditions_of(operation)
    if rank in conditions:
        return conditions[rank]
    if culprit is not None and culprit.silent_for is not None:
        return f"has not answered for {culprit.silent_for:.1f} s"
    answer = operation.answers.get(rank)
    if answer is not None and answer.text.startswith("in ") and not answer.text.startswith(_NOWHERE):
        return f"is {answer.text}"
    return culprit.where if culprit is not None else ""


def _conditions_of(operation: Operation) -> dict[int, str]:
    return operation.context.links.observer.conditions


def _describe_deadlock(operation: Operation) -> str:
    """Describe the cycle of waits that ``operation`` is part of, "" if none is known."""
    cycle = find_cycle(operation.known_waits().values(), operation.context.links.rank)
    return describe_cycle(cycle) if cycle else ""


def _describe_flow(operation: Operation, now: float) -> str:
    """Describe how many bytes have moved; "" if there are none to move."""
    if not operation.posts and not operation.sendings:
        return ""
    due, sent = operation.payload_posted, operation.payload_sent
    came, went = due - sum(operation.missing_bytes().values()), sent - sum(operation.unsent_bytes().values())
    seconds = max(now - operation.started_at, 1e-3)
    rate = (came + went) / seconds / 1e6
    return f"; {came} of {due} bytes came and {went} of {sent} went in {seconds:.1f} s, {rate:.3g} MB/s"
