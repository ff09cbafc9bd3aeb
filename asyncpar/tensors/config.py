"""Settings of the distribution of a model over devices.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncpar.backends.backend import CommunicationBackend
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.tensors.mesh import PIPELINE_AXIS, DeviceMesh, ModelParallelStrategy, hybrid_stages
from asyncpar.tensors.partition import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelConfig:
    """Settings that place one copy of a model on ``num_devices``; rank ``r`` has device ``device_ids[r]``.

    ``pipeline_depth`` is the number of pipeline stages.  With PIPELINE it is a multiple of the number of devices (each
    then holds several), by default equal to it; with HYBRID a divisor of it, by default the least one not below its
    square root; TENSOR has no stages.  ``tensor_split_dim`` is the dimension along which tensors are split by default
    (0).  ``gradient_checkpointing`` recomputes activations, see ``parallelism``.  ``comm_backend`` is the backend of
    the ranks: one of ``CommunicationBackend``, or the registered name of another.

    ``strategy`` cuts the model along its layers, inside its layers, or both.
    """

    num_devices: int = 1
    strategy: ModelParallelStrategy = ModelParallelStrategy.PIPELINE
    device_ids: tuple[int, ...] = (0,)
    pipeline_depth: int | None = None
    tensor_split_dim: int | None = None
    gradient_checkpointing: bool = False
    comm_backend: CommunicationBackend | str = field(default=CommunicationBackend.NATIVE)

    def __post_init__(self) -> None:
        if check_number(self.num_devices, "num_devices") < 1:
            raise UsageError(f"num_devices: expected at least 1, got {self.num_devices}")
        try:
            object.__setattr__(self, "strategy", ModelParallelStrategy(self.strategy))
        except ValueError:
            known = ", ".join(ModelParallelStrategy)
            raise UsageError(f"strategy: expected one of {known}, got {self.strategy!r}") from None
        self._check_devices()
        if self.tensor_split_dim is not None and check_number(self.tensor_split_dim, "tensor_split_dim") < 0:
            raise UsageError(f"tensor_split_dim: expected 0 or more, or None, got {self.tensor_split_dim}")
        if not isinstance(self.gradient_checkpointing, bool):
            raise UsageError(f"gradient_checkpointing: expected True or False, got {self.gradient_checkpointing!r}")
        if not self.comm_backend:
            raise UsageError(f"comm_backend: expected the name of a backend, got {self.comm_backend!r}")
        if self.pipeline_depth is not None and check_number(self.pipeline_depth, "pipeline_depth") < 1:
            raise UsageError(f"pipeline_depth: expected at least 1, or None, got {self.pipeline_depth}")
        self._check_depth()

    def _check_devices(self) -> None:
        ids = tuple(check_number(device, "device_ids") for device in self.device_ids)
        object.__setattr__(self, "device_ids", ids)
        if len(ids) != self.num_devices:
            raise UsageError(
                f"device_ids: expected {self.num_devices}, one for each of num_devices, got {len(ids)}: {list(ids)}"
            )
        if len(set(ids)) != len(ids) or min(ids) < 0:
            raise UsageError(f"device_ids: expected different numbers of 0 or more, got {list(ids)}")

    def _check_depth(self) -> None:
        depth, devices = self.stages, self.num_devices
        if self.strategy is ModelParallelStrategy.TENSOR and depth != 1:
            raise UsageError(f"pipeline_depth: expected 1 or None with strategy tensor, got {depth}")
        if self.strategy is ModelParallelStrategy.PIPELINE and depth % devices:
            raise UsageError(f"pipeline_depth: expected a multiple of num_devices = {devices}, got {depth}")
        if self.strategy is ModelParallelStrategy.HYBRID and devices % depth:
            raise UsageError(f"pipeline_depth: expected a divisor of num_devices = {devices}, got {depth}")

    @property
    def stages(self) -> int:
        """The total number of pipeline stages."""
        if self.pipeline_depth is not None:
            return self.pipeline_depth
        match self.strategy:
            case ModelParallelStrategy.PIPELINE:
                return self.num_devices
            case ModelParallelStrategy.TENSOR:
                return 1
            case ModelParallelStrategy.HYBRID:
                return hybrid_stages(self.num_devices)

    @property
    def split_dim(self) -> int:
        """The dimension along which tensors are split by default."""
        return 0 if self.tensor_split_dim is None else self.tensor_split_dim

    def mesh(self) -> DeviceMesh:
        """Return the mesh of the devices; see ``DeviceMesh.of``."""
        return DeviceMesh.of(self.device_ids, self.strategy, stages=self.stages)

    def parallelism(self, **settings: Any) -> ThreeDParallelismConfig:
        """Return the configuration of one replica of a model in training; ``settings`` are its other fields.

        Stages beyond the number of devices along ``pp`` become chunks of each device.
        """
        sizes = self.mesh().sizes
        pp_size = sizes.get(PIPELINE_AXIS, 1)
        return ThreeDParallelismConfig(
            pp_size=pp_size,
            tp_size=self.num_devices // pp_size,
            num_model_chunks=self.stages // pp_size,
            enable_gradient_checkpointing=self.gradient_checkpointing,
            order="tp-pp-dp",
            **settings,
        )
