"""The arithmetic of meshes: ranks, places and parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.actors.meshes.shape import Coordinates, MeshShape, NoSuchPlace, mesh_table
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.errors import UsageError

GRID = MeshShape.line(range(4)).reshape({"dp": 2, "tp": 2})


@st.composite
def shapes(draw: st.DrawFn) -> MeshShape:
    """Meshes of up to three axes over ranks in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(math.prod(sizes))))
    return MeshShape.line(ranks).reshape(dict(zip("abc", sizes, strict=False)))


@given(shapes())
def test_ranks_and_coordinates_are_one_to_one(shape: MeshShape) -> None:
    places = list(shape.places())
    assert len(set(places)) == len(places) == len(shape)
    assert [shape.at(place) for place in places] == list(shape.ranks)
    assert [shape.coordinates(rank) for rank in shape.ranks] == places


@given(shapes(), st.data())
def test_slices_along_an_axis_part_the_mesh(shape: MeshShape, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(shape.axes))
    parts = [shape.slice({axis: at}) for at in range(shape.sizes[axis])]
    assert sorted(rank for part in parts for rank in part.ranks) == sorted(shape.ranks)
    for at, part in enumerate(parts):
        assert part.axes == tuple(name for name in shape.axes if name != axis)
        for place, rank in zip(part.places(), part.ranks, strict=True):
            assert shape.coordinates(rank) == {**place, axis: at}


@given(shapes(), st.data())
def test_the_groups_along_an_axis_part_the_mesh(shape: MeshShape, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(shape.axes))
    groups = {shape.group(axis, rank) for rank in shape.ranks}
    assert sorted(rank for group in groups for rank in group) == sorted(shape.ranks)
    for group in groups:
        assert [shape.coordinates(rank)[axis] for rank in group] == list(range(shape.sizes[axis]))


@given(shapes())
def test_ranks_keep_their_order_when_reshaped(shape: MeshShape) -> None:
    flat = shape.reshape({"all": -1})
    assert flat.sizes == {"all": len(shape)}
    assert flat.ranks == shape.ranks
    assert flat.reshape(shape.sizes) == shape


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_axes_named_dp_tp_pp_mean_what_rank_mapping_means(dp: int, tp: int, pp: int) -> None:
    config = ThreeDParallelismConfig(dp_size=dp, tp_size=tp, pp_size=pp)
    grid = MeshShape.line(range(config.world_size)).reshape({"dp": dp, "tp": tp, "pp": pp})
    for rank in range(config.world_size):
        mapping = RankMapping(config, rank)
        place = {"dp": mapping.dp_rank, "tp": mapping.tp_rank, "pp": mapping.pp_rank}
        assert grid.coordinates(rank) == place
        assert grid.at(place) == rank == mapping.from_3d_coords(**{f"{axis}_rank": at for axis, at in place.items()})
        assert grid.group("dp", rank) == mapping.dp_group_ranks()
        assert grid.group("tp", rank) == mapping.tp_group_ranks()
        assert grid.group("pp", rank) == mapping.pp_group_ranks()


def test_the_last_axis_runs_fastest() -> None:
    assert [GRID.at({"dp": dp, "tp": tp}) for dp in range(2) for tp in range(2)] == [0, 1, 2, 3]


def test_one_size_may_be_left_open() -> None:
    assert MeshShape.line(range(6)).reshape({"dp": -1, "tp": 2}).sizes == {"dp": 3, "tp": 2}


def test_a_range_keeps_its_axis_and_is_counted_from_zero() -> None:
    part = MeshShape.line(range(6)).reshape({"dp": 3, "tp": 2}).slice({"dp": slice(1, None)})
    assert (part.sizes, part.ranks) == ({"dp": 2, "tp": 2}, (2, 3, 4, 5))
    assert part.at({"dp": 0, "tp": 1}) == 3


def test_one_place_is_left_when_every_axis_is_chosen() -> None:
    part = GRID.slice({"dp": 1, "tp": 0})
    assert (part.axes, part.ranks, len(part), str(part)) == ((), (2,), 1, "mesh of one place")
    assert part.at({}) == 2


def test_chosen_ranks_lie_along_one_axis_in_the_order_given() -> None:
    part = GRID.select([3, 0])
    assert (part.sizes, part.ranks) == ({"member": 2}, (3, 0))


def test_numpy_integers_are_integers() -> None:
    assert GRID.at({"dp": np.int64(1), "tp": np.int32(0)}) == 2  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"dp": 0, "tp": 2}, r"tp: expected a coordinate 0\.\.1, got 2"),
        ({"dp": -1, "tp": 0}, r"dp: expected a coordinate 0\.\.1, got -1"),
        ({"dp": 0}, "place: expected coordinates for dp, tp; tp is missing"),
        ({"dp": 0, "tp": 0, "pp": 0}, "axis: expected one of dp, tp, got 'pp'"),
        ({"dp": 0, "tp": True}, "tp: expected an integer, got True"),
        ({"dp": 0, "tp": 0.0}, "tp: expected an integer, got 0.0"),
    ],
)
def test_a_place_outside_is_refused_by_axis(place: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GRID.at(place)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 3}, "sizes: expected a product of 4, the number of ranks, got dp 3"),
        ({"dp": 3, "tp": -1}, "sizes: expected a product of 4, the number of ranks, got dp 3"),
        ({"dp": 8, "tp": -1}, "sizes: expected a product of 4"),
        ({"dp": -1, "tp": -1}, "sizes: expected at most one -1, got it for dp, tp"),
        ({"dp": 0, "tp": 4}, "dp: expected a positive size or -1, got 0"),
        ({"dp": -2, "tp": -2}, "dp: expected a positive size or -1, got -2"),
        ({"d p": 4}, "axes: expected names that are Python identifiers, got 'd p'"),
        ({}, "sizes: expected a product of 4, the number of ranks, got 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GRID.reshape(sizes)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"pp": 0}, "axis: expected one of dp, tp, got 'pp'"),
        ({"dp": 2}, r"dp: expected a coordinate 0\.\.1, got 2"),
        ({"dp": slice(0, 3)}, r"dp: expected a range within 0\.\.2, got 3"),
        ({"dp": slice(1, 1)}, "dp: expected a range with at least one place"),
    ],
)
def test_parts_that_lie_outside_are_refused(chosen: dict[str, int | slice], message: str) -> None:
    with pytest.raises(NoSuchPlace, match=message):
        GRID.slice(chosen)


@pytest.mark.parametrize("ranks", [[4], [0, 0], []])
def test_ranks_that_are_no_choice_are_refused(ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="ranks: expected"):
        GRID.select(ranks)


def test_a_rank_that_is_not_of_the_mesh_has_no_place() -> None:
    with pytest.raises(NoSuchPlace, match=r"rank: expected one of 0, 1, 2, 3, got 4"):
        GRID.coordinates(4)


def test_coordinates_equal_mappings_and_can_be_keys() -> None:
    place = Coordinates({"dp": 0, "tp": 1})
    assert place == {"tp": 1, "dp": 0}
    assert hash(place) == hash(Coordinates({"tp": 1, "dp": 0}))
    assert (str(place), repr(place)) == ("dp=0, tp=1", "Coordinates(dp=0, tp=1)")


def test_a_table_of_a_large_mesh_ends_with_the_number_of_the_others() -> None:
    html = mesh_table(MeshShape.line(range(100)), "<b>")
    assert "<th>mesh of rank 100 of &lt;b&gt;</th>" in html
    assert html.endswith("<tr><td>rank=63</td><td>63</td></tr><tr><td>and</td><td>36 more</td></tr></tbody></table>")
