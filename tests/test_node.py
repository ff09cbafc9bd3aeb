"""The node: one rank in a running loop."""

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import asyncpar as ap


class Adder(ap.Actor):
    def __init__(self, start: int = 0) -> None:
        self.total = start

    @ap.endpoint
    async def add(self, n: int) -> int:
        self.total += n
        return self.total


async def test_alone_a_node_is_a_world_of_one() -> None:
    async with ap.init() as node:
        x = np.arange(5.0)
        assert (node.rank, node.size) == (0, 1)
        np.testing.assert_array_equal(await node.world.all_reduce(x), np.arange(5.0))


async def test_nodes_and_communicators_say_in_a_prompt_who_they_are() -> None:
    async with ap.testing.local_world(2) as nodes:
        group = nodes[1].world.subgroup([1])
        assert group is not None
        assert repr(nodes[1]) == f"<node: rank 1 of 2{_at(nodes[1])}>"
        assert repr(nodes[1].world) == f"<communicator {nodes[1].world.name!r}: rank 1 of 2>"
        assert repr(group) == f"<communicator {group.name!r}: rank 0 of 1>"
    assert repr(nodes[1]).endswith(", stopped>")


async def test_notebooks_show_nodes_and_communicators_as_tables() -> None:
    async with ap.testing.local_world(2) as nodes:
        group = nodes[1].world.subgroup([1], name="<b>")
        assert group is not None
        node = nodes[1]._repr_html_()  # the name that notebooks call
        assert node.startswith("<table><thead><tr><th>node</th><th>rank 1 of 2</th></tr>")
        assert f"<td>{nodes[1].address or 'none'}</td>" in node
        assert "<td>state</td><td>running</td>" in node
        html = group._repr_html_()
        assert "<th>&lt;b&gt;</th>" in html
        assert "<td>rank</td><td>0 of 1</td>" in html
        assert "<td>state</td><td>in use</td>" in html
    assert "<td>stopped</td>" in nodes[1]._repr_html_()


def _at(node: ap.Node) -> str:
    return f" at {node.address}" if node.address else ""


async def test_a_node_may_be_stopped_by_another_task_than_the_one_that_started_it() -> None:
    node = await asyncio.create_task(ap.Node.start())
    await asyncio.create_task(node.stop())
    await node.stop()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.filterwarnings("ignore:'asyncio.get_event_loop_policy' is deprecated:DeprecationWarning")  # Python 3.14
async def test_a_node_leaves_signal_handlers_and_policy_alone() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    policy = asyncio.get_event_loop_policy()
    async with ap.testing.local_world(2, transport="tcp"):
        during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert during == handlers
    assert asyncio.get_event_loop_policy() is policy


@pytest.mark.parametrize("transport", ap.testing.TRANSPORTS)
async def test_actors_are_asked_across_nodes_by_name_and_by_reference(transport: str) -> None:
    async with ap.testing.local_world(2, transport=transport) as (here, there):
        ref = await there.spawn(Adder, 10, name="adder")
        by_name = here.ref("adder", rank=1)
        assert await by_name.add(5) == 15
        assert await ref.add(1) == 16


async def test_a_node_that_leaves_is_a_lost_peer_for_the_others() -> None:
    async with ap.testing.local_world(2, transport="tcp") as (here, there):
        await asyncio.gather(here.world.barrier(), there.world.barrier())
        waiting = asyncio.create_task(here.world.all_reduce(np.ones(4)))
        await asyncio.sleep(0)
        await there.stop()
        with pytest.raises(ap.PeerLost, match="rank 1") as caught:
            await waiting
    assert caught.value.rank == 1


def test_importing_asyncpar_pulls_in_no_optional_dependency() -> None:
    program = "import sys, asyncpar; print(sorted({'torch', 'matplotlib', 'pytest', 'hypothesis'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


async def test_actors_of_a_known_class_give_typed_results_and_can_be_stopped() -> None:
    async with ap.testing.local_world(2) as (here, there):
        ref = await there.spawn(Adder, name="adder")
        total: int = await here.ref("adder", 1, actor_class=Adder).add(2)
        assert total == 2
        await there.stop_actor(ref)
        with pytest.raises(ap.ActorDown, match=r"adder.*the actor was stopped"):
            await here.ref("adder", 1).add(1)


async def test_an_unknown_transport_is_refused_before_anything_starts() -> None:
    with pytest.raises(ap.UsageError, match="transport"):
        async with ap.init(transport="pigeon"):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "send", "recv", "all_gather_object", "spawn", "ask", "stop"])
