"""Trainers by mode and codec."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

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
from asyncpar.train.batches import Batches
from asyncpar.train.data_parallel import DataParallelTrainer
from asyncpar.train.free_running import FreeTrainer
from asyncpar.train.language_model import LanguageModel
from asyncpar.train.local_steps import LocalTrainer
from asyncpar.train.mode import ModeKind, TrainingMode
from asyncpar.train.replica import StepReport


class Trainer(Protocol):
    """A training loop."""

    def run(self) -> AsyncGenerator[StepReport, None]: ...

    async def check_replicas(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A trainer, and the synchronizer that the codec is used in, if this rank has it; rank 0 always has."""

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

    ``compression`` is that of gradients, or of the rounds' differences where there are rounds, between hosts where
    those are between hosts.
    """
    world = node.world
    if mode.kind is ModeKind.SYNC:
        synchronizer = GradientSynchronizer.data_parallel(world, compression=compression, bucketing=bucketing)
        trainer = DataParallelTrainer(model, batches, communicator=world, synchronizer=synchronizer)
        return Setup(trainer=trainer, synchronizer=synchronizer)
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
    """Return a trainer that averages gradients inside each host, exactly, and makes rounds between hosts."""
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
