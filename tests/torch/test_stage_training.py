"""Modules of torch in our pipelines, sharded training and gradient synchronization."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import asyncpar as ap
from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientSynchronizer
from asyncpar.nn import Stage
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import MemoryManager, PipelineSchedule, Recomputed
from asyncpar.pipeline.result import PipelineResult
from asyncpar.torch.stage.stage import ModuleStage, torch_loss
from asyncpar.zero import ZeROStage
from tests.pipeline.real_stages import make_executors, make_worker, run_all
from tests.pipeline.worlds import Ranks, in_virtual_time
from tests.torch.torch_models import cross_entropy, gradients_of, make_parts, make_tokens, train_alone
from tests.zero.layers import Replica, replicas
from tests.zero.replicas import on_all, whole_values

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO_BATCHES = 4


def cut(count: int, **options: Any) -> list[Stage[Any]]:
    return [ModuleStage(str(place), part) for place, part in enumerate(make_parts(count, **options))]


def schedule_of(kind: Kind, ranks: int) -> PipelineSchedule:
    return PipelineSchedule(num_stages=ranks, num_microbatches=MICRO_BATCHES, schedule_type=kind)


def gradients_in(held: Sequence[Sequence[Stage[Any]]]) -> dict[str, torch.Tensor]:
    stages = [stage for stages in held for stage in stages]
    return {one.name: torch.from_numpy(one.grad.copy()) for stage in stages for one in stage.parameters()}


def train(schedule: PipelineSchedule, **options: Any) -> tuple[list[PipelineResult], dict[str, torch.Tensor]]:
    async def main(ranks: Ranks) -> tuple[list[PipelineResult], dict[str, torch.Tensor]]:
        executors, held = make_executors(schedule, ranks, loss=torch_loss(cross_entropy), **{"cut": cut, **options})
        results = await run_all(executors, *make_tokens(MICRO_BATCHES))
        await asyncio.gather(*(executor.close() for executor in executors))
        return results, gradients_in(held)

    return in_virtual_time(schedule.num_stages, main)


def check_plain(schedule: PipelineSchedule, results: Sequence[PipelineResult], found: dict[str, torch.Tensor]) -> None:
    """Losses and gradients are those of plain torch, up to the order in which micro-batches add up."""
    whole = make_parts(schedule.num_virtual_stages)
    losses = train_alone(whole, *make_tokens(MICRO_BATCHES))
    assert [loss for result in results for loss in result.losses] == losses
    wanted = gradients_of(whole)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_pipeline_computes_what_plain_torch_computes(kind: Kind, ranks: int) -> None:
    schedule = schedule_of(kind, ranks)
    check_plain(schedule, *train(schedule))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [Kind.ONE_FORWARD_ONE_BACKWARD, Kind.ZBV])
async def test_compute_threads_and_real_lanes_change_nothing(kind: Kind, ranks: int) -> None:
    schedule = schedule_of(kind, ranks)
    async with ap.testing.local_world(ranks, transport="tcp") as nodes:
        worlds: Any = type("Ranks", (), {"communicators": [node.world for node in nodes]})
        executors, held = make_executors(schedule, worlds, cut=cut, loss=torch_loss(cross_entropy), compute=make_worker)
        results = await asyncio.wait_for(run_all(executors, *make_tokens(MICRO_BATCHES)), 30)
        await asyncio.gather(*(executor.close() for executor in executors))
    check_plain(schedule, results, gradients_in(held))


@pytest.mark.parametrize("kind", [Kind.GPIPE, Kind.ZBV])
def test_activations_on_disk_come_back_as_they_were(kind: Kind) -> None:
    schedule = schedule_of(kind, 2)
    managers: list[MemoryManager] = []

    def make_memory() -> MemoryManager:
        managers.append(MemoryManager(strategy=MemoryOptimizationStrategy.EXTREME))
        return managers[-1]

    results, found = train(schedule, memory=make_memory)
    check_plain(schedule, results, found)
    assert all(manager.stats.offloaded.nbytes > 0 for manager in managers)
    assert all(manager.stats.restored.nbytes > 0 for manager in managers)


@pytest.mark.parametrize("kind", [Kind.GPIPE, Kind.ZERO_BUBBLE])
def test_recomputed_modules_compute_the_same_with_less_memory(kind: Kind) -> None:
    schedule = schedule_of(kind, 2)
    results, found = train(schedule, change=Recomputed)
    check_plain(schedule, results, found)
    if kind is Kind.GPIPE:
        plain, _ = train(schedule)
        assert all(less.peak_bytes < more.peak_bytes for less, more in zip(results, plain, strict=True))


@pytest.mark.parametrize("kind", [Kind.ONE_FORWARD_ONE_BACKWARD, Kind.DUALPIPE_V])
def test_dropout_is_the_same_wherever_a_part_is(kind: Kind) -> None:
    schedule = schedule_of(kind, 2)
    change = {"cut": partial(cut, dropout=0.3)}
    results, found = train(schedule, **change)
    again, same = train(schedule, change=Recomputed, **change)
    assert [one.losses for one in results] == [one.losses for one in again]
    plain, _ = train(schedule)
    assert [one.losses for one in results] != [one.losses for one in plain]
    for name, gradient in found.items():
        assert torch.equal(gradient, same[name]), name


# -- data parallelism --------------------------------------------------------------------------------------------------


def make_layers() -> list[Stage[Any]]:
    """Layers from 6 features to 6, of unequal sizes; the weights of one of them are tied, one has frozen ones."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        frozen, double = torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)
        frozen.requires_grad_(False)
        tied = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9))
        tied[2].weight = tied[0].weight
        modules = [
            torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.GELU()),
            torch.nn.Sequential(frozen, torch.nn.Dropout(0.2), double),
            tied,
            torch.nn.Linear(9, 6, bias=False),
        ]
    return [ModuleStage(f"layer{place}", module) for place, module in enumerate(modules)]