async def test_a_call_from_another_thread_or_loop_is_refused(call: str) -> None:
    async with ap.testing.local_world(2) as (here, there):
        await there.spawn(Adder, name="adder")
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: here.world.all_reduce(np.ones(3)),
            "barrier": here.world.barrier,
            "send": lambda: here.world.send(np.ones(3), 1),
            "recv": lambda: here.world.recv(1),
            "all_gather_object": lambda: here.world.all_gather_object(1),
            "spawn": lambda: here.spawn(Adder),
            "ask": lambda: here.ref("adder", rank=1).add(3),
            "stop": here.stop,
        }

        async def elsewhere() -> None:
            await calls[call]()

        def in_a_thread() -> None:
            calls[call]().send(None)

        with pytest.raises(ap.UsageError, match="expected on the event loop of its node, got another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        with pytest.raises(ap.UsageError, match="got a thread without a running loop"):
            await asyncio.to_thread(in_a_thread)
        theirs: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: there.world.all_reduce(np.ones(3)),
            "barrier": there.world.barrier,
            "all_gather_object": lambda: there.world.all_gather_object(1),
        }
        for _ in range(2 if call in theirs else 0):  # refused calls take their places
            with pytest.raises(ap.PeerCancelled, match="the call was refused on rank 0"):
                await theirs[call]()
        await asyncio.gather(here.world.barrier(), there.world.barrier())


CALLS: dict[str, Callable[[ap.Communicator, int], Coroutine[Any, Any, Any]]] = {
    "all_reduce": lambda comm, size: comm.all_reduce(np.ones(size)),
    "all_reduce by name": lambda comm, size: comm.all_reduce(np.ones(size), key="name"),
    "all_reduce mean": lambda comm, size: comm.all_reduce(np.ones(size), op="mean"),
    "all_reduce_many": lambda comm, size: comm.all_reduce_many([np.ones(size), np.ones(1)]),
    "reduce": lambda comm, size: comm.reduce(np.ones(size)),
    "reduce_scatter": lambda comm, size: comm.reduce_scatter(np.ones(size)),
    "all_gather": lambda comm, size: comm.all_gather(np.ones(size)),
    "all_gather_v": lambda comm, size: comm.all_gather_v(np.ones(size)),
    "gather": lambda comm, size: comm.gather(np.ones(size)),
    "scatter": lambda comm, size: comm.scatter(np.ones((2, size)), root=comm.rank),
    "all_to_all": lambda comm, size: comm.all_to_all(np.ones((2, size))),
    "broadcast": lambda comm, size: comm.broadcast(np.ones(size)),
    "barrier": lambda comm, size: comm.barrier(),
    "send": lambda comm, size: comm.send(np.ones(size), 1),
    "recv": lambda comm, size: comm.recv(1),
    "send_object": lambda comm, size: comm.send_object([1] * size, 1),
    "broadcast_object": lambda comm, size: comm.broadcast_object([1] * size),
    "all_gather_object": lambda comm, size: comm.all_gather_object([1] * size),
    "gather_object": lambda comm, size: comm.gather_object([1] * size),
}


@pytest.mark.parametrize("transport", ["shm", "tcp", "inproc"])
async def test_a_call_in_another_thread_is_a_usage_error_and_nothing_else(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    async with ap.testing.local_world(2, transport=transport) as (here, there):
        for _ in range(4):  # then small ones take the quick way
            await asyncio.gather(here.world.all_reduce(np.ones(1)), there.world.all_reduce(np.ones(1)))
        gc.collect()  # what tests before this one have left, which later versions of Python collect later
        monkeypatch.setattr(sys, "unraisablehook", lambda event: ignored.append(event.exc_value))
        for name, call in CALLS.items():
            for size in (1, 1 << 15):
                # refused calls take their places in the order of the group, so all ranks make them
                for node in (here, there) if name not in ("send", "recv", "send_object") else (here,):
                    with pytest.raises(ap.UsageError, match="expected on the event loop of its node"):
                        await (await asyncio.to_thread(call, node.world, size))
                assert not ignored, (name, size)
        gc.collect()
        assert not ignored
        results = await asyncio.gather(here.world.all_reduce(np.ones(2)), there.world.all_reduce(np.ones(2)))
        assert [float(result[1]) for result in results] == [2.0, 2.0]


async def test_an_operation_is_awaited_on_the_loop_it_was_called_on() -> None:
    async with ap.testing.local_world(2) as (here, there):
        waiting = asyncio.create_task(there.world.barrier())

        async def elsewhere(called: Coroutine[Any, Any, None]) -> None:
            await called

        with pytest.raises(ap.UsageError, match="barrier #1: expected on the event loop of its node"):
            await asyncio.to_thread(asyncio.run, elsewhere(here.world.barrier()))
        with pytest.raises(ap.PeerCancelled):
            await waiting


async def test_a_wrong_pin_in_the_environment_is_refused_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_ALGORITHM", "all_reduce:0-inf@star")
    with pytest.raises(ap.UsageError, match="'star'"):
        async with ap.init():
            pytest.fail("it was accepted")


@pytest.mark.parametrize("size", [1, 2])
async def test_a_stopped_node_refuses_operations_whatever_the_size_of_its_world(size: int) -> None:
    async with ap.testing.local_world(size) as nodes:
        comm = nodes[0].world
        await asyncio.gather(*(node.world.barrier() for node in nodes))
    for call in (lambda: comm.all_reduce(np.ones(3)), comm.barrier, lambda: comm.all_gather_object(1)):
        with pytest.raises(ap.PeerLost, match="this node is closed"):
            await call()


async def test_a_pin_in_the_environment_that_is_none_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCPAR_ALGORITHM", "fastest")
    with pytest.raises(ap.UsageError, match=r"^ASYNCPAR_ALGORITHM: pin: expected a preset .* got 'fastest'"):
        await ap.Node.start()
