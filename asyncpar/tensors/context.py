"""A rank's view of a model that is distributed over devices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from asyncpar.agreement.joint_call import then
from asyncpar.agreement.settings import compare_settings
from asyncpar.backends.config import BackendConfig
from asyncpar.backends.runtime import CommunicationRuntime
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import ReduceOp
from asyncpar.errors import UsageError
from asyncpar.tensors.communicator import TensorCommunicator, create_communicator
from asyncpar.tensors.config import ModelParallelConfig
from asyncpar.tensors.distributed import DistributedTensor, gather
from asyncpar.tensors.mesh import DeviceMesh
from asyncpar.tensors.partition import TensorPartition
from asyncpar.tensors.process_groups import MeshCommunicators


class ModelParallelContext:
    """Tensors over the ranks of one model-parallel world.  Created by ``create`` or ``open``, on all ranks alike.

    ``rank`` and ``world_size`` are those of the communicator.  ``split_dim`` defaults to ``config.tensor_split_dim``.
    The guarantees of ``TensorCommunicator`` hold for the operations here.
    """

    def __init__(self, config: ModelParallelConfig, communicator: TensorCommunicator, along: MeshCommunicators) -> None:
        """``along`` are the communicators along the axes of the mesh of ``config``."""
        self.config = config
        self.communicator = communicator
        self.mesh: DeviceMesh = config.mesh()
        self.along = along

    @classmethod
    async def create(
        cls, config: ModelParallelConfig, communicator: Communicator | TensorCommunicator
    ) -> ModelParallelContext:
        """Return the context over the ranks of ``communicator``, as many as the devices of ``config``.

        Raises on every rank: ``SettingsDiffer`` if configurations differ, listing those of the ranks, and
        ``UsageError`` if the number of ranks is not that of devices.
        """
        tensors = communicator if isinstance(communicator, TensorCommunicator) else TensorCommunicator(communicator)
        await compare_settings(tensors.communicator, {"config": config}, key="model parallel context")
        if config.num_devices != tensors.size:
            raise UsageError(
                f"config: expected as many devices as ranks, {tensors.size}, got num_devices = {config.num_devices}"
            )
        along = await config.mesh().communicators(tensors.communicator, devices=config.device_ids)
        assert along is not None, "every rank has a device of the mesh"
        return cls(config, tensors, along)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: ModelParallelConfig,
        settings: BackendConfig | None = None,
        *,
        runtime: CommunicationRuntime | None = None,
    ) -> AsyncIterator[ModelParallelContext]:
        """Open ``config.comm_backend`` with ``settings``, see ``create_communicator``, and close it at the end.

        ``runtime`` is that of ``create_communicator``.
        """
        async with await create_communicator(config.comm_backend, settings, runtime=runtime) as communicator:
            yield await cls.create(config, communicator)

    @property
    def rank(self) -> int:
        """This rank's place in the world."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.size

    @property
    def device_id(self) -> int:
        """This rank's device."""
        return self.config.device_ids[self.rank]

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def __repr__(self) -> str:
        return f"ModelParallelContext(rank {self.rank} of {self.world_size}, device {self.device_id})"

    # -- tensors -----------------------------------------------------------------------------------------------------

    def partition_tensor(self, tensor: Array, split_dim: int | None = None) -> DistributedTensor:
        """Return a copy of this rank's part of ``tensor``, cut along ``split_dim``.  All have it: nothing is sent."""
        return DistributedTensor.from_global(
            tensor, self._dim(split_dim), self.world_size, self.rank, device_id=self.device_id
        )

    def all_gather(self, tensor: DistributedTensor) -> Coroutine[Any, Any, Array]:
        """Return the whole of ``tensor``, on every rank."""
        return gather(tensor, self.communicator)

    def reduce_scatter(
        self, tensor: Array, split_dim: int | None = None, op: ReduceOp = "sum"
    ) -> Coroutine[Any, Any, DistributedTensor]:
        """Combine the tensors of all ranks by ``op`` and return this rank's part of the result along ``split_dim``."""
        dim = self._dim(split_dim)

        def part(shard: Array) -> DistributedTensor:
            return DistributedTensor(
                local_shard=shard,
                global_shape=tensor.shape,
                partition=TensorPartition.of(tensor.shape, dim, self.world_size, self.rank),
                device_id=self.device_id,
            )

        return then(self.communicator.reduce_scatter(tensor, dim, op), part)

    def all_reduce(self, tensor: Array, op: ReduceOp = "sum") -> Coroutine[Any, Any, Array]:
        """Combine the tensors of all ranks by ``op``, in place, and return ``tensor``."""
        return self.communicator.all_reduce(tensor, op)

    def broadcast(self, tensor: Array, root: int = 0) -> Coroutine[Any, Any, Array]:
        """Overwrite ``tensor`` with that of ``root``, and return it."""
        return self.communicator.broadcast(tensor, root)

    def _dim(self, split_dim: int | None) -> int:
        return self.config.split_dim if split_dim is None else split_dim
