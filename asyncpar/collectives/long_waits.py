"""Waits of a rank's operations that last long: warnings, inquiries at other ranks, answers to theirs, and timeouts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final

from asyncpar.collectives.inquiry import SILENT_AFTER, Answer, Culprit, Inquiry
from asyncpar.collectives.operation import Group, Operation
from asyncpar.collectives.protocol import MOST_WAITS, Probe, Status, encode_control, shortened
from asyncpar.collectives.wait_report import describe_elsewhere, describe_wait, describe_whereabouts, notice_wait
from asyncpar.core.observe.recorder import NO_TICKET
from asyncpar.core.observe.waits import follow_waits
from asyncpar.errors import PeerTimeout
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.frame import FrameKind, Key

PROBE_AFTER: Final = 1.0
"""Seconds without progress after which an operation asks the ranks it waits for where they are, and interval of
repeats."""

_UPDATE_AFTER: Final = 0.02
"""Seconds after which an answer that this rank got is passed on to those that asked it."""

_REST: Final = 0.002
"""Seconds of rest for each operation that was inspected, which took a twentieth of that: thousands may wait."""


def _ask_after(timeout: float | None, warn_after: float | None) -> float:
    """Return the seconds without progress after which an operation asks other ranks, and between repeats."""
    limits = [limit for limit in (timeout, warn_after) if limit is not None]
    return min(PROBE_AFTER, min(limits, default=math.inf) / 4)


class LongWaits:
    """The long waits of the operations of ``groups``, which are by number.  One per ``OperationTable``.

    ``is_through`` decides whether an operation is over here.  See ``inquiry.py`` for how ranks ask each other.
    """

    def __init__(self, links: Links, groups: Mapping[int, Group], is_through: Callable[[Key], bool]) -> None:
        self._links = links
        self._groups = groups
        self._is_through = is_through
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._askers: dict[tuple[int, Key], tuple[float, Status]] = {}
        """By asking rank and operation: when it asked, and the answer that it got."""
        self._timer: asyncio.TimerHandle | None = None
        self._update_timer: asyncio.TimerHandle | None = None
        self._rest_until = 0.0

    @property
    def askers(self) -> list[tuple[int, Key]]:
        """The ranks that have asked this one, and the operations in which they wait for it."""
        return list(self._askers)

    def close(self) -> None:
        """Stop all timers, which would keep everything of this node alive until they fire."""
        for timer in (self._timer, self._update_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._update_timer = None

    def watch(self, operation: Operation) -> None:
        """Make ``operation`` ask other ranks when its wait is long, and time out when it is too long."""
        if operation.is_standing:
            return
        timeout = operation.home.limits.timeout
        due = max(operation.started_at + _ask_after(timeout, self._links.observer.warn_after), self._rest_until)
        self._look_at(due)
        if self._askers and self._update_timer is None:  # ranks that wait for this one learn that it has come
            self._update_timer = self._loop.call_later(_UPDATE_AFTER, self._announce_begun, operation)

    def _look_at(self, due: float) -> None:
        """Inspect all operations at ``due``, if not before."""
        if self._timer is None or due < self._timer.when():
            self._arm(due)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._now()
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
            every = _ask_after(timeout, self._links.observer.warn_after)
            due = min(due, self._inquire(operation, now, every=every), self._warn(operation, now))
        self._update_askers(now)
        self._rest_until = now + _REST * len(running)
        if running and not self._links.is_closing:
            self._arm(max(due, self._rest_until))

    def _record_wait(self, operation: Operation) -> None:
        """Record the rank for which a collective operation has waited for long."""
        ranks = operation.waits_for() if operation.ticket != NO_TICKET and operation.route is not None else []
        if ranks:
            self._links.recorder.awaits(operation.ticket, ranks[0])

    def _warn(self, operation: Operation, now: float) -> float:
        """Report, once, that ``operation`` waits for long; return when to inspect it again."""
        observer = self._links.observer
        if observer.warn_after is None or operation.has_warned:
            return math.inf
        due = operation.progress_at + observer.warn_after
        if now >= due:
            if observer.is_crowded:
                return now + PROBE_AFTER
            operation.has_warned = True
            observer.report_waiting(operation, notice_wait(operation, now))
            return math.inf
        return due

    def _time_out(self, operation: Operation, now: float) -> None:
        ranks = operation.waits_for()
        message = describe_wait(operation, now)
        culprit = operation.find_culprit(now) or (Culprit(ranks[0]) if ranks else None)
        if culprit is None:
            operation.report_failure("failed", f"PeerTimeout: {message}")
            operation.fail(PeerTimeout(message, operation=operation.label, cause="no rank did its part in time"))
            return
        host = self._links.world.members[culprit.rank].host
        if culprit.silent_for is not None:
            self._links.suspect(culprit.rank, culprit.describe())
        operation.report_failure("timeout", f"PeerTimeout: {message}", lost=culprit.rank)
        operation.fail(
            PeerTimeout(message, rank=culprit.rank, host=host, operation=operation.label, cause=culprit.describe())
        )

    # -- the rank that holds an operation up -------------------------------------------------------------------------

    async def overdue(self, operation: Operation, text: str, seconds: float) -> PeerTimeout:
        """Return the error that names, after ``text``, the rank for which ``operation`` waits; the operation goes on.

        Other ranks are asked for ``seconds`` at most, and for less if one reports that it is the cause, or is silent.
        """
        end = self._now() + seconds
        while not operation.is_over and operation.failure is None and self._now() < end:
            self._ask_on(operation, self._now())
            if operation.is_culprit_sure(self._now()):
                break
            await asyncio.sleep(_UPDATE_AFTER)
        now, ranks = self._now(), operation.waits_for()
        culprit = operation.find_culprit(now) or (Culprit(ranks[0]) if ranks else None)
        wait = describe_wait(operation, now)
        if culprit is None:
            return PeerTimeout(f"{text}; it goes on: {wait}", operation=operation.label)
        return PeerTimeout(
            f"{text}, because of rank {culprit.rank}; it goes on: {wait}",
            rank=culprit.rank,
            host=self._links.world.members[culprit.rank].host,
            operation=operation.label,
            cause=culprit.describe(),
        )

    def _ask_on(self, operation: Operation, now: float) -> None:
        """Ask the ranks that ``operation`` waits for, because another rank waits for this one: see ``inquiry.py``."""
        if not operation.is_over and operation.failure is None and operation.waits_for():
            every = _ask_after(operation.home.limits.timeout, self._links.observer.warn_after)
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
            self._links.control(rank, FrameKind.PROBE, asker.key(), payload)
        return now + min(every, SILENT_AFTER)

    def take_status(self, rank: int, operation: Operation, status: Status) -> None:
        """Record the answer of ``rank`` to this rank's inquiry about ``operation``."""
        if operation.inquiry is None:
            return
        blamed = status.culprit
        known = blamed is not None and 0 <= blamed < self._links.world.size
        culprit = Culprit(blamed, status.silent_for, status.where) if blamed is not None and known else None
        waits = tuple(wait for wait in status.waits if wait.rank != self._links.rank)
        operation.inquiry.record_answer(rank, Answer(self._now(), status.text, culprit, waits))
        if self._update_timer is None and self._askers:  # one pass over all askers for many answers
            self._update_timer = self._loop.call_later(
                max(_UPDATE_AFTER, _REST * len(self._askers)), self._on_update_due
            )

    def answer(self, rank: int, key: Key) -> None:
        """Answer ``rank``, which waits in the operation ``key`` for this rank, now and whenever the answer changes."""
        group = self._groups.get(key.group)
        operation = None if group is None else group.find(key.sequence)
        here = operation if operation is not None and operation.has_started else self._elsewhere(group)
        if here is not None:
            self._ask_on(here, self._now())
        status = self._status(key, rank)
        self._askers[rank, key] = (self._now(), status)
        self._links.control(rank, FrameKind.STATUS, key, encode_control(status))

    def _announce_begun(self, operation: Operation) -> None:
        """Notify askers of ``operation``, which has begun while they already wait, and ask on."""
        now = self._now()
        if any(now - asked_at <= 2 * PROBE_AFTER for asked_at, _ in self._askers.values()):
            self._ask_on(operation, now)
        self._on_update_due()

    def _on_update_due(self) -> None:
        self._update_timer = None
        self._update_askers(self._now())

    def _update_askers(self, now: float) -> None:
        """Answer recent askers again, if this rank has since learnt of another culprit."""
        for (rank, key), (asked_at, sent) in list(self._askers.items()):
            if now - asked_at > 2 * PROBE_AFTER:
                del self._askers[rank, key]
                continue
            status = self._status(key, rank)
            is_other = status.culprit != sent.culprit or (status.silent_for is None) != (sent.silent_for is None)
            if is_other or status.waits != sent.waits:
                self._askers[rank, key] = (asked_at, status)
                self._links.control(rank, FrameKind.STATUS, key, encode_control(status))

    def _status(self, key: Key, asker: int) -> Status:
        """Return the answer to rank ``asker``, which waits in the operation ``key`` for this rank."""
        group = self._groups.get(key.group)
        operation = None if group is None else group.find(key.sequence)
        text = shortened(self._describe_whereabouts(group, operation, key))
        me, is_through = self._links.rank, self._is_through(key)
        if not is_through and (operation is None or not operation.has_started):
            operation = self._elsewhere(group)
        if operation is None or not operation.has_started:
            where = "" if is_through else shortened(self._links.observer.find_program())
            return Status(text, None if is_through else me, where=where)
        culprit = operation.find_culprit(self._now())
        known = operation.known_waits()
        way = follow_waits(known, me)  # first, so that it is passed on whole
        waits = tuple(dict.fromkeys([*way, *(wait for _, wait in sorted(known.items()))]))[:MOST_WAITS]
        if culprit is not None and culprit.rank != asker:
            return Status(text, culprit.rank, culprit.silent_for, culprit.where, waits)
        return Status(text, waits=waits)

    def _describe_whereabouts(self, group: Group | None, operation: Operation | None, key: Key) -> str:
        if operation is not None:
            return describe_whereabouts(operation)
        if self._is_through(key):
            return "it is through with that operation"
        return describe_elsewhere(group, self._elsewhere(group))

    def _elsewhere(self, group: Group | None) -> Operation | None:
        """Return an operation that this rank awaits, one of ``group`` if there is any.

        One that waits for a certain rank comes before one that waits for any.
        """
        groups = list(self._groups.values()) if group is None else [group, *self._groups.values()]
        awaited = [other for known in groups for other in known.pending() if other.is_waiting]
        return next((other for other in awaited if other.waits_for()), awaited[0] if awaited else None)
