"""Have all ranks taken in as many micro-steps, after equal steps?"""

from __future__ import annotations

from asyncpar.agreement.comparison import ALL, Comparison
from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError


class MicroStepRoll:
    """Compares what all ranks of ``world`` have done since the last time, once per step; names begin with ``key``."""

    def __init__(self, world: Communicator, *, key: str) -> None:
        self._world = world
        self._key = key
        self._calls = 0
        self._last = "no step"

    def took(self, step: int, learning_rate: float, clip_norm: float | None) -> None:
        """This rank has taken a step."""
        self._last = f"step {step} with learning rate {learning_rate!r} and clip_norm {clip_norm!r}"

    def open(self, count: int) -> MicroStepCall:
        """Return the comparison of this step, in which this rank has taken in ``count`` micro-steps."""
        self._calls += 1
        line = f"{count} micro-steps after {self._last}"
        return MicroStepCall(self._world, count, line, key=self._key, rare=f"{self._key}/{self._calls}")


class MicroStepCall:
    """One comparison."""

    def __init__(self, world: Communicator, count: int, line: str, *, key: str, rare: str) -> None:
        self._comparison = Comparison(world, {ALL: (line,)}, key=key, rare=rare)
        self._count = count
        self._difference: SettingsDiffer | None = None

    async def run(self) -> None:
        """Find out.  A difference is kept for ``check``: all ranks know it, so all can end what is under way."""
        try:
            await self._comparison.run()
        except SettingsDiffer as difference:
            self._difference = difference

    def close(self) -> None:
        """Abort the comparison on all ranks, unless it is over.  Does not wait."""
        self._comparison.close()

    def check(self) -> None:
        """Raise ``UsageError``, on every rank, unless all ranks have done the same, and one micro-step at least."""
        if self._difference is not None:
            raise self._difference
        if not self._count:
            raise UsageError("synchronize_gradients: expected gradients of at least one micro-step, got none")
