"""Training modes by name (how often ranks meet), and the trainers for modes and codecs."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from asyncpar.errors import UsageError
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    HostGroups,
    SyncStatistics,
)
from asyncpar.node import Node
from asyncpar.parallel import SynchronizationMode
from asyncpar.parallel.local import DiLoCo, HostSynchronizer, Synchronizer
from asyncpar.train.language_model import Batches, LanguageModel
from asyncpar.train.replica import StepReport
from asyncpar.train.trainers import DataParallelTrainer, FreeTrainer, LocalTrainer

T = TypeVar("T", int, float)

FORMS = "sync, local:H, diloco:H[:RATE[:MOMENTUM]], hierarchical:H[:RATE[:MOMENTUM]], async, stale:STEPS"


class ModeKind(StrEnum):
    """Kinds of training modes.

    SYNC averages gradients in every step.  LOCAL averages parameters every H steps.  DILOCO does so with an outer
    optimizer.  HIERARCHICAL averages gradients inside hosts in every step, and parameters between hosts every H steps.
    In ASYNC no rank waits for another.  STALE bounds the number of steps that a rank may be ahead of the slowest.
    """

    SYNC = "sync"
    LOCAL = "local"
    DILOCO = "diloco"
    HIERARCHICAL = "hierarchical"
    ASYNC = "async"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMode:
    """``every``, ``learning_rate`` and ``momentum`` belong to rounds, if there are any, ``staleness`` to STALE."""

    kind: ModeKind = ModeKind.SYNC
    every: int = 1
    learning_rate: float = 1.0
    momentum: float = 0.0
    staleness: int = 0

    @property
    def has_rounds(self) -> bool:
        """Whether ranks, or hosts, train for several steps without exchanging gradients."""
        return self.kind in (ModeKind.LOCAL, ModeKind.DILOCO, ModeKind.HIERARCHICAL)

    @property
    def is_free(self) -> bool:
        """Whether ranks exchange updates without meeting."""
        return self.kind in (ModeKind.ASYNC, ModeKind.STALE)

    @property
    def has_replicas(self) -> bool:
        """Whether the parameters of all ranks are equal in every step."""
        return self.kind is ModeKind.SYNC

    def rounds(self, steps: int) -> int:
        """Return the number of rounds in ``steps`` steps."""
        return -(-steps // self.every)


def parse_mode(text: str) -> TrainingMode:
    """Return the mode called ``text``.  Raises ``UsageError`` listing the available ones."""
    name, *arguments = text.split(":")
    if name not in list(ModeKind):
        raise _unknown(text)
    kind = ModeKind(name)
    match kind, arguments:
        case ((ModeKind.SYNC | ModeKind.ASYNC), []):
            return TrainingMode(kind=kind)
        case ModeKind.STALE, [steps]:
            return TrainingMode(kind=kind, staleness=_number(text, int, steps, least=1))
        case ModeKind.LOCAL, [every]:
            return TrainingMode(kind=kind, every=_number(text, int, every, least=1))
        case ((ModeKind.DILOCO | ModeKind.HIERARCHICAL), [every, *rest]) if len(rest) <= 2:
            return _with_outer(text, kind, every, rest)
        case _:
            raise _unknown(text)


def _with_outer(text: str, kind: ModeKind, every: str, rest: list[str]) -> TrainingMode:
    """Return a mode of rounds with an outer optimizer; DiLoCo's has its paper's settings by default."""
    numbers = [_number(text, float, part, least=0.0) for part in rest]
    defaults = (0.7, 0.9) if kind is ModeKind.DILOCO else (1.0, 0.0)
    rate, momentum = (*numbers, *defaults[len(numbers) :])
    return TrainingMode(kind=kind, every=_number(text, int, every, least=1), learning_rate=rate, momentum=momentum)


def _number(text: str, kind: Callable[[str], T], part: str, *, least: T) -> T:
    try:
        number = kind(part)
    except ValueError:
        raise _unknown(text) from None
    if not (number >= least and math.isfinite(number)):
        raise UsageError(f"sync: expected a number of at least {least}, got {part} in {text!r}")
    return number


def _unknown(text: str) -> UsageError:
    return UsageError(f"sync: expected one of {FORMS}, got {text!r}")


class Trainer(Protocol):
    """A training loop."""

    def run(self) -> AsyncGenerator[StepReport, None]: ...

    async def check_replicas(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A trainer, and the synchronizer that uses the codec, if this rank has it; rank 0 always has."""

    trainer: Trainer
    synchronizer: GradientSynchronizer | None

    def statistics(self) -> SyncStatistics:
        """Return the synchronizer's statistics; empty ones without it."""
        return SyncStatistics() if self.synchronizer is None else self.synchronizer.get_sync_stats()


