"""What schemes with a codec have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Values
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.feedback import Feedback
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.scheme import Scheme


class Lossy(Scheme):
    """``flat`` and ``result`` are float32 vectors of ``count`` values; error feedback is kept where it is asked for."""

    def __init__(self, bucket: Bucket, *, size: int, count: int, has_feedback: bool, memory: Memory) -> None:
        super().__init__(bucket, size=size, keeps_input=memory.keeps_input)
        self.flat = np.zeros(count, np.float32)
        self.result = np.zeros(count, np.float32) if memory.keeps_input else self.flat
        self.feedback = Feedback(bucket, count=count, is_kept=has_feedback)
        self._is_lent = False

    def lend(self, values: NDArray[Any]) -> bool:
        is_fit = values.dtype == np.float32 and values.shape == self.flat.shape and values.flags.c_contiguous
        if is_fit and not self.keeps_input:
            self.flat = self.result = values
            self._is_lent = True
        elif self._is_lent:
            self.flat = self.result = np.zeros(self.flat.shape, np.float32)
            self._is_lent = False
        return self._is_lent

    def commit(self) -> None:
        self.feedback.commit()

    def buffers(self) -> Iterator[NDArray[Any]]:
        if not self._is_lent:
            yield from super().buffers()

    @property
    def residual_nbytes(self) -> int:
        return self.feedback.nbytes

    def residuals(self) -> Iterator[tuple[str, Values]]:
        return self.feedback.by_name()
