"""State machine of the agreement of a group's survivors, although ranks die meanwhile.  Pure.

Theory of operation.  A leader, the first rank of the group that is not known to be lost, collects a contribution from
every survivor, proposes an outcome, and decides it when every survivor has accepted it.  When the leader is lost, the
next one takes over: contributions to it contain the proposal that a rank has accepted last, and it proposes the one
with the highest ballot again, if there is one.  This is the consensus of Buntinas ("Scalable distributed consensus to
support MPI fault tolerance", IPDPS 2012), with a star for its tree, and ballots as in Paxos.

*All survivors get the same outcome, which is also that of any rank that got one and died later.*  An outcome is decided
only when all survivors have accepted it.  A later leader is one of them, and learns of it before it proposes.  It gets
contributions from all survivors, and none of them accepts proposals of an earlier leader any more: a rank that
contributes to a leader declares all ranks before it lost, and drops their messages.  A leader may propose another
outcome while not all have accepted the last one (for example because a rank that was to accept is lost): nothing was
decided then, and the later one has the higher ballot.

*It terminates.*  Lost ranks are not waited for.  One that does not answer for as long as the group's timeout is
declared lost.  One that answers, but does not call, ends the agreement with a ``timeout`` for all.

Losses are contagious: a rank that learns from a message of this agreement that another is lost declares it lost
itself.  A live rank that the others have declared lost is notified, and gets no outcome.  Ranks on two sides of a
network partition that declare each other lost agree separately on each side; where that must not be, a quorum decides
which side goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncpar.collectives.fault_tolerance.messages import (
    AcceptedOutcome,
    AcceptOutcome,
    AgreementKind,
    AgreementMessage,
    AskMember,
    Contribution,
    DecideOutcome,
    Outcome,
    ProposeOutcome,
)

_NO_BITS_MISSING: Final = -1


@dataclass(frozen=True, slots=True)
class AgreementCalled:
    """Call on this rank with ``flag``, which waits ``timeout`` seconds (None: forever)."""

    kind: AgreementKind
    flag: int
    timeout: float | None


@dataclass(frozen=True, slots=True)
class MemberSent:
    """Arrival of a message of ``rank``."""

    rank: int
    message: AgreementMessage


@dataclass(frozen=True, slots=True)
class MemberLost:
    """Permanent loss of ``rank``."""

    rank: int


@dataclass(frozen=True, slots=True)
class MemberExpelled:
    """Notice that others have declared this rank lost; ``text`` names them and the reason."""

    text: str


@dataclass(frozen=True, slots=True)
class AgreementTick:
    """A tick of time."""


AgreementEvent: TypeAlias = AgreementCalled | MemberSent | MemberLost | MemberExpelled | AgreementTick


@dataclass(frozen=True, slots=True)
class SendToMember:
    """Send ``message`` to ``rank``."""

    rank: int
    message: AgreementMessage


@dataclass(frozen=True, slots=True)
class DeclareLost:
    """Declare ``rank`` lost, because of ``cause``."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class ReturnOutcome:
    """Return the outcome: the agreement is over."""

    outcome: Outcome


AgreementCommand: TypeAlias = SendToMember | DeclareLost | ReturnOutcome


