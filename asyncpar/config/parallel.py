"""Configuration of 3D-parallel training (data, tensor, pipeline), and who is who in it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from asyncpar.config.rank_order import RankOrder
from asyncpar.errors import UsageError

DEFAULT_ORDER = "pp-tp-dp"
"""Pipeline neighbours are adjacent ranks, data-parallel replicas are farthest apart."""

_MEGABYTES_PER_LAYER = 1024.0


class MemoryOptimizationStrategy(StrEnum):
    """What is kept of the activations between forward and backward."""

    BASIC = "basic"
    STANDARD = "standard"
    AGGRESSIVE = "aggressive"
    EXTREME = "extreme"


class CommunicationStrategy(StrEnum):
    """How gradients are reduced."""

    ALL_REDUCE = "all_reduce"
    HIERARCHICAL_ALL_REDUCE = "hierarchical_all_reduce"
    RING_ALL_REDUCE = "ring_all_reduce"
    TREE_ALL_REDUCE = "tree_all_reduce"
    ADAPTIVE = "adaptive"


class PipelineScheduleType(StrEnum):
    """Order of forward and backward passes in a pipeline.

    SEQUENTIAL: all forwards, then backwards in reverse.  GPIPE: the same with backwards first in, first out.
    ROUND_ROBIN: one micro-batch at a time.  The others interleave the two to save memory or idle time.
    """

    SEQUENTIAL = "sequential"
    ROUND_ROBIN = "round_robin"
    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "one_forward_one_backward"
    INTERLEAVED_ONE_F1B = "interleaved_one_f1b"
    ZERO_BUBBLE = "zero_bubble"
    ZBV = "zbv"
    DUALPIPE_V = "dualpipe_v"


_ACTIVATION_FACTOR: Mapping[MemoryOptimizationStrategy, float] = MappingProxyType(
    {
        MemoryOptimizationStrategy.BASIC: 2.0,
        MemoryOptimizationStrategy.STANDARD: 1.5,
        MemoryOptimizationStrategy.AGGRESSIVE: 1.2,
        MemoryOptimizationStrategy.EXTREME: 1.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirements:
    """Memory that one rank needs, in MiB."""

    model_memory_mb: float
    activation_memory_mb: float
    optimizer_memory_mb: float

    @property
    def total_memory_mb(self) -> float:
        return self.model_memory_mb + self.activation_memory_mb + self.optimizer_memory_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeDParallelismConfig:
    """How a model and its batch are spread over ranks.

    ``dp_size``, ``tp_size`` and ``pp_size`` are the numbers of replicas, of slices of each layer, and of stages.
    ``order`` names the axes, fastest first (``"tp-dp-pp"`` makes tensor-parallel peers adjacent).  ``layers_per_stage``
    gives the number of layers of each stage where they are not all the same; ``num_model_chunks`` is the number of
    pieces that each stage holds in an interleaved schedule.  ``max_memory_per_device`` is in GB.
    """

    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    num_layers: int = 24
    micro_batch_size: int = 1
    memory_strategy: MemoryOptimizationStrategy = MemoryOptimizationStrategy.STANDARD
    comm_strategy: CommunicationStrategy = CommunicationStrategy.ALL_REDUCE
    enable_gradient_checkpointing: bool = False
    enable_mixed_precision: bool = False
    pipeline_schedule: PipelineScheduleType = PipelineScheduleType.INTERLEAVED_ONE_F1B
    max_memory_per_device: float = 8.0
    communication_timeout_ms: int = 30_000
    num_model_chunks: int = 1
    order: str = DEFAULT_ORDER
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("dp_size", "tp_size", "pp_size", "num_layers", "micro_batch_size", "num_model_chunks"):
            size = getattr(self, name)
            if size < 1:
                raise UsageError(f"{name}: expected a positive number, got {size}")
        if not self.max_memory_per_device > 0.0:
            raise UsageError(
                f"max_memory_per_device: expected a positive number of GB, got {self.max_memory_per_device}"
            )
        if self.communication_timeout_ms < 1:
            raise UsageError(f"communication_timeout_ms: expected 1 or more, got {self.communication_timeout_ms}")
        if self.pp_size > self.num_layers:
            raise UsageError(f"pp_size: expected at most num_layers = {self.num_layers}, got {self.pp_size}")
        if self.layers_per_stage is not None:
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        self.rank_order()

    @property
    def world_size(self) -> int:
        """Number of ranks that the configuration is for."""
        return self.dp_size * self.tp_size * self.pp_size

    def rank_order(self) -> RankOrder:
        """Return the layout of ranks along the axes."""
        return RankOrder.parse(self.order, {"dp": self.dp_size, "tp": self.tp_size, "pp": self.pp_size})

    def validate(
        self, world_size: int, *, hidden: int | None = None, heads: int | None = None, vocabulary: int | None = None
    ) -> None:
        """Raise ``UsageError`` unless the configuration fits ``world_size`` ranks and, where given, the model."""
        if self.world_size != world_size:
            product = f"{self.dp_size}*{self.tp_size}*{self.pp_size}"
            raise UsageError(
                "3D parallelism configuration mismatch: "
                f"expected {self.world_size} devices ({product}), got {world_size}"
            )
        self.stage_layers()
        for name, size in (("hidden", hidden), ("heads", heads), ("vocabulary", vocabulary)):
            if size is not None and size % self.tp_size:
                raise UsageError(f"tp_size: expected a divisor of {name} = {size}, got {self.tp_size}")

    def stage_layers(self) -> tuple[int, ...]:
        """Return the number of layers of each stage.

        Raises ``UsageError`` when the layers do not divide evenly and ``layers_per_stage`` does not say how to.
        """
        if self.layers_per_stage is None:
            each, rest = divmod(self.num_layers, self.pp_size)
            if rest:
                raise UsageError(
                    f"num_layers: expected a multiple of pp_size = {self.pp_size}, got {self.num_layers}; "
                    "give layers_per_stage to split unevenly"
                )
            return (each,) * self.pp_size
        given = self.layers_per_stage
        if len(given) != self.pp_size or sum(given) != self.num_layers or min(given) < 1:
            raise UsageError(
                f"layers_per_stage: expected {self.pp_size} positive numbers with sum {self.num_layers}, "
                f"got {list(given)}"
            )
        return given

    def memory_requirements(self) -> MemoryRequirements:
        """Return a rough rule of thumb for the fullest stage.

        1,024 MiB per layer over ``tp_size``; activations 2.0, 1.5, 1.2 or 1.0 times that by strategy; optimizer twice.
        """
        model = _MEGABYTES_PER_LAYER * max(self.stage_layers()) / self.tp_size
        return MemoryRequirements(
            model_memory_mb=model,
            activation_memory_mb=model * _ACTIVATION_FACTOR[self.memory_strategy],
            optimizer_memory_mb=model * 2.0,
        )


class RankMapping:
    """The place of one rank among data-parallel replicas, tensor slices and pipeline stages.

    ``local_rank`` is what the launcher says it is (None when nobody did): it does not follow from the rank.
    """

    def __init__(self, config: ThreeDParallelismConfig, global_rank: int, *, local_rank: int | None = None) -> None:
        self.config = config
        self._order = config.rank_order()
        place = self._order.coordinates(global_rank)
        self.global_rank = global_rank
        self.local_rank = local_rank
        self.world_size = config.world_size
        self.dp_rank = place["dp"]
        self.tp_rank = place["tp"]
        self.pp_rank = place["pp"]

    def from_3d_coords(self, dp_rank: int, tp_rank: int, pp_rank: int) -> int:
        """Return the rank at the given coordinates."""
        return self._order.rank_at({"dp": dp_rank, "tp": tp_rank, "pp": pp_rank})

    def is_dp_head(self) -> bool:
        """Is this the first replica?"""
        return self.dp_rank == 0

    def is_tp_head(self) -> bool:
        """Does this rank hold the first slice?"""
        return self.tp_rank == 0

    def is_pp_head(self) -> bool:
        """Does this rank hold the first stage?"""
        return self.pp_rank == 0

    def is_pp_tail(self) -> bool:
        """Does this rank hold the last stage?"""
        return self.pp_rank == self.config.pp_size - 1

    def dp_group_ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold the same slice of the same stage."""
        return self._order.group("dp", self.global_rank)

    def tp_group_ranks(self) -> tuple[int, ...]:
        """Return the ranks that share this rank's stage and batch."""
        return self._order.group("tp", self.global_rank)

    def pp_group_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's pipeline, first stage first."""
        return self._order.group("pp", self.global_rank)

    def next_pp_rank(self) -> int | None:
        """Return the rank of the next stage; None on the last."""
        return None if self.is_pp_tail() else self.pp_group_ranks()[self.pp_rank + 1]

    def prev_pp_rank(self) -> int | None:
        """Return the rank of the previous stage; None on the first."""
        return None if self.is_pp_head() else self.pp_group_ranks()[self.pp_rank - 1]


