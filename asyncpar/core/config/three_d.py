"""The configuration of 3D-parallel training: data, tensor, pipeline.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Self, overload

from asyncpar.core.config.checks import DefaultInt, check_choice, check_count, check_positive
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.core.config.schedule_type import PipelineScheduleType, check_schedule_name, schedule_record
from asyncpar.core.config.slicing import split_layers
from asyncpar.core.config.strategies import (
    CommunicationStrategy,
    MemoryOptimizationStrategy,
    MemoryRequirements,
    rough_requirements,
)
from asyncpar.errors import UsageError

DEFAULT_ORDER = "pp-tp-dp"
"""Pipeline neighbours are adjacent ranks, data-parallel replicas are farthest apart."""

_CHOICES: Mapping[str, type[StrEnum]] = MappingProxyType(
    {
        "memory_strategy": MemoryOptimizationStrategy,
        "comm_strategy": CommunicationStrategy,
    }
)


class LayersPerStage(tuple[int, ...]):
    """The number of layers of each stage, as given or as layers divide; empty if they do not divide.

    Calling it returns ``ThreeDParallelismConfig.stage_layers()``, or raises.  ``is_given`` is False if the
    configuration was given no numbers.
    """

    is_given: bool
    _count: Callable[[], tuple[int, ...]] | None

    def __new__(
        cls,
        layers: Iterable[int] = (),
        *,
        is_given: bool = True,
        count: Callable[[], tuple[int, ...]] | None = None,
    ) -> Self:
        """Return ``layers``, which call ``count`` when they are called."""
        made = super().__new__(cls, layers)
        made.is_given, made._count = is_given, count
        return made

    def __call__(self) -> tuple[int, ...]:
        return tuple(self) if self._count is None else self._count()


class _LayersField:
    """The field ``layers_per_stage``: written as numbers or None, read as ``LayersPerStage``."""

    @overload
    def __get__(self, config: None, owner: object) -> None: ...
    @overload
    def __get__(self, config: ThreeDParallelismConfig, owner: object) -> LayersPerStage: ...
    def __get__(self, config: ThreeDParallelismConfig | None, owner: object) -> LayersPerStage | None:
        if config is None:
            return None  # the default
        given = config.given_layers
        if given is not None:
            return LayersPerStage(given, count=config.stage_layers)
        try:
            layers = config.stage_layers()
        except UsageError:  # which the call raises
            layers = ()
        return LayersPerStage(layers, is_given=False, count=config.stage_layers)

    def __set__(self, config: ThreeDParallelismConfig, layers: Iterable[int] | None) -> None:
        if isinstance(layers, LayersPerStage) and not layers.is_given:
            layers = None
        vars(config)["_given_layers"] = None if layers is None else tuple(layers)


@dataclass(frozen=True, kw_only=True)
class ThreeDParallelismConfig:
    """The distribution of a model and its batch over ranks.

    ``dp_size``, ``tp_size`` and ``pp_size`` are the numbers of replicas, of slices of each layer, and of stages.
    ``order`` names the axes, fastest first (``"tp-dp-pp"`` makes tensor-parallel peers adjacent).  ``layers_per_stage``
    sets the number of layers of each stage if they differ; read or called, it gives those of all stages.
    ``num_model_chunks`` is the number of pieces that each stage holds in an interleaved schedule.  ``micro_batch_size``
    is the number of sequences in each micro-batch, which training then enforces; with 1, the default, it accepts any
    number.

    ``max_memory_per_device`` is in GB.  An operation in the groups of a ``ThreeDParallelismCoordinator`` in which a
    rank makes no progress for ``communication_timeout_ms`` ends with ``PeerTimeout``.  If the timeout is not given, but
    the ``timeout`` of the coordinator's world was set, the world's is used.  A ``GradientSynchronizer`` of its own uses
    it if it is given, and else the timeout of its communicator.

    ``num_layers`` is that of the whole model, ``pipeline_schedule`` the order of micro-batches.  ``memory_strategy``
    and ``enable_gradient_checkpointing`` trade memory for time, ``comm_strategy`` selects how gradients are exchanged,
    and ``enable_mixed_precision`` computes in 16 bits.
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
    pipeline_schedule: PipelineScheduleType | str = PipelineScheduleType.INTERLEAVED_ONE_F1B
    max_memory_per_device: float = 8.0
    communication_timeout_ms: int = DefaultInt(30_000)
    num_model_chunks: int = 1
    order: str = DEFAULT_ORDER
    layers_per_stage: _LayersField = _LayersField()  # None by default; all that it keeps is in the object

    def __post_init__(self) -> None:
        for name in ("dp_size", "tp_size", "pp_size", "num_layers", "micro_batch_size", "num_model_chunks"):
            check_count(name, getattr(self, name))
        check_count("communication_timeout_ms", self.communication_timeout_ms)
        check_positive("max_memory_per_device", self.max_memory_per_device, "GB")
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, check_choice(name, kind, getattr(self, name)))
        schedule = check_schedule_name("pipeline_schedule", self.pipeline_schedule)
        object.__setattr__(self, "pipeline_schedule", schedule)
        if self.pp_size > self.num_layers:
            raise UsageError(f"pp_size: expected at most num_layers = {self.num_layers}, got {self.pp_size}")
        for layers in self.given_layers or ():
            check_count("layers_per_stage", layers, least=0)
        self.rank_order()

    @property
    def given_layers(self) -> tuple[int, ...] | None:
        """The numbers of layers that were given, None if layers divide evenly among stages."""
        given: tuple[int, ...] | None = vars(self)["_given_layers"]
        return given

    @property
    def world_size(self) -> int:
        """Number of ranks that the configuration is for."""
        return self.dp_size * self.tp_size * self.pp_size

    def rank_order(self) -> RankOrder:
        """Return the layout of ranks along the axes."""
        return RankOrder.parse(self.order, {"dp": self.dp_size, "tp": self.tp_size, "pp": self.pp_size})

    @property
    def chunks_per_stage(self) -> int:
        """Pieces of the model that each rank holds: ``num_model_chunks``, or 2 where the schedule is V-shaped."""
        return schedule_record(self.pipeline_schedule).chunks(self.num_model_chunks)

    def stage_ranks(self) -> tuple[int, ...]:
        """Return the pipeline rank that holds each virtual stage, in the order of the model."""
        return schedule_record(self.pipeline_schedule).stage_ranks(self.pp_size, self.num_model_chunks)

    @property
    def end_stages(self) -> tuple[int, ...]:
        """The pipeline ranks that hold the first layer or the last one: one or two."""
        ranks = self.stage_ranks()
        return tuple(dict.fromkeys((ranks[0], ranks[-1])))

    def validate(
        self,
        world_size: int,
        *,
        hidden: int | None = None,
        heads: int | None = None,
        vocabulary: int | None = None,
        batch: int | None = None,
    ) -> None:
        """Raise ``UsageError`` unless the configuration fits ``world_size`` ranks and, if given, model and batch.

        ``hidden`` and ``heads`` are those of the model, which ranks of a tensor group divide among them.
        ``vocabulary`` is checked for models that need equal slices of it; the layers of this package take any.
        ``batch`` counts the sequences that all replicas together see in one step.
        """
        if self.world_size != world_size:
            product = f"{self.dp_size}*{self.tp_size}*{self.pp_size}"
            raise UsageError(
                "3D parallelism configuration mismatch: "
                f"expected {self.world_size} devices ({product}), got {world_size}"
            )
        self.virtual_stage_layers()
        if hidden is not None and heads is not None and hidden % heads:
            raise UsageError(f"heads: expected a divisor of hidden = {hidden}, got {heads}")
        for name, size in (("hidden", hidden), ("heads", heads), ("vocabulary", vocabulary)):
            if size is not None and size % self.tp_size:
                raise UsageError(f"tp_size: expected a divisor of {name} = {size}, got {self.tp_size}")
        if batch is not None:
            self.micro_batches(batch)

    def micro_batches(self, batch: int) -> int:
        """Return the number of micro-batches per replica in a step over ``batch`` sequences in all.

        Raises ``UsageError`` unless they divide evenly.
        """
        check_count("batch", batch)
        count, rest = divmod(batch, self.dp_size * self.micro_batch_size)
        if rest:
            raise UsageError(
                f"batch: expected a multiple of dp_size * micro_batch_size = {self.dp_size} * {self.micro_batch_size}, "
                f"got {batch}"
            )
        return count

    def stage_layers(self) -> tuple[int, ...]:
        """Return the number of layers of each stage, that is, of each pipeline rank.

        Raises ``UsageError`` if the layers do not divide evenly and ``layers_per_stage`` is not given.
        """
        layers = [0] * self.pp_size
        for rank, count in zip(self.stage_ranks(), self.virtual_stage_layers(), strict=True):
            layers[rank] += count
        return tuple(layers)

    def virtual_stage_layers(self) -> tuple[int, ...]:
        """Return the number of layers of each virtual stage, in the order of the model.

        They are as many as in ``stage_layers`` if each rank holds one piece of the model.
        """
        return split_layers(self.num_layers, self.stage_ranks(), self.given_layers)

    def memory_requirements(self, *, rough: bool = True) -> MemoryRequirements:
        """Return the memory that the fullest stage needs by a rule of thumb; see ``rough_requirements``.

        ``rough=False`` is an error here: a real estimate needs the model's shape, and
        ``asyncpar.estimate.memory_requirements``.
        """
        if not rough:
            raise UsageError(
                "rough: expected True, as a configuration does not know its model; "
                "asyncpar.estimate.memory_requirements(config, model, ...) estimates from shapes"
            )
        return rough_requirements(max(self.stage_layers()), self.tp_size, self.memory_strategy)
