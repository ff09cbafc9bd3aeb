"""The operations of a step on the parts of a sharded state; ``step.py`` has the rest."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.elasticity.donors import StepUpdate
from asyncpar.elasticity.gradients import by_parameter
from asyncpar.elasticity.job_worlds import JobWorlds
from asyncpar.elasticity.portion_codec import StepCodec
from asyncpar.elasticity.portions import Portions
from asyncpar.elasticity.sharded import Sharded
from asyncpar.elasticity.sharded_optimizer import ShardedGradients, ShardedOptimizer
from asyncpar.errors import DivergedState, NonFiniteValue, PeerError, StaleGeneration, UsageError
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.parameter import Parameter

if TYPE_CHECKING:
    from asyncpar.elasticity.pipeline import ElasticPipeline, OfPortion
    from asyncpar.pipeline.execution import LossFunction

Array: TypeAlias = NDArray[Any]
T = TypeVar("T")


class ShardedStep:
    """Step ``number`` of a state that has parts; a newcomer, which has none yet, has the ``replay`` of it."""

    def __init__(self, job: JobWorlds, sharded: Sharded, number: int, replay: StepUpdate | None) -> None:
        self._job = job
        self._sharded = sharded
        self._number = number
        self._replay = replay
        self._update: StepUpdate | None = None

    @property
    def codec(self) -> StepCodec | None:
        """The codec of this step's gradients, if there is one."""
        codec = self._sharded.codec
        return None if codec is None else StepCodec(codec, self._sharded.parts, self._number)

    @property
    def has_parts_of_gradients(self) -> bool:
        """Whether each rank gets only its part of the sums."""
        return self._sharded.stage.shards_gradients

    def takes(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` is the one that is sharded."""
        return self._sharded.takes(optimizer)

    def in_order(self, gradients: Any) -> Any:
        """Return ``gradients`` in the order of the parts, if their sums are sharded."""
        if not self.has_parts_of_gradients:
            return gradients
        optimizer = self._optimizer.optimizer
        found = by_parameter(optimizer, gradients)
        for parameter, gradient in zip(optimizer.parameters, found, strict=True):
            if np.shape(gradient) != parameter.shape:
                raise UsageError(
                    f"gradients: expected {list(parameter.shape)} of {parameter.name!r}, got {list(np.shape(gradient))}"
                )
        return found

    def bounds(self, portions: Portions) -> list[int] | None:
        """Return where the part of each rank begins among the sums; None if all ranks get everything."""
        if not self.has_parts_of_gradients:
            return None
        bounds = self._optimizer.bounds
        return [*(bounds[portions.of(rank).start] for rank in range(portions.size)), bounds[-1]]

    async def run_pipeline(
        self, inputs: OfPortion, targets: OfPortion, loss: LossFunction, *, is_mean: bool
    ) -> tuple[Array, float]:
        """Return the sums of this rank's stages, flat, and the sum of the losses."""
        if self._replay is not None:
            return np.empty(0, self._optimizer.stored), self._replay.loss
        return await self._called(
            self.pipeline.run(
                self._job.world,
                self._sharded.parts,
                self._number,
                inputs=inputs,
                targets=targets,
                loss=loss,
                is_mean=is_mean,
            )
        )

    @property
    def has_pipeline(self) -> bool:
        """Whether portions go through the stages of a pipeline."""
        return self._sharded.pipeline is not None

    @property
    def pipeline(self) -> ElasticPipeline:
        """The pipeline.  Raises ``UsageError`` if there is none."""
        if self._sharded.pipeline is None:
            raise UsageError(f"step {self._number}: there is no pipeline; give job.state its stages: pipeline=[...]")
        return self._sharded.pipeline

    @property
    def _optimizer(self) -> ShardedOptimizer:
        assert self._sharded.optimizer is not None
        return self._sharded.optimizer

    async def update(self, gradients: Any, *, learning_rate: float, clip_norm: float | None) -> None:
        """Make the step of the sharded optimizer.  Raises ``NonFiniteValue`` on all ranks, with nothing changed."""
        optimizer = self._optimizer
        if optimizer.is_updated:
            raise UsageError(f"step {self._number}: its sharded optimizer was updated before; once in a step")
        optimizer.arguments = [float(learning_rate), None if clip_norm is None else float(clip_norm)]
        if self._replay is not None:
            values = self._replayed(self._replay)
        elif self.has_parts_of_gradients != isinstance(gradients, ShardedGradients):
            raise UsageError(f"gradients: expected what step.reduce() has given, got {type(gradients).__name__}")
        else:
            values = await self._called(self._update_parts(gradients, learning_rate, clip_norm))
        if values is not None:
            await self._job.current_state.open(optimizer.optimizer)
            await off_loop(lambda: optimizer.spread(values), nbytes=values.nbytes)

    def _replayed(self, replay: StepUpdate) -> Array | None:
        if not replay.is_updated:
            raise NonFiniteValue(f"step {self._number}: the gradients were not finite on the ranks that made it")
        self._optimizer.count_step()
        return replay.values

    async def _update_parts(self, gradients: Any, learning_rate: float, clip_norm: float | None) -> Array | None:
        optimizer, parts = self._optimizer, self._sharded.parts
        if isinstance(gradients, ShardedGradients):
            flat = gradients.flat
        else:
            flat = optimizer.flat_of(by_parameter(optimizer.optimizer, gradients), parts.owned)
        world = self._job.world
        own = await optimizer.update(world, parts, flat, learning_rate=learning_rate, clip_norm=clip_norm)
        if optimizer.stage.shards_parameters:
            return None
        if world.size == 1:
            return own
        with self._job.meter.waiting():
            return await world.all_gather_v(own)

    async def _called(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except DivergedState:
            raise
        except (PeerError, StaleGeneration) as error:
            raise self._job.changed(error) from error

    # -- whole parameters ----------------------------------------------------------------------------------------------

    async def gather(self, parameters: Iterable[Parameter] | None) -> None:
        """Give sharded ``parameters`` their latest values; does nothing on a newcomer that repeats a step."""
        if self._replay is None:
            gathering = self._optimizer.gather(self._job.world, self._sharded.parts, self._chosen(parameters))
            with self._job.meter.waiting():
                await self._called(gathering)

    def release(self, parameters: Iterable[Parameter] | None) -> None:
        """Free the values that ``gather`` has fetched."""
        self._optimizer.release(self._chosen(parameters))

    def _chosen(self, parameters: Iterable[Parameter] | None) -> Sequence[Parameter]:
        if not self._sharded.stage.shards_parameters:
            raise UsageError(f"step {self._number}: parameters are not sharded; gather is for job.state(..., zero=3)")
        sharded = self._optimizer.optimizer.parameters
        chosen = list(sharded) if parameters is None else list(parameters)
        for parameter in chosen:
            if not any(parameter is known for known in sharded):
                raise UsageError(f"parameters: expected some of the sharded optimizer, got {parameter!r}")
        return chosen

    # -- the end of the block ------------------------------------------------------------------------------------------

    def keep(self, update: StepUpdate | None) -> None:
        """Keep ``update``, to be completed by this step, for newcomers."""
        self._update = update

    async def exchange(self) -> None:
        """Send the changes to mirrors, and the update to newcomers."""
        parts, optimizer = self._sharded.parts, self._sharded.optimizer
        if self._replay is not None:
            parts.replay(self._replay.part_sums)
            return
        with self._job.meter.waiting():
            await self._called(parts.exchange(self._job.world))
        if self._update is not None:
            self._job.shelf.keep(
                replace(
                    self._update,
                    part_sums=parts.next_sums,
                    is_updated=optimizer is not None and optimizer.is_updated,
                    values=None if optimizer is None else optimizer.values,
                )
            )
