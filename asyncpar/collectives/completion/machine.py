"""State machine that chooses the contributors to an operation that does not wait for all ranks.  Pure.

Theory of operation.  A rank that calls the operation announces to all others that it is present.  When its policy is
satisfied by the present ranks, a rank proposes them: the first of them at once, the others one after the other, each a
while after the one before it, if nothing has been decided by then.  So the rank that decides is one of those present,
and another one takes over when it is lost, or stops in the middle.

Proposals go through the synod of Lamport ("The part-time parliament", 1998), with the event loops of all ranks as
acceptors, whether their programs have called the operation or not.  A majority of the group must accept; of an even
number, half of the ranks form one if the first rank of the group is among them.  Any two majorities have a rank in
common, so a decision is final: even while ranks are slow, lost or cut off, and even when two of them propose at the
same time.  A rank that comes too late is notified of the decision.

*Termination.*  It ends if a majority of event loops answers and the policy can be met: if so many ranks are lost that
it cannot, or that there is no majority left, every rank that has called it fails, and so does one that has waited for
too long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from asyncpar.collectives.completion.messages import (
    NO_BALLOT,
    AcceptChosen,
    AcceptedChosen,
    Chosen,
    ContributorBallot,
    ContributorMessage,
    DecideChosen,
    Here,
    Outvoted,
    PrepareChoice,
    PromiseChoice,
)

PATIENCE: Final = 0.05
"""Seconds after which the next rank proposes, if nothing has been decided by then."""


@dataclass(frozen=True, slots=True)
class CalledHere:
    """Call of the operation on this rank, which ``call`` describes and which needs ``need`` ranks.

    It waits ``wait`` seconds for more than ``need`` of them (0: not at all), and ``timeout`` in all (None: forever).
    """

    call: str
    need: int
    wait: float
    timeout: float | None


@dataclass(frozen=True, slots=True)
class ContributorSent:
    """Arrival of a message of ``rank``."""

    rank: int
    message: ContributorMessage


@dataclass(frozen=True, slots=True)
class RankLost:
    """Permanent loss of ``rank``."""

    rank: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A tick of time."""


ChoiceEvent: TypeAlias = CalledHere | ContributorSent | RankLost | TimePassed


@dataclass(frozen=True, slots=True)
class SendToRank:
    """Send ``message`` to ``rank``."""

    rank: int
    message: ContributorMessage


@dataclass(frozen=True, slots=True)
class ReturnChosen:
    """Return the decision to the caller, if there is one."""

    chosen: Chosen


@dataclass(frozen=True, slots=True)
class FailChoice:
    """Fail the call, because of ``rank``."""

    fault: Literal["lost", "timeout", "mismatch"]
    rank: int
    text: str


ChoiceCommand: TypeAlias = SendToRank | ReturnChosen | FailChoice