class SurvivorAgreement:
    """One agreement of ``ranks`` (of the world, in the order of the group), from the view of ``me``.

    It goes on after its outcome was returned, of which others may need to be notified.
    """

    def __init__(
        self, *, me: int, ranks: tuple[int, ...], lost: Iterable[int], timeout: float | None, now: float
    ) -> None:
        assert me in ranks
        self.me = me
        self.ranks = ranks
        self.outcome: Outcome | None = None
        self._lost = set(lost) & set(ranks)
        self._call: AgreementCalled | None = None
        self._contributions: dict[int, Contribution] = {}
        self._accepted: AcceptedOutcome | None = None
        self._proposal: AcceptedOutcome | None = None
        """The last proposal of this rank as the leader."""
        self._inherited: AcceptedOutcome | None = None
        """The proposal of an earlier leader, which may have decided it."""
        self._acceptors: set[int] = set()
        self._fault: Outcome | None = None
        """The fault that the leader proposes instead of a result."""
        self._begun_at = now
        self.timeout = timeout
        self._received_at: dict[int, float] = {}
        """By awaited rank, the time of its last message, or of the beginning of the wait for it."""
        self._commands: list[AgreementCommand] = []

    @property
    def leader(self) -> int:
        """The first rank that is not lost; this one at the latest."""
        return next(rank for rank in self.ranks if rank not in self._lost or rank == self.me)

    @property
    def left(self) -> list[int]:
        """The ranks that are not lost."""
        return [rank for rank in self.ranks if rank not in self._lost]

    def awaited(self) -> list[int]:
        """Return the other ranks that this one waits for."""
        if self.outcome is not None:
            return []
        if self.leader != self.me:
            return [] if self._call is None else [self.leader]
        others = [rank for rank in self.left if rank != self.me]
        if self._proposal is not None:
            return [rank for rank in others if rank not in self._acceptors]
        return [rank for rank in others if not self._has_called(rank)] if self.is_under_way else []

    @property
    def is_under_way(self) -> bool:
        """Whether this rank, or one that it leads, waits for the outcome."""
        if self.outcome is not None:
            return False
        return self._call is not None or (self.leader == self.me and bool(self._contributions))

    def handle(self, event: AgreementEvent, *, now: float) -> list[AgreementCommand]:
        """Handle ``event``; return the resulting commands, in order."""
        match event:
            case AgreementCalled():
                self._called(event, now)
            case MemberSent(rank, message) if rank in self.ranks and rank not in self._lost:
                self._received_at[rank] = now
                self._receive(rank, message)
            case MemberLost(rank):
                self._lose([rank])
            case MemberExpelled(text) if self.outcome is None:
                self._expel(text)
            case AgreementTick():
                self._tick(now)
        awaited = self.awaited()
        self._received_at = {rank: self._received_at.get(rank, now) for rank in awaited}
        commands, self._commands = self._commands, []
        return commands

    # -- events --------------------------------------------------------------------------------------------------------

    def _called(self, call: AgreementCalled, now: float) -> None:
        self._call, self.timeout, self._begun_at = call, call.timeout, now
        if self.outcome is None:
            self._contribute()

    def _receive(self, rank: int, message: AgreementMessage) -> None:
        match message:
            case DecideOutcome(outcome) if self.me in outcome.lost:
                self._expel(f"rank {rank} has declared this rank, {self.me}, lost")
            case DecideOutcome(outcome):
                self._lose_reported(outcome.lost, rank)
                waiting = [] if self.outcome is not None else [other for other in self.left if other != rank]
                self._return(outcome)
                for other in waiting:
                    if other in self._contributions:  # it waits for this rank, its leader
                        self._answer_decided(other)
            case Contribution():
                self._contributed(rank, message)
            case AskMember(lost=lost):
                self._lose_reported(lost, rank)
                if not self._answer_decided(rank):
                    self._send(rank, self._contribution())
            case ProposeOutcome(ballot=ballot, outcome=outcome):
                self._proposed(rank, AcceptedOutcome(ballot, outcome))
            case AcceptOutcome(ballot, lost):
                if self._proposal is not None and ballot == self._proposal.ballot:
                    self._acceptors.add(rank)
                self._lose_reported(lost, rank)
                self._lead()

    def _contributed(self, rank: int, contribution: Contribution) -> None:
        self._contributions[rank] = contribution
        timeout = contribution.timeout
        if self._call is None and timeout is not None:
            self.timeout = timeout if self.timeout is None else min(timeout, self.timeout)
        self._lose_reported(contribution.lost, rank)
        if not self._answer_decided(rank):
            self._lead()

    def _proposed(self, rank: int, proposal: AcceptedOutcome) -> None:
        """Handle the proposal of the leader ``rank``: a rank that accepts it declares all ranks before it lost."""
        place = self.ranks.index(rank)
        if self._answer_decided(rank):
            return
        if proposal.ballot[0] != place or place > self.ranks.index(self.me):
            return
        self._lose_reported((*self.ranks[:place], *proposal.outcome.lost), rank)
        if self.leader != rank:
            return
        if self._accepted is None or proposal.ballot >= self._accepted.ballot:
            self._accepted = proposal
            self._send(rank, AcceptOutcome(proposal.ballot, self._known()))

    def _tick(self, now: float) -> None:
        timeout = self.timeout
        if timeout is None or not self.is_under_way:
            return
        silent = [rank for rank in self.awaited() if now - self._received_at.get(rank, now) >= timeout]
        for rank in silent:
            self._commands.append(DeclareLost(rank, f"it has not answered for {timeout:.1f} s in an agreement"))
        self._lose(silent)
        if self.outcome is None and self.leader == self.me and now >= self._begun_at + timeout:
            answered = [rank for rank in self.left if rank == self.me or rank in self._contributions]
            absent = [rank for rank in answered if not self._has_called(rank)]
            if absent and self._fault is None:
                text = f"it has not called it within {timeout:.1f} s"
                self._fault = Outcome(0, (), "timeout", absent[0], text)
                self._lead()
        for rank in self.awaited():
            self._send(rank, AskMember(self.ranks, self._known()))

    # -- losses --------------------------------------------------------------------------------------------------------

    def _lose_reported(self, ranks: Iterable[int], by: int) -> None:
        """Declare lost the ranks that ``by`` has; this rank itself is notified in another way."""
        news = [rank for rank in dict.fromkeys(ranks) if rank in self.ranks and rank not in self._lost]
        news = [rank for rank in news if rank not in (self.me, by)]
        self._commands += [DeclareLost(rank, f"it is lost (reported by rank {by})") for rank in news]
        self._lose(news)

    def _lose(self, ranks: Iterable[int]) -> None:
        before = self.leader
        lost = {rank for rank in ranks if rank in self.ranks and rank != self.me} - self._lost
        if not lost:
            return
        self._lost |= lost
        if self.leader == before:
            self._lead()
        elif self.outcome is not None:
            if self.leader != self.me:
                self._answer_decided(self.leader)
        elif self._call is not None or self._accepted is not None:
            self._contribute()
        else:
            self._lead()

    # -- contributing --------------------------------------------------------------------------------------------------

    def _contribute(self) -> None:
        if self.leader == self.me:
            self._lead()
        else:
            self._send(self.leader, self._contribution())

    def _contribution(self) -> Contribution:
        call = self._call
        kind, flag = (None, _NO_BITS_MISSING) if call is None else (call.kind, call.flag)
        timeout = None if call is None else call.timeout
        return Contribution(self.ranks, kind, flag, self._known(), self._accepted, timeout)

    def _answer_decided(self, rank: int) -> bool:
        """Send ``rank`` the decision, if there is one; a rank that others have declared lost has none to send."""
        if self.outcome is not None and self.outcome.fault != "expelled":
            self._send(rank, DecideOutcome(self.outcome))
        return self.outcome is not None

    # -- leading -------------------------------------------------------------------------------------------------------

    def _has_called(self, rank: int) -> bool:
        if rank == self.me:
            return self._call is not None
        contribution = self._contributions.get(rank)
        return contribution is not None and contribution.kind is not None

    def _lead(self) -> None:
        """Propose, and decide, as far as this rank can, if it is the leader."""
        if self.outcome is not None or self.leader != self.me:
            return
        others = [rank for rank in self.left if rank != self.me]
        outcome = self._choose(others)
        if outcome is None:
            return
        if self._proposal is None or self._proposal.outcome != outcome:
            number = 0 if self._proposal is None else self._proposal.ballot[1] + 1
            self._proposal = self._accepted = AcceptedOutcome((self.ranks.index(self.me), number), outcome)
            self._acceptors.clear()
            for rank in others:
                self._send(rank, ProposeOutcome(self.ranks, self._proposal.ballot, outcome))
        if self._acceptors.issuperset(others):
            for rank in others:
                self._send(rank, DecideOutcome(outcome))
            self._return(outcome)

    def _choose(self, others: list[int]) -> Outcome | None:
        """Return the outcome to propose; None while something is missing for that."""
        contributions = [self._contributions[rank] for rank in others if rank in self._contributions]
        if len(contributions) < len(others):
            return None
        place = self.ranks.index(self.me)
        accepted = [given.accepted for given in (*contributions, self._contribution()) if given.accepted is not None]
        accepted += [] if self._inherited is None else [self._inherited]
        earlier = [one for one in accepted if one.ballot[0] < place]
        if earlier:  # its sender may be lost by the next time, and this rank accepts its own proposal instead
            self._inherited = max(earlier, key=lambda one: one.ballot)
            return self._inherited.outcome
        if self._fault is not None:
            return self._fault
        if not all(map(self._has_called, self.left)):
            return None
        given = [self._contribution(), *contributions]
        first = given[0]
        for rank, one in zip((self.me, *others), given, strict=True):
            if one.kind != first.kind:
                text = f"rank {rank} calls {one.kind} where rank {self.me} calls {first.kind}"
                return Outcome(0, (), "mismatch", rank, text)
        flag = _NO_BITS_MISSING
        for one in given:
            flag &= one.flag
        return Outcome(flag, self._known())

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _return(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._commands.append(ReturnOutcome(outcome))

    def _expel(self, text: str) -> None:
        self._return(Outcome(0, (), "expelled", self.me, text[:2048]))

    def _known(self) -> tuple[int, ...]:
        return tuple(sorted(self._lost))

    def _send(self, rank: int, message: AgreementMessage) -> None:
        self._commands.append(SendToMember(rank, message))
