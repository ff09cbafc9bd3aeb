"""V-shaped schedules: the model goes down the ranks and back up.

Chunk 0 of a rank is its stage on the way down, chunk 1 that on the way up.

ZBV: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024) and "Zero Bubble Pipeline Parallelism" (2023).
The backward pass has two halves; there is no bubble in the steady state, and all ranks keep equally much.  The order is
made for at least 2 p - 1 micro-batches, which fill the V of p ranks; steps of nonexistent ones are left out.

DualPipeV: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1, in the V shape that holds each stage once.
In the steady state each forward is next to a backward of the other direction, so that one computes while the other
communicates.  The order is made for at least 2 p micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from asyncpar.pipeline.orders.step import ComputeStep, backward, backward_input, backward_weight, forward, only_first

_DOWN, _UP = 0, 1


def zbv(rank: int, ranks: int, micro_batches: int) -> Iterator[ComputeStep]:
    """Fill the V, then run one forward and one backward through each chunk in turn, then drain it."""
    enough = max(micro_batches, 2 * ranks - 1)
    return only_first(_zbv_order(rank, ranks, enough), micro_batches)


def _zbv_order(rank: int, ranks: int, micro_batches: int) -> Iterator[ComputeStep]:
    yield from _zbv_fill(rank, ranks)
    yield from _zbv_steady(rank, ranks, micro_batches)
    yield from _zbv_drain(rank, ranks, micro_batches)


def _zbv_fill(rank: int, ranks: int) -> Iterator[ComputeStep]:
    """Go down until the first micro-batch is back up; then both ways until the first gradient has arrived."""
    alone = 2 * (ranks - rank) - 1
    for micro_batch in range(alone):
        yield forward(_DOWN, micro_batch)
    for micro_batch in range(rank):
        yield forward(_UP, micro_batch)
        yield forward(_DOWN, alone + micro_batch)
    for backwards in range(ranks - rank):
        yield forward(_UP, rank + backwards)
        yield from _whole_backward(_UP, backwards)


def _zbv_steady(rank: int, ranks: int, micro_batches: int) -> Iterator[ComputeStep]:
    down, up = 2 * ranks - rank - 1, ranks
    for done in range(micro_batches - ranks):
        if down + done < micro_batches:
            yield forward(_DOWN, down + done)
        yield from _whole_backward(_DOWN, done)
        yield forward(_UP, up + done)
        yield from _whole_backward(_UP, ranks - rank + done)


def _zbv_drain(rank: int, ranks: int, micro_batches: int) -> Iterator[ComputeStep]:
    """Send gradients on as soon as they arrive; remaining weight gradients fill the time between, and the end."""
    down, up = micro_batches - ranks, micro_batches - rank
    down_weight = down
    for more in range(rank):
        yield backward_input(_DOWN, down + more)
        yield backward_input(_UP, up + more)
    for more in range(rank, ranks):
        yield backward_input(_DOWN, down + more)
        yield backward_weight(_DOWN, down_weight)
        down_weight += 1
    for micro_batch in range(up, micro_batches):
        yield backward_weight(_UP, micro_batch)
    for micro_batch in range(down_weight, micro_batches):
        yield backward_weight(_DOWN, micro_batch)


def _whole_backward(chunk: int, micro_batch: int) -> Iterator[ComputeStep]:
    yield backward_input(chunk, micro_batch)
    yield backward_weight(chunk, micro_batch)


def dualpipe_v(rank: int, ranks: int, micro_batches: int) -> Iterator[ComputeStep]:
    """Fill the V, overlap forwards with backwards, then drain it with backward passes in two halves."""
    enough = max(micro_batches, 2 * ranks)
    return only_first(_DualPipe(rank, ranks, enough).steps(), micro_batches)


class _DualPipe:
    """Counts the operations of each chunk, and keeps the weight gradients that are still to be computed."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self._rank = rank
        self._behind = ranks - 1 - rank
        self._overlapped = micro_batches - 2 * ranks + rank + 1
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._late: deque[ComputeStep] = deque()

    def steps(self) -> Iterator[ComputeStep]:
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

    def _drain(self) -> Iterator[ComputeStep]:
        """Split the second half of the backwards in both directions, so that weight gradients fill the end."""
        half = self._rank + 1
        for place in range(2 * (self._rank + 1)):
            chunk = _DOWN if place % 2 else _UP
            yield self._backward(chunk) if place < half else self._backward_input(chunk)
        for _ in range(self._behind):
            yield self._weight()
            yield self._backward_input(_DOWN)
        while self._late:
            yield self._weight()

    def _forward(self, chunk: int) -> ComputeStep:
        self._forwards[chunk] += 1
        return forward(chunk, self._forwards[chunk] - 1)

    def _backward(self, chunk: int) -> ComputeStep:
        self._backwards[chunk] += 1
        return backward(chunk, self._backwards[chunk] - 1)

    def _backward_input(self, chunk: int) -> ComputeStep:
        micro_batch = self._backward(chunk).micro_batch
        self._late.append(backward_weight(chunk, micro_batch))
        return backward_input(chunk, micro_batch)

    def _weight(self) -> ComputeStep:
        return self._late.popleft()