async def train_replicas(stage: ZeROStage, **settings: Any) -> tuple[list[bytes], dict[str, bytes]]:
    """Return the outputs of three steps on two replicas, and the values after them."""
    async with replicas(2, stage, **settings) as made:
        outputs: list[bytes] = []
        for step in range(3):
            outputs += [y.tobytes() for y in await on_all(made, partial(Replica.run, step=step))]
        values = await on_all([replica.engine for replica in made], whole_values)
        return outputs, {name: value.tobytes() for name, value in values[0].items()}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("stage", [ZeROStage.STAGE1, ZeROStage.STAGE2, ZeROStage.STAGE3])
async def test_sharded_modules_compute_the_bits_of_whole_ones(stage: ZeROStage, recomputes: bool) -> None:
    def make() -> list[Stage[Any]]:
        return [Recomputed(layer) for layer in make_layers()] if recomputes else make_layers()

    whole = await train_replicas(ZeROStage.NONE, make=make_layers)
    assert await train_replicas(stage, make=make, bucket_size_mb=1e-4) == whole


async def test_values_of_a_module_are_there_only_while_it_computes() -> None:
    seen: list[list[int]] = []

    class Watching(torch.nn.Linear):
        everything: Sequence[torch.nn.Linear] = ()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(
                [place for place, one in enumerate(self.everything) if _cells(one.weight) == one.weight.numel()]
            )
            y: torch.Tensor = super().forward(x)
            return y

    def make() -> list[Stage[Any]]:
        layers = [Watching(6, 6) for _ in range(3)]
        for layer in layers:
            layer.everything = list(layers)
        modules.extend(layers)
        stages.extend(ModuleStage(str(place), layer) for place, layer in enumerate(layers))
        return list(stages)

    modules: list[torch.nn.Linear] = []
    stages: list[ModuleStage] = []
    async with replicas(1, make=make) as (replica,):
        await replica.run(0)
        assert seen == [[0], [1], [2]]
        assert [_cells(one.weight) for one in modules] == [1, 1, 1]
        with pytest.raises(UsageError, match=r"parameter 0.weight: its value is released"):
            stages[0].forward(np.ones((1, 6), np.float32))


def _cells(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


async def test_our_synchronizer_makes_gradients_of_replicas_equal() -> None:
    async with ap.testing.local_world(2) as nodes:
        stages = [ModuleStage("layer", torch.nn.Linear(3, 2)) for _ in nodes]
        for number, stage in enumerate(stages):
            y, saved = stage.forward(np.full((2, 3), 1.0 + number, np.float32))
            stage.backward(saved, np.ones_like(y))
        bucketing = GradientBucketingConfig(gradient_as_bucket_view=True)
        synchronizers = [GradientSynchronizer.data_parallel(node.world, bucketing=bucketing) for node in nodes]
        each = zip(synchronizers, stages, strict=True)
        await asyncio.gather(*(synchronizer.synchronize_gradients(stage) for synchronizer, stage in each))
    for stage in stages:
        module: Any = stage.module
        assert torch.equal(module.weight.grad, torch.full((2, 3), 3.0))
        assert torch.equal(module.bias.grad, torch.full((2,), 2.0))
        weight: Array = stage.parameters()[0].grad
        assert weight.ctypes.data == module.weight.grad.data_ptr()
