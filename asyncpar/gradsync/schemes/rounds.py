"""Codecs in rounds, such as PowerSGD: each round sends the mean of a float32 message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import RoundCodec, Values
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.errors import NonFiniteValue
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.scheme import Lossy, Place, ReductionStep, SchemeMemory, all_finite


class Rounds(Lossy):
    """The mean, as the codec's rounds approximate it."""

    is_mean = True

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        codec: RoundCodec,
        *,
        algorithm: AllReduceAlgorithm | None,
        has_feedback: bool,
        memory: SchemeMemory,
    ) -> None:
        count = bucket.count
        super().__init__(bucket, size=communicator.size, count=count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self._algorithm = algorithm
        self._encoder = codec.encoder(bucket.shapes)
        if has_feedback:
            self._encoder.reserve_residual()
        self._has_state = False

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        works = [self._start, *(self._advancing(index) for index in range(len(self._encoder.messages) - 1))]
        return [
            ReductionStep(work, self._reducing(message, key / f"round/{index}"))
            for index, (work, message) in enumerate(zip(works, self._encoder.messages, strict=True))
        ]

    def settle(self) -> None:
        last = len(self._encoder.messages) - 1
        self._advance(last)
        if self.is_finite:
            self._encoder.finish(self.result, lost=self.feedback.lost)
            self.is_finite = all_finite(self.result)

    def commit(self) -> None:
        super().commit()
        self._encoder.commit()
        self._has_state = True

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._encoder.nbytes

    def state(self) -> Iterator[tuple[str, Values]]:
        if not self._has_state:
            return
        for slot, kept in zip(self.bucket.slots, self._encoder.state(), strict=True):
            if kept is not None:
                yield slot.name, kept

    def restore(self, state: Mapping[str, Values]) -> None:
        kept = [state.get(slot.name) for slot in self.bucket.slots]
        self._encoder.restore(kept)
        self._has_state = any(values is not None for values in kept)

    def _start(self) -> None:
        try:
            self._encoder.start(self.flat, residual=self.feedback.residual)
        except NonFiniteValue:
            self._encoder.messages[0].fill(np.nan)

    def _advance(self, index: int) -> None:
        messages = self._encoder.messages
        self.is_finite = all_finite(messages[index])
        if self.is_finite:
            try:
                self._encoder.advance(index)
            except NonFiniteValue:  # products of this rank overflowed, so the others must be informed
                self.is_finite = False
        if not self.is_finite and index + 1 < len(messages):
            messages[index + 1].fill(np.nan)

    def _advancing(self, index: int) -> Callable[[], None]:
        return lambda: self._advance(index)

    def _reducing(self, message: NDArray[Any], key: Name) -> Callable[[], Any]:
        reduce = self._communicator.all_reduce
        return lambda: reduce(message, op="mean", algorithm=self._algorithm, key=str(key))
