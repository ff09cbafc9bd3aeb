"""A forgotten await and a forgotten block say what to write."""

from __future__ import annotations

import inspect
import operator
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.core.concurrency.async_block import opened_by
from asyncpar.errors import UsageError
from asyncpar.testing import local_world

X = np.ones(2)


CALLS: dict[str, Callable[[ap.Communicator], Any]] = {
    "agree": lambda comm: comm.agree(1),
    "all_gather": lambda comm: comm.all_gather(X),
    "all_gather_object": lambda comm: comm.all_gather_object(1),
    "all_gather_v": lambda comm: comm.all_gather_v(X),
    "all_reduce": lambda comm: comm.all_reduce(X.copy()),
    "all_reduce_many": lambda comm: comm.all_reduce_many([X.copy()]),
    "all_to_all": lambda comm: comm.all_to_all(np.ones((comm.size, 2))),
    "all_to_all_v": lambda comm: comm.all_to_all_v(np.ones((comm.size, 2)), [1] * comm.size),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(X.copy()),
    "broadcast_object": lambda comm: comm.broadcast_object(1),
    "calibrate": lambda comm: comm.calibrate(),
    "gather": lambda comm: comm.gather(X),
    "gather_object": lambda comm: comm.gather_object(1),
    "recv": lambda comm: comm.recv(1 - comm.rank),
    "recv_any": lambda comm: comm.recv_any(),
    "recv_object": lambda comm: comm.recv_object(1 - comm.rank),
    "reduce": lambda comm: comm.reduce(X.copy()),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones((comm.size, 2))),
    "scatter": lambda comm: comm.scatter(np.ones((comm.size, 2)), root=comm.rank),
    "scatter_object": lambda comm: comm.scatter_object([1] * comm.size, root=comm.rank),
    "send": lambda comm: comm.send(X, 1 - comm.rank),
    "send_object": lambda comm: comm.send_object(1, 1 - comm.rank),
    "shrink": lambda comm: comm.shrink(),
    "split": lambda comm: comm.split(0),
}
"""A call of every method of a communicator that is to be awaited."""

COROUTINES = {"calibrate"}
"""Those that are coroutines of Python, which says itself that a coroutine has no such attribute."""

MESSAGES = {"recv_any": "recv", "recv_object": "recv", "send_object": "send"}
"""Those that are one operation with another: all messages are."""

USES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda y: y.shape,
    "item": lambda y: y[0],
    "loop": list,
    "length": len,
    "array": np.asarray,
    "number": float,
    "index": operator.index,
    "sum": lambda y: y + 1,
    "sum from the right": lambda y: 1 + y,
    "sum with an array": lambda y: X + y,
    "product": lambda y: y @ X,
    "negation": lambda y: -y,
    "comparison": lambda y: y < 1,
    "search": lambda y: 1 in y,
}


def test_every_method_that_is_awaited_is_tried() -> None:
    awaited = {
        name
        for name, method in inspect.getmembers(ap.Communicator, callable)
        if not name.startswith("_") and str(inspect.signature(method).return_annotation).startswith("Coroutine")
    }
    assert awaited == CALLS.keys()


@pytest.mark.parametrize("name", sorted(CALLS.keys() - COROUTINES))
async def test_a_call_that_is_used_as_its_result_says_to_await_it(name: str) -> None:
    async with local_world(2) as nodes:
        call = CALLS[name](nodes[0].world)
        for use, function in USES.items():
            with pytest.raises((UsageError, AttributeError), match="not its result: write `await comm") as refused:
                function(call)
            assert f"the call of {MESSAGES.get(name, name)}," in str(refused.value), use
        assert call
        assert not hasattr(call, "shape")
        assert "write `await comm." in repr(call)
        call.close()


async def test_a_call_that_was_awaited_shows_that() -> None:
    async with ap.init() as node:
        call = node.world.barrier()
        await call
        assert repr(call) == "<the call of barrier, awaited>"


async def test_a_call_that_is_passed_to_another_is_named() -> None:
    async with ap.init() as node:
        call: Any = node.world.all_gather(X)
        with pytest.raises(
            UsageError, match="x: expected a numpy array, got a call that was not awaited; write `await`"
        ):
            await node.world.all_reduce(call)
        await call


# -- blocks ------------------------------------------------------------------------------------------------------------


async def test_a_node_is_not_there_before_its_block() -> None:
    form = "write `async with ap.init\\(\\) as node:`"
    with pytest.raises(UsageError, match=form):
        await ap.init()  # type: ignore[misc]
    with pytest.raises(UsageError, match=form), ap.init():  # type: ignore[attr-defined]
        pass
    node: Any = ap.init()
    with pytest.raises(AttributeError, match=f"rank: .*{form}"):
        _ = node.rank
    assert not hasattr(node, "_repr_html_")
    assert "async with ap.init() as node" in repr(node)
    async with node as opened:
        assert opened.rank == 0


async def test_a_world_of_nodes_is_not_there_before_its_block() -> None:
    with pytest.raises(UsageError, match=r"write `async with local_world\(2\) as nodes:`"):
        await local_world(2)  # type: ignore[misc]


async def test_a_block_keeps_its_signature_and_handles_errors() -> None:
    seen: list[str] = []

    @opened_by("async with number(1) as x:")
    async def number(x: int) -> AsyncIterator[int]:
        """Give a number."""
        try:
            yield x
        except KeyError:
            seen.append("KeyError")
        finally:
            seen.append("end")

    async with number(3) as found:
        if found == 3:
            raise KeyError
    assert seen == ["KeyError", "end"]
    assert (number.__doc__, list(inspect.signature(number).parameters)) == ("Give a number.", ["x"])
