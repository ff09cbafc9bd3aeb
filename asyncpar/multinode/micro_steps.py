"""Have all ranks taken in as many micro-steps, after equal steps?"""

from __future__ import annotations

from asyncpar.agreement.errors import Disagreement
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.multinode.groups import agreement


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
        self._agreement = agreement(world, (line,), key=key, rare=rare)
        self._count = count
        self._difference: Disagreement | None = None

    async def run(self) -> None:
        """Find out.  A difference is kept for ``check``: all ranks know it, so all can end what is under way."""
        try:
            await self._agreement.run()
        except Disagreement as difference:
            self._difference = difference

    async def give_up(self) -> None:
        """Tell the others that this rank does not take the step.  Waits for nobody."""
        await self._agreement.give_up()

    def check(self) -> None:
        """Raise ``UsageError``, on every rank, unless all ranks have done the same, and one micro-step at least."""
        if self._difference is not None:
            raise self._difference
        if not self._count:
            raise UsageError("synchronize_gradients: expected gradients of at least one micro-step, got none")
