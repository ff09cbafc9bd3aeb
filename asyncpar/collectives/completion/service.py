"""Choices of contributors on this rank: dispatch of frames, losses and time to them, and results for their callers."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from asyncpar.collectives.completion.machine import (
    CalledHere,
    ChoiceEvent,
    ContributorChoice,
    ContributorSent,
    FailChoice,
    RankLost,
    ReturnChosen,
    SendToRank,
    TimePassed,
)
from asyncpar.collectives.completion.messages import (
    AcceptChosen,
    DecideChosen,
    Here,
    PrepareChoice,
    decode_contributors,
    encode_contributors,
)
from asyncpar.collectives.control_calls import ControlCalls, Place
from asyncpar.errors import AsyncparError, PeerLost, ProtocolError
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.frame import FrameKind, Key

_REMEMBERED: Final = 4096
"""Number of choices that are kept for ranks that have not learnt of them."""


class ChoiceFailedError(Exception):
    """A choice failed for this rank; the caller turns it into a typed error."""

    def __init__(self, failed: FailChoice) -> None:
        super().__init__(failed.text)
        self.failed = failed


class ContributorChoices:
    """All choices of the groups of one rank.  One per ``Links``."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._choices: OrderedDict[Place, ContributorChoice] = OrderedDict()
        self._calls = ControlCalls[tuple[int, ...]](links, FrameKind.CONTRIBUTORS)
        self._left: dict[Place, Callable[[tuple[int, ...]], None]] = {}
        self._decided: dict[int, int] = {}
        """By series, the number of the last decided operation."""
        self._timer: asyncio.TimerHandle | None = None
        links.add_loss_listener(self._lost)

    def call(self, place: Place, ranks: tuple[int, ...], call: CalledHere) -> asyncio.Future[tuple[int, ...]]:
        """Call operation ``place`` of a group of ``ranks``; return the future of its contributors, or of an error.

        The error is ``ChoiceFailedError``, or ``PeerLost`` when this rank leaves.
        """
        choice = self._find(place, ranks)
        future = self._calls.open(place)
        if self._links.closed is not None:
            self.close(self._links.closed)
            return future
        self._feed(place, choice, call)
        if choice.chosen is not None:
            self._calls.settle(place, choice.chosen.contributors)
        return future

    def leave(self, place: Place, on_chosen: Callable[[tuple[int, ...]], None]) -> None:
        """Stop waiting; ``on_chosen`` is called with the contributors when they are known."""
        self._calls.leave(place)
        choice = self._choices.get(place)
        if choice is not None and choice.chosen is not None:
            on_chosen(choice.chosen.contributors)
        elif choice is not None:
            choice.has_failed = True
            self._left[place] = on_chosen

    def refuse(self, place: Place, ranks: tuple[int, ...], text: str) -> None:
        """Notify the other ranks that this one's call of ``place`` is refused."""
        for rank in ranks:
            if rank != self._links.rank and self._links.closed is None:
                self._send(rank, place, Here(ranks, text))

    def end(self, series: int, error: AsyncparError) -> None:
        """End the waits of ``series`` with ``error``: this rank's group is over."""
        for place in self._calls:
            if place[0] == series:
                self._calls.fail(place, error)

    def last_decided(self, series: int) -> int:
        """Return the number of the last operation of ``series`` that is known to be decided, 0 if there is none."""
        return self._decided.get(series, 0)

    def missing(self, place: Place) -> list[int]:
        """Return the ranks that have not called operation ``place``."""
        choice = self._choices.get(place)
        return [] if choice is None else choice.missing()

    def receive(self, rank: int, key: Key, payload: bytes) -> None:
        """Handle a CONTRIBUTORS frame of ``rank``.  Raises ``ProtocolError`` for an invalid one."""
        message = decode_contributors(payload, size=self._links.world.size)
        place = key.group, key.sequence
        choice = self._choices.get(place)
        if choice is None:
            if not isinstance(message, Here | PrepareChoice | AcceptChosen | DecideChosen):
                return  # an answer to an old question of this rank
            self._calls.check_ranks(rank, message.ranks)
            choice = self._find(place, message.ranks)
        chosen = getattr(message, "chosen", None) or getattr(message, "accepted", None)
        if chosen is not None and not (chosen.contributors and set(chosen.contributors) <= set(choice.ranks)):
            raise ProtocolError(f"CONTRIBUTORS frame: expected some of ranks {choice.ranks}, got {chosen.contributors}")
        self._feed(place, choice, ContributorSent(rank, message))

    def close(self, error: PeerLost) -> None:
        """End all waits with ``error``: this rank leaves."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._calls.close(error)
        self._left.clear()
        self._choices.clear()

    # -- internals -----------------------------------------------------------------------------------------------------

    def _find(self, place: Place, ranks: tuple[int, ...]) -> ContributorChoice:
        choice = self._choices.get(place)
        if choice is None:
            choice = self._choices[place] = ContributorChoice(me=self._links.rank, ranks=ranks, lost=self._links.lost)
            while len(self._choices) > _REMEMBERED:
                oldest = next(iter(self._choices))
                if oldest in self._calls:
                    break
                self._left.pop(oldest, None)
                del self._choices[oldest]
        return choice

    def _lost(self, rank: int, error: PeerLost) -> None:  # noqa: ARG002
        for place in [*self._calls, *self._left]:
            choice = self._choices.get(place)
            if choice is not None:
                self._feed(place, choice, RankLost(rank))
        for choice in self._choices.values():
            choice.lose(rank)

    def _feed(self, place: Place, choice: ContributorChoice, event: ChoiceEvent) -> None:
        if self._links.closed is not None:
            return
        for command in choice.handle(event, now=self._loop.time()):
            match command:
                case SendToRank(rank, message):
                    self._send(rank, place, message)
                case ReturnChosen(chosen):
                    self._decided[place[0]] = max(place[1], self._decided.get(place[0], 0))
                    self._return(place, chosen.contributors)
                case FailChoice():
                    self._calls.fail(place, ChoiceFailedError(command))
        self._look_later()

    def _send(self, rank: int, place: Place, message: object) -> None:
        self._calls.send(rank, place, encode_contributors(message))  # type: ignore[arg-type]

    def _return(self, place: Place, contributors: tuple[int, ...]) -> None:
        self._calls.settle(place, contributors)
        left = self._left.pop(place, None)
        if left is not None:
            left(contributors)

    def _look_later(self) -> None:
        now = self._loop.time()
        looks = [self._choices[place].next_look(now) for place in self._calls if place in self._choices]
        due = min(looks, default=math.inf)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < math.inf:
            self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        for place in self._calls:
            choice = self._choices.get(place)
            if choice is not None:
                self._feed(place, choice, TimePassed())
        self._look_later()