def make_trainer(
    mode: TrainingMode,
    model: LanguageModel,
    batches: Batches,
    *,
    node: Node,
    compression: GradientCompressionConfig,
    bucketing: GradientBucketingConfig,
) -> Setup:
    """Return the trainer for ``mode`` over all ranks.

    ``compression`` is that of gradients, or, with rounds, of their differences, between hosts if rounds are between
    hosts.  Raises ``UsageError`` if the model's configuration has ``tuning`` in another mode than SYNC.
    """
    world, tuning = node.world, model.config.tuning
    if mode.kind is ModeKind.SYNC:
        synchronizer = GradientSynchronizer.data_parallel(
            world, compression=compression, bucketing=bucketing, tuning=tuning
        )
        trainer = DataParallelTrainer(model, batches, communicator=world, synchronizer=synchronizer)
        return Setup(trainer=trainer, synchronizer=synchronizer)
    if tuning is not None:
        raise UsageError(f"tuning: expected None with {mode.kind}, which has no gradients of all ranks in every step")
    if mode.kind is ModeKind.HIERARCHICAL:
        return _make_hierarchical(mode, model, batches, node=node, compression=compression, bucketing=bucketing)
    if mode.is_free:
        return _make_free(mode, model, batches, node=node, compression=compression)
    synchronizer = GradientSynchronizer.data_parallel(
        world, compression=compression, bucketing=bucketing, name="rounds"
    )
    local = LocalTrainer(model, batches, communicator=world, rounds=_make_rounds(mode, model, synchronizer))
    return Setup(trainer=local, synchronizer=synchronizer)


def _make_hierarchical(
    mode: TrainingMode,
    model: LanguageModel,
    batches: Batches,
    *,
    node: Node,
    compression: GradientCompressionConfig,
    bucketing: GradientBucketingConfig,
) -> Setup:
    """Return a trainer that averages gradients exactly inside each host, and makes rounds between hosts."""
    groups = HostGroups.of(node.world, node.world.hosts)
    inside = GradientSynchronizer.data_parallel(groups.inside, bucketing=bucketing)
    between = None
    if groups.between is not None:
        between = GradientSynchronizer.data_parallel(
            groups.between, compression=compression, bucketing=bucketing, name="rounds"
        )
    rounds = _make_rounds(mode, model, HostSynchronizer(groups.inside, between))
    trainer = LocalTrainer(model, batches, communicator=node.world, rounds=rounds, inside=inside)
    return Setup(trainer=trainer, synchronizer=between)


def _make_free(
    mode: TrainingMode, model: LanguageModel, batches: Batches, *, node: Node, compression: GradientCompressionConfig
) -> Setup:
    if compression.is_enabled:
        raise UsageError(f"codec: {mode.kind} sends updates as they are, expected none, got {compression.codec_name}")
    limit = None if mode.kind is ModeKind.ASYNC else mode.staleness
    trainer = FreeTrainer(model, batches, communicator=node.world, mode=SynchronizationMode(limit))
    return Setup(trainer=trainer, synchronizer=None)


def _make_rounds(mode: TrainingMode, model: LanguageModel, synchronizer: Synchronizer) -> DiLoCo:
    return DiLoCo(
        model.model.parameters(),
        synchronizer,
        every=mode.every,
        outer_learning_rate=mode.learning_rate,
        outer_momentum=mode.momentum,
    )
