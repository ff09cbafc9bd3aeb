"""Blocking nodes: made, used from everywhere, interrupted, closed."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.blocking import Cancelled, LoopThread, Node, Ref, init
from asyncpar.errors import NodeClosed, NotFound, PeerCancelled, PeerLost, RemoteError, UsageError
from asyncpar.testing.blocking_world import blocking_world, run_ranks


class Counter(ap.Actor):
    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.is_over = threading.Event()

    @ap.endpoint
    async def add(self, n: int) -> int:
        self.total += n
        return self.total

    @ap.endpoint
    async def fail(self) -> None:
        raise ValueError("not today")

    @ap.endpoint
    async def sleep(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.total = -1

    @ap.endpoint
    async def items(self, n: int) -> AsyncIterator[int]:
        try:
            for number in range(n):
                yield number
        finally:
            self.total = -2

    @ap.endpoint
    async def itself(self) -> ap.ActorRef[Counter]:
        return self.ref  # type: ignore[return-value]  # type checkers see references as their actors

    @ap.endpoint
    async def ask(self, other: ap.ActorRef[Counter], n: int) -> int:
        return int(await other.add(n))


def test_alone_it_is_a_world_of_one() -> None:
    with init() as node:
        assert (node.rank, node.size, node.world.size) == (0, 1, 1)
        np.testing.assert_array_equal(node.world.all_reduce(np.ones(3)), np.ones(3))
        assert node.empty(4).shape == (4,)
        assert (node.address, node.has_arena, node.bytes_sent) == ("", False, 0)
        assert repr(node) == "<blocking node: rank 0 of 1>"
        assert "<th>blocking node</th><th>rank 0 of 1</th>" in node._repr_html_()  # the name that notebooks call
    assert node.is_closed
    assert "<td>state</td><td>closed</td>" in node._repr_html_()


def test_what_has_no_blocking_form_is_run_on_the_loop() -> None:
    with Node.start() as node:

        async def work() -> float:
            return float((await node.on_loop.world.all_reduce(np.ones(1)))[0])

        assert node.run(work) == 1.0
        assert node.begin(work).wait(20) == 1.0
        assert node.call(asyncio.get_running_loop) is node.call(asyncio.get_running_loop)
        with pytest.raises(TimeoutError, match=r"run: not over within its timeout of 0.01 s"):
            node.run(lambda: asyncio.sleep(30), timeout=0.01)


def test_after_closing_everything_is_refused() -> None:
    node = Node.start()
    actor = node.spawn(Counter)
    node.close()
    node.close()
    for attempt in (
        node.world.barrier,
        node.world.start.barrier,
        lambda: node.empty(3),
        lambda: node.run(lambda: asyncio.sleep(0)),
        lambda: node.spawn(Counter),
        lambda: node.ref("counter"),
        lambda: actor.add(1),
    ):
        with pytest.raises(NodeClosed, match="this node is closed"):
            attempt()
    assert node.rank == 0


def test_closing_ends_what_other_threads_wait_for() -> None:
    with blocking_world(2) as nodes:
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                nodes[0].world.barrier()
            except Exception as error:  # noqa: BLE001  # looked at below
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not nodes[0]._handle.thread._running:  # noqa: SLF001  # waits until a call has begun on the loop: a blocked caller notifies nobody
            nodes[0].call(int)
        nodes[0].close()
        waiter.join(20)
        assert not waiter.is_alive()
        assert isinstance(errors[0], PeerLost | PeerCancelled | Cancelled | UsageError)
        with pytest.raises(PeerLost, match="rank 0"):
            nodes[1].world.barrier(timeout=20)


def test_blocking_code_in_a_coroutine_of_the_node_is_refused() -> None:
    with Node.start() as node:

        async def wrong() -> None:
            node.world.barrier()

        for attempt in (wrong, node.close):
            with pytest.raises(UsageError, match="use await, or another thread"):
                node.run(attempt) if attempt is wrong else node.call(attempt)


def test_a_coroutine_function_is_not_called_in_place_of_being_run() -> None:
    async def coroutine() -> None:
        raise AssertionError

    function: Callable[[], object] = coroutine
    with Node.start() as node, pytest.raises(UsageError, match=r"node\.run\(\)"):
        node.call(function)


def test_it_works_where_the_main_thread_has_a_running_loop() -> None:
    """As in a notebook."""

    async def cell() -> float:
        with Node.start() as node:
            return float(node.world.all_reduce(np.ones(1))[0])

    assert asyncio.run(cell()) == 1.0


def test_a_rank_that_fails_is_as_if_its_process_had_ended() -> None:
    def work(node: Node) -> None:
        if node.rank == 1:
            raise KeyError("mine")
        with pytest.raises(PeerLost, match="rank 1"):
            node.world.barrier(timeout=20)

    with blocking_world(3) as nodes, pytest.raises(KeyError, match="mine"):
        run_ranks(nodes, work)


# -- actors ----------------------------------------------------------------------------------------------------------


def test_actors_are_asked_told_and_streamed_from() -> None:
    with blocking_world(2) as (first, second):
        actor = first.spawn(Counter, 5, name="counter")
        assert isinstance(actor, Ref)
        remote = second.ref("counter", rank=0, actor_class=Counter)
        assert remote == actor
        remote.add.tell(3).wait(20)
        assert remote.add(2) == 10
        assert remote.add.start(1).wait(20) == 11
        assert list(remote.items.stream(100)) == list(range(100))
        assert "add" in dir(remote)
        assert repr(actor.add) == "<blocking endpoint add of <Counter 'counter' on rank 0>>"
        assert "<th>Counter</th><th>counter</th>" in actor._repr_html_()


def test_references_travel_and_come_back_blocking() -> None:
    with blocking_world(2) as (first, second):
        actor, other = first.spawn(Counter, name="a"), second.spawn(Counter, 7, name="b")
        assert actor.ask(other, 3) == 10
        again = actor.itself()
        assert isinstance(again, Ref)
        assert again.add(1) == 1
        assert isinstance(second.wrap(actor), Ref)


def test_errors_of_actors_are_raised() -> None:
    with Node.start() as node:
        actor = node.spawn(Counter)
        with pytest.raises(RemoteError, match="ValueError: not today"):
            actor.fail()
        with pytest.raises(NotFound, match="no endpoint of this name"):
            actor.subtract(1)
        with pytest.raises(UsageError, match=r"argument 1 of add\(\)"):
            actor.add.tell(object())
        node.stop_actor(actor)
        with pytest.raises(PeerCancelled, match="the actor was stopped"):
            actor.add(1)
        node.kill_actor(node.spawn(Counter))


def test_an_ask_that_takes_too_long_is_cancelled_there() -> None:
    with Node.start() as node:
        actor = node.spawn(Counter)
        with pytest.raises(TimeoutError, match=r"endpoint sleep of .*not over within its timeout of 0.05 s"):
            actor.sleep.within(0.05)()
        assert actor.add(0) == -1


def test_a_stream_that_is_left_or_dropped_ends_there() -> None:
    with Node.start() as node:
        actor = node.spawn(Counter, 1)
        for number in actor.items.stream(10**6):
            if number == 3:
                break
        assert actor.add(3) in (1, 4)  # dropped: soon over
        assert eventually(lambda: actor.add(0) in (-2, 1))
        with actor.items.stream(10**6) as items:
            assert next(items) == 0
        assert list(items) == []
        assert eventually(lambda: actor.add(0) == -2)


def eventually(condition: object) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
    return False


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_wait_and_its_operation_and_leaves_the_node_usable() -> None:
    with blocking_world(2) as nodes:
        large = np.ones(1 << 16)  # so that nobody can have all of it before both take part
        received: list[object] = []
        was_interrupted = threading.Event()

        def peer() -> None:
            while not nodes[0]._handle.thread._running:  # noqa: SLF001  # waits until a call has begun on the loop: a blocked caller notifies nobody
                nodes[1].call(int)
            os.kill(os.getpid(), signal.SIGINT)
            assert was_interrupted.wait(20)
            try:
                nodes[1].world.all_reduce(large, timeout=20)
            except PeerCancelled as error:
                received.append(str(error))
            received.append(nodes[1].world.all_reduce(np.ones(1), timeout=20)[0])

        other = threading.Thread(target=peer)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            nodes[0].world.all_reduce(large.copy())
        was_interrupted.set()
        assert nodes[0].world.all_reduce(np.ones(1), timeout=20)[0] == 2.0
        other.join(20)
        assert received == ["rank 1: all_reduce #1: rank 0 cancelled it: CancelledError", 2.0]


def test_ctrl_c_at_any_moment_leaves_the_loop_in_order(thread: LoopThread) -> None:
    """Signals come like rain; what is done on the loop is done whole, and nobody hangs."""
    half, done, is_over = 0, 0, threading.Event()

    def whole() -> None:
        nonlocal half, done
        half += 1
        for _ in range(20):
            sum(range(10))
        done += 1

    is_exposed = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_exposed
        if is_exposed:  # not where this test counts, nor in what called it
            is_exposed = False
            raise KeyboardInterrupt

    def rain() -> None:
        dice = random.Random(7)
        while not is_over.wait(dice.random() * 0.002):
            os.kill(os.getpid(), signal.SIGINT)

    cloud = threading.Thread(target=rain)
    interrupted = 0
    gc.collect()
    gc.disable()  # finalizers of earlier tests' objects are not to be rained on
    before = signal.signal(signal.SIGINT, interrupt)
    cloud.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end or not interrupted:
            try:
                is_exposed = True
                thread.do(whole)
                thread.call(lambda: asyncio.sleep(0))
                is_exposed = False
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        is_exposed = False
        is_over.set()
        cloud.join(20)
        found = signal.signal(signal.SIGINT, before)
        gc.enable()
    assert interrupted > 0
    assert thread.do(lambda: half == done)
    assert eventually(lambda: not thread._running)  # what was interrupted last is being cancelled  # noqa: SLF001  # calls that are interrupted must not stay: the thread lists them nowhere else
    assert found is interrupt
