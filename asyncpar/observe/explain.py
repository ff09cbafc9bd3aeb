"""Explanation of a hang, from the images of all ranks: the rank that holds the job up, and the reason.  Pure.

Theory of operation.  Ranks that call different operations at one place of a group are found first: they explain
everything after them.  Otherwise each rank that waits points at the ranks that its operation, message or call needs and
that have not done their part; from there the pointers are followed to a rank that waits for no other.  The reason why
that one does nothing comes from its agent (dead, stopped), from its ring (the loop is blocked) or from its stack (it
sleeps).  Pointers that form a cycle are a deadlock, of calls or of the order of operations; and where all ranks are in
the operation, and one waits for a message that the other has sent, the link between them is at fault.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from asyncpar.core.observe.records import UNBOUND, EventKind, EventState
from asyncpar.core.observe.waits import CONDITION_WORDS
from asyncpar.observe.image import Event, RankImage

_NEARBY: Final = 16
"""Distance, in operations, of the search for another rank's operation that was called in another order."""

_MESSAGES: Final = (EventKind.SEND, EventKind.RECEIVE)
_WAITS: Final = (EventKind.COLLECTIVE, *_MESSAGES, EventKind.ASK)


class HangCause(StrEnum):
    """Reason why a rank holds the others up."""

    ABSENT = "absent"
    OTHER_OPERATION = "other operation"
    SHAPE = "shape"
    DTYPE = "dtype"
    ROOT = "root"
    REDUCTION = "other arguments"
    ORDER = "order"
    SLEEPING = "sleeping"
    BLOCKED = "blocked loop"
    STOPPED = "stopped"
    DEAD = "dead"
    CYCLE = "cycle of calls"
    LINK = "half of a link"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts about a rank from outside of its ring.

    ``condition`` is ``well``, ``stopped``, ``hung`` (no Python code runs), ``busy`` (but it computes),
    ``uninterruptible`` (in the kernel) or ``ended``, with ``detail``; ``doing`` describes its program, in the words of
    the job's status (``sleeps at train.py:57``), as far as it is known.
    """

    condition: str = "well"
    detail: str = ""
    doing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """The ``culprits`` hold up the ranks ``waiting``, because of ``cause``; ``text`` describes it."""

    cause: HangCause
    culprits: tuple[int, ...]
    text: str
    waiting: tuple[int, ...] = ()
    operation: str = ""


class _RankWait(NamedTuple):
    """The event in which a rank waits, and the awaited ranks; ``is_in_it``: these are in the same operation."""

    event: Event
    ranks: tuple[int, ...]
    is_in_it: bool = False


@dataclass
class _Evidence:
    images: Mapping[int, RankImage]
    facts: Mapping[int, RankFacts]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = [image.identity.size for image in self.images.values()]
        self.size = max([*sizes, *(rank + 1 for rank in (*self.images, *self.facts))], default=0)

    def condition(self, rank: int) -> str:
        known = self.facts.get(rank)
        if known is None:
            return "well" if rank in self.images else "ended"
        return known.condition

    def members(self, group: int) -> tuple[int, ...]:
        for image in self.images.values():
            if group in image.groups:
                return image.groups[group].ranks
        return ()

    def group_name(self, group: int) -> str:
        names = (image.groups[group].name for image in self.images.values() if group in image.groups)
        return next(names, f"{group:#x}")

    def is_past(self, rank: int, event: Event) -> bool:
        """Return whether ``rank`` has called the operation of ``event``, or a later one of the group."""
        image = self.images.get(rank)
        if image is None:
            return False
        if image.find(event.group, event.sequence) is not None:
            return True
        last = [other.sequence for other in image.operations if other.group == event.group and not other.is_keyed]
        return not event.is_keyed and max(last, default=0) >= event.sequence


def explain(images: Mapping[int, RankImage], facts: Mapping[int, RankFacts] | None = None) -> list[HangFinding]:
    """Return the causes of the hold-up, most likely first; none for a job that makes progress.

    ``images`` are by rank; a missing rank is assumed dead.
    """
    evidence = _Evidence(images, facts or {})
    found = _mismatches(evidence)
    return found or _chains(evidence)


# -- different operations at one place -----------------------------------------------------------------------------


def _mismatches(evidence: _Evidence) -> list[HangFinding]:
    """Return the first place of each group at which ranks call different operations."""
    places: dict[tuple[int, int], dict[int, Event]] = defaultdict(dict)
    for rank, image in evidence.images.items():
        for event in image.operations:
            if event.kind is EventKind.COLLECTIVE and event.fingerprint:
                places[event.group, event.sequence][rank] = event
    first: dict[int, tuple[float, dict[int, Event]]] = {}
    for (group, _), calls in places.items():
        if len({event.fingerprint for event in calls.values()}) > 1:
            at = max(event.created for event in calls.values())
            if group not in first or at < first[group][0]:
                first[group] = at, calls
    return [_mismatch(evidence, calls) for _, calls in sorted(first.values(), key=lambda found: found[0])]


def _mismatch(evidence: _Evidence, calls: dict[int, Event]) -> HangFinding:
    counts = Counter(event.fingerprint for event in calls.values())
    usual = max(counts, key=lambda known: (counts[known], -min(r for r in calls if calls[r].fingerprint == known)))
    culprits = tuple(sorted(rank for rank, event in calls.items() if event.fingerprint != usual))
    others = tuple(sorted(set(calls) - set(culprits)))
    odd, normal = calls[culprits[0]], calls[others[0]]
    cause = _difference(odd, normal)
    if _is_swapped(evidence.images[culprits[0]], evidence.images[others[0]], odd, normal):
        cause = HangCause.ORDER
    return HangFinding(
        cause=cause,
        culprits=culprits,
        waiting=others,
        operation=normal.label,
        text=f"{_ranks(culprits)} {_verb(culprits, 'call')} {_call(odd)} where {_ranks(others)} "
        f"{_verb(others, 'call')} {_call(normal)} (group {evidence.group_name(normal.group)}, {_place(normal)})"
        + (": the same operations in another order" if cause is HangCause.ORDER else f": {cause}"),
    )


def _difference(odd: Event, normal: Event) -> HangCause:
    if odd.name != normal.name:
        return HangCause.OTHER_OPERATION
    if odd.root != normal.root:
        return HangCause.ROOT
    if [dtype for dtype, _ in odd.arrays] != [dtype for dtype, _ in normal.arrays]:
        return HangCause.DTYPE
    return HangCause.SHAPE if odd.arrays != normal.arrays else HangCause.REDUCTION


def _is_swapped(one: RankImage, other: RankImage, odd: Event, normal: Event) -> bool:
    """Return whether each rank has the operation of the other, too, at another place nearby."""
    return _has_nearby(one, odd, normal.fingerprint) and _has_nearby(other, normal, odd.fingerprint)


def _has_nearby(image: RankImage, event: Event, fingerprint: int) -> bool:
    return any(
        known.group == event.group
        and known.fingerprint == fingerprint
        and event.sequence < known.sequence <= event.sequence + _NEARBY
        for known in image.operations
    )


# -- chains of waits ------------------------------------------------------------------------------------------------


def _chains(evidence: _Evidence) -> list[HangFinding]:
    """Follow the waits of all ranks to those that hold them up."""
    waits = {rank: wait for rank in evidence.images if (wait := _wait_of(evidence, rank)) is not None}
    ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(waits):
        ends[_follow(evidence, waits, rank)].append(rank)
    found = [_finding(evidence, waits, end, waiting) for end, waiting in ends.items() if end]
    return sorted(found, key=lambda finding: -len(finding.waiting))


def _is_root(evidence: _Evidence, rank: int) -> bool:
    """Return whether ``rank`` does nothing, whatever it waits for."""
    image = evidence.images.get(rank)
    return evidence.condition(rank) != "well" or image is None or _blocked(image) is not None


def _blocked(image: RankImage) -> Event | None:
    return next((event for event in image.pending if event.kind is EventKind.BLOCKED), None)


def _wait_of(evidence: _Evidence, rank: int) -> _RankWait | None:
    """Return the wait of ``rank`` that cannot go on: the oldest such event."""
    if _is_root(evidence, rank):
        return None
    for event in evidence.images[rank].pending:
        if event.kind in _WAITS:
            wait = _needs(evidence, rank, event)
            if wait.ranks:
                return wait
    return None


def _needs(evidence: _Evidence, rank: int, event: Event) -> _RankWait:
    peers: tuple[int, ...] = () if event.peer is None else (event.peer,)
    if event.kind is EventKind.ASK:
        return _RankWait(event, () if peers == (rank,) and _is_handled(evidence, rank, event) else peers)
    if event.kind in _MESSAGES:
        return _RankWait(event, peers, bool(peers) and _has_met(evidence, event, peers[0]))
    absent = tuple(peer for peer in evidence.members(event.group) if not evidence.is_past(peer, event))
    if absent:
        return _RankWait(event, tuple(sorted(absent, key=lambda peer: (peer not in peers, peer))))
    return _RankWait(event, peers, is_in_it=True)


def _is_handled(evidence: _Evidence, rank: int, event: Event) -> bool:
    """Return whether an endpoint of ``rank`` runs for the call, so that the endpoint's own wait counts."""
    return any(
        known.kind is EventKind.HANDLE and (known.group, known.sequence) == (event.group, event.sequence)
        for known in evidence.images[rank].pending
    )


