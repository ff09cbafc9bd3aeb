"""Have all ranks taken in as many micro-steps?"""

from __future__ import annotations

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.agreement import Disagreement
from asyncpar.multinode.groups import agreement


class MicroStepRoll:
    """Compares the numbers of micro-steps of all ranks of ``world``, once per step; names begin with ``key``."""

    def __init__(self, world: Communicator, *, key: str) -> None:
        self._world = world
        self._key = key
        self._calls = 0

    def open(self, count: int) -> MicroStepCall:
        """Return the comparison of this step, in which this rank has taken in ``count``."""
        self._calls += 1
        return MicroStepCall(self._world, count, key=self._key, rare=f"{self._key}/{self._calls}")


class MicroStepCall:
    """One comparison."""

    def __init__(self, world: Communicator, count: int, *, key: str, rare: str) -> None:
        line = f"{count} micro-steps since gradients were last applied"
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
        """Raise ``UsageError``, on every rank, unless all ranks have taken in as many, at least one."""
        if self._difference is not None:
            raise self._difference
        if not self._count:
            raise UsageError("synchronize_gradients: expected gradients of at least one micro-step, got none")
