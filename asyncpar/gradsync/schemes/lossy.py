"""What schemes with a codec have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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

    def commit(self) -> None:
        self.feedback.commit()

    def residuals(self) -> Iterator[tuple[str, Values]]:
        return self.feedback.by_name()
