"""All that is asked of a node whose block has ended is one error, ``NodeClosed``; what is known of it can be read."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.blocking.communicator import Starting
from asyncpar.errors import NodeClosed, PeerLost, StaleGeneration, UsageError
from asyncpar.testing import blocking_world, local_world
from tests.test_forgotten_await import CALLS

CLOSED = "this node is closed; use it, its communicators and its actors inside the block that opens it"


class Counter(ap.Actor):
    """Counts."""

    @ap.endpoint
    async def add(self, more: int) -> int:
        """Return the number behind ``more``."""
        return more + 1

    @ap.endpoint
    async def count(self) -> AsyncIterator[int]:
        """Yield a number."""
        yield 1


class Face(NamedTuple):
    """What the public names of a class do on a closed node.  Properties and attributes can be read."""

    asked: Mapping[str, Callable[[Any], Any]]
    """Calls that need the node, by name: they raise."""
    done: Mapping[str, Callable[[Any], Any]] = {}
    """Calls of methods that look at what is there, and of those that end what has ended: they raise nothing."""
    others: frozenset[str] = frozenset()
    """Names that need no node, or make one, or that this node has not."""


COMMUNICATOR = Face(
    asked={
        **CALLS,
        "claim": lambda comm: comm.claim("name", comm),
        "empty": lambda comm: comm.empty(3),
        "set_device_lanes": lambda comm: comm.set_device_lanes(comm.device_lanes),
        "subgroup": lambda comm: comm.subgroup([0]),
    },
    done={
        "algorithm_table": lambda comm: comm.algorithm_table(),
        "algorithms": lambda comm: comm.algorithms("all_reduce"),
        "describe_waits": lambda comm: comm.describe_waits(),
        "is_pinned": lambda comm: comm.is_pinned("all_reduce"),
        "late_counts": lambda comm: comm.late_counts(),
        "predict": lambda comm: comm.predict("all_reduce", 8),
        "refuse": lambda comm: comm.refuse("all_reduce", ValueError("no")),
        "refuse_recv": lambda comm: comm.refuse_recv(ValueError("no"), 1),
        "refuse_send": lambda comm: comm.refuse_send(ValueError("no"), 1),
        "release": lambda comm: comm.release("name", comm),
        "give_up": lambda comm: comm.give_up(1, "it is over"),
        "revoke": lambda comm: comm.revoke("it is over"),
        "close": lambda comm: comm.close(),
    },
    others=frozenset({"world"}),
)
BLOCKING_COMMUNICATOR = Face(
    asked={**COMMUNICATOR.asked, "run": lambda comm: comm.run(lambda group: group.barrier())},
    done=COMMUNICATOR.done,
)
STARTING = Face(asked={name: call for name, call in CALLS.items() if hasattr(Starting, name)})
NODE = Face(
    asked={
        "empty": lambda node: node.empty(3),
        "kill_actor": lambda node: node.kill_actor(node.counter),
        "on_blocked": lambda node: node.on_blocked(print),
        "ref": lambda node: node.ref("counter"),
        "spawn": lambda node: node.spawn(Counter),
        "stop_actor": lambda node: node.stop_actor(node.counter),
        "watch": lambda node: node.watch(node.counter),
    },
    done={
        "span": lambda node: node.span("load").__enter__().__exit__(None, None, None),
        "stop": lambda node: node.stop(),
        "watch_world": lambda node: _to_its_end(node.watch_world()),
    },
    others=frozenset({"credentials", "start"}),
)
BLOCKING_NODE = Face(
    asked={
        **{name: NODE.asked[name] for name in ("empty", "kill_actor", "ref", "spawn", "stop_actor")},
        "begin": lambda node: node.begin(node.on_loop.world.barrier),
        "call": lambda node: node.call(int),
        "run": lambda node: node.run(node.on_loop.world.barrier),
    },
    done={"close": lambda node: node.close(), "wrap": lambda node: node.wrap(node.counter)},
    others=frozenset({"start"}),
)
ENDPOINT = Face(
    asked={"__call__": lambda endpoint: endpoint(1), "tell": lambda endpoint: endpoint.tell(1)},
    others=frozenset({"stream"}),
)
STREAM = Face(asked={"stream": lambda endpoint: anext(aiter(endpoint.stream()))}, others=frozenset({"tell"}))
BLOCKING_ENDPOINT = Face(
    asked={
        **ENDPOINT.asked,
        "start": lambda endpoint: endpoint.start(1),
        "within": lambda endpoint: endpoint.within(3.0)(1),
    },
    others=frozenset({"stream"}),
)
BLOCKING_STREAM = Face(
    asked={"stream": lambda endpoint: next(iter(endpoint.stream()))}, others=frozenset({"start", "tell", "within"})
)
NODES = Face(
    asked={"spawn": lambda nodes: nodes.spawn(Counter)},
    done={
        "at": lambda nodes: nodes.at(rank=0),
        "coordinates": lambda nodes: nodes.coordinates(0),
        "reshape": lambda nodes: nodes.reshape(a=1, b=2),
        "select": lambda nodes: nodes.select([0]),
        "slice": lambda nodes: nodes.slice(rank=slice(1)),
    },
    others=frozenset({"of_world"}),
)
MESH = Face(
    asked={"kill": lambda mesh: mesh.kill(), "stop": lambda mesh: mesh.stop(), "watch": lambda mesh: mesh.watch()},
    done={
        "all": lambda mesh: mesh.all(Counter.add),
        "at": lambda mesh: mesh.at(rank=0),
        "choose": lambda mesh: mesh.choose(),
        "coordinates": lambda mesh: mesh.coordinates(0),
        "select": lambda mesh: mesh.select([0]),
        "slice": lambda mesh: mesh.slice(rank=slice(1)),
    },
)
MESH_ENDPOINT = Face(
    asked={**ENDPOINT.asked, "as_completed": lambda endpoint: anext(aiter(endpoint.as_completed(1)))},
    others=frozenset({"stream"}),
)
MESH_STREAM = Face(asked=STREAM.asked, others=frozenset({"as_completed", "tell"}))


async def _to_its_end(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


def _is_call(value: object) -> bool:
    return not isinstance(value, property | MemberDescriptorType)


async def _check(face: Face, thing: Any) -> None:
    """Check all public names of ``thing``, whose node is closed."""
    names = dict(inspect.getmembers_static(type(thing)))
    public = {name for name in names if not name.startswith("_") or (name == "__call__" and name in face.asked)}
    calls = {name for name in public if _is_call(names[name])}
    assert calls | face.others == {*face.asked, *face.done, *face.others}
    for name, ask in face.asked.items():
        with pytest.raises(NodeClosed, match=CLOSED) as refused:
            await _result(ask(thing))
        assert (refused.value.rank, refused.value.cause) == (0, "closed"), name
    for name in public:
        if not _is_call(names[name]) and name not in face.others:
            getattr(thing, name)
    for do in face.done.values():
        await _result(do(thing))


async def _result(made: Any) -> object:
    return await made if inspect.isawaitable(made) else made


async def test_every_public_name_of_a_closed_node() -> None:
    async with local_world(2) as (node, _):
        counter: Any = await node.spawn(Counter, name="counter")
        vars(node)["counter"] = counter  # which the calls ask for
        mesh = await node.nodes.spawn(Counter)
        group = node.world.subgroup([0, 1])
        world = COMMUNICATOR._replace(done={**COMMUNICATOR.done, "close": lambda comm: comm.size})
        looked_at: list[tuple[Face, Any]] = [
            (NODE, node),
            (COMMUNICATOR, group),
            (world, node.world),
            (ENDPOINT, counter.add),
            (STREAM, counter.count),
            (NODES, node.nodes),
            (MESH, mesh),
            (MESH_ENDPOINT, mesh.all(Counter.add)),
            (MESH_STREAM, mesh.count),
        ]
    for face, thing in looked_at:
        await _check(face, thing)


async def test_every_public_name_of_a_closed_blocking_node() -> None:
    with blocking_world(2) as (node, _):
        counter: Any = node.spawn(Counter, name="counter")
        vars(node)["counter"] = counter  # which the calls ask for
        group = node.world.subgroup([0, 1])
        assert group is not None
        vars(group.start).update(rank=0, size=2)  # which the calls ask for
    for face, thing in (
        (STARTING, group.start),
        (BLOCKING_COMMUNICATOR, group),
        (BLOCKING_COMMUNICATOR, node.world),
        (BLOCKING_ENDPOINT, counter.add),
        (BLOCKING_STREAM, counter.count),
        (BLOCKING_NODE, node),
    ):
        await _check(face, thing)


async def test_parts_on_a_closed_node() -> None:
    async with ap.init() as node:
        pass
    with pytest.raises(NodeClosed, match=CLOSED):
        await anext(aiter(node.world.all_reduce.parts(np.ones(2))))


async def test_a_rank_that_has_left_a_revoked_world_learns_of_the_newer_one() -> None:
    async with local_world(2) as (node, _):
        node.world.revoke("a rank is gone")
    for ask in (node.world.barrier, lambda: node.world.subgroup([0]), lambda: node.empty(3)):
        with pytest.raises(StaleGeneration, match="use the communicator of the world that followed it"):
            await _result(ask())


def test_a_closed_node_is_a_lost_rank() -> None:
    error = NodeClosed.of(3)
    assert isinstance(error, PeerLost)
    assert not isinstance(error, UsageError), "ranks that are closed have not used anything in a wrong way, all alike"
    assert (error.rank, error.cause) == (3, "closed")
