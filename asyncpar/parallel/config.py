"""Settings of distributed data parallelism."""

from __future__ import annotations

from asyncpar.core.records import dataclass

BUCKET_BYTES = 25 << 20

DDP_GROUP = "ddp_main"
"""Name of the group of all replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPConfig:
    """How gradients are averaged over ranks in synchronous mode; equal on all ranks.

    ``find_unused_parameters``: parameters that no backward pass has reached since the last synchronization are allowed.
    Ranks agree on them: where no rank has reached one, its gradient is left alone; where some have, the others count as
    zero.  Without it such a parameter is a ``UsageError``.
    ``gradient_as_bucket_view``: gradients are views of the buckets' memory, so that they are not copied into it.
    ``static_graph``: every step reaches the same parameters.  Ranks agree on them in the first, where some may be
    unused; from then on nothing is asked any more, unused ones are not sent, and a step that reaches others is a
    ``UsageError``.
    ``delay_all_reduce``: communication starts after the backward pass; without it, as soon as gradients are ready.
    """

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    delay_all_reduce: bool = True
