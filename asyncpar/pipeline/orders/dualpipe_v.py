"""DualPipeV: the model goes down the ranks and back up, and in the steady state each forward stands next to a backward
of the other direction, so that one can compute while the other communicates.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1, in the V shape that holds each stage once.
Chunk 0 is the rank's stage on the way down, chunk 1 that on the way up.  The order is made for at least 2 p
micro-batches; steps of those that do not exist are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from asyncpar.pipeline.orders.step import Step, backward, backward_input, backward_weight, forward, only_first

_DOWN, _UP = 0, 1


def dualpipe_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    """Fill the V, overlap forwards with backwards, then drain it with backward passes in two halves."""
    enough = max(micro_batches, 2 * ranks)
    return only_first(_Order(rank, ranks, enough).steps(), micro_batches)


class _Order:
    """Counts what was done with each chunk, and keeps the weight gradients that are still to be computed."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self._rank = rank
        self._behind = ranks - 1 - rank
        self._overlapped = micro_batches - 2 * ranks + rank + 1
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._late: deque[Step] = deque()

    def steps(self) -> Iterator[Step]:
        for _ in range(2 * self._behind):
            yield self._forward(_DOWN)
        for _ in range(self._rank + 1):
            yield self._forward(_DOWN)
            yield self._forward(_UP)
        for _ in range(self._behind):
            yield self._backward_input(_UP)
            yield self._weight()
            yield self._forward(_UP)
        for _ in range(self._overlapped):
            yield self._forward(_DOWN)
            yield self._backward(_UP)
            yield self._forward(_UP)
            yield self._backward(_DOWN)
        for _ in range(self._behind):
            yield self._backward(_UP)
            yield self._forward(_UP)
            yield self._backward(_DOWN)
        yield from self._drain()

    def _drain(self) -> Iterator[Step]:
        """The second half of the backwards on both ways come in two halves, so that weight gradients fill the end."""
        half = self._rank + 1
        for place in range(2 * (self._rank + 1)):
            chunk = _DOWN if place % 2 else _UP
            yield self._backward(chunk) if place < half else self._backward_input(chunk)
        for _ in range(self._behind):
            yield self._weight()
            yield self._backward_input(_DOWN)
        while self._late:
            yield self._weight()

    def _forward(self, chunk: int) -> Step:
        self._forwards[chunk] += 1
        return forward(chunk, self._forwards[chunk] - 1)

    def _backward(self, chunk: int) -> Step:
        self._backwards[chunk] += 1
        return backward(chunk, self._backwards[chunk] - 1)

    def _backward_input(self, chunk: int) -> Step:
        micro_batch = self._backward(chunk).micro_batch
        self._late.append(backward_weight(chunk, micro_batch))
        return backward_input(chunk, micro_batch)

    def _weight(self) -> Step:
        return self._late.popleft()
