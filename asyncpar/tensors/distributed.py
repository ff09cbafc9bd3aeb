"""A tensor in parts, one per rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncpar.agreement.joint_call import Extent, Joint, join, then
from asyncpar.collectives.arrays import Array, check_array
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.slicing import TensorSlice, ceil_chunks
from asyncpar.errors import UsageError
from asyncpar.tensors.communicator import AnyCommunicator, plain_communicator
from asyncpar.tensors.partition import (
    TensorPartition,
    check_number,
    check_shape,
    check_split_dim,
    join_pieces,
    pack_pieces,
    rows_along,
    tensor_of_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistributedTensor:
    """This rank's part, ``local_shard``, of a tensor of ``global_shape``, on ``device_id``.

    ``partition`` describes the part; its ``partition_rank`` is this rank's place in the communicator, or 0 if every
    rank has the whole (one partition).  Parts may be any adjacent ranges in the order of ranks, including empty ones;
    those made here are ceil chunks.
    """

    local_shard: Array
    global_shape: tuple[int, ...]
    partition: TensorPartition
    device_id: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_shard", check_array(self.local_shard, "local_shard"))
        object.__setattr__(self, "global_shape", check_shape(self.global_shape, "global_shape"))
        if check_number(self.device_id, "device_id") < 0:
            raise UsageError(f"device_id: expected 0 or more, got {self.device_id}")
        expected = self.slice.local_shape
        if self.local_shard.shape != expected:
            raise UsageError(
                f"local_shard: expected shape {expected}, part {self.partition.start_idx}..{self.partition.end_idx} "
                f"along dimension {self.partition.split_dim} of {self.global_shape}, got {self.local_shard.shape}"
            )

    @classmethod
    def from_global(
        cls, whole: Array, split_dim: int, num_partitions: int, partition_rank: int, device_id: int | None = None
    ) -> DistributedTensor:
        """Return a copy of part ``partition_rank`` of ``whole``, which all ranks have.  Nothing is sent.

        ``device_id`` is ``partition_rank`` unless given.
        """
        array = check_array(whole, "whole")
        partition = TensorPartition.of(array.shape, split_dim, num_partitions, partition_rank)
        return cls(
            local_shard=partition.slice_of(array.shape).cut(array),
            global_shape=array.shape,
            partition=partition,
            device_id=partition_rank if device_id is None else device_id,
        )

    # -- description -------------------------------------------------------------------------------------------------

    @property
    def slice(self) -> TensorSlice:
        """The slice of the whole tensor, as recorded in checkpoints."""
        return self.partition.slice_of(self.global_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.local_shard.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.local_shard.shape

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole tensor."""
        return self.partition.is_whole

    @property
    def requires_communication(self) -> bool:
        """Whether other ranks hold parts that a result over the whole tensor requires."""
        return not self.is_replicated

    def __repr__(self) -> str:
        part = "whole" if self.is_replicated else f"{self.partition.start_idx}..{self.partition.end_idx}"
        return (
            f"DistributedTensor({self.dtype.name}{list(self.global_shape)}, {part} along dimension "
            f"{self.partition.split_dim}, device {self.device_id})"
        )

    # -- all ranks ---------------------------------------------------------------------------------------------------

    def gather(self, communicator: AnyCommunicator) -> Coroutine[Any, Any, Array]:
        """Return the whole tensor, on every rank; a copy."""

        return gather(self, communicator)

    def replicate(self, communicator: AnyCommunicator) -> Coroutine[Any, Any, DistributedTensor]:
        """Return the replicated tensor, whole on every rank."""
        partition = TensorPartition.of(self.global_shape, self.partition.split_dim, 1, 0)
        return then(self.gather(communicator), lambda whole: self._moved(whole, partition))

    def redistribute(self, split_dim: int, communicator: AnyCommunicator) -> Coroutine[Any, Any, DistributedTensor]:
        """Return the tensor split along ``split_dim`` into ceil chunks.

        Every rank sends every other only the elements of its part that the other will have.
        """

        plain = plain_communicator(communicator)
        return join(plain, "redistribute", lambda: self._redistributing(split_dim, plain))

    # -- elementwise -------------------------------------------------------------------------------------------------

    def map(self, function: Callable[..., Any], *others: DistributedTensor | complex) -> DistributedTensor:
        """Return the result of ``function`` on the parts of this tensor and ``others``; it must keep their shape.

        Tensors among ``others`` must be split in the same way.  Nothing is sent.
        """
        operands = [self._operand(other) for other in others]
        shard = np.asarray(function(self.local_shard, *operands))
        return replace(self, local_shard=shard)

    def __neg__(self) -> DistributedTensor:
        return self.map(np.negative)

    def __add__(self, other: DistributedTensor | complex) -> DistributedTensor:
        return self.map(operator.add, other)

    def __sub__(self, other: DistributedTensor | complex) -> DistributedTensor:
        return self.map(operator.sub, other)

    def __mul__(self, other: DistributedTensor | complex) -> DistributedTensor:
        return self.map(operator.mul, other)

    def __truediv__(self, other: DistributedTensor | complex) -> DistributedTensor:
        return self.map(operator.truediv, other)

    def _operand(self, other: DistributedTensor | complex) -> Any:
        if not isinstance(other, DistributedTensor):
            if np.ndim(other):
                raise UsageError(f"other: expected a number or a DistributedTensor, got {type(other).__name__}")
            return other
        if (other.global_shape, other.partition) != (self.global_shape, self.partition):
            raise UsageError(
                f"other: expected a tensor that is split as {self!r}, got {other!r}; redistribute it first"
            )
        return other.local_shard

    # -- inside ------------------------------------------------------------------------------------------------------

    def _gathering(self, communicator: Communicator) -> Joint[Any, Array]:
        self._check_place(communicator)
        if self.is_replicated:
            return self._joint("gather", communicator, lambda: self.local_shard.copy(order="C"))
        dim, rows = self.partition.split_dim, rows_along(self.local_shard, self.partition.split_dim)
        return Joint(
            line=self._line("gather"),
            extent=self._extent,
            begin=lambda: communicator.all_gather_v(rows),
            check=lambda extents: self._check_cover(extents, communicator),
            finish=lambda gathered, _: tensor_of_rows(gathered, dim),
        )

    def _redistributing(self, split_dim: int, communicator: Communicator) -> Joint[Any, DistributedTensor]:
        self._check_place(communicator)
        dim = check_split_dim(split_dim, len(self.global_shape))
        target = TensorPartition.of(self.global_shape, dim, communicator.size, communicator.rank)
        operation = f"redistribute along dimension {dim}:"
        if self.is_replicated:
            cut = target.slice_of(self.global_shape).cut
            return self._joint(operation, communicator, lambda: self._moved(cut(self.local_shard), target))
        pieces = self._pieces(dim, ceil_chunks(self.global_shape[dim], communicator.size))
        packed = pack_pieces(self.local_shard, dim, pieces)
        counts = [self._elements(dim, stop - start) for start, stop in pieces]
        return Joint(
            line=self._line(operation),
            extent=self._extent,
            begin=lambda: communicator.all_to_all_v(packed, counts),
            check=lambda extents: self._check_cover(extents, communicator),
            finish=lambda got, extents: self._moved(self._assembled(got[0], target, extents), target),
        )

    @property
    def _extent(self) -> Extent:
        return self.partition.start_idx, self.partition.end_idx

    def _line(self, operation: str) -> str:
        how = "held whole" if self.is_replicated else f"split along dimension {self.partition.split_dim}"
        return f"{operation} {self.dtype.name}[{', '.join(map(str, self.global_shape))}] {how}"

    def _joint(self, operation: str, communicator: Communicator, make: Callable[[], Any]) -> Joint[None, Any]:
        """Return a call in which only the comparison is sent."""
        return Joint(line=self._line(operation), begin=communicator.barrier, finish=lambda _, __: make())

    def _check_place(self, communicator: Communicator) -> None:
        partition = self.partition
        if partition.is_whole:
            return
        if partition.num_partitions != communicator.size:
            raise UsageError(
                f"communicator: expected {partition.num_partitions} ranks, one per partition, got {communicator.size}"
            )
        if partition.partition_rank != communicator.rank:
            raise UsageError(
                f"partition_rank: expected {communicator.rank}, this rank's place in the communicator, "
                f"got {partition.partition_rank}"
            )

    def _check_cover(self, extents: Sequence[Extent], communicator: Communicator) -> None:
        """Raise unless the parts of all ranks are adjacent and cover each element once."""
        length, reached = self.global_shape[self.partition.split_dim], 0
        ranks = communicator.ranks
        for rank, (start, end) in zip(ranks, extents, strict=True):
            if start == end:
                continue
            if start != reached:
                raise UsageError(
                    f"partition: expected the part of rank {rank} to begin at {reached}, got {start}..{end}"
                )
            reached = end
        if reached != length:
            raise UsageError(
                f"partition: expected parts up to {length}, got parts up to {reached} on ranks {list(ranks)}"
            )

    def _elements(self, dim: int, length: int) -> int:
        """Return the elements of this rank's part at ``length`` places along ``dim``."""
        rest = [size for axis, size in enumerate(self.local_shard.shape) if axis != dim]
        return int(np.prod(rest, dtype=np.int64)) * length

    def _pieces(self, dim: int, bounds: Sequence[Extent]) -> list[Extent]:
        """Return the ranges along ``dim`` of this rank's part that belong to the future parts of all ranks."""
        start, end = self._extent
        if dim != self.partition.split_dim:
            return list(bounds)
        return [(_within(low, start, end) - start, _within(high, start, end) - start) for low, high in bounds]

    def _assembled(self, elements: Array, target: TensorPartition, extents: Sequence[Extent]) -> Array:
        """Return this rank's new part, assembled from the elements of all ranks."""
        source, shapes = self.partition.split_dim, []
        for start, end in extents:
            shape = list(self.global_shape)
            shape[target.split_dim] = target.length
            if target.split_dim == source:
                start, end = (_within(at, target.start_idx, target.end_idx) for at in (start, end))
            shape[source] = end - start
            shapes.append(tuple(shape))
        return join_pieces(elements, source, shapes)

    def _moved(self, shard: Array, target: TensorPartition) -> DistributedTensor:
        return replace(self, local_shard=shard, partition=target)


def gather(tensor: DistributedTensor, communicator: AnyCommunicator) -> Coroutine[Any, Any, Array]:
    """See ``DistributedTensor.gather``; for anything but such a tensor the other ranks also get the error."""

    def make() -> Joint[Any, Array]:
        if not isinstance(tensor, DistributedTensor):
            raise UsageError(f"tensor: expected a DistributedTensor, got {type(tensor).__name__}")
        return tensor._gathering(plain)

    plain = plain_communicator(communicator)
    return join(plain, "gather", make)


def _within(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)
