"""Values with their places."""

from __future__ import annotations

import pytest

from asyncpar.actors.meshes.shape import MeshShape, NoSuchPlace
from asyncpar.actors.meshes.values import MeshValues

GRID = MeshShape.line([3, 2, 1, 0]).reshape({"dp": 2, "tp": 2})
ALL = MeshValues(GRID, {rank: f"of {rank}" for rank in range(4)})
SOME = MeshValues(GRID, {0: "zero", 3: "three"})


def test_values_come_in_mesh_order() -> None:
    assert list(ALL.values()) == ["of 3", "of 2", "of 1", "of 0"]
    assert list(ALL) == [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}, {"dp": 1, "tp": 1}]
    assert list(ALL.by_rank()) == [3, 2, 1, 0]


def test_a_value_is_found_by_its_place_or_rank() -> None:
    assert ALL[{"dp": 1, "tp": 0}] == ALL.at(dp=1, tp=0) == ALL.by_rank()[1] == "of 1"


def test_values_of_a_part_have_the_places_of_the_part() -> None:
    row = ALL.slice(dp=1)
    assert dict(row) == {place: f"of {rank}" for place, rank in zip(row, (1, 0), strict=True)}
    assert row.at(tp=1) == "of 0"


def test_values_that_did_not_arrive_are_left_out() -> None:
    assert list(SOME) == [{"dp": 0, "tp": 0}, {"dp": 1, "tp": 1}]
    assert list(SOME.values()) == ["three", "zero"]
    assert len(SOME) == 2
    assert {"dp": 0, "tp": 1} not in SOME
    with pytest.raises(NoSuchPlace, match=r"place: no value arrived from dp=0, tp=1 \(rank 2\)"):
        SOME.at(dp=0, tp=1)


def test_a_place_that_the_mesh_does_not_have_is_refused_by_axis() -> None:
    with pytest.raises(NoSuchPlace, match=r"tp: expected a coordinate 0\.\.1, got 2"):
        ALL.at(dp=0, tp=2)
    with pytest.raises(KeyError):
        ALL[{"dp": 0}]


def test_values_show_their_places() -> None:
    assert repr(SOME) == "MeshValues({(dp=0, tp=0): 'three', (dp=1, tp=1): 'zero'})"
