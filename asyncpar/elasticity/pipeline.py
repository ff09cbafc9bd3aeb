"""Pipelines in worlds that change: data parallelism over replicas of a pipeline, whose stages are parts of the state.

Portions are the micro-batches.  Their gradients are kept apart, stage by stage, and added along the tree of portions
over the replicas; so the bits depend neither on the number of replicas, nor on the number of stages per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.elasticity.parts import StateParts
from asyncpar.elasticity.pipeline_places import PipelinePlaces
from asyncpar.elasticity.portions import PartialSums, Portions, sum_tree
from asyncpar.elasticity.reduction import FlatPool, PortionSum
from asyncpar.elasticity.samples import stage_rng_state
from asyncpar.elasticity.sharded_optimizer import ShardedOptimizer
from asyncpar.errors import UsageError
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Stage
from asyncpar.pipeline.execution import LossFunction
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.registry import make_schedule

Array: TypeAlias = NDArray[Any]
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

OfPortion: TypeAlias = Callable[[int], Any]
"""Returns the input or the target of a portion."""

_SCHEDULE = "one_forward_one_backward"


class ElasticPipeline:
    """The ``stages`` of a model, whose parameters ``optimizer`` has by stage; one process runs some of them."""

    def __init__(self, stages: Sequence[Stage[Any]], optimizer: ShardedOptimizer, portions: int, seed: int) -> None:
        self.stages = tuple(stages)
        self._optimizer = optimizer
        self._portions = portions
        self._seed = seed
        self._world: Communicator | None = None
        self._executor: PipelineExecutor | None = None
        self._running: _PortionStage | None = None
        self._loss: LossFunction | None = None
        self.seconds_busy = 0.0
        """The time for which this rank has computed in the last run."""

    def _call_loss(self, output: Any, target: Any) -> tuple[Any, Array]:
        assert self._loss is not None, "it is set before each run"
        return self._loss(output, target)

    @staticmethod
    def bounds(stages: Sequence[Stage[Any]], parameters: Sequence[object]) -> list[int]:
        """Return where the parameters of each stage begin.  Raises ``UsageError`` if ``parameters`` are not theirs."""
        own = [parameter for stage in stages for parameter in stage.parameters()]
        if len(own) != len(parameters) or any(one is not other for one, other in zip(own, parameters, strict=True)):
            raise UsageError(
                "pipeline: expected an optimizer of the parameters of all stages, in their order, and each in one stage"
            )
        bounds = [0]
        for stage in stages:
            bounds.append(bounds[-1] + sum(parameter.size for parameter in stage.parameters()))
        return bounds

    def places(self, size: int) -> PipelinePlaces:
        """Return the places of stages and portions in a world of ``size`` ranks."""
        return PipelinePlaces(len(self.stages), self._portions, size)

    async def run(
        self,
        world: Communicator,
        parts: StateParts,
        step: int,
        *,
        inputs: OfPortion,
        targets: OfPortion,
        loss: LossFunction,
        is_mean: bool,
    ) -> tuple[Array, float]:
        """Return the sums (or means) of this rank's stages over all portions, flat, and the sum of all losses."""
        places, portions = self.places(world.size), Portions(self._portions, self.places(world.size).replicas)
        replica, mine = places.replica_of(world.rank), places.portions_of(world.rank)
        losses, flat = np.zeros(self._portions), np.empty(0, self._optimizer.stored)
        self.seconds_busy = 0.0
        if replica is not None:
            self._loss = loss
            self._optimizer.show(parts)
            executor, stage = await self._prepared(world, places)
            total = PortionSum(portions, PartialSums(portions, replica), None, FlatPool())
            with stage.recording(total, mine, step):
                result = await executor.run(
                    [inputs(portion) for portion in mine] if executor.has_first_stage else None,
                    [targets(portion) for portion in mine] if executor.has_last_stage else None,
                )
            self.seconds_busy = result.seconds_busy
            if executor.has_last_stage:
                losses[mine.start : mine.stop] = result.losses
            peers = world.subgroup(places.peers_of(world.rank), name="replicas of a stage", key="elastic peers")
            assert peers is not None, "this rank is one of its own peers"
            flats, _ = await total.total(peers, is_mean=is_mean)
            assert total.layout is not None
            flat = np.concatenate(total.layout.trimmed(flats))
        if world.size > 1:
            await world.all_reduce(losses)  # each from one rank: it has no order
        shown = {range(portion, portion + 1): float(found) for portion, found in enumerate(losses)}
        return flat, sum_tree(range(self._portions), shown, lambda left, right: left + right)

    async def _prepared(self, world: Communicator, places: PipelinePlaces) -> tuple[PipelineExecutor, _PortionStage]:
        if self._world is not world or self._executor is None or self._running is None:
            await self.close()
            ranks = places.pipeline_of(world.rank)
            group = world.subgroup(ranks, name="pipeline", key="elastic pipeline")
            assert group is not None, "this rank is in its own pipeline"
            stages = places.stages_of(world.rank)
            self._running = _PortionStage([self.stages[stage] for stage in stages], stages, self._seed)
            schedule = make_schedule(
                _SCHEDULE, num_stages=len(ranks), num_microbatches=len(places.portions_of(world.rank))
            )
            self._world = world
            self._executor = PipelineExecutor(
                schedule,
                [self._running],
                communicator=group,
                compute=_OffLoop(self._optimizer.size),
                loss=self._call_loss,
            )
        return self._executor, self._running

    async def close(self) -> None:
        """Forget the pipeline of the current world."""
        executor, self._executor, self._world = self._executor, None, None
        if executor is not None:
            await executor.close()


class _OffLoop:
    """Runs the computation of layers, off the event loop if there are many parameters."""

    def __init__(self, size: int) -> None:
        self._nbytes = 4 * size

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        return await off_loop(lambda: function(*arguments), nbytes=self._nbytes)


class _PortionStage(Stage[Any]):
    """Consecutive stages that record the gradients of each portion separately."""

    def __init__(self, stages: Sequence[Stage[Any]], numbers: range, seed: int) -> None:
        self._stages = stages
        self._numbers = numbers
        self._seed = seed
        self._inner = Sequential(stages)
        self._total: PortionSum | None = None
        self._portions = range(0)
        self._step = 0
        self._forwards = 0

    @contextmanager
    def recording(self, total: PortionSum, portions: range, step: int) -> Iterator[None]:
        """Add the gradients of ``portions``, which arrive in order, to ``total``."""
        self._total, self._portions, self._step, self._forwards = total, portions, step, 0
        try:
            yield
        finally:
            self._total = None
            self._inner.zero_grad()

    def forward(self, x: Any) -> tuple[Array, Any]:
        portion = self._portions[self._forwards]
        self._forwards += 1
        for number, stage in zip(self._numbers, self._stages, strict=True):
            for place, generator in enumerate(stage.generators()):
                generator.bit_generator.state = stage_rng_state(self._seed, self._step, portion, number, place)
        y, saved = self._inner.forward(x)
        return np.ascontiguousarray(y), (portion, saved)

    def backward(self, saved: Any, dy: Array, on_gradient: Any = None, deferred: Any = None) -> Array | None:
        del on_gradient, deferred  # the schedule defers nothing
        portion, kept = saved
        self._inner.zero_grad()
        dx = self._inner.backward(kept, dy)
        assert self._total is not None, "portions are recorded while the pipeline runs"
        packed = self._total.pack([parameter.grad for parameter in self._inner.parameters()])
        self._total.add(portion, packed, 0.0)
        return None if dx is None else np.ascontiguousarray(dx)

    def parameters(self) -> Any:
        return self._inner.parameters()
