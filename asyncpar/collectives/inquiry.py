"""Search for the rank that holds up an operation, by asking the ranks that it waits for.  Pure.

Theory of operation.  A rank that waits for long asks the ranks that it waits for where they are.  One that does not
answer is silent.  One that answers names the rank that it holds responsible itself: so the name of a silent rank
travels back along the waits, from each rank to those that asked it, whatever the length and shape of the chain.  A rank
that answers and waits for no other rank is responsible itself, unless another one is silent.

A rank that is asked asks on at once, so that a chain is known as soon as one rank has waited for long, even if the
ranks between came late.  As long as no rank at its end is known to be silent or responsible, the last rank that the
waits lead to is named: never one that only waits itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from asyncpar.core.observe.waits import WaitEdge, follow_waits

SILENT_AFTER: Final = 0.25
"""Seconds without an answer after which a rank counts as silent."""


class Culprit(NamedTuple):
    """The rank that holds up an operation; ``silent_for`` None: it answers, but does not do its part.

    ``where`` describes its program (``is in user code at train.py:57``), "" if that is not known.
    """

    rank: int
    silent_for: float | None = None
    where: str = ""

    @property
    def weight(self) -> float:
        """Order among culprits: silent ranks come before others, those that have been silent for longest first."""
        return -1.0 if self.silent_for is None else self.silent_for

    def describe(self) -> str:
        """Describe the rank."""
        if self.silent_for is None:
            return "it did not do its part in time" + (f": it {self.where}" if self.where else "")
        return f"it did not do its part in time, and has not answered for {self.silent_for:.1f} s"


class Answer(msgspec.Struct, frozen=True):
    """The answer of a rank, and its time; ``culprit`` is the rank that it holds responsible.

    ``waits`` are the waits that it knows of.
    """

    at: float
    text: str
    culprit: Culprit | None = None
    waits: tuple[WaitEdge, ...] = ()


class Inquiry:
    """Answers of the ranks that an operation waits for; ``begun_at`` is the time of its last progress."""

    __slots__ = ("_unanswered", "answers", "asked_at", "begun_at")

    def __init__(self, begun_at: float) -> None:
        self.begun_at = begun_at
        self.asked_at: float | None = None
        self.answers: dict[int, Answer] = {}
        self._unanswered: dict[int, float] = {}

    def ask(self, ranks: Iterable[int], now: float) -> None:
        """Record that ``ranks`` are asked now."""
        self.asked_at = now
        for rank in ranks:
            self._unanswered.setdefault(rank, now)

    def record_answer(self, rank: int, answer: Answer) -> None:
        """Record the answer of ``rank``."""
        self._unanswered.pop(rank, None)
        self.answers[rank] = answer

    @property
    def waits(self) -> dict[int, WaitEdge]:
        """The waits of other ranks, by rank; a rank's own report takes precedence over those of others."""
        reported = [wait for answer in self.answers.values() for wait in answer.waits]
        own = [wait for rank, answer in self.answers.items() for wait in answer.waits if wait.rank == rank]
        latest = {wait.rank: wait for wait in (*reported, *own)}
        return {
            rank: wait
            for rank, wait in latest.items()
            if rank not in self.answers or any(wait.rank == rank for wait in self.answers[rank].waits)
        }

    def find_culprit(self, awaited: Iterable[int], *, me: int, now: float) -> Culprit | None:
        """Return the rank that makes rank ``me`` wait for the ranks ``awaited``; None if it is not known yet."""
        awaited = list(awaited)
        known, is_sure = self._find_known(awaited, me, now)
        if is_sure:
            return known
        waits = self.waits
        ends = (way[-1].awaited for rank in awaited if (way := follow_waits(waits, rank)))
        return next((Culprit(end) for end in ends if end != me and end not in waits), known)

    def is_sure(self, awaited: Iterable[int], *, me: int, now: float) -> bool:
        """Return whether the rank of ``find_culprit`` is silent, or reported to wait for no other rank."""
        return self._find_known(awaited, me, now)[1]

    def _find_known(self, awaited: Iterable[int], me: int, now: float) -> tuple[Culprit | None, bool]:
        """Return the rank that the ranks ``awaited`` hold responsible, and whether it does not only wait itself."""
        found = [culprit for rank in awaited if (culprit := self._judge(rank, now)) and culprit.rank != me]
        known = max(found, key=lambda culprit: culprit.weight, default=None)
        return known, known is not None and (known.silent_for is not None or known.rank not in self.waits)

    def _judge(self, rank: int, now: float) -> Culprit | None:
        """Return the rank that ``rank``, which is awaited, holds responsible; ``rank`` itself if it is silent.

        If it does not answer now, it may only be slow: the rank that it reported as silent before is named as long as
        that one's silence is longer.
        """
        since = self._unanswered.get(rank)
        silence = 0.0 if since is None else now - since
        behind, reported = self._behind(rank, now)
        if behind is not None and (silence < SILENT_AFTER or reported > silence):
            return behind
        if silence >= SILENT_AFTER:
            return Culprit(rank, silence)
        answer = self.answers.get(rank)
        blamed = None if answer is None else answer.culprit
        return None if blamed is None or blamed.silent_for is not None else blamed

    def _behind(self, rank: int, now: float) -> tuple[Culprit | None, float]:
        """Return the other rank that ``rank`` reported as silent, and the reported seconds of silence."""
        answer = self.answers.get(rank)
        if answer is None or answer.culprit is None:
            return None, 0.0
        other, reported, _ = answer.culprit
        if reported is None or other == rank or (other in self.answers and other not in self._unanswered):
            return None, 0.0  # none, or it has answered this rank
        return Culprit(other, reported + now - answer.at), reported
