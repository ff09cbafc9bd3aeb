"""A rank answers over its socket from a thread of its own, whatever its event loop does."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

import asyncpar as ap
from asyncpar.core.observe.reporting import Reporter
from asyncpar.core.observe.waits import WaitNotice
from asyncpar.launch.host_watch import RankChannel
from asyncpar.observe import service
from asyncpar.observe.rank_view import make_summary, watch_node
from asyncpar.observe.service import RankService, provide
from asyncpar.observe.stack_views import ProcessStacks
from asyncpar.observe.summary import RankSummary, pack, unpack
from asyncpar.testing import local_world

_ENDS_WHILE_IT_ANSWERS = """
import os, socket, threading, time
import numpy as np
from asyncpar.observe import service

has_begun = threading.Event()

def answer():
    has_begun.set()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        np.unique(np.arange(4000, dtype=np.uint32))  # releases the interpreter lock within C++ code
    os.write(1, b"answered")
    return b""

here, there = socket.socketpair()
service.provide("numbers", answer)
service.open_service({service.OBSERVE_FD: str(there.detach())})
here.sendall(service.frame(service.ObserverRequest(1, "numbers")))
assert has_begun.wait(30.0)
"""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


async def test_requests_are_answered_in_any_number(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = RankChannel(ends[0])
    withdraw = provide("greeting", lambda: b"hello")
    RankService(ends[1]).start()
    try:
        replies = await asyncio.gather(*(channel.ask("greeting", within=5.0) for _ in range(5)))
        assert [reply.content for reply in replies if reply is not None] == [b"hello"] * 5
        unknown = await channel.ask("nonsense", within=5.0)
        assert unknown is not None
        assert "no nonsense" in unknown.error
    finally:
        withdraw()
        await channel.close()


async def test_a_failure_is_reported_and_the_next_request_is_answered(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    answers: Iterator[RuntimeError | bytes] = iter([RuntimeError("dictionary changed size"), b"fine"])

    def make() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    channel = RankChannel(ends[0])
    withdraw = provide("moody", make)
    RankService(ends[1]).start()
    try:
        first, second = await channel.ask("moody", within=5.0), await channel.ask("moody", within=5.0)
        assert first is not None
        assert first.error == "RuntimeError: dictionary changed size"
        assert second is not None
        assert second.content == b"fine"
    finally:
        withdraw()
        await channel.close()


async def test_a_silent_rank_is_not_waited_for_and_owes_few_answers(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = RankChannel(ends[0])
    assert [await channel.ask("summary", within=0.01) for _ in range(20)] == [None] * 20
    ends[1].setblocking(False)
    assert len(ends[1].recv(1 << 16)) < 1000  # later requests were not even sent
    await channel.close()


async def test_the_end_of_a_rank_ends_what_was_asked(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = RankChannel(ends[0])
    asking = asyncio.ensure_future(channel.ask("summary", within=60.0))
    await asyncio.sleep(0)
    ends[1].close()
    assert await asking is None
    assert await channel.ask("summary", within=60.0) is None
    await channel.close()


async def test_a_frame_that_is_none_ends_the_service_and_not_the_process(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    RankService(ends[1]).start()
    ends[0].sendall(b"\xff" * 64)
    ends[0].settimeout(5.0)
    with suppress(ConnectionResetError):  # it has not read everything
        assert await asyncio.to_thread(ends[0].recv, 1) == b""


@pytest.mark.process
def test_a_process_that_ends_while_it_answers_is_not_killed_by_its_thread() -> None:
    command = [sys.executable, "-c", _ENDS_WHILE_IT_ANSWERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "answered", "")


async def test_a_process_without_an_agent_has_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "x", "-1"):
        service.open_service({service.OBSERVE_FD: text})
    assert not service.is_open()


async def test_a_rank_that_waits_names_operation_rank_and_place() -> None:
    async with local_world(2) as nodes:
        unwatch = watch_node(nodes[0].links, nodes[0]._actors, None)  # noqa: SLF001
        try:
            waiting = asyncio.create_task(nodes[0].world.barrier(), name="the user's")
            for _ in range(20):
                await asyncio.sleep(0)
            summary = await asyncio.to_thread(make_summary)
            assert unpack(pack(summary), RankSummary) == summary
            assert summary.rank == 0
            assert summary.longest is not None
            assert summary.longest.kind == "barrier"
            assert summary.longest.waits_for == (1,)
            assert summary.longest.is_awaited
            await asyncio.gather(waiting, nodes[1].world.barrier())
            assert (await asyncio.to_thread(make_summary)).operations == ()
        finally:
            unwatch()


class Loader(ap.Actor):
    """Answers when it is released."""

    def __init__(self, release: asyncio.Event) -> None:
        self.release = release

    @ap.endpoint
    async def load(self) -> None:
        await self.release.wait()


def announce_wait(node: ap.Node) -> asyncio.Event:
    """Return an event that is set when the rank has reported a wait, which it does soon."""
    observer, is_reported = node.links.observer, asyncio.Event()
    observer.warn_after = 0.1

    class Announcing(Reporter):
        def waiting(self, notice: WaitNotice | None, *, has_failed: bool = False) -> None:
            is_reported.set()

    observer.reporter = Announcing(None)
    return is_reported


async def _load(node: ap.Node) -> None:
    await node.ref("loader", 1).load()


async def test_a_rank_that_waits_for_an_actor_names_it_with_time_and_place() -> None:
    async with local_world(2) as nodes:
        unwatch = watch_node(nodes[0].links, nodes[0]._actors, None)  # noqa: SLF001
        release = asyncio.Event()
        is_reported = announce_wait(nodes[0])
        try:
            await nodes[1].spawn(Loader, release, name="loader")
            waiting = asyncio.create_task(_load(nodes[0]), name="the user's")
            async with asyncio.timeout(30):
                await is_reported.wait()
            summary = await asyncio.to_thread(make_summary)
            assert unpack(pack(summary), RankSummary) == summary
            [ask] = summary.asks
            assert (ask.rank, ask.actor, ask.endpoint) == (1, "loader", "load")
            assert 0.0 < ask.seconds < 60.0
            assert ask.site.startswith("test_service.py:")
            assert ask.told is not None
            assert ask.told.actor == "loader"
            release.set()
            await waiting
            assert (await asyncio.to_thread(make_summary)).asks == ()
        finally:
            unwatch()


async def test_a_blocked_loop_is_seen_with_its_place() -> None:
    async with local_world(1) as nodes:
        unwatch = watch_node(nodes[0].links, nodes[0]._actors, None)  # noqa: SLF001
        try:

            async def look_twice() -> RankSummary:
                await asyncio.to_thread(make_summary)
                looking = asyncio.ensure_future(asyncio.to_thread(_look_later))
                await asyncio.sleep(0.05)
                time.sleep(1.2)  # noqa: ASYNC251  # what is looked at
                return await looking

            summary = await look_twice()
            assert summary.blocked is not None
            assert summary.blocked.where.startswith("test_service.py:")
            assert 0.5 <= summary.blocked.seconds < 30.0
        finally:
            unwatch()


def _look_later() -> RankSummary:
    time.sleep(0.2)
    make_summary()  # asks the loop
    time.sleep(0.6)
    return make_summary()


def test_stacks_survive_msgpack() -> None:
    empty = ProcessStacks(pid=1, rank=2, time=3.0)
    assert unpack(pack(empty), ProcessStacks) == empty