def _has_met(evidence: _Evidence, event: Event, peer: int) -> bool:
    """Return whether ``peer`` has done its part of a message: sent it, or posted its receive."""
    image = evidence.images.get(peer)
    if image is None:
        return False
    wanted = EventKind.RECEIVE if event.kind is EventKind.SEND else EventKind.SEND
    theirs = [known for known in image.operations if known.kind is wanted and known.group == event.group]
    if event.sequence != UNBOUND:
        return any(known.sequence in (UNBOUND, event.sequence) for known in theirs)
    mine = max((known.sequence for known in _past(evidence, event) if known.sequence != UNBOUND), default=-1)
    return any(known.sequence > mine for known in theirs)


def _past(evidence: _Evidence, event: Event) -> Iterable[Event]:
    for image in evidence.images.values():
        if event in image.operations:
            return [known for known in image.operations if known.group == event.group and known.kind is event.kind]
    return []


def _follow(evidence: _Evidence, waits: Mapping[int, _RankWait], rank: int) -> tuple[int, ...]:
    """Return the rank at the end of the waits that begin at ``rank``, or the ranks of the cycle in which they end."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        if rank not in waits:
            return (rank,)
        wait = waits[rank]
        if wait.is_in_it and wait.ranks[0] not in waits:
            return (rank, wait.ranks[0])  # the other one has done its part
        roots = [peer for peer in wait.ranks if _is_root(evidence, peer)]
        rank = (roots or [peer for peer in wait.ranks if peer not in waits] or list(wait.ranks))[0]
    circle = path[path.index(rank) :]
    return tuple(sorted(circle)) if len(circle) > 1 or rank in waits[rank].ranks else ()


def _finding(
    evidence: _Evidence, waits: Mapping[int, _RankWait], end: tuple[int, ...], waiting: Sequence[int]
) -> HangFinding:
    held = tuple(rank for rank in waiting if rank not in end) or tuple(waiting)
    operation = waits[held[0]].event.label
    if len(end) > 1 or end[0] in waits:
        cause, text = _circle(waits, end)
        if cause is HangCause.ORDER:
            end = _fewest(waits) or end
            held = tuple(rank for rank in waiting if rank not in end)
    else:
        cause, text = _idle(evidence, waits, end[0], held)
    return HangFinding(cause=cause, culprits=end, waiting=held, operation=operation, text=text)


def _is_receive(wait: _RankWait) -> bool:
    return wait.event.kind is EventKind.RECEIVE


def _fewest(waits: Mapping[int, _RankWait]) -> tuple[int, ...]:
    """Return the ranks that wait in the operation with the fewest waiting ranks; none if there is a tie."""
    ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        ranks[wait.event.group, wait.event.sequence].append(rank)
    few, *more = sorted(ranks.values(), key=len)
    return () if more and len(more[0]) == len(few) else tuple(sorted(few))


def _circle(waits: Mapping[int, _RankWait], end: tuple[int, ...]) -> tuple[HangCause, str]:
    inside = [waits[rank] for rank in end if rank in waits]
    words = "; ".join(f"rank {rank} {_waiting(waits[rank])}" for rank in end if rank in waits)
    if all(wait.is_in_it for wait in inside):
        inward = [(waits[rank].ranks[0], rank) for rank in end if rank in waits and _is_receive(waits[rank])]
        link = f"from rank {inward[0][0]} to rank {inward[0][1]}" if inward else f"between {_ranks(end)}"
        return HangCause.LINK, f"the link {link}: {words}, and that has done its part"
    if any(wait.event.kind is EventKind.ASK for wait in inside):
        return HangCause.CYCLE, f"{_ranks(end)} wait for each other: {words}"
    return HangCause.ORDER, f"{_ranks(end)} wait for each other, as they call in different orders: {words}"


def _idle(
    evidence: _Evidence, waits: Mapping[int, _RankWait], rank: int, waiting: Sequence[int]
) -> tuple[HangCause, str]:
    facts = evidence.facts.get(rank, RankFacts())
    image = evidence.images.get(rank)
    what = f"{_ranks(waiting)} {_verb(waiting, 'wait')} for rank {rank} in {_call(waits[waiting[0]].event)}"
    condition = evidence.condition(rank)
    blocked = None if image is None else _blocked(image)
    detail = f": {facts.detail}" if facts.detail else ""
    doing = facts.doing.strip()
    if condition == "ended":
        return HangCause.DEAD, f"{what}; it has ended{detail}"
    if words := CONDITION_WORDS.get(condition):
        cause = HangCause.STOPPED if condition == "stopped" else HangCause.BLOCKED
        return cause, f"{what}; it {doing or words}{detail}"
    if blocked is not None:
        by = blocked.text.removeprefix("by=") or blocked.name
        how = doing if doing.startswith("blocks") else f"blocks its event loop by {by}{_at(blocked)}"
        return HangCause.BLOCKED, f"{what}; it {how}"
    if "sleep" in doing:
        return HangCause.SLEEPING, f"{what}; it {doing}"
    seen = _whereabouts(image)
    return HangCause.ABSENT, f"{what}; it {seen}" + (f", and {doing}" if doing and doing not in seen else "")


def _whereabouts(image: RankImage | None) -> str:
    if image is None:
        return "has left no image"
    pending = [event for event in image.pending if event.kind not in (EventKind.BLOCKED, EventKind.HANDLE)]
    if pending:
        state = "has called, but does not await," if pending[-1].state is EventState.CALLED else "is in"
        return f"{state} {pending[-1].label}{_at(pending[-1])}"
    last = image.operations[-1] if image.operations else None
    return "has called nothing so far" if last is None else f"has called nothing since {last.label}{_at(last)}"


# -- descriptions ---------------------------------------------------------------------------------------------------


def _call(event: Event) -> str:
    return f"{event.text or event.label}{_at(event)}"


def _at(event: Event) -> str:
    return "" if event.site is None else f" at {event.site}"


def _place(event: Event) -> str:
    return "a keyed operation" if event.is_keyed else f"operation #{event.sequence}"


def _waiting(wait: _RankWait) -> str:
    return f"waits in {_call(wait.event)} for rank {wait.ranks[0]}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
