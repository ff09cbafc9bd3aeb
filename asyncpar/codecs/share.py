"""The share of values that a selecting codec sends, as a decimal fraction: 0.07 of 100 values are 7, not 8."""

from __future__ import annotations

from fractions import Fraction

from asyncpar.errors import UsageError


class KeptShare:
    """A share ``0 < ratio <= 1``; anything else raises ``UsageError``."""

    def __init__(self, ratio: float) -> None:
        if not 0.0 < ratio <= 1.0:
            raise UsageError(f"ratio: expected a number with 0 < ratio <= 1, got {ratio!r}")
        self._fraction = Fraction(repr(float(ratio)))
        self.text = repr(float(ratio))

    def of(self, count: int) -> int:
        """Return ``ceil(ratio * count)``, exactly."""
        return -(-count * self._fraction.numerator // self._fraction.denominator)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptShare) and self._fraction == other._fraction

    def __hash__(self) -> int:
        return hash(self._fraction)
