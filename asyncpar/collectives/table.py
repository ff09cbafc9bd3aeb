"""The operations of one rank, and the dispatch of frames and link events to them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from asyncpar.collectives.ledger import (
    KEYED,
    ChannelLedger,
    KnowsPast,
    NameClaims,
    channel_number,
    world_number,
)
from asyncpar.collectives.long_waits import LongWaits
from asyncpar.collectives.operation import Closes, Group, Operation, OperationContext, show
from asyncpar.collectives.protocol import (
    Abort,
    Description,
    Probe,
    Status,
    decode_control,
    difference,
    encode_control,
    shortened,
)
from asyncpar.collectives.revocation import Revocation, decode_revocation, encode_revocation, notified_by
from asyncpar.collectives.shared_memory.group import ArenaHost
from asyncpar.errors import AsyncparError, LinkDamaged, OperationMismatch, PeerCancelled, PeerLost
from asyncpar.net.arena.run_queue import RunQueue
from asyncpar.net.transport.links import LEFT, Links, as_reported
from asyncpar.net.transport.protection import DAMAGED
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key

if TYPE_CHECKING:
    from asyncpar.collectives.completion.service import ContributorChoices
    from asyncpar.collectives.fault_tolerance.service import SurvivorAgreements

_REMEMBERED_ABORTS = 4096
_REMEMBERED_CLOSED = 4096
_REMEMBERED_REVOCATIONS = 4096

_BLAMING: Final = ("timeout", "failed", "cancelled")
"""Reasons of an abort that may blame another rank than its sender."""

CLOSED: Final = "the group was closed there"


class OperationTable:
    """The ``OperationEvents`` of a rank's links.  One per ``Links``."""

    def __init__(self, links: Links, arena: ArenaHost | None = None) -> None:
        self.links = links
        self.loop = asyncio.get_running_loop()
        self.arena = arena
        self.now = self.loop.time
        self._groups: dict[int, Group] = {}
        self.waits = LongWaits(links, self._groups, self._is_through)
        self.context = OperationContext(links, self.waits.watch)
        self.claims = NameClaims()
        self.devices: Closes | None = None
        """The CUDA and NCCL state, once device arrays were used."""
        self.fallbacks: set[str] = set()
        """Operations for which the log has reported that they cannot run as pinned."""
        self.aborted: OrderedDict[tuple[int, int], tuple[int, Abort]] = OrderedDict()
        """Aborts by peers of operations that were not called here yet: the rank, and its message."""
        self._closed: OrderedDict[int, Revocation | KnowsPast | None] = OrderedDict()
        """The numbers of groups that are no longer used here, with the reason if they were revoked, or else with the
        numbers of their operations, if any: other ranks may be behind in these."""
        self._revoked: OrderedDict[int, Revocation] = OrderedDict()
        self._is_leaving = False
        """Whether this rank has made all of its calls.  See ``announce_leaving``."""
        self._agreements: SurvivorAgreements | None = None
        self._choices: ContributorChoices | None = None
        links.operations = self

    @property
    def agreements(self) -> SurvivorAgreements:
        """The agreements of this rank with other survivors, made when the first begins."""
        if self._agreements is None:
            from asyncpar.collectives.fault_tolerance.service import SurvivorAgreements  # most programs need none

            self._agreements = SurvivorAgreements(self.links)
        return self._agreements

    @property
    def choices(self) -> ContributorChoices:
        """The choices of contributors to operations with a policy, made when the first is called here or by a peer."""
        if self._choices is None:
            from asyncpar.collectives.completion.service import ContributorChoices  # most programs need none

            self._choices = ContributorChoices(self.links)
        return self._choices

    def add(self, group: Group) -> None:
        """Register ``group``; its number must be new."""
        assert group.number not in self._groups, f"group {group.number:#x} exists already"
        self._groups[group.number] = group
        group.has_left = self.links.closed is not None
        for number in (group.number, *group.ancestors) if self._revoked else ():
            revocation = self._revoked.get(number)
            if revocation is not None:
                group.revocation = revocation
                group.given_up = revocation.culprit, revocation.cause

    def drop(self, group: Group) -> None:
        """Drop ``group``, which this rank has closed, and all that belongs to it; its number must not be used again."""
        for number in (group.number, *group.channels):
            known = self._groups.pop(number, None)
            past = None if known is None else known.ledger.closed(frozenset(known.active))
            for operation in [] if known is None else [*known.active.values(), *known.loose]:
                operation.discard()
            self._close_number(number, past)
            self._forget_frames(number)

    def _close_number(self, number: int, ending: Revocation | KnowsPast | None) -> None:
        """Drop all frames of a group from now on."""
        self._closed[number] = ending
        if len(self._closed) > _REMEMBERED_CLOSED:
            self._closed.popitem(last=False)

    def find(self, number: int) -> Group | None:
        """Return the group with this number on the wire."""
        return self._groups.get(number)

    def enter(self, operation: Operation) -> None:
        """Register ``operation``, which has its number; fail it if a peer has already given it up."""
        assert operation.route is not None
        operation.route.active[operation.sequence] = operation
        if self.aborted:
            reported = self.aborted.pop((operation.route.number, operation.sequence), None)
            if reported is not None:
                operation.fail(_error_of(operation, *reported))

    def take_abort(self, group: Group, sequence: int) -> bool:
        """Forget that a peer has given up ``sequence``, which was not called yet; return whether one had."""
        return self.aborted.pop((group.number, sequence), None) is not None

    def is_calm(self, run_queue: RunQueue, group: Group, sequence: int) -> bool:
        """Return whether no task is queued, no rank of ``group`` lost, and ``sequence`` not aborted by a peer."""
        links = self.links
        return not (
            run_queue.tasks
            or (self.aborted and (group.number, sequence) in self.aborted)
            or (links.lost and not group.members.isdisjoint(links.lost))
            or links.closed is not None
        )

    # -- revocation --------------------------------------------------------------------------------------------------

    def revoke(self, revocation: Revocation) -> None:
        """End a group and all groups made from it, on all ranks; do nothing if they have ended already.

        If this rank has left the world, they end on it alone: their communicators are then stale.
        """
        number = revocation.number
        if number in self._revoked:
            return
        self._revoked[number] = revocation
        if len(self._revoked) > _REMEMBERED_REVOCATIONS:
            self._revoked.popitem(last=False)
        if self.links.rank in revocation.ranks and self.links.closed is None:
            for rank in notified_by(self.links.rank, revocation.ranks):
                self._send_revocation(rank, revocation)
        self.links.is_revoked |= number == world_number(self.links.world.generation)
        for group in list(self._groups.values()):
            if number == group.number or number in group.ancestors:
                self._end(group, revocation)

    def _send_revocation(self, rank: int, revocation: Revocation) -> None:
        self.links.control(rank, FrameKind.REVOKE, Key(revocation.number, 0, 0), encode_revocation(revocation))

    def _end(self, group: Group, revocation: Revocation) -> None:
        """End the operations of ``group``, and drop frames for those that were not called yet."""
        if group.is_closed or group.revocation is not None:
            return
        group.revocation = revocation
        group.given_up = revocation.culprit, revocation.cause
        if self.links.closed is not None:
            return  # all is over, and the memory that others shared is gone
        me = self.links.rank
        for operation in group.pending():
            operation.fail(revocation.error(f"rank {me}: {operation.label}"))
        for peer, number in () if group.on_ended is None else group.on_ended():
            if number not in self._groups:  # messages that were sent to this rank, which has not asked for any
                self._close_number(number, revocation)
                self.links.link(peer).forget(number)
        self._forget_frames(group.number)

    def _forget_frames(self, number: int) -> None:
        """Drop frames for operations of a group that will not be called."""
        self.links.forget(number)
        for key in [key for key in self.aborted if key[0] == number]:
            del self.aborted[key]

    # -- leaving -----------------------------------------------------------------------------------------------------

    def announce_leaving(self) -> None:
        """End the waits of other ranks for calls that this one has not made and will not make.

        Its calls so far go on.  The others get the error that they would get once this rank has left, which may be a
        while later: its sent messages may have yet to be received.
        """
        self._is_leaving = True
        me = self.links.rank
        for group in list(self._groups.values()):
            if isinstance(group.ledger, ChannelLedger) or group.is_closed or group.revocation is not None:
                continue
            for rank in group.members - {me}:
                self._send_leaving(rank, group.number, group.ledger.next_numbers())
                number = channel_number(group.number, me, rank)
                ledger = self._groups[number].ledger if number in self._groups else ChannelLedger()
                self._send_leaving(rank, number, ledger.next_numbers())
        for rank, key in self.waits.askers:
            known = self._groups.get(key.group)
            if not (self._is_through(key) or (known is not None and known.find(key.sequence))):
                self._send_leaving(rank, key.group, [key.sequence])

    def _send_leaving(self, rank: int, number: int, sequences: Iterable[int]) -> None:
        """End the operations ``sequences`` of the group ``number`` on ``rank``."""
        payload = encode_control(Abort("lost", LEFT, rank=self.links.rank))
        for sequence in sequences:
            self.links.control(rank, FrameKind.ABORT, Key(number, sequence, 0), payload)

    # -- events of links (OperationEvents) -------------------------------------------------------------------------

    def is_stale(self, group: int, sequence: int) -> bool:
        known = self._groups.get(group)
        return known.is_stale(sequence) if known is not None else group in self._closed

    def frame_mismatch(self, rank: int, header: FrameHeader) -> None:
        operation = self._operation(header.group, header.sequence)
        if operation is not None:
            operation.suspect(rank)

    def control(self, rank: int, header: FrameHeader, payload: bytes) -> None:
        match header.kind:
            case FrameKind.ABORT:
                self._on_abort(rank, header.key, decode_control(payload, Abort))
            case FrameKind.PROBE:
                self._on_probe(rank, header.key, decode_control(payload, Probe))
            case FrameKind.STATUS:
                operation, status = self._operation(header.group, header.sequence), decode_control(payload, Status)
                if operation is not None:
                    self.waits.take_status(rank, operation, status)
            case FrameKind.AGREE:
                self.agreements.receive(rank, header.key, payload)
            case FrameKind.CONTRIBUTORS:
                self.choices.receive(rank, header.key, payload)
            case FrameKind.REVOKE:
                world = self.links.world
                number, generation = header.group, world.generation
                self.revoke(decode_revocation(payload, number=number, generation=generation, size=world.size))

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        for group in list(self._groups.values()):
            if rank in group.members:
                for operation in group.pending():
                    if operation.failure is None:  # only the link may be lost, which no other rank sees
                        operation.report_failure("lost", error.cause or str(error), lost=rank, is_linked=True)
                    operation.fail(operation.lost(error))

    def job_ends(self, error: PeerLost) -> None:
        for group in list(self._groups.values()):
            for operation in group.pending():
                if operation.has_started:
                    operation.fail(operation.lost(error))

    def closed(self, error: PeerLost) -> None:
        for group in list(self._groups.values()):
            group.has_left = True
            for operation in group.pending():
                if operation.has_started:
                    operation.fail(error)
            if group.on_left is not None:
                group.on_left()
        if self._agreements is not None:
            self._agreements.close(error)
        if self._choices is not None:
            self._choices.close(error)
        if self.devices is not None:
            self.devices.close()
        self.waits.close()

    # -- failures that peers report ----------------------------------------------------------------------------------

    def _on_abort(self, rank: int, key: Key, abort: Abort) -> None:
        group = self._groups.get(key.group)
        on_notice = None if group is None else group.notices.get(key.sequence)
        if on_notice is not None:
            on_notice()
            return
        operation = self._operation(key.group, key.sequence)
        if operation is not None:
            if abort.operation is not None:
                self._mismatch(rank, operation, abort.operation, is_answered=abort.is_answer)
            else:
                operation.fail(_error_of(operation, rank, abort))
        elif group is not None and group.is_stale(key.sequence):
            if abort.operation is not None and not abort.is_answer:
                self._answer_for_past(rank, key, group, abort.operation)
        elif abort.operation is None and key.group not in self._closed:
            self.aborted[key.group, key.sequence] = (rank, abort)
            if len(self.aborted) > _REMEMBERED_ABORTS:
                self.aborted.popitem(last=False)

    def _mismatch(self, rank: int, operation: Operation, other: Description, *, is_answered: bool = False) -> None:
        """Fail ``operation``, in whose place ``rank`` calls ``other``, and notify all ranks."""
        me = self.links.rank
        where = f"group {operation.home.name}, operation {_number(operation)}"
        text = difference(me, operation.description, rank, other, where=where)
        if not is_answered:
            show(self.links, rank, operation.key(), operation.description, is_answer=True)
        if operation.failure is not None:
            return
        if me < rank:
            payload = encode_control(Abort("mismatch", shortened(text)))
            for third in operation.audience:
                if third != rank:
                    self.links.control(third, FrameKind.ABORT, operation.key(), payload)
        operation.fail(OperationMismatch(text, call=operation.description.text))

    def _answer_for_past(self, rank: int, key: Key, group: Group, other: Description) -> None:
        """Answer ``rank``, which calls ``other`` where this rank called another operation, perhaps long ago."""
        past = group.history.get(key.sequence)
        if past is not None:
            show(self.links, rank, key, past, is_answer=True)
            return
        place = "a keyed operation" if key.sequence & KEYED else f"operation #{key.sequence}"
        text = (
            f"rank {rank} calls {other.text} where rank {self.links.rank} has called something else, more than "
            f"{len(group.history)} operations ago (group {group.name}, {place})"
        )
        self.links.control(rank, FrameKind.ABORT, key, encode_control(Abort("mismatch", shortened(text))))

    def _on_probe(self, rank: int, key: Key, probe: Probe) -> None:
        group = self._groups.get(key.group)
        operation = self._operation(key.group, key.sequence)
        if operation is not None and operation.description.fingerprint != probe.operation.fingerprint:
            self._mismatch(rank, operation, probe.operation)
            return
        if group is not None:
            past = group.history.get(key.sequence)
            if past is not None and past.fingerprint != probe.operation.fingerprint:
                show(self.links, rank, key, past, is_answer=True)
                return
            if group.revocation is not None:
                self._send_revocation(rank, group.revocation)
                return
            if operation is None and group.given_up is not None and not group.is_stale(key.sequence):
                culprit, why = group.given_up
                abort = Abort("timeout", shortened(f"the group was given up there, because {why}"), rank=culprit)
                self.links.control(rank, FrameKind.ABORT, key, encode_control(abort))
                return
        elif key.group in self._closed and not self._is_through(key):
            ending = self._closed[key.group]
            if isinstance(ending, Revocation):
                self._send_revocation(rank, ending)
                return
            self.links.control(rank, FrameKind.ABORT, key, encode_control(Abort("failed", CLOSED)))
            return
        if self._is_leaving and operation is None and not self._is_through(key):
            self._send_leaving(rank, key.group, [key.sequence])
            return
        self.waits.answer(rank, key)

    def _is_through(self, key: Key) -> bool:
        """Return whether the operation ``key`` is over here, perhaps in a group that has been closed since."""
        group = self._groups.get(key.group)
        if group is not None:
            return group.is_stale(key.sequence)
        ending = self._closed.get(key.group)
        return ending is not None and not isinstance(ending, Revocation) and ending.is_past(key.sequence)

    def _operation(self, group: int, sequence: int) -> Operation | None:
        known = self._groups.get(group)
        return None if known is None else known.find(sequence)


