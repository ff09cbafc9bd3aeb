"""Schedules whose stages go round the ranks, each time from first to last.

GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).  With
several chunks per rank, all micro-batches go through a chunk before any goes through the next ("breadth first", Lamy-
Poirier 2022).

1F1B: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), in its synchronous form.

Interleaved 1F1B: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(2021), section 2.2: a smaller bubble for more messages and more activations.  Micro-batches go through the chunks in
groups.  Groups as large as the number of ranks keep least; if the number of micro-batches is not a multiple of that,
groups are larger (less than twice), never smaller: the bubble stays (p - 1) (F + B) for any number of micro-batches
from p on.

Zero bubble: ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (2023): weight gradients fill the bubble, and a rank
keeps as much as the first rank of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from asyncpar.pipeline.orders.step import ComputeStep, backward, backward_input, backward_weight, forward, only_first


def gpipe(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """Yield all forwards, then all backwards, both in the order of micro-batches."""
    yield from _forwards(micro_batches, chunks)
    for chunk in reversed(range(chunks)):
        for micro_batch in range(micro_batches):
            yield backward(chunk, micro_batch)


def sequential(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """Yield all forwards, then all backwards in reverse."""
    yield from _forwards(micro_batches, chunks)
    for chunk in reversed(range(chunks)):
        for micro_batch in reversed(range(micro_batches)):
            yield backward(chunk, micro_batch)


def round_robin(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """Yield one micro-batch at a time: only one rank computes at any moment, and only one micro-batch is kept."""
    for micro_batch in range(micro_batches):
        for chunk in range(chunks):
            yield forward(chunk, micro_batch)
        for chunk in reversed(range(chunks)):
            yield backward(chunk, micro_batch)


def _forwards(micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    for chunk in range(chunks):
        for micro_batch in range(micro_batches):
            yield forward(chunk, micro_batch)


def one_f1b(rank: int, ranks: int, micro_batches: int) -> Iterator[ComputeStep]:
    """Run ahead by as many forwards as there are ranks after this one, then alternate, then finish the backwards."""
    ahead = min(ranks - 1 - rank, micro_batches)
    for micro_batch in range(ahead):
        yield forward(0, micro_batch)
    for micro_batch in range(ahead, micro_batches):
        yield forward(0, micro_batch)
        yield backward(0, micro_batch - ahead)
    for micro_batch in range(micro_batches - ahead, micro_batches):
        yield backward(0, micro_batch)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """Run ahead through all chunks but the last and two steps per rank after this one, then alternate.

    With one chunk there is nothing to interleave, and the order is that of 1F1B.
    """
    if chunks == 1:
        return one_f1b(rank, ranks, micro_batches)
    return only_first(_interleave(rank, groups_of(ranks, micro_batches), ranks, chunks), micro_batches)


def groups_of(ranks: int, micro_batches: int) -> list[range]:
    """Cut micro-batches into as many groups of at least ``ranks`` as possible, with sizes differing by at most one.

    There may be more than ``micro_batches`` of them if those are fewer than ranks.
    """
    count = max(micro_batches, ranks)
    groups = count // ranks
    bounds = [group * (count // groups) + min(group, count % groups) for group in range(groups + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def group_by_group(groups: Sequence[range], chunks: range) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) pairs: each group of micro-batches goes through all of ``chunks`` before the next."""
    return [(chunk, micro_batch) for group in groups for chunk in chunks for micro_batch in group]


def _interleave(rank: int, groups: Sequence[range], ranks: int, chunks: int) -> Iterator[ComputeStep]:
    forwards = group_by_group(groups, range(chunks))
    backwards = group_by_group(groups, range(chunks)[::-1])
    total = len(forwards)
    ahead = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), total)
    for place in range(total + ahead):
        if place < total:
            yield forward(*forwards[place])
        if place >= ahead:
            yield backward(*backwards[place - ahead])


def zero_bubble(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[ComputeStep]:
    """Run one step ahead for each rank after this one; weight gradients lag by one step for each rank before it."""
    return only_first(_split_backwards(rank, groups_of(ranks, micro_batches), ranks, chunks), micro_batches)


def _split_backwards(rank: int, groups: Sequence[range], ranks: int, chunks: int) -> Iterator[ComputeStep]:
    forwards = group_by_group(groups, range(chunks))
    backwards = group_by_group(groups, range(chunks)[::-1])
    total = len(forwards)
    ahead = min((chunks - 1) * len(groups[0]) + ranks - 1 - rank, total)
    for place in range(total + ahead + rank):
        if place < total:
            yield forward(*forwards[place])
        if ahead <= place < ahead + total:
            yield backward_input(*backwards[place - ahead])
        if place >= ahead + rank:
            yield backward_weight(*backwards[place - ahead - rank])
