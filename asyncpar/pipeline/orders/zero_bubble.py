"""1F1B with the backward pass in two halves: what nobody waits for (weight gradients) fills the bubble.

ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (2023), which keeps as much as 1F1B does on its first rank; with
several chunks, the same on the order of interleaved 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncpar.pipeline.orders.interleaved import group_by_group, groups_of
from asyncpar.pipeline.orders.step import Step, backward_input, backward_weight, forward, only_first


def zero_bubble(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Step]:
    """Run one step ahead for each rank behind this one; weight gradients lag by one step for each rank before it."""
    return only_first(_alternate(rank, groups_of(ranks, micro_batches), ranks, chunks), micro_batches)


def _alternate(rank: int, groups: Sequence[range], ranks: int, chunks: int) -> Iterator[Step]:
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
