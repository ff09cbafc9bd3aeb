"""The operations of one rank: dispatch of frames and link events to them, timeouts, and inquiries."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from asyncpar.collectives.inquiry import SILENT_AFTER, Answer, Culprit, Inquiry
from asyncpar.collectives.ledger import (
    KEYED,
    ChannelLedger,
    GroupLedger,
    KnowsPast,
    NameClaims,
    channel_number,
    world_number,
)
from asyncpar.collectives.operation import Closes, Group, Operation, OperationContext, show
from asyncpar.collectives.protocol import (
    MOST_WAITS,
    Abort,
    Description,
    Probe,
    Status,
    decode_control,
    difference,
    encode_control,
    shortened,
)
from asyncpar.collectives.revocation import Revocation, decode_revocation, encode_revocation, told_by
from asyncpar.collectives.shared_memory.group import ArenaHost
from asyncpar.core.observe.recorder import NO_TICKET
from asyncpar.core.observe.waits import follow_waits
from asyncpar.errors import AsyncparError, LinkDamaged, OperationMismatch, PeerCancelled, PeerLost, PeerTimeout
from asyncpar.net.arena.run_queue import RunQueue
from asyncpar.net.transport.links import LEFT, Links, as_reported
from asyncpar.net.transport.protection import DAMAGED
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key

if TYPE_CHECKING:
    from asyncpar.collectives.completion.service import ContributorChoices
    from asyncpar.collectives.fault_tolerance.service import SurvivorAgreements

PROBE_AFTER: Final = 1.0
"""Seconds without progress after which an operation asks the ranks it waits for where they are, and interval of
repeats."""

_TELL_AFTER: Final = 0.02
"""Seconds after which an answer that this rank got is passed on to those that asked it."""

_REST: Final = 0.002
"""Seconds of rest for each operation that was inspected, which took a twentieth of that: thousands may wait."""

_REMEMBERED_ABORTS = 4096
_REMEMBERED_CLOSED = 4096
_REMEMBERED_REVOCATIONS = 4096

_IN_IT_TOO: Final = "in that operation too"
_TOLD: Final = ("timeout", "failed", "cancelled")
"""Reasons of an abort that may blame another rank than its sender."""

CLOSED: Final = "the group was closed there"


def _ask_after(timeout: float | None, warn_after: float | None) -> float:
    """Return the seconds without progress after which an operation asks other ranks, and between repeats."""
    limits = [limit for limit in (timeout, warn_after) if limit is not None]
    return min(PROBE_AFTER, min(limits, default=math.inf) / 4)


class OperationTable:
    """The ``OperationEvents`` of a rank's links.  One per ``Links``."""

    def __init__(self, links: Links, arena: ArenaHost | None = None) -> None:
        self.links = links
        self.loop = asyncio.get_running_loop()
        self.arena = arena
        self.now = self.loop.time
        self.context = OperationContext(links, self.watch)
        self.claims = NameClaims()
        self.devices: Closes | None = None
        """The CUDA and NCCL state, once device arrays were used."""
        self.fallbacks: set[str] = set()
        """Operations for which the log has reported that they cannot run as pinned."""
        self._groups: dict[int, Group] = {}
        self.aborted: OrderedDict[tuple[int, int], tuple[int, Abort]] = OrderedDict()
        """Aborts by peers of operations that were not called here yet: the rank, and its message."""
        self._closed: OrderedDict[int, Revocation | KnowsPast | None] = OrderedDict()
        """The numbers of groups that are no longer used here, with the reason if they were revoked, or else with the
        numbers of their operations, if any: other ranks may be behind in these."""
        self._revoked: OrderedDict[int, Revocation] = OrderedDict()
        self._askers: dict[tuple[int, Key], tuple[float, Status]] = {}
        """By asking rank and operation: when it asked, and the answer that it got."""
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._is_leaving = False
        """Whether this rank has made all of its calls.  See ``announce_leaving``."""
        self._rest_until = 0.0
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
            told = self.aborted.pop((operation.route.number, operation.sequence), None)
            if told is not None:
                operation.fail(_error_of(operation, *told))

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
            for rank in told_by(self.links.rank, revocation.ranks):
                self._tell_revoked(rank, revocation)
        self.links.is_revoked |= number == world_number(self.links.world.generation)
        for group in list(self._groups.values()):
            if number == group.number or number in group.ancestors:
                self._end(group, revocation)

    def _tell_revoked(self, rank: int, revocation: Revocation) -> None:
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
                self._tell_leaving(rank, group.number, group.ledger.next_numbers())
                number = channel_number(group.number, me, rank)
                ledger = self._groups[number].ledger if number in self._groups else ChannelLedger()
                self._tell_leaving(rank, number, ledger.next_numbers())
        for rank, key in list(self._askers):
            known = self._groups.get(key.group)
            if not (self._is_through(key) or (known is not None and known.find(key.sequence))):
                self._tell_leaving(rank, key.group, [key.sequence])

    def _tell_leaving(self, rank: int, number: int, sequences: Iterable[int]) -> None:
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
                self._on_status(rank, header.key, decode_control(payload, Status))
            case FrameKind.AGREE:
                self.agreements.heard(rank, header.key, payload)
            case FrameKind.CONTRIBUTORS:
                self.choices.heard(rank, header.key, payload)
            case FrameKind.REVOKE:
                world = self.links.world
                number, generation = header.group, world.generation
                self.revoke(decode_revocation(payload, number=number, generation=generation, size=world.size))

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        for group in list(self._groups.values()):
            if rank in group.members:
                for operation in group.pending():
                    if operation.failure is None:  # only the link may be lost, which no other rank sees
                        operation.tell_failure("lost", error.cause or str(error), lost=rank, is_linked=True)
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
        if self._timer is not None:  # it would keep everything of this node alive until it fires
            self._timer.cancel()
            self._timer = None
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    # -- failures that peers report ----------------------------------------------------------------------------------

    def _on_abort(self, rank: int, key: Key, abort: Abort) -> None:
        group = self._groups.get(key.group)
        hear = None if group is None else group.notices.get(key.sequence)
        if hear is not None:
            hear()
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

    # -- long waits --------------------------------------------------------------------------------------------------

    def watch(self, operation: Operation) -> None:
        """Make ``operation`` ask other ranks when its wait is long, and time out when it is too long."""
        if operation.is_standing:
            return
        timeout = operation.home.limits.timeout
        due = max(operation.started_at + _ask_after(timeout, self.links.observer.warn_after), self._rest_until)
        self._look_at(due)
        if self._askers and self._telling is None:  # ranks that wait for this one learn that it has come
            self._telling = self.loop.call_later(_TELL_AFTER, self._tell_begun, operation)

    def _look_at(self, due: float) -> None:
        """Inspect all operations at ``due``, if not before."""
        if self._timer is None or due < self._timer.when():
            self._arm(due)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self.now()
        running = [
            operation
            for group in list(self._groups.values())
            for operation in group.pending()
            if operation.is_waiting and operation.failure is None
        ]
        due = now + PROBE_AFTER
        for operation in running:
            operation.refresh(now)
            self._record_wait(operation)
            timeout = operation.home.limits.timeout
            if timeout is not None:
                deadline = operation.progress_at + timeout
                if now >= deadline:
                    self._time_out(operation, now)
                    continue
                due = min(due, deadline)
            every = _ask_after(timeout, self.links.observer.warn_after)
            due = min(due, self._inquire(operation, now, every=every), self._warn(operation, now))
        self._tell_askers(now)
        self._rest_until = now + _REST * len(running)
        if running and not self.links.is_closing:
            self._arm(max(due, self._rest_until))

    def _record_wait(self, operation: Operation) -> None:
        """Record the rank for which a collective operation has waited for long."""
        ranks = operation.waits_for() if operation.ticket != NO_TICKET and operation.route is not None else []
        if ranks:
            self.links.recorder.awaits(operation.ticket, ranks[0])

    def _warn(self, operation: Operation, now: float) -> float:
        """Report, once, that ``operation`` waits for long; return when to inspect it again."""
        observer = self.links.observer
        if observer.warn_after is None or operation.has_warned:
            return math.inf
        due = operation.progress_at + observer.warn_after
        if now >= due:
            if observer.is_crowded:
                return now + PROBE_AFTER
            operation.has_warned = True
            observer.report_waiting(operation, operation.notice_wait(now))
            return math.inf
        return due

    def _time_out(self, operation: Operation, now: float) -> None:
        ranks = operation.waits_for()
        message = operation.describe_wait(now)
        culprit = operation.find_culprit(now) or (Culprit(ranks[0]) if ranks else None)
        if culprit is None:
            operation.tell_failure("failed", f"PeerTimeout: {message}")
            operation.fail(PeerTimeout(message, operation=operation.label, cause="no rank did its part in time"))
            return
        host = self.links.world.members[culprit.rank].host
        operation.tell_failure("timeout", f"PeerTimeout: {message}", lost=culprit.rank)
        operation.fail(
            PeerTimeout(message, rank=culprit.rank, host=host, operation=operation.label, cause=culprit.describe())
        )

    # -- the rank that holds an operation up -------------------------------------------------------------------------

    async def overdue(self, operation: Operation, text: str, seconds: float) -> PeerTimeout:
        """Return the error that names, after ``text``, the rank for which ``operation`` waits; the operation goes on.

        Other ranks are asked for ``seconds`` at most, and for less if one reports that it is the cause, or is silent.
        """
        end = self.now() + seconds
        while not operation.is_over and operation.failure is None and self.now() < end:
            self._ask_on(operation, self.now())
            if operation.is_culprit_sure(self.now()):
                break
            await asyncio.sleep(_TELL_AFTER)
        now, ranks = self.now(), operation.waits_for()
        culprit = operation.find_culprit(now) or (Culprit(ranks[0]) if ranks else None)
        wait = operation.describe_wait(now)
        if culprit is None:
            return PeerTimeout(f"{text}; it goes on: {wait}", operation=operation.label)
        return PeerTimeout(
            f"{text}, because of rank {culprit.rank}; it goes on: {wait}",
            rank=culprit.rank,
            host=self.links.world.members[culprit.rank].host,
            operation=operation.label,
            cause=culprit.describe(),
        )

    def _ask_on(self, operation: Operation, now: float) -> None:
        """Ask the ranks that ``operation`` waits for, because another rank waits for this one: see ``inquiry.py``."""
        if not operation.is_over and operation.failure is None and operation.waits_for():
            every = _ask_after(operation.home.limits.timeout, self.links.observer.warn_after)
            self._look_at(max(self._inquire(operation, now, every=every, is_asked=True), self._rest_until))

    def _inquire(self, operation: Operation, now: float, *, every: float, is_asked: bool = False) -> float:
        """Ask the ranks that ``operation`` waits for if that is due; return when to inspect it again.

        The first inquiry is due ``every`` seconds after its last progress, or at once if this rank ``is_asked``.
        """
        asker = operation.asker
        if asker is None:
            return now + PROBE_AFTER
        inquiry = asker.inquiry
        if inquiry is None or inquiry.begun_at != operation.progress_at:
            inquiry = asker.inquiry = Inquiry(operation.progress_at)
        last = inquiry.asked_at
        due = last + every if last is not None else now if is_asked else operation.progress_at + every
        if now < due:
            return due if last is None or now >= last + SILENT_AFTER else min(due, last + SILENT_AFTER)
        ranks = operation.waits_for()
        payload = encode_control(Probe(operation.description))
        inquiry.ask(ranks, now)
        for rank in ranks:
            self.links.control(rank, FrameKind.PROBE, asker.key(), payload)
        return now + min(every, SILENT_AFTER)

    def _on_status(self, rank: int, key: Key, status: Status) -> None:
        operation = self._operation(key.group, key.sequence)
        if operation is None or operation.inquiry is None:
            return
        blamed = status.culprit
        known = blamed is not None and 0 <= blamed < self.links.world.size
        culprit = Culprit(blamed, status.silent_for, status.where) if blamed is not None and known else None
        waits = tuple(wait for wait in status.waits if wait.rank != self.links.rank)
        operation.inquiry.hear(rank, Answer(self.now(), status.text, culprit, waits))
        if self._telling is None and self._askers:  # one pass over all askers for many answers
            self._telling = self.loop.call_later(max(_TELL_AFTER, _REST * len(self._askers)), self._tell_soon)

    def _tell_begun(self, operation: Operation) -> None:
        """Notify askers of ``operation``, which has begun while they already wait, and ask on."""
        now = self.now()
        if any(now - asked_at <= 2 * PROBE_AFTER for asked_at, _ in self._askers.values()):
            self._ask_on(operation, now)
        self._tell_soon()

    def _tell_soon(self) -> None:
        self._telling = None
        self._tell_askers(self.now())

    def _tell_askers(self, now: float) -> None:
        """Answer recent askers again, if this rank has since learnt of another culprit."""
        for (rank, key), (asked_at, told) in list(self._askers.items()):
            if now - asked_at > 2 * PROBE_AFTER:
                del self._askers[rank, key]
                continue
            status = self._status(key, rank)
            is_other = status.culprit != told.culprit or (status.silent_for is None) != (told.silent_for is None)
            if is_other or status.waits != told.waits:
                self._askers[rank, key] = (asked_at, status)
                self.links.control(rank, FrameKind.STATUS, key, encode_control(status))

    def _status(self, key: Key, asker: int) -> Status:
        """Return the answer to rank ``asker``, which waits in the operation ``key`` for this rank."""
        group, operation = self._groups.get(key.group), self._operation(key.group, key.sequence)
        text = shortened(self._whereabouts(group, operation, key))
        me, is_through = self.links.rank, self._is_through(key)
        if not is_through and (operation is None or not operation.has_started):
            operation = self._elsewhere(group)
        if operation is None or not operation.has_started:
            where = "" if is_through else shortened(self.links.observer.find_program())
            return Status(text, None if is_through else me, where=where)
        culprit = operation.find_culprit(self.now())
        known = operation.known_waits()
        way = follow_waits(known, me)  # first, so that it is passed on whole
        waits = tuple(dict.fromkeys([*way, *(wait for _, wait in sorted(known.items()))]))[:MOST_WAITS]
        if culprit is not None and culprit.rank != asker:
            return Status(text, culprit.rank, culprit.silent_for, culprit.where, waits)
        return Status(text, waits=waits)

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
                self._tell_revoked(rank, group.revocation)
                return
            if operation is None and group.given_up is not None and not group.is_stale(key.sequence):
                culprit, why = group.given_up
                abort = Abort("timeout", shortened(f"the group was given up there, because {why}"), rank=culprit)
                self.links.control(rank, FrameKind.ABORT, key, encode_control(abort))
                return
        elif key.group in self._closed and not self._is_through(key):
            ending = self._closed[key.group]
            if isinstance(ending, Revocation):
                self._tell_revoked(rank, ending)
                return
            self.links.control(rank, FrameKind.ABORT, key, encode_control(Abort("failed", CLOSED)))
            return
        if self._is_leaving and operation is None and not self._is_through(key):
            self._tell_leaving(rank, key.group, [key.sequence])
            return
        here = operation if operation is not None and operation.has_started else self._elsewhere(group)
        if here is not None:
            self._ask_on(here, self.now())
        status = self._status(key, rank)
        self._askers[rank, key] = (self.now(), status)
        self.links.control(rank, FrameKind.STATUS, key, encode_control(status))

    def _is_through(self, key: Key) -> bool:
        """Return whether the operation ``key`` is over here, perhaps in a group that has been closed since."""
        group = self._groups.get(key.group)
        if group is not None:
            return group.is_stale(key.sequence)
        ending = self._closed.get(key.group)
        return ending is not None and not isinstance(ending, Revocation) and ending.is_past(key.sequence)

    def _whereabouts(self, group: Group | None, operation: Operation | None, key: Key) -> str:
        if operation is not None:
            if not operation.has_started:
                return "it has called that operation, but does not await it yet"
            ranks = operation.waits_for()
            return _IN_IT_TOO + (f", waiting for rank {ranks[0]}{_answer_of(operation, ranks[0])}" if ranks else "")
        if self._is_through(key):
            return "it is through with that operation"
        here = self._elsewhere(group)
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

    def _elsewhere(self, group: Group | None) -> Operation | None:
        """Return an operation that this rank awaits, one of ``group`` if there is any.

        One that waits for a certain rank comes before one that waits for any.
        """
        groups = list(self._groups.values()) if group is None else [group, *self._groups.values()]
        awaited = [other for known in groups for other in known.pending() if other.is_waiting]
        return next((other for other in awaited if other.waits_for()), awaited[0] if awaited else None)

    def _operation(self, group: int, sequence: int) -> Operation | None:
        known = self._groups.get(group)
        return None if known is None else known.find(sequence)


def _answer_of(operation: Operation, rank: int) -> str:
    """Describe what ``rank`` does instead of ``operation``, or what it knows of the rank that it waits for."""
    answer = operation.answers.get(rank)
    if answer is None:
        return ""
    if not answer.text.startswith(_IN_IT_TOO):
        return f"; rank {rank} is {answer.text}"
    _, semicolon, said = answer.text.partition("; ")
    return semicolon + said


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
    is_told = abort.reason in _TOLD and abort.rank is not None and 0 <= abort.rank < len(members)
    culprit = abort.rank if is_told and abort.rank is not None and abort.rank != me else rank
    may_pass_on = is_told and abort.rank == me and abort.reason != "failed"
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
