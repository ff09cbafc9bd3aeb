"""Mistakes in tensors, meshes and groups."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives import reductions
from asyncpar.collectives.array_operations import ArrayOperations
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.long_waits import LongWaits
from asyncpar.collectives.operation import Operation
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.slicing import ceil_div
from asyncpar.errors import PeerError
from asyncpar.tensors import (
    DeviceMesh,
    DistributedTensor,
    ModelParallelConfig,
    ModelParallelContext,
    ModelParallelStrategy,
    ProcessGroups,
    TensorCommunicator,
    TensorPartition,
    communicator,
    distributed,
    partition,
)
from tests.breakages.breakage import Breakage, Mistake, impatient
from tests.tensors.worlds import draw_tensor, on_world, outcomes

WHOLE = draw_tensor((5, 6), 0)

# -- checks -----------------------------------------------------------------------------------------------------------


def parts_are_ceil_chunks() -> None:
    parts = [TensorPartition.of((5,), 0, 4, rank) for rank in range(4)]
    assert [(part.start_idx, part.end_idx) for part in parts] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def a_place_outside_a_mesh_is_none() -> None:
    mesh = DeviceMesh((2, 2), ("row", "column"))
    assert [mesh.device_at(place) for place in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [0, 1, 2, 3]
    assert mesh.device_at((0, 2)) is None, "coordinates alias another device"


def on_ranks(size: int, main: Callable[[TensorCommunicator], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Return the check that runs ``main`` on all ranks of a world."""

    def check() -> None:
        on_world(size, main)

    return check


async def _gathered_is_the_whole(c: TensorCommunicator) -> None:
    config = ModelParallelConfig(
        num_devices=c.size, strategy=ModelParallelStrategy.TENSOR, device_ids=tuple(range(c.size))
    )
    context = await ModelParallelContext.create(config, c)
    for dim in (0, 1):
        got = await context.all_gather(context.partition_tensor(WHOLE, dim))
        np.testing.assert_array_equal(got, WHOLE, err_msg=f"gathered along dimension {dim}")


async def _concatenated_along(c: TensorCommunicator, dim: int = 1) -> None:
    got = await c.all_gather(WHOLE, dim)
    np.testing.assert_array_equal(got, np.concatenate([WHOLE] * c.size, axis=dim), err_msg=f"along dimension {dim}")


async def _redistributed_is_the_same_tensor(c: TensorCommunicator) -> None:
    moved = await DistributedTensor.from_global(WHOLE, 0, c.size, c.rank).redistribute(1, c)
    expected = DistributedTensor.from_global(WHOLE, 1, c.size, c.rank).local_shard
    np.testing.assert_array_equal(moved.local_shard, expected, err_msg="redistributed")


async def _scattered_sums_are_the_whole_sum(c: TensorCommunicator) -> None:
    part = await c.reduce_scatter(WHOLE, 0)
    gathered = await c.all_gather(part, 0)
    assert gathered.shape == WHOLE.shape, "a remainder is lost"
    np.testing.assert_array_equal(gathered, WHOLE * c.size)


async def _broadcast_overwrites(c: TensorCommunicator) -> None:
    own = WHOLE + c.rank
    await c.broadcast(own, root=1)
    np.testing.assert_array_equal(own, WHOLE + 1, err_msg="broadcast")


async def _groups_of_a_mesh_are_its_own(c: TensorCommunicator) -> None:
    groups = await DeviceMesh((2, 2), ("dp", "tp")).communicators(c.communicator)
    assert groups is not None
    sums = [(await groups[axis].all_reduce(np.array([2.0**c.rank]))).item() for axis in ("dp", "tp")]
    expected = [[1 + 4, 1 + 2], [2 + 8, 1 + 2], [1 + 4, 4 + 8], [2 + 8, 4 + 8]]
    assert sums == expected[c.rank], "sums over groups"


async def _process_groups_are_their_own(c: TensorCommunicator) -> None:
    groups = await ProcessGroups.create(ThreeDParallelismConfig(dp_size=2, tp_size=2), c.communicator)
    for group in (groups.dp, groups.tp):
        total = (await group.all_reduce(np.array([2.0**c.rank]))).item()
        assert total == sum(2.0**rank for rank in group.ranks) < 15, "sums over groups"


def a_missing_rank_is_an_error_of_all_others() -> None:
    async def main(c: TensorCommunicator) -> Any:
        plain = impatient(c.communicator)
        return None if c.rank == 1 else await plain.all_reduce(np.ones(64))

    got = outcomes(3, main)
    for outcome in (got[0], got[2]):
        assert isinstance(outcome, PeerError), f"expected an error, as rank 1 never came, got {outcome!r}"
        assert "rank 1" in str(outcome)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def forget_to_clamp_starts(patch: pytest.MonkeyPatch) -> None:
    def wrong(length: int, parts: int) -> list[tuple[int, int]]:
        step = ceil_div(length, parts)
        return [(part * step, min((part + 1) * step, length)) for part in range(parts)]

    patch.setattr(partition, "ceil_chunks", wrong)


def number_places_without_looking_at_bounds(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: DeviceMesh, coordinates: tuple[int, int]) -> int | None:
        number = coordinates[0] * self.shape[1] + coordinates[1]
        return self.devices[number] if number < len(self.devices) else None

    patch.setattr(DeviceMesh, "device_at", wrong)


def reshape_in_place_of_moving(patch: pytest.MonkeyPatch) -> None:
    def wrong(rows: Array, dim: int) -> Array:
        return rows.reshape(np.moveaxis(rows, 0, dim).shape)

    patch.setattr(communicator, "tensor_of_rows", wrong)
    patch.setattr(distributed, "tensor_of_rows", wrong)


