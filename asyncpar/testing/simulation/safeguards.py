"""Remove safeguards, in simulations only, to show that a missing one would be found.

Production code has no switches for this.  Each safeguard is one row of ``SAFEGUARDS``: its purpose, and the functions
that are replaced, with their replacements, while ``without(name)`` lasts.  Interchangeable places are replaced
together.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from asyncpar.collectives.fault_tolerance.machine import SurvivorAgreement
from asyncpar.collectives.operation import Group
from asyncpar.collectives.revocation import Revocation
from asyncpar.collectives.table import OperationTable
from asyncpar.elasticity import commit_lease, placement
from asyncpar.elasticity import state as states
from asyncpar.elasticity.buffers import KeptArray, SwappedArray
from asyncpar.elasticity.job_worlds import JobWorlds
from asyncpar.elasticity.parts import StateParts
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.step_machine import Vote
from asyncpar.errors import UsageError
from asyncpar.hosts import director, lineage, next_world
from asyncpar.hosts.lineage import Lineage, MemberReport
from asyncpar.net.arena.segment import Segment
from asyncpar.net.transport.link import Link
from asyncpar.net.transport.machine import Answer, Defer, Negotiator, Proposal
from asyncpar.net.transport.messages import MessageInbox
from asyncpar.net.wire.frame import FrameHeader, FrameKind, FrameVerifier, Key
from asyncpar.testing.simulation import connector
from asyncpar.testing.simulation.process import CURRENT
from asyncpar.testing.simulation.result import REMOVED

_LONG: Final = 1e6
"""Seconds."""

Patch = tuple[object, str, Any]
"""A module or class, the name of one of its functions, and its replacement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Safeguard:
    """A safeguard: the failure that it prevents, and the patch that removes it."""

    prevents: str
    patches: Callable[[], tuple[Patch, ...]]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Remove the safeguards of these ``names`` within the block.  Raises ``UsageError`` for unknown names."""
    with ExitStack() as stack:
        for name in names:
            if name not in SAFEGUARDS:
                raise UsageError(f"without: expected some of {', '.join(SAFEGUARDS)}, got {name!r}")
            for place, attribute, replacement in SAFEGUARDS[name].patches():
                stack.callback(setattr, place, attribute, inspect.getattr_static(place, attribute))
                setattr(place, attribute, replacement)
        token = REMOVED.set((*REMOVED.get(), *names))
        try:
            yield
        finally:
            REMOVED.reset(token)


# -- frames ------------------------------------------------------------------------------------------------------------


def _any_generation() -> tuple[Patch, ...]:
    lend, accept, answer = Link.lend, Link.accept, Negotiator.answer

    def lend_any(link: Link, header: FrameHeader) -> memoryview | None:
        return lend(link, header._replace(generation=link._generation))

    def accept_any(link: Link, header: FrameHeader, payload: memoryview) -> bool:
        return accept(link, header._replace(generation=link._generation), payload)

    def answer_any(negotiator: Negotiator, proposal: Proposal, **rest: Any) -> Answer:
        return answer(negotiator, replace(proposal, generation=negotiator._generation), **rest)

    return (
        (Link, "lend", lend_any),
        (Link, "accept", accept_any),
        (Negotiator, "answer", answer_any),
        (connector, "own_terms", lambda _proposal, agreed: agreed),
    )


def _any_number() -> tuple[Patch, ...]:
    check = FrameVerifier.check_header

    def check_any(verifier: FrameVerifier, data: memoryview, offset: int) -> None:
        verifier._number = int.from_bytes(data[offset + 40 : offset + 44], "little")
        check(verifier, data, offset)

    def accept_any(inbox: MessageInbox, header: FrameHeader, payload: memoryview) -> bool:
        inbox._admit_eager(header)
        inbox._next = max(inbox._next, header.sequence + 1)
        inbox.deliver(memoryview(bytearray(payload)), partial(inbox._release, header))
        return True

    return (FrameVerifier, "check_header", check_any), (MessageInbox, "accept", accept_any)


def _unchecked_payload() -> tuple[Patch, ...]:
    return ((FrameVerifier, "check_payload", lambda _verifier, _data, _offset: None),)


def _unchecked_header() -> tuple[Patch, ...]:
    def check(verifier: FrameVerifier, data: memoryview, offset: int) -> None:
        verifier.begin_payload(int.from_bytes(data[offset + 44 : offset + 48], "little"))

    return ((FrameVerifier, "check_header", check),)


def _without_frames(*kinds: FrameKind) -> tuple[Patch, ...]:
    control = Link.control

    def send(link: Link, kind: FrameKind, key: Key, payload: bytes = b"") -> None:
        if kind not in kinds:
            control(link, kind, key, payload)

    return ((Link, "control", send),)


def _both_dials() -> tuple[Patch, ...]:
    answer = Negotiator.answer

    def accept_both(negotiator: Negotiator, proposal: Proposal, **rest: Any) -> Answer:
        dialing, negotiator._dialing = negotiator._dialing, set()
        try:
            return answer(negotiator, proposal, **rest)
        finally:
            negotiator._dialing = dialing

    return ((Negotiator, "answer", accept_both),)


def _always_defer() -> tuple[Patch, ...]:
    answer = Negotiator.answer

    def defer_both(negotiator: Negotiator, proposal: Proposal, **rest: Any) -> Answer:
        if proposal.dialer in negotiator._dialing:
            return Defer()
        return answer(negotiator, proposal, **rest)

    return ((Negotiator, "answer", defer_both),)


def _patient_dials() -> tuple[Patch, ...]:
    return ((connector, "LINK_UP_SECONDS", _LONG), (connector, "REACH_SECONDS", _LONG))


# -- shared memory -----------------------------------------------------------------------------------------------------


def _segments_stay() -> tuple[Patch, ...]:
    create = Segment.create
    kept: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int | None, Segment]] = WeakKeyDictionary()

    def create_once(*, control_bytes: int, heap_bytes: int, nonce: bytes) -> Segment:
        process = CURRENT.get()
        segments = kept.setdefault(asyncio.get_running_loop(), {})
        node = None if process is None else process.node
        before = segments.get(node)
        if before is None or before._descriptor < 0:
            found = create(control_bytes=control_bytes, heap_bytes=heap_bytes, nonce=nonce)
        else:
            sizes = {"control_bytes": before.control_bytes, "heap_bytes": before.heap_bytes}
            found = Segment(os.dup(before._descriptor), **sizes, is_owner=True)
        segments[node] = found
        return found

    return ((Segment, "create", create_once),)


# -- groups without the lost -------------------------------------------------------------------------------------------


def _child_groups_stay() -> tuple[Patch, ...]:
    end = OperationTable._end

    def end_this(table: OperationTable, group: Group, revocation: Revocation) -> None:
        if group.number == revocation.number:
            end(table, group, revocation)

    return ((OperationTable, "_end", end_this),)


def _own_proposal() -> tuple[Patch, ...]:
    choose = SurvivorAgreement._choose

    def choose_own(machine: SurvivorAgreement, others: list[int]) -> Any:
        machine._inherited = machine._accepted = None
        for rank, given in machine._contributions.items():
            machine._contributions[rank] = replace(given, accepted=None)
        return choose(machine, others)

    return ((SurvivorAgreement, "_choose", choose_own),)


# -- elastic worlds ----------------------------------------------------------------------------------------------------


def _stays_arrived() -> tuple[Patch, ...]:
    async def withdraw(_source: PipeWorlds) -> None:
        pass

    return ((PipeWorlds, "withdraw", withdraw),)


def _any_lineage() -> tuple[Patch, ...]:
    async def is_caught_up(_job: object, _membership: object) -> bool:
        return True

    return (
        (next_world, "is_caught_up", lambda _held, _lineage: True),
        (JobWorlds, "is_caught_up", is_caught_up),
    )


def _most_popular() -> tuple[Patch, ...]:
    def popular(reports: Sequence[MemberReport]) -> Lineage:
        return Counter(report.lineage for report in reports).most_common(1)[0][0]

    def agreed(reports: Mapping[str, MemberReport]) -> Lineage:
        return popular([*reports.values()])

    def target(reports: Sequence[MemberReport]) -> int:
        return popular(reports).step

    return (
        (next_world, "target_step", target),
        (director, "agreed_lineage", agreed),
    )


def _commit_unasked() -> tuple[Patch, ...]:
    async def hold(_lease: commit_lease.CommitLease) -> None:
        pass

    return ((commit_lease.CommitLease, "hold", hold),)


def _quarrels_last() -> tuple[Patch, ...]:
    return ((next_world.Unreachability, "member_to_evict", lambda _unreachability, _world: None),)


# -- elastic steps -----------------------------------------------------------------------------------------------------


def _commit_alone() -> tuple[Patch, ...]:
    async def vote(step: ElasticStep) -> Vote:
        return Vote(agrees=True, is_pending=step._job.has_pending)

    return ((ElasticStep, "_vote_with_all", vote),)


def _never_forward() -> tuple[Patch, ...]:
    def target(reports: Any) -> int:
        return int(max(report.lineage.step for report in reports))

    return (lineage, "target_step", target), (next_world, "target_step", target)


def _always_forward() -> tuple[Patch, ...]:
    def target(reports: Any) -> int:
        prepared = [report.prepared.step for report in reports if report.prepared is not None]
        return int(max([report.lineage.step for report in reports] + prepared))

    return (
        (lineage, "target_step", target),
        (next_world, "target_step", target),
        (next_world, "is_sound", lambda _: True),
    )


def _step_number_alone() -> tuple[Patch, ...]:
    return (
        (Lineage, "word", property(lambda lineage: lineage.step)),
        (Lineage, "__eq__", lambda lineage, other: isinstance(other, Lineage) and lineage.step == other.step),
        (Lineage, "__hash__", lambda lineage: lineage.step),
    )


def _deaf_to_revoke() -> tuple[Patch, ...]:
    return ((JobWorlds, "on_revoked", lambda _worlds, _generation, _why: None),)


def _values_stay() -> tuple[Patch, ...]:
    async def abort(state: states.ElasticState) -> None:
        state._prepared = None
        states._abort_all(state._arrays.values())

    return ((states.ElasticState, "abort", abort),)


def _arrays_stay() -> tuple[Patch, ...]:
    return ((states, "_abort_all", lambda _arrays: None),)


def _lent_is_written() -> tuple[Patch, ...]:
    return tuple((kind, "lend", lambda array: array.committed) for kind in (SwappedArray, KeptArray))


def _no_mirror() -> tuple[Patch, ...]:
    return ((placement, "mirror_of", lambda _rank, _hosts: None),)


def _parts_begin_anew() -> tuple[Patch, ...]:
    async def reshard(parts: StateParts, communicator: Any, hosts: Any, _step: int) -> None:
        parts._rank, parts._placement = communicator.rank, parts._place(hosts)
        for kind in parts.kinds.values():
            for part in parts._placement.held(parts._rank):
                parts._committed.setdefault((kind.name, part), np.array(kind.initial(part)))

    return ((StateParts, "reshard", reshard),)


SAFEGUARDS: Final[dict[str, Safeguard]] = {
    "generation-check": Safeguard(
        prevents="a rank that wakes in an old world takes part in a new one", patches=_any_generation
    ),
    "frame-numbers": Safeguard(prevents="a frame that comes twice is taken twice", patches=_any_number),
    "payload-checksums": Safeguard(prevents="changed bits of a payload are taken", patches=_unchecked_payload),
    "header-checksums": Safeguard(prevents="changed bits of a header are taken", patches=_unchecked_header),
    "leaving-is-announced": Safeguard(
        prevents="a rank that leaves in good order counts as lost", patches=partial(_without_frames, FrameKind.GOODBYE)
    ),
    "one-dial-wins": Safeguard(prevents="ranks that dial each other at once get two lanes", patches=_both_dials),
    "one-dial-goes-on": Safeguard(prevents="ranks that dial each other at once both wait", patches=_always_defer),
    "dials-have-a-deadline": Safeguard(
        prevents="a rank waits for a link to one that is stopped for as long as that is", patches=_patient_dials
    ),
    "fresh-segments": Safeguard(
        prevents="flags and payloads of an old generation are taken for new ones in shared memory",
        patches=_segments_stay,
    ),
    "child-groups-are-revoked": Safeguard(
        prevents="a rank waits in a group made from one that was revoked", patches=_child_groups_stay
    ),
    "proposals-are-inherited": Safeguard(
        prevents="survivors form different groups: one that was lost had announced its outcome to some",
        patches=_own_proposal,
    ),
    "arrival-is-taken-back": Safeguard(
        prevents="a world waits for a newcomer that has to be healed anew", patches=_stays_arrived
    ),
    "newcomers-are-caught-up": Safeguard(
        prevents="a newcomer with an older state counts as a member", patches=_any_lineage
    ),
    "history-not-popularity": Safeguard(
        prevents="a step that few have committed is undone by the many that have not", patches=_most_popular
    ),
    "commit-lease": Safeguard(
        prevents="a process that was stopped commits a step after the others have gone on without it",
        patches=_commit_unasked,
    ),
    "quarrels-end": Safeguard(
        prevents="two members that cannot reach each other end all worlds", patches=_quarrels_last
    ),
    "vote-of-all": Safeguard(prevents="a step is committed on some ranks only", patches=_commit_alone),
    "roll-forward": Safeguard(prevents="a step that a lost rank has committed is done again", patches=_never_forward),
    "forward-if-all-prepared": Safeguard(
        prevents="a step is committed that a rank has not prepared", patches=_always_forward
    ),
    "lineage-digest": Safeguard(prevents="ranks with other states go on together", patches=_step_number_alone),
    "revoke-interrupts": Safeguard(prevents="a rank waits in a world that is over", patches=_deaf_to_revoke),
    "abort-restores-values": Safeguard(
        prevents="random numbers and values of an aborted step stay", patches=_values_stay
    ),
    "abort-restores-arrays": Safeguard(prevents="sums of an aborted step stay", patches=_arrays_stay),
    "parts-are-mirrored": Safeguard(prevents="parts of the state are lost with one rank", patches=_no_mirror),
    "residuals-are-rekeyed": Safeguard(
        prevents="a portion that another rank takes over begins without what its codec owes", patches=_parts_begin_anew
    ),
    "lent-arrays-stay": Safeguard(
        prevents="a newcomer gets another state than the digest says", patches=_lent_is_written
    ),
}
"""All safeguards that can be removed, by name."""