class ProcessGroupIds:
    """Names of the sub-groups, each unique in the world.  Group ids say which coordinates their ranks share."""

    def __init__(self, config: ThreeDParallelismConfig) -> None:
        self._sizes = {"dp": config.dp_size, "tp": config.tp_size, "pp": config.pp_size}

    def get_dp_group_id(self, tp_rank: int, pp_rank: int) -> str:
        """Return the name of the replicas' group at the given slice and stage."""
        self._check(tp=tp_rank, pp=pp_rank)
        return f"dp_group_tp{tp_rank}_pp{pp_rank}"

    def get_tp_group_id(self, dp_rank: int, pp_rank: int) -> str:
        """Return the name of the slices' group of the given replica and stage."""
        self._check(dp=dp_rank, pp=pp_rank)
        return f"tp_group_dp{dp_rank}_pp{pp_rank}"

    def get_pp_group_id(self, dp_rank: int, tp_rank: int) -> str:
        """Return the name of the pipeline of the given replica and slice."""
        self._check(dp=dp_rank, tp=tp_rank)
        return f"pp_group_dp{dp_rank}_tp{tp_rank}"

    def _check(self, **place: int) -> None:
        for axis, at in place.items():
            if not 0 <= at < self._sizes[axis]:
                raise UsageError(f"{axis}_rank: expected 0..{self._sizes[axis] - 1}, got {at}")
