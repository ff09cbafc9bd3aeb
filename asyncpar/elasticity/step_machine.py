"""One training step as a state machine, and the 8-byte vote that commits it on all ranks or on none.  Pure.

Theory of operation.  A rank *computes*, *reduces* (the sums are there), changes its state in second buffers, and then
votes: it is *prepared*.  The vote is one all-reduce, which no rank can end before all have begun it; so a rank that has
the result knows that all are prepared, and commits.  When the world ends in between, the survivors compare: if all of
them are prepared, the step is committed (a lost rank may have committed it); if any is not, no rank can have committed
it, and all abort.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncpar.elasticity.portions import PartialSums, Portions
from asyncpar.errors import UsageError
from asyncpar.hosts.lineage import LINEAGE_BITS, Lineage


class StepPhase(StrEnum):
    """The phases of a step."""

    NEW = "not begun"
    COMPUTING = "computing"
    REDUCING = "reducing"
    REDUCED = "reduced"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


_OVER = (StepPhase.COMMITTED, StepPhase.ABORTED)


class StepMachine:
    """The phase of step ``number``, which decides the calls that may come next, and the end of the step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = StepPhase.NEW
        self._sums: PartialSums | None = None

    @property
    def is_over(self) -> bool:
        return self.phase in _OVER

    def begin(self, portions: Portions, rank: int) -> PartialSums:
        """Enter the block of the step, as ``rank`` of the world."""
        self._enter()
        self._sums = PartialSums(portions, rank)
        return self._sums

    def begin_replay(self) -> None:
        """Enter the block of the step as a newcomer, which repeats it without portions."""
        self._enter()

    def _enter(self) -> None:
        if self.phase is not StepPhase.NEW:
            raise UsageError(f"step {self.number}: it is {self.phase}; each step is entered once")
        self.phase = StepPhase.COMPUTING

    def require_addable(self, portion: int) -> None:
        """Raise ``UsageError`` unless the gradients of ``portion`` may be added now."""
        self._expect("add", StepPhase.COMPUTING)
        if self._sums is None:
            raise UsageError(f"step {self.number}: a newcomer repeats it and has no portions; use step.portions")
        self._sums.check(portion)

    def record_added(self, portion: int) -> None:
        """Record the gradients of ``portion``."""
        self.require_addable(portion)
        assert self._sums is not None
        self._sums.take(portion)

    def reduce(self) -> None:
        """Begin the sums."""
        self._expect("reduce", StepPhase.COMPUTING)
        if self._sums is not None and self._sums.missing:
            missing = ", ".join(str(portion) for portion in self._sums.missing)
            raise UsageError(f"step {self.number}: reduce before all portions were added; missing {missing}")
        self.phase = StepPhase.REDUCING

    def reduced(self) -> None:
        """Record that the sums are there."""
        self._expect("reduced", StepPhase.REDUCING)
        self.phase = StepPhase.REDUCED

    def check_update(self) -> None:
        """Check that the state may be changed now."""
        self._expect("update", StepPhase.REDUCED)

    def check_prepare(self) -> None:
        """Check that all changes may be complete; mirrors may have to get them before this rank votes."""
        if self.phase is StepPhase.COMPUTING:
            raise UsageError(
                f"step {self.number}: its block ended without `await step.reduce()`; nothing was committed"
            )
        self._expect("the end of the block", StepPhase.REDUCED)

    def prepare(self) -> None:
        """Vote: all changes are made."""
        self.check_prepare()
        self.phase = StepPhase.PREPARED

    def commit(self) -> None:
        """Commit: all ranks have voted, or all survivors had."""
        self._expect("commit", StepPhase.PREPARED)
        self.phase = StepPhase.COMMITTED

    def abort(self) -> None:
        """Abort: the step will be repeated."""
        if not self.is_over:
            self.phase = StepPhase.ABORTED

    def _expect(self, call: str, phase: StepPhase) -> None:
        if self.phase is not phase:
            raise UsageError(f"step {self.number}: {call} when it is {self.phase}; expected it to be {phase}")


_OK, _CALM = 1, 2
_FIRST_BIT = 2
_ALL_BITS = (1 << LINEAGE_BITS) - 1


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of all votes: whether all lineages are the same, and whether a rank knows of a coming change."""

    agrees: bool
    is_pending: bool


def encode_vote(lineage: Lineage, *, is_pending: bool) -> int:
    """Return a vote as a word; words are combined by bitwise and.

    The bits of the lineage occur plain and inverted: lineages agree if each bit survives in one of the two.
    """
    calm = 0 if is_pending else _CALM
    word = lineage.word
    return _OK | calm | word << _FIRST_BIT | (word ^ _ALL_BITS) << (_FIRST_BIT + LINEAGE_BITS)


def decode_vote(word: int) -> Vote:
    """Decode the combined ``word``."""
    plain, inverted = (word >> _FIRST_BIT) & _ALL_BITS, word >> (_FIRST_BIT + LINEAGE_BITS)
    return Vote(agrees=(plain | inverted) == _ALL_BITS and bool(word & _OK), is_pending=not word & _CALM)
