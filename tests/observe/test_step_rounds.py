"""Rounds of ranks that train are their steps: a slow one is named, whatever keys and groups its collectives have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import step_meter
from asyncpar.collectives.ledger import world_number
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.core.observe.spans import EventSpan
from asyncpar.gradsync import GradientBucketingConfig, GradientSynchronizer
from asyncpar.hybrid import HybridConfig, ThreeDParallelismConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import Parameter, TransformerConfig
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.observe.image import Event, read_image
from asyncpar.observe.rounds import Cause, Round, join_rounds, rounds_of
from asyncpar.observe.stragglers import REPORTED_ROUNDS, Straggler, find_straggler
from asyncpar.observe.timeline import make_timeline
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage
from tests.products import in_turn
from tests.soak import first

STEPS = REPORTED_ROUNDS + 2
CULPRIT = 1
LOOKED_AT = 128


class Gradient:
    def __init__(self, name: str, count: int = 64) -> None:
        self.name = name
        self.grad = np.ones(count, np.float32)


def rounds(node: Node) -> list[Round]:
    events = read_image(node.links.recorder.snapshot(), latest=LOOKED_AT).events
    return rounds_of(events, world_number(node.links.world.generation), REPORTED_ROUNDS)


def steps(node: Node) -> list[Event]:
    return [event for event in read_image(node.links.recorder.snapshot()).events if event.kind is EventKind.STEP]


async def train(size: int, program: Callable[[Node], Awaitable[None]], *, steps: int = STEPS) -> list[Node]:
    """Let each rank do ``steps`` of a program, and return them."""
    async with local_world(size) as nodes:

        async def run(node: Node) -> None:
            for _ in range(steps):
                await program(node)

        await asyncio.gather(*(run(node) for node in nodes))
    return list(nodes)


def synchronizing(
    compute: Callable[[Node], Awaitable[None]], *, buckets: int = 1, in_block: bool = True
) -> Callable[[Node], Awaitable[None]]:
    """Return a step that computes, in the block of a synchronizer or before it."""
    synchronizers: dict[int, GradientSynchronizer] = {}
    bucketing = GradientBucketingConfig(bucket_size_mb=0.0002, max_buckets=1000)

    async def step(node: Node) -> None:
        synchronizer = synchronizers.get(node.rank)
        if synchronizer is None:
            synchronizer = GradientSynchronizer.data_parallel(node.world, bucketing=bucketing)
            synchronizers[node.rank] = synchronizer
        gradients = [Gradient(f"w{number}") for number in range(buckets)]
        if not in_block:
            await compute(node)
        async with synchronizer.step(gradients) as reports:
            if in_block:
                await compute(node)
                for gradient in gradients:
                    reports.ready(gradient.name)
                await node.world.all_reduce(np.ones(1), key="loss")

    return step


async def sleep_longer(node: Node) -> None:
    await asyncio.sleep(0.05 if node.rank == CULPRIT else 0.03)


@pytest.mark.parametrize(("buckets", "in_block"), in_turn([1, 40], [True, False]))
def test_a_rank_that_computes_longer_in_the_steps_of_a_synchronizer_is_named(buckets: int, in_block: bool) -> None:
    nodes = run_virtual(train(3, synchronizing(sleep_longer, buckets=buckets, in_block=in_block)))
    straggler = find_straggler({node.rank: rounds(node) for node in nodes})
    assert isinstance(straggler, Straggler)
    assert (straggler.rank, straggler.cause) == (CULPRIT, Cause.COMPUTE)
    assert straggler.excess == pytest.approx(0.02, abs=0.002)
    assert straggler.describe().startswith("rank 1 is slow: each of its rounds takes 20.0 ms (40%) more")


def test_ranks_that_compute_as_long_as_the_others_are_not_named() -> None:
    nodes = run_virtual(train(4, synchronizing(lambda _: asyncio.sleep(0.03), buckets=3)))
    everyone = {node.rank: rounds(node) for node in nodes}
    assert all(len(own) == REPORTED_ROUNDS for own in everyone.values())
    assert find_straggler(everyone) is None


def test_a_wait_for_others_between_steps_is_not_the_own_time_of_a_rank() -> None:
    async def compute(node: Node) -> None:
        await sleep_longer(node)
        await node.world.all_reduce(np.ones(4), "max")

    nodes = run_virtual(train(3, synchronizing(compute, in_block=False)))
    own = {node.rank: [one.own for one in rounds(node)] for node in nodes}
    assert own[0] == pytest.approx([0.03] * REPORTED_ROUNDS, abs=1e-4)
    assert own[CULPRIT] == pytest.approx([0.05] * REPORTED_ROUNDS, abs=1e-4)


def test_input_is_the_cause_where_a_rank_loads_longer_between_steps() -> None:
    async def load(node: Node) -> None:
        recorder = node.links.recorder  # a span of the program is of the node that was started last
        with EventSpan("load batch", recorder=recorder):
            await asyncio.sleep(0.03 if node.rank == CULPRIT else 0.01)
        await asyncio.sleep(0.03)

    nodes = run_virtual(train(2, synchronizing(load, in_block=False)))
    straggler = find_straggler({node.rank: rounds(node) for node in nodes})
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (CULPRIT, Cause.INPUT)


class SlowModel(TransformerModel):
    """Takes longer for the loss on one rank."""

    seconds = 0.0

    def make_loss(self, *arguments: Any) -> Any:
        loss = super().make_loss(*arguments)

        def slower(output: Any, target: Any) -> Any:
            time.sleep(self.seconds)
            return loss(output, target)

        return slower


class SlowerModel(SlowModel):
    seconds = 0.05


@pytest.mark.parametrize(("replicas", "stages"), first(1, [(2, 1), (1, 2)]))
async def test_a_rank_that_computes_longer_under_a_coordinator_is_named(replicas: int, stages: int) -> None:
    parallelism = ThreeDParallelismConfig(dp_size=replicas, pp_size=stages, num_layers=2)
    config = HybridConfig(parallelism=parallelism, micro_batches=2)
    settings = TransformerConfig(vocabulary=16, length=8, features=8, layers=2)
    rows = np.random.default_rng(0).integers(0, 16, (2, 9))
    inputs, targets = [rows[:, :-1]] * 2, [rows[:, 1:]] * 2
    async with local_world(2) as nodes:

        async def run(node: Node) -> None:
            model = (SlowerModel if node.rank == CULPRIT else SlowModel)(config=settings)
            async with await ThreeDParallelismCoordinator.create(config, model, node.world) as coordinator:
                for _ in range(STEPS):
                    await coordinator.train_step(inputs, targets, learning_rate=1e-3)

        await asyncio.gather(*(run(node) for node in nodes))
        straggler = find_straggler({node.rank: rounds(node) for node in nodes})
        assert straggler is not None
        assert (straggler.rank, straggler.cause) == (CULPRIT, Cause.COMPUTE)
        assert straggler.excess > 0.05
        assert [step.label for step in steps(nodes[0])] == [f"step {n + 1} of training" for n in range(STEPS)]


@pytest.mark.parametrize("stage", list(ZeROStage))
def test_a_rank_that_computes_longer_between_steps_of_an_optimizer_with_shards_is_named(stage: ZeROStage) -> None:
    optimizers: dict[int, ZeROOptimizer] = {}

    async def step(node: Node) -> None:
        optimizer = optimizers.get(node.rank)
        if optimizer is None:
            optimizer = optimizers[node.rank] = ZeROOptimizer(SGD(), ZeROConfig(stage=stage), node.world)
            await optimizer.register_parameters([Parameter("w", np.ones(8, np.float32))])
        await sleep_longer(node)
        optimizer.update_gradients({"w": np.ones(8, np.float32)})
        await optimizer.optimizer_step()

    nodes = run_virtual(train(2, step))
    straggler = find_straggler({node.rank: rounds(node) for node in nodes})
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (CULPRIT, Cause.COMPUTE)
    assert straggler.excess == pytest.approx(0.02, abs=0.002)


async def test_a_step_that_fails_is_recorded_and_is_no_round() -> None:
    async with local_world(1) as (node,):
        synchronizer = GradientSynchronizer.data_parallel(node.world)
        for number in range(3):
            with suppress(ValueError):
                async with synchronizer.step([Gradient("w")]):
                    if number == 1:
                        raise ValueError
        states = [step.state for step in steps(node)]
        assert states == [EventState.COMPLETED, EventState.FAILED, EventState.COMPLETED]
        assert [one.number for one in rounds(node)] == [3]


async def test_steps_of_some_ranks_are_recorded_and_are_no_rounds() -> None:
    async with local_world(2) as nodes:
        for number, node in enumerate(nodes):
            alone = node.world.subgroup([number], name="alone")
            assert alone is not None
            synchronizer = GradientSynchronizer.data_parallel(alone)
            for _ in range(3):
                await synchronizer.synchronize_gradients({"w": np.ones(4)})
        assert [len(steps(node)) for node in nodes] == [3, 3]
        assert [rounds(node) for node in nodes] == [[], []]


async def test_a_step_within_the_step_of_another_is_not_recorded() -> None:
    async with local_world(1) as (node,):
        outer, inner = step_meter(node.world, "outer"), step_meter(node.world, "inner")
        outer.begin(1)
        inner.begin(1)
        inner.end()
        assert [step.name for step in steps(node)] == ["outer"]
        del outer  # its step does not hide others
        inner.begin(2)
        inner.end()
        assert [step.name for step in steps(node)] == ["outer", "inner"]


async def test_a_trace_shows_steps_with_the_own_time_of_the_rank() -> None:
    async with local_world(1) as (node,):
        meter = step_meter(node.world, "mine")
        meter.begin(7)
        meter.add(0.25)
        meter.end()
        timeline = make_timeline({0: read_image(node.links.recorder.snapshot())})
    (step,) = [one for one in timeline.slices if one.track == "steps"]
    assert (step.name, step.facts) == ("step 7 of mine", {"own time": "250.0 ms"})


def test_rounds_are_kept_between_inspections_until_numbers_begin_anew() -> None:
    def some(*numbers: int, own: float = 1.0) -> list[Round]:
        return [Round(number=number, own=own, seconds=2.0) for number in numbers]

    joined = join_rounds(some(1, 2, 3), some(3, 4, own=0.5), 3)
    assert [(one.number, one.own) for one in joined] == [(2, 1.0), (3, 1.0), (4, 0.5)]
    assert join_rounds(some(8, 9), some(1, 2), 3) == some(1, 2)
    assert join_rounds([], [], 3) == []
    assert join_rounds(some(1), [], 3) == some(1)
