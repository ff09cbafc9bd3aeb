"""Reports of asks that wait for long: the actor they wait for, and its current work, on whichever rank.

Theory of operation.  A timer that runs while asks are pending records the number of the next call; so the age of all
calls is known without a clock reading per call.  When an ask has waited for ``warn_after`` seconds, its caller inquires
at the actor's rank; the answer names the ask that the actor itself waits for, if it does, and the caller goes on to
that one's rank (``WaitChase``).  It ends at an actor that waits for no other one, at a rank that does not answer, or at
a place where it has been before, which means a deadlock.  Every wait is reported once, and of several waits for one
actor only the first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from asyncpar.actors.runtime.calls import PendingCall
from asyncpar.actors.runtime.message import AskAnswer, AskInquiry, AskLink
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.core.observe.waits import WaitEdge, WaitNotice, describe_cycle

ANSWER_SECONDS: Final = 0.5
"""Seconds that a rank may take to answer an inquiry about its actor."""

_TICKS: Final = 8
"""Number of times that the age of calls is inspected within the time after which they are reported."""

_MOST_STEPS: Final = 64
_MOST_CHASES: Final = 8
"""Number of waits that are followed at one moment; others are not reported, though they may wait for other actors."""


CallIdentity = tuple[int, int]
"""The rank of a caller, and the number of the call there."""


class WaitChase:
    """Follows one ask over the actors that wait for each other.  Pure.

    ``where`` describes the last actor's work, and ``cycle`` holds the waits of a deadlock, if it leads into one.
    """

    def __init__(self, rank: int, actor: str, link: AskLink) -> None:
        self.first = _edge(rank, actor, link)
        self.where = ""
        self.cycle: list[WaitEdge] = []
        self._caller, self._link = rank, link
        self._path: list[tuple[CallIdentity, WaitEdge | None]] = [((rank, link.call), self.first)]

    @property
    def culprit(self) -> tuple[int, str]:
        """The rank and the name of the actor at the end."""
        return self._link.rank, self._link.actor

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self._path)

    def inquiry(self, number: int) -> AskInquiry:
        """Return the next inquiry to the rank of the ``culprit``."""
        return AskInquiry(number, self._caller, self._link.call, self._link.actor)

    def receive(self, answer: AskAnswer) -> bool:
        """Handle the answer of the culprit's rank; return whether another culprit's rank is to be asked now."""
        self.where = answer.text
        rank, actor = self.culprit
        if answer.caller is not None and answer.call is not None:
            works_for = (answer.caller, answer.call)
            if works_for != self._path[-1][0]:  # the call waits until the actor has answered that one
                if self._ends_at(works_for, after=1):
                    return False
                self._path.append((works_for, None))
        link = answer.waits_for
        if link is None or self._ends_at((rank, link.call), after=0) or self.steps >= _MOST_STEPS:
            return False
        self._caller, self._link = rank, link
        self._path.append(((rank, link.call), _edge(rank, actor, link)))
        return True

    def silent(self, seconds: float) -> None:
        """Record that the culprit's rank has not answered."""
        self.where = f"has not answered for {seconds:.3g} s"

    def _ends_at(self, call: CallIdentity, *, after: int) -> bool:
        """Return whether it has been at ``call`` before, in a circle that begins ``after`` steps later."""
        place = next((place for place, (known, _) in enumerate(self._path) if known == call), None)
        if place is None:
            return False
        self.cycle = [edge for _, edge in self._path[place + after :] if edge is not None]
        return True


def _edge(rank: int, actor: str, link: AskLink) -> WaitEdge:
    return WaitEdge(
        rank, link.rank, f"{link.endpoint}()", (rank, link.call), link.site, actor=actor, awaited_actor=link.actor
    )


class _Chasing(msgspec.Struct):
    pending: PendingCall
    since: float
    chase: WaitChase
    timer: asyncio.TimerHandle | None = None


