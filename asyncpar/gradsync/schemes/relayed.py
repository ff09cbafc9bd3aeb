"""What the schemes have in common in which some ranks reduce and broadcast the result to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from asyncpar.codecs import Values
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.scheme import Scheme, all_finite


class Relayed(Scheme):
    """``inner`` reduces; ranks where it is None receive its result.

    ``size``, ``is_mean`` and ``dtype`` are those of the inner scheme, also on ranks that do not have it.
    """

    def __init__(
        self, bucket: Bucket, inner: Scheme | None, *, size: int, is_mean: bool, dtype: np.dtype[Any], memory: Memory
    ) -> None:
        super().__init__(bucket, size=size)
        self._inner = inner
        self._is_mean = is_mean
        if inner is not None:
            self.flat, self.result = inner.flat, inner.result
        else:
            self.flat = memory.shared((bucket.count,), dtype)
            self.result = memory.shared((bucket.count,), dtype) if memory.keeps_input else self.flat

    @property
    def is_mean(self) -> bool:
        return self._is_mean

    def settle(self) -> None:
        self.is_finite = all_finite(self.reduced)

    def spoil(self) -> None:
        super().spoil()
        self.reduced.fill(np.nan)
        if self._inner is not None:
            self._inner.spoil()

    def commit(self) -> None:
        if self._inner is not None:
            self._inner.commit()

    def swap(self) -> None:
        super().swap()
        if self._inner is not None:
            self._inner.swap()

    @property
    def nbytes(self) -> int:
        return super().nbytes if self._inner is None else self._inner.nbytes

    @property
    def residual_nbytes(self) -> int:
        return 0 if self._inner is None else self._inner.residual_nbytes

    def residuals(self) -> Iterator[tuple[str, Values]]:
        if self._inner is not None:
            yield from self._inner.residuals()

    def state(self) -> Iterator[tuple[str, Values]]:
        if self._inner is not None:
            yield from self._inner.state()

    def restore(self, state: Mapping[str, Values]) -> None:
        if self._inner is not None:
            self._inner.restore(state)

    def settle_inner(self) -> None:
        """Complete the inner reduction; NaN tells the others of a result that is not finite."""
        if self._inner is not None:
            self._inner.settle()
            if not self._inner.is_finite:
                self.reduced.fill(np.nan)