def _number(operation: Operation) -> str:
    return operation.label.partition(" ")[2] if operation.sequence & KEYED else f"#{operation.sequence}"


def _error_of(operation: Operation, rank: int, abort: Abort) -> AsyncparError:
    """Return the error that ``abort`` of ``rank`` causes on this rank."""
    me = operation.context.links.rank
    if abort.reason == "mismatch":
        return OperationMismatch(abort.text, call=operation.description.text)
    members = operation.context.links.world.members
    if abort.reason == "lost" and abort.rank is not None and 0 <= abort.rank < len(members):
        host = members[abort.rank].host
        cause = as_reported(abort.text, rank)
        kind = LinkDamaged if DAMAGED in cause else PeerLost
        error = kind(f"rank {abort.rank} on {host} is lost: {cause}", rank=abort.rank, host=host, cause=cause)
        return operation.lost(error)
    has_blame = abort.reason in _BLAMING and abort.rank is not None and 0 <= abort.rank < len(members)
    culprit = abort.rank if has_blame and abort.rank is not None and abort.rank != me else rank
    may_pass_on = has_blame and abort.rank == me and abort.reason != "failed"
    known = operation.find_culprit(operation.context.now()) if may_pass_on else None
    if known is not None and known.silent_for is not None:  # this rank is blamed, and only waits itself
        culprit = known.rank
    did = {
        "cancelled": f"rank {rank} cancelled it",
        "refused": f"the call was refused on rank {rank}",
    }.get(abort.reason, f"rank {culprit if abort.reason == 'failed' else rank} failed in it")
    return PeerCancelled(
        f"rank {me}: {operation.label}: {did}: {abort.text or 'no reason was given'}",
        rank=culprit,
        host=members[culprit].host,
        operation=operation.label,
        cause=abort.text or abort.reason,
    )
