"""ZBV: the model goes down the ranks and back up, the backward pass in two halves; no bubble once it runs, and all
ranks keep equally much.

Qi et al., "Pipeline Parallelism with Controllable Memory" (2024) and "Zero Bubble Pipeline Parallelism" (2023).
Chunk 0 is the rank's stage on the way down, chunk 1 that on the way up.  The order is made for at least 2 p - 1
micro-batches, which it takes to fill the V of p ranks; steps of those that do not exist are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.pipeline.orders.step import Step, backward_input, backward_weight, forward, only_first

_DOWN, _UP = 0, 1


def zbv(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    """Fill the V, then one forward and one backward through each chunk in turn, then drain it."""
    enough = max(micro_batches, 2 * ranks - 1)
    return only_first(_order(rank, ranks, enough), micro_batches)


def _order(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    yield from _fill(rank, ranks)
    yield from _steady(rank, ranks, micro_batches)
    yield from _drain(rank, ranks, micro_batches)


def _fill(rank: int, ranks: int) -> Iterator[Step]:
    """Go down until the first micro-batch is back up; then both ways until the first gradient is here."""
    alone = 2 * (ranks - rank) - 1
    for micro_batch in range(alone):
        yield forward(_DOWN, micro_batch)
    for micro_batch in range(rank):
        yield forward(_UP, micro_batch)
        yield forward(_DOWN, alone + micro_batch)
    for backwards in range(ranks - rank):
        yield forward(_UP, rank + backwards)
        yield from _whole_backward(_UP, backwards)


def _steady(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    down, up = 2 * ranks - rank - 1, ranks
    for done in range(micro_batches - ranks):
        if down + done < micro_batches:
            yield forward(_DOWN, down + done)
        yield from _whole_backward(_DOWN, done)
        yield forward(_UP, up + done)
        yield from _whole_backward(_UP, ranks - rank + done)


def _drain(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    """Send gradients on as soon as they come; what weights still need fills the time between, and is done last."""
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


def _whole_backward(chunk: int, micro_batch: int) -> Iterator[Step]:
    yield backward_input(chunk, micro_batch)
    yield backward_weight(chunk, micro_batch)
