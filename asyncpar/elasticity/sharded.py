"""The state that is cut into parts by portion: shards of an optimizer, and residuals of a lossy codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncpar.core.config.names import CodecName
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.elasticity.local_workers import LocalWorkers
from asyncpar.elasticity.parts import StateParts
from asyncpar.elasticity.pipeline_places import by_stage
from asyncpar.elasticity.placement import by_portion
from asyncpar.elasticity.portion_codec import PortionCodec, portion_codec
from asyncpar.elasticity.sharded_optimizer import ShardedOptimizer
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.nn.stage import Stage
from asyncpar.parallel.local.outer import OuterConfig

if TYPE_CHECKING:
    from asyncpar.elasticity.pipeline import ElasticPipeline


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Settings of a sharded state; see ``ElasticJob.state``."""

    portions: int
    zero: int = 0
    codec: CodecName | None = None
    residual_codec: CodecName | None = None
    outer: OuterConfig | None = None
    pipeline: Sequence[Stage[Any]] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.zero, bool) or self.zero not in range(len(ZeROStage)):
            raise UsageError(f"zero: expected a stage, 0 to 3, got {self.zero!r}")
        if self.codec is not None:
            portion_codec(self.codec, "codec")
        if self.residual_codec is not None:
            if self.codec is None:
                raise UsageError(
                    f"residual_codec: {self.residual_codec!r} is of no use without a codec; give codec too"
                )
            portion_codec(self.residual_codec, "residual_codec")
        if self.pipeline is not None and (self.zero or self.codec or self.outer or not self.pipeline):
            raise UsageError("pipeline: expected stages, whose parameters are sharded; leave zero, codec and outer out")
        if self.outer is not None and (self.zero or self.codec):
            raise UsageError("outer: workers train whole parameters by themselves; leave zero and codec out")


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """The parts of a state, and the objects that change them."""

    parts: StateParts
    optimizer: ShardedOptimizer | None
    codec: PortionCodec | None
    workers: LocalWorkers | None = None
    pipeline: ElasticPipeline | None = None

    @property
    def stage(self) -> ZeROStage:
        """The stage of sharding of the optimizer."""
        return ZeROStage.NONE if self.optimizer is None else self.optimizer.stage

    def takes(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` is the one that is sharded."""
        return self.optimizer is not None and self.optimizer.optimizer is optimizer

    def holds(self, parameter: object) -> bool:
        """Return whether the values of ``parameter`` are kept in parts only."""
        if self.optimizer is None or not self.stage.shards_parameters:
            return False
        return any(parameter is held for held in self.optimizer.optimizer.parameters)

    def commit(self) -> None:
        """Keep the changes."""
        self.parts.commit()
        if self.optimizer is not None:
            self.optimizer.forget_initial()
            self.optimizer.ended()

    def abort(self) -> None:
        """Undo the changes."""
        self.parts.abort()
        if self.optimizer is not None:
            self.optimizer.ended()

    @classmethod
    def of(cls, how: Sharding, parameters: Iterable[object], optimizers: Sequence[Optimizer]) -> Sharded | None:
        """Cut a state of ``parameters`` and ``optimizers``; None if nothing is to be cut."""
        optimizer, codec, workers = None, None, None
        if how.pipeline is not None:
            return cls._of_stages(how, how.pipeline, optimizers)
        if (how.zero or how.outer) and len(optimizers) != 1:
            raise UsageError(f"zero, outer: expected one optimizer, whose parameters are meant, got {len(optimizers)}")
        if how.outer is not None:
            workers = LocalWorkers("optimizer", optimizers[0], how.outer, how.portions)
        if how.zero:
            optimizer = ShardedOptimizer(
                "optimizer", optimizers[0], ZeROStage.of(how.zero), _even_bounds(optimizers[0], how.portions)
            )
        if how.codec is not None:
            kept = None if how.residual_codec is None else portion_codec(how.residual_codec, "residual_codec")
            size = sum(_float32_size(parameter) for parameter in parameters)
            codec = PortionCodec(portion_codec(how.codec, "codec"), kept, size, how.portions)
        kinds = [
            *([] if optimizer is None else optimizer.kinds),
            *([] if codec is None else [codec.kind]),
            *([] if workers is None else workers.kinds),
        ]
        if not kinds and optimizer is None:
            return None
        parts = StateParts(how.portions, kinds, partial(by_portion, how.portions))
        return cls(parts=parts, optimizer=optimizer, codec=codec, workers=workers)

    @classmethod
    def _of_stages(cls, how: Sharding, stages: Sequence[Stage[Any]], optimizers: Sequence[Optimizer]) -> Sharded:
        if len(optimizers) != 1:
            raise UsageError(f"pipeline: expected one optimizer of the parameters of all stages, got {len(optimizers)}")
        from asyncpar.elasticity.pipeline import ElasticPipeline  # needed only with pipelines

        bounds = ElasticPipeline.bounds(stages, optimizers[0].parameters)
        optimizer = ShardedOptimizer("optimizer", optimizers[0], ZeROStage.STAGE3, bounds)
        parts = StateParts(len(stages), optimizer.kinds, partial(by_stage, len(stages), how.portions))
        pipeline = ElasticPipeline(stages, optimizer, how.portions, how.seed)
        return cls(parts=parts, optimizer=optimizer, codec=None, pipeline=pipeline)

    async def leave_world(self) -> None:
        """Leave the current world."""
        if self.pipeline is not None:
            await self.pipeline.close()


def _even_bounds(optimizer: Optimizer, count: int) -> list[int]:
    size = sum(parameter.size for parameter in optimizer.parameters)
    return [part * size // count for part in range(count + 1)]


def _float32_size(parameter: object) -> int:
    if isinstance(parameter, Parameter):
        dtype, name = stored_dtype(parameter), parameter.name
    else:
        assert isinstance(parameter, np.ndarray)
        dtype, name = parameter.dtype, "an array"
    if dtype != np.float32:
        raise UsageError(f"codec: expected float32 parameters, and {name} is {dtype}")
    return int(parameter.size)
