"""Without a codec: one all-reduce in the gradients' own dtype, or none."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.scheme import Leg, Place, Scheme, all_finite


class Exact(Scheme):
    """The mean, by an all-reduce with ``algorithm``."""

    is_mean = True

    def __init__(self, bucket: Bucket, communicator: Communicator, *, algorithm: str | None, memory: Memory) -> None:
        super().__init__(bucket, size=communicator.size, keeps_input=memory.keeps_input)
        self._communicator = communicator
        self._algorithm = algorithm
        self.flat = memory.shared((bucket.count,), bucket.dtype)
        self.result = memory.shared((bucket.count,), bucket.dtype) if memory.keeps_input else self.flat
        self._spoiled: NDArray[Any] | None = None

    def legs(self, key: Name, place: Place) -> Sequence[Leg]:  # noqa: ARG002
        self._spoiled = None
        return [Leg(None, Obligation(lambda: self._reduce(key)))]

    def settle(self) -> None:
        self.is_finite = all_finite(self.result)

    def spoil(self) -> None:
        super().spoil()
        if self.keeps_input:
            self._spoiled = np.full_like(self.flat, np.nan)

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        if self._spoiled is not None:
            yield self._spoiled

    def _reduce(self, key: Name) -> Coroutine[Any, Any, NDArray[Any]]:
        values = self.flat if self._spoiled is None else self._spoiled
        out = None if self.result is self.flat else self.result
        return self._communicator.all_reduce(values, op="mean", out=out, algorithm=self._algorithm, key=str(key))


class Alone(Scheme):
    """There is no other replica."""

    is_mean = True

    def __init__(self, bucket: Bucket, *, keeps_input: bool = False) -> None:
        super().__init__(bucket, size=1, keeps_input=keeps_input)
        self.flat = self.result = np.zeros(bucket.count, bucket.dtype)

    def legs(self, key: Name, place: Place) -> Sequence[Leg]:  # noqa: ARG002
        return []

    def settle(self) -> None:
        self.is_finite = all_finite(self.result)
