"""Without a codec: what DistributedDataParallel does without a hook, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes import Place, ReductionStep, Scheme
from asyncpar.gradsync.schemes.scheme import all_finite


class Prescaled(Scheme):
    """The sum, in the memory that is lent, of what was divided by the number of ranks before.

    It ``looks`` for values that are not finite where somebody wants to know.
    """

    is_mean = True

    def __init__(self, bucket: Bucket, communicator: Communicator, *, looks: bool) -> None:
        super().__init__(bucket, size=communicator.size)
        self._communicator = communicator
        self._looks = looks

    def lend(self, values: NDArray[Any]) -> bool:
        self.flat = self.result = values
        return True

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        if self.size == 1:
            return []
        return [ReductionStep(None, lambda: self._communicator.all_reduce(self.flat, key=f"{key}/exact"))]

    def settle(self) -> None:
        self.is_finite = not self._looks or all_finite(self.flat)
