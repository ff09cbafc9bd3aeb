"""Devices along named axes: the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.errors import UsageError
from asyncpar.tensors import DeviceMesh

SQUARE = DeviceMesh((2, 2), ("row", "column"))


@st.composite
def meshes(draw: st.DrawFn) -> DeviceMesh:
    """Meshes of up to three axes over devices in any order, whose last places may be empty."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    devices = draw(st.permutations(range(math.prod(sizes) + 2)))[: math.prod(sizes)]
    taken = draw(st.integers(1, len(devices)))
    return DeviceMesh(sizes, tuple("abc"[: len(sizes)]), devices[:taken])


def test_a_square_is_numbered_row_by_row() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [SQUARE.device_at(place) for place in places] == [0, 1, 2, 3]
    assert [SQUARE.coordinates_of(device) for device in range(4)] == places


@pytest.mark.parametrize("place", [(0, 2), (2, 0), (0, -1), (-1, 1), (1, 3)])
def test_a_place_outside_one_axis_is_none_whatever_number_it_would_alias(place: tuple[int, int]) -> None:
    assert SQUARE.device_at(place) is None
    assert SQUARE.device_at({"row": place[0], "column": place[1]}) is None


@given(meshes())
def test_devices_and_coordinates_are_one_to_one(mesh: DeviceMesh) -> None:
    places = [mesh.coordinates_of(device) for device in mesh.devices]
    assert len(set(places)) == len(mesh) == len(mesh.devices)
    assert [mesh.device_at(place) for place in places] == list(mesh.devices)


@given(meshes(), st.lists(st.integers(-3, 6), min_size=3, max_size=3))
def test_a_device_is_found_only_at_its_own_place(mesh: DeviceMesh, place: list[int]) -> None:
    place = place[: len(mesh.shape)]
    device = mesh.device_at(place)
    assert device is None or mesh.coordinates_of(device) == tuple(place)
    if any(not 0 <= at < size for at, size in zip(place, mesh.shape, strict=True)):
        assert device is None


@given(meshes(), st.data())
def test_the_groups_along_an_axis_part_the_mesh(mesh: DeviceMesh, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(mesh.axes) - 1))
    groups = mesh.groups(mesh.axes[number])
    assert sorted(device for group in groups for device in group) == sorted(mesh.devices)
    for group in groups:
        places = [list(mesh.coordinates_of(device)) for device in group]
        assert [place.pop(number) for place in places] == list(range(len(group)))
        assert all(place == places[0] for place in places)


@given(meshes(), st.data())
def test_slices_along_an_axis_part_the_mesh(mesh: DeviceMesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(mesh.axes))
    filled = sorted({mesh.coordinates_of(device)[mesh.axes.index(axis)] for device in mesh.devices})
    parts = [mesh.slice(**{axis: at}) for at in filled]
    assert sorted(device for part in parts for device in part.devices) == sorted(mesh.devices)


@given(meshes(), st.data())
def test_a_submesh_along_one_axis_is_the_group(mesh: DeviceMesh, data: st.DataObject) -> None:
    axis, device = data.draw(st.sampled_from(mesh.axes)), data.draw(st.sampled_from(mesh.devices))
    part = mesh.submesh(axis, through=device)
    assert (part.axes, part.devices) == ((axis,), mesh.group(axis, device))
    assert mesh.submesh(*mesh.axes, through=device) == mesh
    assert mesh.submesh(through=device).devices == (device,)


def test_a_slice_of_a_range_keeps_its_axis_and_counts_from_0() -> None:
    mesh = DeviceMesh((3, 2), ("dp", "tp"), (5, 4, 3, 2, 1, 0))
    part = mesh.slice(dp=slice(1, 3))
    assert part == DeviceMesh((2, 2), ("dp", "tp"), (3, 2, 1, 0))
    assert mesh.slice(dp=slice(None, None, -1), tp=1) == DeviceMesh((3,), ("dp",), (0, 2, 4))