class ContributorChoice:
    """One choice among ``ranks`` (of the world, in the order of the group), from the view of ``me``.

    It goes on after the decision, of which others may need to be notified.
    """

    def __init__(self, *, me: int, ranks: tuple[int, ...], lost: Iterable[int]) -> None:
        assert me in ranks
        self.me = me
        self.ranks = ranks
        self.chosen: Chosen | None = None
        self.call: CalledHere | None = None
        self.has_failed = False
        self._begun_at = 0.0
        self._lost = set(lost) & set(ranks)
        self._here: dict[int, str] = {}
        """By present rank, its call."""
        self._due_at: float | None = None
        """Time at which the policy was satisfied."""
        self._promised: ContributorBallot = NO_BALLOT
        self._accepted: tuple[ContributorBallot, Chosen] | None = None
        self._attempt: _ChoiceAttempt | None = None
        self._attempts = 0
        self._next_at = 0.0
        """Time from which this rank may propose again."""
        self._commands: list[ChoiceCommand] = []

    def handle(self, event: ChoiceEvent, *, now: float) -> list[ChoiceCommand]:
        """Handle ``event``; return the resulting commands, in order."""
        match event:
            case CalledHere():
                self._called(event, now)
            case ContributorSent(rank, message) if rank in self.ranks and rank not in self._lost:
                self._receive(rank, message)
            case RankLost(rank):
                self.lose(rank)
        self._look(now)
        commands, self._commands = self._commands, []
        return commands

    def lose(self, rank: int) -> None:
        """Record that ``rank`` is lost."""
        self._lost |= {rank} & set(self.ranks)

    @property
    def is_under_way(self) -> bool:
        """Whether this rank waits for the choice."""
        return self.call is not None and self.chosen is None and not self.has_failed

    def next_look(self, now: float) -> float:
        """Return the next time at which the passage of time may change something, if this rank waits for the choice."""
        call = self.call
        if call is None or not self.is_under_way:
            return math.inf
        times = [] if call.timeout is None else [self._begun_at + call.timeout]
        if self._due_at is None:
            times.append(self._begun_at + call.wait)
        else:
            times.append(max(self._turn_at(), self._next_at))
        return min((time for time in times if time > now), default=math.inf)

    def missing(self) -> list[int]:
        """Return the other ranks that have not called, in order."""
        return [rank for rank in self.ranks if rank not in self._here and rank != self.me]

    # -- events --------------------------------------------------------------------------------------------------------

    def _called(self, call: CalledHere, now: float) -> None:
        self.call, self._begun_at = call, now
        self._here[self.me] = call.call
        if self.chosen is None:
            self._send_to_others(Here(self.ranks, call.call))
        else:
            self._compare(self.chosen)

    def _receive(self, rank: int, message: ContributorMessage) -> None:
        if self.chosen is not None:
            if isinstance(message, Here | PrepareChoice | AcceptChosen):
                self._send(rank, DecideChosen(self.ranks, self.chosen))
            return
        match message:
            case Here(call=call):
                self._here[rank] = call
            case PrepareChoice(ballot=ballot):
                self._prepared(rank, ballot)
            case AcceptChosen(ballot=ballot, chosen=chosen):
                self._asked_to_accept(rank, ballot, chosen)
            case DecideChosen(chosen=chosen):
                self._decide(chosen)
            case Outvoted(ballot):
                self._attempts = max(self._attempts, ballot[0] + 1)
                self._attempt = None
            case PromiseChoice(ballot, at, accepted) if self._attempt is not None and ballot == self._attempt.ballot:
                self._attempt.promises.add(rank)
                if accepted is not None and at > self._attempt.best:
                    self._attempt.best, self._attempt.chosen = at, accepted
                self._go_on(self._attempt)
            case AcceptedChosen(ballot) if self._attempt is not None and ballot == self._attempt.ballot:
                self._attempt.accepts.add(rank)
                self._go_on(self._attempt)

    # -- accepting -----------------------------------------------------------------------------------------------------

    def _prepared(self, rank: int, ballot: ContributorBallot) -> None:
        if ballot <= self._promised:
            self._send(rank, Outvoted(self._promised))
            return
        self._promised = ballot
        at, chosen = self._accepted or (NO_BALLOT, None)
        self._send(rank, PromiseChoice(ballot, at, chosen))

    def _asked_to_accept(self, rank: int, ballot: ContributorBallot, chosen: Chosen) -> None:
        if ballot < self._promised:
            self._send(rank, Outvoted(self._promised))
            return
        self._promised, self._accepted = ballot, (ballot, chosen)
        self._send(rank, AcceptedChosen(ballot))

    # -- proposing -----------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Propose, or fail, if it is time to do so."""
        call = self.call
        if call is None or not self.is_under_way:
            return
        wrong = next((rank for rank, other in sorted(self._here.items()) if other != call.call), None)
        if wrong is not None:
            self._fail("mismatch", wrong, self._here[wrong])
            return
        left = [rank for rank in self.ranks if rank not in self._lost]
        if len(left) < call.need or not self._is_majority(left):
            first = next(rank for rank in self.ranks if rank in self._lost)
            what = f"{call.need} of {len(self.ranks)} ranks are wanted" if len(left) < call.need else "no majority left"
            self._fail("lost", first, f"{what}, and {len(left)} are left")
            return
        if call.timeout is not None and now >= self._begun_at + call.timeout:
            late = [rank for rank in self.missing() if rank not in self._lost] or [left[0]]
            self._fail("timeout", late[0], f"nothing was decided within {call.timeout:.1f} s")
            return
        here = [rank for rank in left if rank in self._here]
        has_waited = now >= self._begun_at + call.wait
        if self._due_at is None and len(here) >= call.need and (has_waited or len(here) == len(left)):
            self._due_at = now
        if self._due_at is not None and len(here) >= call.need and now >= max(self._turn_at(), self._next_at):
            self._propose(here, call, now)

    def _turn_at(self) -> float:
        """Return the time of this rank's turn to propose, once the policy is satisfied."""
        assert self._due_at is not None
        here = [rank for rank in self.ranks if rank in self._here and rank not in self._lost]
        return self._due_at + PATIENCE * here.index(self.me)

    def _propose(self, here: list[int], call: CalledHere, now: float) -> None:
        place = self.ranks.index(self.me)
        ballot = (self._attempts, place)
        self._attempts += 1
        self._next_at = now + PATIENCE * (len(self.ranks) + place)
        self._attempt = attempt = _ChoiceAttempt(ballot, Chosen(tuple(here), call.call))
        if ballot == (0, 0):  # the lowest ballot: nothing can have been accepted before
            attempt.promises.update(self.ranks)
            self._go_on(attempt)
        elif ballot > self._promised:
            self._promised = ballot
            attempt.promises.add(self.me)
            if self._accepted is not None:
                attempt.best, attempt.chosen = self._accepted
            self._send_to_others(PrepareChoice(self.ranks, ballot))
            self._go_on(attempt)
        else:
            self._attempts = max(self._attempts, self._promised[0] + 1)
            self._attempt = None

    def _go_on(self, attempt: _ChoiceAttempt) -> None:
        if not attempt.is_asked and self._is_majority(attempt.promises):
            attempt.is_asked = True
            if attempt.ballot >= self._promised:
                self._promised, self._accepted = attempt.ballot, (attempt.ballot, attempt.chosen)
                attempt.accepts.add(self.me)
            self._send_to_others(AcceptChosen(self.ranks, attempt.ballot, attempt.chosen))
        if attempt.is_asked and self._is_majority(attempt.accepts):
            self._decide(attempt.chosen)
            self._send_to_others(DecideChosen(self.ranks, attempt.chosen))

    def _is_majority(self, ranks: Iterable[int]) -> bool:
        votes = set(ranks)
        return 2 * len(votes) + (self.ranks[0] in votes) > len(self.ranks)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _decide(self, chosen: Chosen) -> None:
        self.chosen, self._attempt = chosen, None
        self._compare(chosen)
        self._commands.append(ReturnChosen(chosen))

    def _compare(self, chosen: Chosen) -> None:
        """Fail if this rank's call differs from that of the chosen ranks."""
        if self.call is not None and self.call.call != chosen.call and not self.has_failed:
            self._fail("mismatch", chosen.contributors[0], chosen.call)

    def _fail(self, fault: Literal["lost", "timeout", "mismatch"], rank: int, text: str) -> None:
        self.has_failed = True
        self._commands.append(FailChoice(fault, rank, text))

    def _send(self, rank: int, message: ContributorMessage) -> None:
        self._commands.append(SendToRank(rank, message))

    def _send_to_others(self, message: ContributorMessage) -> None:
        for rank in self.ranks:
            if rank != self.me and rank not in self._lost:
                self._send(rank, message)


class _ChoiceAttempt:
    """A proposal of this rank in progress.  ``best`` is the highest ballot that others had accepted before."""

    __slots__ = ("accepts", "ballot", "best", "chosen", "is_asked", "promises")

    def __init__(self, ballot: ContributorBallot, chosen: Chosen) -> None:
        self.ballot = ballot
        self.chosen = chosen
        self.best: ContributorBallot = NO_BALLOT
        self.promises: set[int] = set()
        self.accepts: set[int] = set()
        self.is_asked = False
