"""Communicators along the axes of a mesh, over real worlds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.tensors import DeviceMesh, MeshCommunicators, SettingsDiffer, TensorCommunicator
from tests.tensors.worlds import on_world, outcomes

MESH = DeviceMesh((2, 2), ("dp", "tp"), (3, 1, 0, 2))


async def groups_of(c: TensorCommunicator, mesh: DeviceMesh, **more: Any) -> MeshCommunicators:
    groups = await mesh.communicators(c.communicator, **more)
    assert groups is not None
    return groups


def test_each_axis_has_its_own_group_whose_ranks_are_coordinates() -> None:
    async def main(c: TensorCommunicator) -> dict[str, tuple[tuple[int, ...], int]]:
        return {axis: (group.ranks, group.rank) for axis, group in (await groups_of(c, MESH)).items()}

    assert on_world(4, main) == [
        {"dp": ((3, 0), 1), "tp": ((0, 2), 0)},
        {"dp": ((1, 2), 0), "tp": ((3, 1), 1)},
        {"dp": ((1, 2), 1), "tp": ((0, 2), 1)},
        {"dp": ((3, 0), 0), "tp": ((3, 1), 0)},
    ]


def test_operations_in_different_groups_do_not_meet_nor_wait_for_the_world() -> None:
    async def main(c: TensorCommunicator) -> list[float]:
        groups = await groups_of(c, MESH)
        if groups.coordinates["dp"] == 1:  # who is in another row may do nothing at all
            return []
        sums = [groups["tp"].all_reduce(np.array([2.0**c.rank])) for _ in range(2)]
        return [total.item() for total in await asyncio.gather(*sums)]

    assert on_world(4, main) == [[], [2 + 8] * 2, [], [2 + 8] * 2]


def test_a_group_over_several_axes_joins_what_differs_along_any_of_them() -> None:
    mesh = DeviceMesh((2, 1, 2), ("dp", "pp", "tp"))

    async def main(c: TensorCommunicator) -> tuple[Any, ...]:
        groups = await groups_of(c, mesh)
        everyone = groups.over("tp", "dp")
        total = await everyone.all_reduce(np.array([1.0]))
        return everyone.ranks, total.item(), groups.over("tp").ranks, groups.over().ranks

    assert on_world(4, main) == [
        ((0, 1, 2, 3), 4.0, (0, 1), (0,)),
        ((0, 1, 2, 3), 4.0, (0, 1), (1,)),
        ((0, 1, 2, 3), 4.0, (2, 3), (2,)),
        ((0, 1, 2, 3), 4.0, (2, 3), (3,)),
    ]


def test_who_asks_again_gets_the_same_communicators() -> None:
    async def main(c: TensorCommunicator) -> bool:
        once, again = await groups_of(c, MESH), await groups_of(c, MESH)
        return once["dp"] is again["dp"] is once.over("dp")

    assert on_world(4, main) == [True] * 4


def test_a_rank_outside_the_mesh_gets_none() -> None:
    async def main(c: TensorCommunicator) -> tuple[int, ...] | None:
        groups = await DeviceMesh.linear((2, 0)).communicators(c.communicator)
        return None if groups is None else groups["device"].ranks

    assert on_world(3, main) == [(2, 0), None, (2, 0)]


def test_a_place_without_a_device_is_in_no_group() -> None:
    async def main(c: TensorCommunicator) -> tuple[tuple[int, ...], ...]:
        groups = await groups_of(c, DeviceMesh.two_dimensional(3))
        return groups["row"].ranks, groups["column"].ranks, groups.over("row", "column").ranks

    assert on_world(3, main) == [((0, 2), (0, 1), (0, 1, 2)), ((1,), (0, 1), (0, 1, 2)), ((0, 2), (2,), (0, 1, 2))]


def test_devices_need_not_be_ranks() -> None:
    async def main(c: TensorCommunicator) -> tuple[tuple[int, ...], int]:
        groups = await groups_of(c, DeviceMesh.linear((7, 5)), devices=(5, 7))
        return groups["device"].ranks, groups.device

    assert on_world(2, main) == [((1, 0), 5), ((1, 0), 7)]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DeviceMesh((2, 2), ("dp", "tp")), r"mesh.devices is .* on ranks 0, 2, 3 and \[0, 1, 2, 3\] on rank 1"),
        (
            DeviceMesh((4, 1), ("dp", "tp"), (3, 1, 0, 2)),
            "mesh.shape is .*dp 2 x tp 2.* on ranks .*dp 4 x tp 1.* on rank 1",
        ),
        (DeviceMesh((2, 2), ("pp", "tp"), (3, 1, 0, 2)), "mesh.shape is .* on rank 1"),
        (DeviceMesh.linear((3, 1, 9)), "mesh.shape is .* on rank 1"),
    ],
)
def test_different_meshes_are_an_error_on_all_ranks_that_says_who_has_which(other: DeviceMesh, message: str) -> None:
    async def main(c: TensorCommunicator) -> Any:
        return await (other if c.rank == 1 else MESH).communicators(c.communicator)

    for error in outcomes(4, main):
        with pytest.raises(SettingsDiffer, match=message):
            raise error


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        (DeviceMesh.linear(4), None, r"devices: device 2 of the mesh of device 4 is that of no rank.* \[0, 1\]"),
        (DeviceMesh.linear(2), (0,), r"devices: expected a device for each of 2 ranks, all different, got \[0\]"),
        (DeviceMesh.linear(2), (0, 0), r"devices: expected a device for each of 2 ranks, all different, got \[0, 0\]"),
        (DeviceMesh.linear(2), (0, -1), r"devices: expected a device for each of 2 ranks.* got \[0, -1\]"),
        (DeviceMesh.linear(2), (0, 1.5), "devices: expected an integer, got 1.5"),
    ],
)
def test_a_mesh_that_does_not_fit_the_world_is_an_error_on_all_ranks(
    mesh: DeviceMesh, devices: Any, message: str
) -> None:
    for error in outcomes(2, lambda c: mesh.communicators(c.communicator, devices=devices)):
        with pytest.raises(UsageError, match=message):
            raise error


def test_an_axis_that_the_mesh_does_not_have_is_an_error() -> None:
    async def main(c: TensorCommunicator) -> None:
        groups = await groups_of(c, MESH)
        with pytest.raises(UsageError, match="axes: expected some of dp, tp, got 'pp'"):
            groups.over("pp")
        with pytest.raises(KeyError):
            groups["pp"]

    on_world(4, main)
