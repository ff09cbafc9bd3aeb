"""The errors of several ranks as one."""

from __future__ import annotations

import pytest

from asyncpar.actors.meshes.shape import MeshShape
from asyncpar.actors.meshes.values import MeshError, mesh_error
from asyncpar.errors import AsyncparError, NodeClosed, PeerLost, RemoteError

GRID = MeshShape.line(range(4)).reshape({"dp": 2, "tp": 2})


def failed() -> MeshError:
    failures: dict[int, Exception] = {
        3: PeerLost("rank 3 is gone", rank=3),
        1: RemoteError("no", rank=1, type_name="ValueError", remote_traceback=""),
    }
    error = mesh_error("step", GRID, failures, {0: "a", 2: "b"})
    assert isinstance(error, MeshError)
    return error


def test_a_closed_node_is_one_error_and_not_one_for_each_place() -> None:
    error = mesh_error("step", GRID, {rank: NodeClosed.of(2) for rank in range(4)}, {})
    assert isinstance(error, NodeClosed)
    assert str(error).startswith("step: this node is closed")
    assert error.rank == 2


def test_each_failure_says_where_it_is_from() -> None:
    error = failed()
    assert str(error) == "step failed on 2 of 4 ranks (2 sub-exceptions)"
    assert [type(each) for each in error.exceptions] == [RemoteError, PeerLost]
    assert [each.__notes__ for each in error.exceptions] == [
        ["from rank 1 at dp=0, tp=1 of a mesh of dp 2 x tp 2"],
        ["from rank 3 at dp=1, tp=1 of a mesh of dp 2 x tp 2"],
    ]


def test_the_values_that_arrived_are_kept() -> None:
    assert failed().values.by_rank() == {0: "a", 2: "b"}


def test_parts_of_the_group_keep_kind_and_values() -> None:
    lost, others = failed().split(PeerLost)
    assert isinstance(lost, MeshError)
    assert isinstance(others, MeshError)
    assert [type(each) for each in others.exceptions] == [RemoteError]
    assert lost.values.by_rank() == {0: "a", 2: "b"}


def test_it_can_be_handled_by_kind_of_failure() -> None:
    handled: list[Exception] = []
    try:
        raise failed()
    except* PeerLost as lost:
        handled += lost.exceptions
    except* RemoteError as raised:
        handled += raised.exceptions
    assert [type(each) for each in handled] == [PeerLost, RemoteError]


def test_it_is_one_of_our_errors() -> None:
    with pytest.raises(AsyncparError):
        raise failed()