def test_an_empty_place_stays_where_it_is_in_a_part() -> None:
    mesh = DeviceMesh.two_dimensional(3)
    backwards = mesh.slice(row=slice(None, None, -1))
    assert [backwards.device_at(place) for place in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [2, None, 0, 1]
    assert backwards.group("column", 2) == (2,)
    with pytest.raises(UsageError, match="expected some with a device"):
        mesh.slice(row=1, column=1)


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1)), (2, (2, 1)), (3, (2, 2)), (4, (2, 2)), (5, (3, 2)), (8, (3, 3)), (12, (4, 3))]
)
def test_two_dimensions_have_the_rounded_up_square_root_of_rows(count: int, shape: tuple[int, int]) -> None:
    mesh = DeviceMesh.two_dimensional(count)
    assert mesh.shape == shape
    assert mesh.devices == tuple(range(count))


@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1, 1)), (8, (2, 2, 2)), (27, (3, 3, 3)), (12, (3, 2, 2))])
def test_three_dimensions_have_the_rounded_up_cube_root_of_planes(count: int, shape: tuple[int, int, int]) -> None:
    assert DeviceMesh.three_dimensional(count).shape == shape


@given(st.integers(1, 200))
def test_grids_have_room_for_all_and_no_empty_row(count: int) -> None:
    for mesh in (DeviceMesh.two_dimensional(count), DeviceMesh.three_dimensional(count)):
        assert len(mesh) == count <= math.prod(mesh.shape)
        assert mesh.coordinates_of(count - 1)[0] == mesh.shape[0] - 1 or len(mesh.shape) == 3


def test_a_line_has_one_axis() -> None:
    assert DeviceMesh.linear((7, 3), axis="dp") == DeviceMesh((2,), ("dp",), (7, 3))
    assert DeviceMesh.linear(3).device_at([2]) == 2
    assert DeviceMesh.linear(3).device_at([3]) is None


def test_integers_and_arrays_of_numpy_will_do() -> None:
    mesh = DeviceMesh.linear(np.arange(4)[::-1])
    assert mesh == DeviceMesh.linear((3, 2, 1, 0))
    assert DeviceMesh.two_dimensional(np.int64(4)).device_at(np.array([1, 0])) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "shape: expected at least one axis"),
        (([2, 0],), "expected at least one place along each axis, got 0 along 'axis1'"),
        (([2, 2], ["a"]), r"axes: expected 2 names, one per length of shape, got \['a'\]"),
        (([2, 2], ["a", "a"]), "axes: expected different names"),
        (([2], ["a b"]), "expected names that are Python identifiers"),
        (([2], ["a"], [0, 1, 2]), r"devices: expected 1\.\.2, as many as \[2\] has places, got 3"),
        (([2], ["a"], []), r"devices: expected 1\.\.2, as many as \[2\] has places, got 0"),
        (([2], ["a"], [1, 1]), r"devices: expected different numbers of 0 or more, got \[1, 1\]"),
        (([2], ["a"], [-1, 1]), r"devices: expected different numbers of 0 or more, got \[-1, 1\]"),
        (([2.5],), "shape: expected an integer, got 2.5"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_an_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeviceMesh(*arguments)


@pytest.mark.parametrize("place", [(0,), (0, 1, 2), {"row": 0}, {"row": 0, "depth": 1}, (0, "1")])
def test_coordinates_of_other_axes_are_an_error(place: Sequence[int] | Mapping[str, int]) -> None:
    with pytest.raises(UsageError, match="coordinates: expected"):
        SQUARE.device_at(place)


def test_unknown_devices_and_axes_are_errors() -> None:
    with pytest.raises(UsageError, match=r"device: expected one of the mesh, \[0, 1, 2, 3\], got 4"):
        SQUARE.coordinates_of(4)
    with pytest.raises(UsageError, match="axis: expected one of row, column, got 'depth'"):
        SQUARE.group("depth", 0)
    with pytest.raises(UsageError, match="axes: expected some of row, column, got 'depth'"):
        SQUARE.submesh("depth", through=0)
    with pytest.raises(UsageError, match="row: expected a coordinate"):
        SQUARE.slice(row=2)