class AskWaits:
    """Reports the calls in ``pending`` that wait for long.  One per caller; ``close`` it."""

    def __init__(
        self, rank: int, pending: Mapping[int, PendingCall], outbound: Outbound, next_call: Callable[[], int]
    ) -> None:
        self.is_ticking = False
        """Whether the age of calls is being inspected."""
        self.reported: dict[int, PendingCall] = {}
        """By number, the calls whose wait was reported and is not over."""
        self._rank = rank
        self._pending = pending
        self._outbound = outbound
        self._marks: deque[tuple[float, int]] = deque()
        """Times, with the number of the next call at each."""
        self._next_call = next_call
        self._inspected = 0
        """The calls before this one have been inspected."""
        self._timer: asyncio.TimerHandle | None = None
        self._chasing: dict[int, _Chasing] = {}

    def begin(self, call: int) -> None:
        """Inspect the age of calls from ``call`` on, until all have been inspected."""
        after = self._outbound.observer.warn_after
        if after is not None:
            self.is_ticking = True
            self._inspected = call
            loop = asyncio.get_running_loop()
            self._marks = deque([(loop.time(), call + 1)])
            self._timer = loop.call_later(after / _TICKS, self._tick)

    def over(self, pending: PendingCall) -> None:
        """Report the end of a wait that was reported."""
        if self.reported.pop(pending.call, None) is not None:
            future = pending.future
            has_failed = future.done() and (future.cancelled() or future.exception() is not None)
            self._outbound.observer.report_over(pending, has_failed=has_failed or not future.done())

    def close(self) -> None:
        """Stop inspecting.  Idempotent."""
        for timer in (self._timer, *(chasing.timer for chasing in self._chasing.values())):
            if timer is not None:
                timer.cancel()
        self._chasing.clear()

    # -- inspections -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        after, now = self._outbound.observer.warn_after, asyncio.get_running_loop().time()
        self._timer = None
        if after is None:
            self.is_ticking = False
            return
        since, limit = 0.0, 0
        while self._marks and self._marks[0][0] <= now - after + 1e-6:
            since, limit = self._marks.popleft()
        if limit > self._inspected:
            self._follow(since, range(self._inspected, limit))
            self._inspected = limit
        self._marks.append((now, self._next_call()))
        if any(call >= self._inspected for call in self._pending):
            self._timer = asyncio.get_running_loop().call_later(after / _TICKS, self._tick)
        else:
            self.is_ticking = False

    def _follow(self, since: float, calls: range) -> None:
        """Follow the ``calls`` that are still pending, which began before ``since``."""
        known = {(each.ref.rank, each.ref.name) for each in self.reported.values()}
        known |= {(each.pending.ref.rank, each.pending.ref.name) for each in self._chasing.values()}
        for call in [call for call in self._pending if call in calls]:
            pending = self._pending[call]
            place = (pending.ref.rank, pending.ref.name)
            if (
                pending.future.done()
                or pending.inlet is not None
                or place in known
                or len(self._chasing) >= _MOST_CHASES
            ):
                continue
            known.add(place)
            actor = "" if pending.origin is None else pending.origin.actor
            self._chasing[call] = _Chasing(pending, since, WaitChase(self._rank, actor, self.link_of(pending)))
            self._inquire(call)

    def link_of(self, pending: PendingCall) -> AskLink:
        """Return the description of a call for others."""
        site = self._outbound.recorder.site_of(pending.ticket)
        return AskLink(pending.ref.rank, pending.call, pending.ref.name, pending.endpoint, site)

    def _inquire(self, call: int) -> None:
        chasing = self._chasing[call]
        loop = asyncio.get_running_loop()
        chasing.timer = loop.call_later(ANSWER_SECONDS, self._silent, call, chasing.chase.steps)
        self._outbound.send_message(chasing.chase.culprit[0], chasing.chase.inquiry(call))

    def receive(self, rank: int, answer: AskAnswer) -> None:
        """Handle an answer of ``rank``."""
        chasing = self._chasing.get(answer.number)
        if chasing is None or chasing.chase.culprit[0] != rank:
            return
        if chasing.timer is not None:
            chasing.timer.cancel()
        if chasing.chase.receive(answer):
            self._inquire(answer.number)
        else:
            self._report(answer.number)

    def _silent(self, call: int, steps: int) -> None:
        chasing = self._chasing.get(call)
        if chasing is not None and chasing.chase.steps == steps:
            chasing.chase.silent(ANSWER_SECONDS)
            self._report(call)

    def _report(self, call: int) -> None:
        chasing = self._chasing.pop(call)
        pending, chase = chasing.pending, chasing.chase
        if pending.future.done() or call not in self._pending:
            return
        rank, actor = chase.culprit
        notice = WaitNotice(
            operation=f"{pending.endpoint}() of actor {pending.ref.name!r}",
            seconds=asyncio.get_running_loop().time() - chasing.since,
            site=chase.first.site,
            culprit=rank,
            host=self._outbound.host_of(rank),
            where=chase.where,
            cycle=describe_cycle(chase.cycle) if chase.cycle else "",
            actor=actor,
        )
        self.reported[call] = pending
        self._outbound.observer.report_waiting(pending, notice)
