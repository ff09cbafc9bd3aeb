"""Settings of distributed data parallelism, and of how far apart ranks may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig, NonFinitePolicy


@dataclass(frozen=True, slots=True)
class SynchronizationMode:
    """``max_staleness`` is the number of steps that a rank may run ahead of the slowest; None: any number.

    ``SYNCHRONOUS`` (0): gradients are averaged before each update, so all ranks hold the same parameters at every step.
    ``ASYNCHRONOUS`` (None): no rank waits for another.  Each applies its own update at once and those of others when
    they arrive, all of them weighted by 1 / ranks.  ``BOUNDED_STALENESS(n)``: as asynchronous, but a rank that is ``n``
    steps ahead of the slowest waits for it (stale synchronous parallel, Ho et al. 2013).  With 0 that is synchronous.
    """

    max_staleness: int | None

    SYNCHRONOUS: ClassVar[SynchronizationMode]
    ASYNCHRONOUS: ClassVar[SynchronizationMode]

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(f"max_staleness: expected 0 or more steps, or None, got {self.max_staleness}")

    @classmethod
    def BOUNDED_STALENESS(cls, max_staleness: int) -> SynchronizationMode:  # noqa: N802
        """Return the mode in which no rank runs more than ``max_staleness`` steps ahead of another."""
        return cls(max_staleness)

    @property
    def is_synchronous(self) -> bool:
        """Whether gradients are averaged rather than updates exchanged."""
        return self.max_staleness == 0

    def __str__(self) -> str:
        if self.max_staleness is None:
            return "asynchronous"
        return "synchronous" if self.is_synchronous else f"bounded staleness {self.max_staleness}"


SynchronizationMode.SYNCHRONOUS = SynchronizationMode(0)
SynchronizationMode.ASYNCHRONOUS = SynchronizationMode(None)


BUCKET_BYTES = 25 << 20

DDP_GROUP = "ddp_main"
"""Name of the group of all replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPConfig:
    """Settings of averaging gradients over ranks in synchronous mode; equal on all ranks.

    ``find_unused_parameters``: parameters that no backward pass has reached since the last synchronization are allowed.
    Ranks agree on them: if no rank has reached one, its gradient is left alone; if some have, the others count as zero.
    Without it such a parameter raises ``UsageError``.  ``gradient_as_bucket_view``: gradients are views of the buckets'
    memory, so they are not copied into it.  ``static_graph``: every step reaches the same parameters.  Ranks agree on
    them in the first, where some may be unused; after that there is no further exchange, unused ones are not sent, and
    a step that reaches others raises ``UsageError``.  ``delay_all_reduce``: communication starts after the backward
    pass; without it, as soon as gradients are ready.  ``no_sync_weight``: the weight of each of the k backward passes
    combined by ``no_sync``: ``"mean"`` is 1 / k, ``"sum"`` is 1, as in torch, where programs divide the loss
    themselves.
    """

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    delay_all_reduce: bool = True
    no_sync_weight: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.no_sync_weight not in ("mean", "sum"):
            raise UsageError(f'no_sync_weight: expected "mean" or "sum", got {self.no_sync_weight!r}')


def check_free(
    mode: SynchronizationMode,
    config: DDPConfig,
    bucket_size: int,
    compression: GradientCompressionConfig,
    when_not_finite: NonFinitePolicy,
) -> None:
    """Raise ``UsageError`` for settings of gradient averaging in a mode without it."""
    if compression.is_enabled:
        raise unused_setting("compression", mode, str(compression))
    if bucket_size != BUCKET_BYTES:
        raise unused_setting("bucket_size", mode, bucket_size)
    if when_not_finite != NonFinitePolicy.ABORT:
        raise unused_setting("when_not_finite", mode, str(when_not_finite))
    for name in ("static_graph", "gradient_as_bucket_view"):
        if getattr(config, name):
            raise unused_setting(name, mode, True)


def unused_setting(name: str, mode: SynchronizationMode, got: object) -> UsageError:
    """Return the error for a setting of gradient averaging in a mode without it."""
    return UsageError(
        f"{name}: expected the default with {mode} training, which sends updates of parameters as they are and "
        f"averages no gradients, got {got!r}"
    )
