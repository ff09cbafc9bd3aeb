"""Actors of a mesh form groups with the right ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.actors.meshes.shape import MeshShape
from asyncpar.actors.runtime.groups import ranks_along
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.errors import UsageError


def place_on(shape: MeshShape) -> MeshPlace:
    return MeshPlace(mesh="m", axes=shape.axes, sizes=tuple(shape.sizes.values()), ranks=shape.ranks)


CUBE = MeshShape.line(range(8)).reshape({"dp": 2, "tp": 2, "pp": 2})


@given(st.permutations(range(8)), st.sampled_from(CUBE.axes))
def test_ranks_along_an_axis_are_those_of_the_mesh(ranks: list[int], axis: str) -> None:
    shape = MeshShape(CUBE.dimensions, tuple(ranks))
    for rank in ranks:
        assert ranks_along(place_on(shape), axis, rank) == shape.group(axis, rank)


def test_without_an_axis_all_ranks_are_meant() -> None:
    assert ranks_along(place_on(CUBE), None, 5) == tuple(range(8))


def test_an_axis_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="group: expected an axis of mesh m: 'dp', 'tp', 'pp', or nothing for all; go"):
        ranks_along(place_on(CUBE), "world", 0)
    with pytest.raises(UsageError, match="group: expected an axis of mesh m: none, or nothing"):
        ranks_along(place_on(MeshShape((), (3,))), "dp", 3)


@pytest.mark.parametrize(
    "place",
    [
        MeshPlace("m", ("dp",), (2,), (1, 2)),
        MeshPlace("m", ("dp",), (3,), (0, 1)),
        MeshPlace("m", ("dp", "tp"), (2,), (0, 1, 2, 3)),
        MeshPlace("m", ("dp", "tp"), (-1, -2), (0, 1)),
        MeshPlace("m", (), (), ()),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(place: MeshPlace) -> None:
    with pytest.raises(UsageError, match="group: rank 0 has no place on mesh m"):
        ranks_along(place, "dp", 0)
