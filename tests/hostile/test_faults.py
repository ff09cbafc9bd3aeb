"""Seeded faults on the way between ranks: the right result or a typed error on both ranks, before anything hangs.

A few trials of each kind of lane; with ``--soak`` 300.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.addresses import split_address
from asyncpar.core.config.world import World
from asyncpar.errors import AsyncparError, LinkDamaged
from asyncpar.net.transport import lane_kinds
from asyncpar.net.transport.connect import TcpListener, dial_tcp
from asyncpar.net.transport.links import Links
from tests.hostile.faults import Fault, FaultyProxy, proxy
from tests.net.transport.worlds import Rank, open_world
from tests.soak import chosen

TRIALS = chosen(0, soak=300)
LANES = {"tcp": ("tcp", 1, 10), "tcp striped": ("tcp", 3, 6), "grpc": ("grpc", 1, 6)}
"""Pinned lane, connections, and trials of the sample."""

JOBS = {"small": 16, "medium": 12_000, "large": 400_000, "messages": 3_000}
_AT_ONCE = 6
_SILENCE = 2.0
"""Seconds without anything after which a link is lost, less than the default."""

HUNG = {"grpc": (289, 0)}
"""More seeds for the sample: a message whose length was damaged swallowed all that followed, and silence."""


async def reduce(links: Links, length: int, rounds: int = 3) -> str | Exception:
    """Sum over both ranks a few times; return what came of it."""
    communicator = Communicator.world(links, timeout=60.0)
    try:
        for turn in range(rounds):
            array = np.arange(length, dtype=np.int64) + links.rank * (turn + 1)
            await communicator.all_reduce(array)
            if not (array == 2 * np.arange(length) + turn + 1).all():
                return "wrong"
    except AsyncparError as error:
        return error
    return "right"


async def exchange_messages(links: Links, length: int) -> str | Exception:
    """Send messages both ways; return what came of it."""
    peer = 1 - links.rank
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_message(rank: int, payload: memoryview, release: Callable[[], None]) -> None:
        arrived.put_nowait(bytes(payload))
        release()

    links.on_message = on_message
    links.add_loss_listener(lambda rank, error: None if lost.done() else lost.set_exception(error))
    payloads = [random.Random(turn).randbytes(length) for turn in range(20)]
    try:
        await Communicator.world(links, timeout=60.0).barrier()
        for payload in payloads:
            sending = links.send_message(peer, memoryview(payload))
            if sending is not None:
                await sending.done
        for payload in payloads:
            getting = asyncio.ensure_future(arrived.get())
            waited: set[asyncio.Future[Any]] = {getting, lost}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                lost.result()
            elif getting.result() != payload:
                return "wrong"
    except AsyncparError as error:
        return error
    finally:
        lost.cancel() if not lost.done() else lost.exception()
    return "right"


def behind(ranks: list[Rank], ports: list[int]) -> None:
    """Let ranks reach each other's servers through proxies."""
    world = ranks[0].links.world
    members = tuple(
        replace(member, address=f"127.0.0.1:{port}") for member, port in zip(world.members, ports, strict=True)
    )
    for rank in ranks:
        rank.links.world = World(members=members, generation=world.generation, job=world.job)


async def try_fault(lane: str, connections: int, seed: int, forwarded: dict[int, FaultyProxy]) -> tuple[str, float]:
    """Run one job over a damaged lane; return what came of it and in how many seconds."""
    dice = random.Random(seed)
    job = dice.choice(list(JOBS))
    length = JOBS[job]
    volume = length * 20 if job == "messages" else length * 3 * 8 + 500
    fault = Fault.draw(dice, volume=volume // connections + 1)
    async with AsyncExitStack() as stack:
        ranks = await stack.enter_async_context(
            open_world(lane, lane, hosts="ab", connections=(connections,) * 2, link_timeout=_SILENCE)
        )
        proxies = []
        for rank in ranks:
            if lane == "tcp":
                tcp = rank.connector._acceptor._listeners["tcp"]  # noqa: SLF001  # a proxy is put before the port that the listener tells peers, which has no setting
                assert isinstance(tcp, TcpListener)
                proxies.append(await stack.enter_async_context(proxy(("127.0.0.1", tcp.port))))
                forwarded[tcp.port] = proxies[-1]
            else:
                target = split_address(rank.server.address)
                proxies.append(await stack.enter_async_context(proxy(target)))
        if lane == "grpc":
            behind(ranks, [each.port for each in proxies])
        for rank in ranks:
            rank.join()
        assert await asyncio.gather(*(reduce(rank.links, 4) for rank in ranks)) == ["right"] * 2
        for each in proxies:
            each.arm(fault, dice.randrange(3))
        began = time.monotonic()
        run = exchange_messages if job == "messages" else reduce
        try:
            async with asyncio.timeout(40):
                outcomes = await asyncio.gather(*(run(rank.links, length) for rank in ranks))
        except TimeoutError:
            outcomes = ["hang"]
        seconds = time.monotonic() - began
        struck = any(each.has_struck for each in proxies)
    return judge(outcomes, struck=struck) + f" (seed {seed}, {job}, {fault}, {outcomes})", seconds


def judge(outcomes: list[str | Exception], *, struck: bool) -> str:
    """Return what came of a trial, in a word."""
    for bad in ("wrong", "hang"):
        if bad in outcomes:
            return bad
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors and not struck:
        return "groundless"
    if any(isinstance(error, LinkDamaged) for error in errors):
        return "damaged"
    return "lost" if errors else "right" if struck else "untouched"


@pytest.mark.timeout(3600 if TRIALS else 60)
@pytest.mark.parametrize("name", LANES)
async def test_faults_on_a_lane_end_in_the_right_result_or_a_typed_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, connections, sample = LANES[name]
    forwarded: dict[int, FaultyProxy] = {}
    dial: Any = dial_tcp
    monkeypatch.setattr(
        lane_kinds, "dial_tcp", lambda host, port, *terms, **more: dial(host, forwarded[port].port, *terms, **more)
    )
    gate = asyncio.Semaphore(_AT_ONCE)
    seen: Counter[str] = Counter()
    slowest: list[tuple[float, int]] = []
    bad: list[str] = []

    async def trial(seed: int) -> None:
        async with gate:
            outcome, seconds = await try_fault(lane, connections, seed, forwarded)
            word = outcome.partition(" (")[0]
            seen[word] += 1
            slowest.append((seconds, seed))
            if word in {"wrong", "hang", "groundless"}:
                bad.append(outcome)

    async with asyncio.TaskGroup() as tasks:
        for seed in dict.fromkeys([*HUNG.get(name, ()), *range(TRIALS or sample)]):
            tasks.create_task(trial(seed))
    print(f"\n{name}: {dict(seen)}, slowest {sorted(slowest)[-3:]}")
    assert bad == []
    assert seen["damaged"] > 0
