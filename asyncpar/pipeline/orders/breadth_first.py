"""All forwards before all backwards, or one micro-batch at a time: the schedules that never mix the two passes.

GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).  With
several chunks per rank, all micro-batches go through a chunk before any goes through the next ("breadth first", Lamy-
Poirier 2022).
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.pipeline.orders.step import ComputeStep, backward, forward


def gpipe(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """All forwards, then all backwards, the micro-batch that came first going first in both."""
    yield from _forwards(micro_batches, chunks)
    for chunk in reversed(range(chunks)):
        for micro_batch in range(micro_batches):
            yield backward(chunk, micro_batch)


def sequential(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """All forwards, then all backwards in reverse."""
    yield from _forwards(micro_batches, chunks)
    for chunk in reversed(range(chunks)):
        for micro_batch in reversed(range(micro_batches)):
            yield backward(chunk, micro_batch)


def round_robin(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """One micro-batch at a time: only one rank computes at any moment, and only one micro-batch is kept."""
    for micro_batch in range(micro_batches):
        for chunk in range(chunks):
            yield forward(chunk, micro_batch)
        for chunk in reversed(range(chunks)):
            yield backward(chunk, micro_batch)


def _forwards(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    for chunk in range(chunks):
        for micro_batch in range(micro_batches):
            yield forward(chunk, micro_batch)