def join_along_the_first_dimension(patch: pytest.MonkeyPatch) -> None:
    def wrong(elements: Array, dim: int, shapes: list[tuple[int, ...]]) -> Array:
        whole = list(shapes[0])
        whole[dim] = sum(shape[dim] for shape in shapes)
        return elements.reshape(whole)

    patch.setattr(distributed, "join_pieces", wrong)
    patch.setattr(distributed, "pack_pieces", lambda tensor, dim, bounds: tensor.ravel())


def scatter_equal_parts_only(patch: pytest.MonkeyPatch) -> None:
    def wrong(length: int, parts: int) -> list[tuple[int, int]]:
        return [(part * (length // parts), (part + 1) * (length // parts)) for part in range(parts)]

    patch.setattr(reductions, "ceil_chunks", wrong)


def broadcast_into_a_copy(patch: pytest.MonkeyPatch) -> None:
    right = ArrayOperations.broadcast

    def wrong(self: ArrayOperations, x: Array, **options: Any) -> Coroutine[Any, Any, Array]:
        return right(self, x.copy(), **options)

    patch.setattr(ArrayOperations, "broadcast", wrong)


def let_the_world_be_every_group(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Communicator, ranks: Iterable[int], **options: Any) -> Communicator | None:
        return self if self.rank in ranks else None

    patch.setattr(Communicator, "subgroup", wrong)


def call_every_rank_0(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TensorCommunicator, "rank", 0)


def cut_every_part_for_rank_0(patch: pytest.MonkeyPatch) -> None:
    right = ModelParallelContext.partition_tensor

    def wrong(self: ModelParallelContext, tensor: Array, split_dim: int | None = None) -> DistributedTensor:
        part = right(self, tensor, split_dim)
        dim, size = part.partition.split_dim, part.partition.num_partitions
        first = DistributedTensor.from_global(tensor, dim, size, 0)
        return DistributedTensor(
            local_shard=np.resize(first.local_shard, part.local_shard.shape),
            global_shape=part.global_shape,
            partition=part.partition,
            device_id=0,
        )

    patch.setattr(ModelParallelContext, "partition_tensor", wrong)


def return_when_time_is_up(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: LongWaits, operation: Operation, now: float) -> None:
        for future in [*operation.posts.values()]:
            if not future.done():
                future.set_result(None)

    patch.setattr(LongWaits, "_time_out", wrong)


# -- cases ------------------------------------------------------------------------------------------------------------

CASES = (
    Breakage(
        mistake=Mistake.START_PAST_END,
        where="tensors",
        switch_on=forget_to_clamp_starts,
        check=parts_are_ceil_chunks,
        shows=r"start_idx, end_idx: expected a range from 0 or more, got 6\.\.5",
    ),
    Breakage(
        mistake=Mistake.ALIASED_COORDINATES,
        where="mesh",
        switch_on=number_places_without_looking_at_bounds,
        check=a_place_outside_a_mesh_is_none,
        shows="coordinates alias another device",
    ),
    Breakage(
        mistake=Mistake.WRONG_LAYOUT,
        where="all_gather",
        switch_on=reshape_in_place_of_moving,
        check=on_ranks(2, _concatenated_along),
        shows="along dimension 1",
    ),
    Breakage(
        mistake=Mistake.WRONG_LAYOUT,
        where="gather",
        switch_on=reshape_in_place_of_moving,
        check=on_ranks(4, _gathered_is_the_whole),
        shows="gathered along dimension 1",
    ),
    Breakage(
        mistake=Mistake.WRONG_LAYOUT,
        where="redistribute",
        switch_on=join_along_the_first_dimension,
        check=on_ranks(2, _redistributed_is_the_same_tensor),
        shows="redistributed",
    ),
    Breakage(
        mistake=Mistake.LOST_REMAINDER,
        where="collectives",
        switch_on=scatter_equal_parts_only,
        check=on_ranks(4, _scattered_sums_are_the_whole_sum),
        shows="a remainder is lost",
    ),
    Breakage(
        mistake=Mistake.DROPPED_RESULT,
        where="broadcast",
        switch_on=broadcast_into_a_copy,
        check=on_ranks(3, _broadcast_overwrites),
        shows="broadcast",
    ),
    Breakage(
        mistake=Mistake.SUBGROUP_IS_WORLD,
        where="mesh",
        switch_on=let_the_world_be_every_group,
        check=on_ranks(4, _groups_of_a_mesh_are_its_own),
        shows="sums over groups",
    ),
    Breakage(
        mistake=Mistake.SUBGROUP_IS_WORLD,
        where="process_groups",
        switch_on=let_the_world_be_every_group,
        check=on_ranks(4, _process_groups_are_their_own),
        shows="sums over groups",
    ),
    Breakage(
        mistake=Mistake.RANK_IS_ZERO,
        where="tensors",
        switch_on=call_every_rank_0,
        check=on_ranks(4, _gathered_is_the_whole),
        shows="partition_rank: expected 1, this rank's place in the communicator, got 0",
    ),
    Breakage(
        mistake=Mistake.RANK_IS_ZERO,
        where="context",
        switch_on=cut_every_part_for_rank_0,
        check=on_ranks(4, _gathered_is_the_whole),
        shows="gathered along dimension 0",
    ),
    Breakage(
        mistake=Mistake.RANK_NEVER_CAME,
        where="collectives",
        switch_on=return_when_time_is_up,
        check=a_missing_rank_is_an_error_of_all_others,
        shows="expected an error, as rank 1 never came, got array",
    ),
)
