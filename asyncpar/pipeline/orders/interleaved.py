"""1F1B with several chunks per rank: a smaller bubble for more messages and more activations.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 2.2.
Micro-batches go through the chunks in groups.  Groups as large as there are ranks keep least; where the number of
micro-batches is no multiple of that, groups are somewhat larger (less than twice), never smaller: that costs memory,
but the bubble stays that of the paper, (p - 1) (F + B), for any number of micro-batches from p on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from asyncpar.pipeline.orders.one_f1b import one_f1b
from asyncpar.pipeline.orders.step import Step, backward, forward, only_first


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Step]:
    """Run ahead through all chunks but the last and two steps per rank behind this one, then alternate.

    With one chunk there is nothing to interleave, and the order is that of 1F1B.
    """
    if chunks == 1:
        return one_f1b(rank, ranks, micro_batches)
    return only_first(_alternate(rank, groups_of(ranks, micro_batches), ranks, chunks), micro_batches)


def groups_of(ranks: int, micro_batches: int) -> list[range]:
    """Cut micro-batches into as many groups of at least ``ranks`` as there can be, sizes differing by one at most.

    There may be more than ``micro_batches`` of them if those are fewer than ranks.
    """
    count = max(micro_batches, ranks)
    groups = count // ranks
    bounds = [group * (count // groups) + min(group, count % groups) for group in range(groups + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def group_by_group(groups: Sequence[range], chunks: range) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) pairs: each group of micro-batches goes through all of ``chunks`` before the next."""
    return [(chunk, micro_batch) for group in groups for chunk in chunks for micro_batch in group]


def _alternate(rank: int, groups: Sequence[range], ranks: int, chunks: int) -> Iterator[Step]:
    forwards = group_by_group(groups, range(chunks))
    backwards = group_by_group(groups, range(chunks)[::-1])
    total = len(forwards)
    ahead = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), total)
    for place in range(total + ahead):
        if place < total:
            yield forward(*forwards[place])
        if place >= ahead:
            yield backward(*backwards[place - ahead])
