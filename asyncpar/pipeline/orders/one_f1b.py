"""One forward, one backward in turn, which bounds what is kept by the number of ranks.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), in its synchronous form.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpar.pipeline.orders.step import Step, backward, forward


def one_f1b(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    """Run ahead by as many forwards as there are ranks behind this one, then alternate, then finish the backwards."""
    ahead = min(ranks - 1 - rank, micro_batches)
    for micro_batch in range(ahead):
        yield forward(0, micro_batch)
    for micro_batch in range(ahead, micro_batches):
        yield forward(0, micro_batch)
        yield backward(0, micro_batch - ahead)
    for micro_batch in range(micro_batches - ahead, micro_batches):
        yield backward(0, micro_batch)
