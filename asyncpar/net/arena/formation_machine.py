"""Decide whether the ranks of one host get an arena: all of them or none.  Sans-I/O: feed events, obey commands.

The lowest rank, the *leader*, decides for all, itself included.  Everyone offers what it brings; when all offers are
there, everyone gets the roster; when everyone has mapped it, there is an arena.  Whatever goes wrong before that is the
end of it, and nothing that happens later changes the verdict.  Those who come late to a failed formation are still
told, so that nobody has to wait for its own deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpar.net.arena.formation_messages import Offer, Ready, Unable, Verdict, shorten


@dataclass(frozen=True, slots=True)
class Came:
    """A rank has come and proved itself."""

    rank: int


@dataclass(frozen=True, slots=True)
class Said:
    """A rank said something; the leader itself does, too."""

    rank: int
    message: Offer | Unable | Ready


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection to a rank that had come ended (``how``)."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The time is up."""


Event = Came | Said | Gone | Expired


@dataclass(frozen=True, slots=True)
class Share:
    """Give everyone these offers, in order of rank."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a rank the verdict."""

    rank: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Finish:
    """It is over: everyone who can be told was told."""

    verdict: Verdict


Command = Share | Tell | Finish


class Formation:
    """The leader's view of one formation among ``ranks``, ascending, itself first."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._here: set[int] = set()
        self._gone: set[int] = set()
        self._offers: dict[int, Offer] = {}
        self._ready: set[int] = set()
        self._verdict: Verdict | None = None
        self._is_finished = False

    def handle(self, event: Event) -> list[Command]:
        """Take an event, return what must be done."""
        if isinstance(event, Came):
            self._here.add(event.rank)
        elif isinstance(event, Gone):
            self._gone.add(event.rank)
        if self._verdict is not None:
            return self._handle_late(event, self._verdict)
        match event:
            case Said(rank, Offer() as offer):
                return self._take_offer(rank, offer)
            case Said(rank, Unable(problem)):
                return self._end(f"rank {rank}: {problem}")
            case Said(rank, Ready()):
                return self._take_ready(rank)
            case Gone(rank, how):
                return self._end(f"rank {rank} is gone: {how}", culprit=rank)
            case Expired():
                return self._expire()
        return []

    def _handle_late(self, event: Event, verdict: Verdict) -> list[Command]:
        if self._is_finished:
            return []
        told: list[Command] = [Tell(event.rank, verdict)] if isinstance(event, Came) else []
        if isinstance(event, Expired) or self._here | self._gone >= set(self._ranks[1:]):
            self._is_finished = True
            return [*told, Finish(verdict)]
        return told

    def _take_offer(self, rank: int, offer: Offer) -> list[Command]:
        if rank != offer.rank or rank in self._offers:
            return self._end(f"rank {rank} offered out of turn, as rank {offer.rank}", culprit=rank)
        self._offers[rank] = offer
        leader = self._offers.get(self._ranks[0])
        if leader is None:
            return []
        for other in self._offers.values():
            if other.terms != leader.terms:
                return self._end(
                    f"the ranks have different settings: rank {leader.rank} {leader.terms}, "
                    f"rank {other.rank} {other.terms}"
                )
        if len(self._offers) < len(self._ranks):
            return []
        return [Share(tuple(self._offers[member] for member in self._ranks))]

    def _take_ready(self, rank: int) -> list[Command]:
        if len(self._offers) < len(self._ranks) or rank in self._ready:
            return self._end(f"rank {rank} was ready out of turn", culprit=rank)
        self._ready.add(rank)
        return self._end("") if len(self._ready) == len(self._ranks) else []

    def _expire(self) -> list[Command]:
        if len(self._offers) < len(self._ranks):
            missing, what = [rank for rank in self._ranks if rank not in self._offers], "did not come"
        else:
            missing, what = [rank for rank in self._ranks if rank not in self._ready], "did not get ready"
        names = ", ".join(str(rank) for rank in missing)
        ended = self._end(f"rank{'s' if len(missing) > 1 else ''} {names} {what} in time", culprit=missing[0])
        return ended if self._is_finished else [*ended, *self.handle(Expired())]

    def _end(self, problem: str, *, culprit: int | None = None) -> list[Command]:
        """Give the verdict to all who are here."""
        verdict = self._verdict = Verdict(shorten(problem), culprit)
        told: list[Command] = [Tell(rank, verdict) for rank in sorted(self._here - self._gone)]
        if self._here | self._gone >= set(self._ranks[1:]):
            self._is_finished = True
            return [*told, Finish(verdict)]
        return told


def check_roster(offers: Sequence[Offer], *, ranks: Sequence[int], own: Offer) -> str:
    """Return what is wrong with a whole roster as a rank received it; empty if nothing is."""
    named = [offer.rank for offer in offers]
    if named != list(ranks):
        return f"the roster names ranks {named}, expected {list(ranks)}"
    if own not in offers:
        return f"the roster does not repeat what rank {own.rank} offered"
    return ""
