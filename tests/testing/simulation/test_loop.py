"""The loop of a simulation: turns, clocks, pauses, deaths, threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import DaemonThread, WorkerThread
from asyncpar.testing.simulation.loop import SimulatedDeadlock, SimulationLoop
from asyncpar.testing.simulation.patches import simulated_machine
from asyncpar.testing.simulation.process import CURRENT, SimulatedProcess
from asyncpar.testing.simulation.trace import Trace

Program = Callable[[], Coroutine[Any, Any, None]]


def run(
    *programs: Program, seed: int = 0, during: Callable[[SimulationLoop, list[SimulatedProcess]], None] | None = None
) -> float:
    """Run each program in a process of its own; return the true time at the end of the last one that ends."""
    loop = SimulationLoop(seed, Trace())

    async def watch() -> None:
        processes = [SimulatedProcess(f"node {n}", number=n + 1, node=n) for n in range(len(programs))]
        tasks = [loop.start(process, program()) for process, program in zip(processes, programs, strict=True)]
        if during is not None:
            during(loop, processes)
        await asyncio.gather(*tasks)

    try:
        with simulated_machine(loop, seed):
            loop.run_until_complete(watch())
            return loop.now
    finally:
        loop.close()


def test_callbacks_of_a_process_run_in_their_order_whatever_the_seed() -> None:
    for seed in range(20):
        order: list[int] = []

        async def program(order: list[int] = order) -> None:
            loop = asyncio.get_running_loop()
            for n in range(10):
                loop.call_soon(order.append, n)
            await asyncio.sleep(0)

        run(program, program, seed=seed)
        assert sorted(order[:]) == sorted([*range(10), *range(10)])
        firsts = [order.index(n) for n in range(10)]
        assert firsts == sorted(firsts)


def test_seeds_order_processes_and_timers_of_one_moment_differently() -> None:
    def orders(seed: int) -> tuple[list[int], list[int]]:
        turns: list[int] = []
        timers: list[int] = []

        async def program() -> None:
            process = CURRENT.get()
            assert process is not None
            for _ in range(3):
                turns.append(process.number)
                await asyncio.sleep(0)
            if process.number == 1:
                loop = asyncio.get_running_loop()
                when = loop.time() + 1.0
                for n in range(4):
                    loop.call_at(when, timers.append, n)
                await asyncio.sleep(2.0)

        run(program, program, program, seed=seed)
        return turns, timers

    seen = [orders(seed) for seed in range(20)]
    assert orders(3) == seen[3]
    assert len({tuple(turns) for turns, _ in seen}) > 10
    assert len({tuple(timers) for _, timers in seen}) > 5


def test_a_dead_process_runs_nothing_any_more_not_even_finally() -> None:
    received: list[str] = []

    async def victim() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            received.append("finally")

    async def witness() -> None:
        await asyncio.sleep(200.0)
        received.append("witness")

    loop = SimulationLoop(0, Trace())

    async def watch() -> None:
        one, other = (SimulatedProcess(f"node {n}", number=n + 1, node=n) for n in range(2))
        loop.start(one, victim())
        task = loop.start(other, witness())
        await asyncio.sleep(1.0)
        loop.kill(one)
        await task
        assert received == ["witness"]

    loop.run_until_complete(watch())
    loop.bury(1.0)
    assert received == ["witness", "finally"]
    loop.close()


def test_generators_that_the_dead_were_in_are_closed_in_the_end() -> None:
    closed: list[str] = []

    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.001)
            closed.append(name)

    async def outer() -> AsyncIterator[int]:
        try:
            async for number in numbers("inner"):
                yield number
        finally:
            await asyncio.sleep(0.001)
            closed.append("outer")

    async def victim() -> None:
        async for _ in outer():
            await asyncio.sleep(100.0)

    loop = SimulationLoop(0, Trace())
    process = SimulatedProcess("node 0", number=1, node=0)
    loop.start(process, victim())
    loop.run_until_complete(asyncio.sleep(1.0))
    loop.kill(process)
    assert closed == []
    loop.bury(1.0)
    loop.close()
    assert sorted(closed) == ["inner", "outer"]


def test_a_paused_process_goes_on_where_it_was_and_its_clock_has_gone_on() -> None:
    times: list[float] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(4):
            times.append(loop.time())
            await asyncio.sleep(1.0)

    def pause(loop: SimulationLoop, processes: list[SimulatedProcess]) -> None:
        loop.schedule(loop.outside, 1.5, loop.pause, processes[0])
        loop.schedule(loop.outside, 11.5, loop.resume, processes[0])

    run(program, during=pause)
    assert [round(moment) for moment in times[:2]] == [0, 1]
    assert times[2] == pytest.approx(11.5, abs=0.01)
    assert times[3] == pytest.approx(12.5, abs=0.01)


def test_a_fast_clock_shows_more_and_fires_timers_early() -> None:
    seen: list[float] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(10.0)
        seen.append(loop.time())

    def speed_up(loop: SimulationLoop, processes: list[SimulatedProcess]) -> None:
        loop.schedule(loop.outside, 5.0, loop.set_clock, processes[0], 2.0)

    assert run(program, during=speed_up) == pytest.approx(7.5, abs=0.01)
    assert seen[0] == pytest.approx(10.0, abs=0.01)


def test_sleeping_without_await_blocks_its_own_process_only() -> None:
    ticks: list[float] = []

    async def blocker() -> None:
        before = time.monotonic()
        time.sleep(1.0)  # noqa: ASYNC251
        assert time.monotonic() - before == pytest.approx(1.0)
        await asyncio.sleep(0)
        assert time.monotonic() - before == pytest.approx(1.0, abs=0.01)

    async def ticker() -> None:
        for _ in range(4):
            await asyncio.sleep(0.2)
            ticks.append(time.monotonic())

    assert run(blocker, ticker) == pytest.approx(1.0, abs=0.01)
    assert ticks == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.01)


def test_threads_sleep_in_virtual_time_and_run_beside_each_other() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        assert await asyncio.gather(*(asyncio.to_thread(time.sleep, 5.0) for _ in range(3))) == [None] * 3
        assert loop.time() - begun == pytest.approx(5.0, abs=0.01)
        worker = WorkerThread("one")
        await asyncio.gather(*(worker.run(time.sleep, 5.0) for _ in range(3)))
        assert loop.time() - begun == pytest.approx(20.0, abs=0.01)
        worker.close()

    assert run(program) == pytest.approx(20.0, abs=0.01)


def test_a_thread_that_waits_for_the_loop_over_a_bridge_gets_its_answer() -> None:
    async def program() -> None:
        bridge = LoopBridge()
        worker = WorkerThread("compute", bridge)

        async def ask(n: int) -> int:
            await asyncio.sleep(1.0)
            return n

        def compute() -> int:
            return sum(bridge.call(lambda n=n: ask(n)) for n in range(4))  # type: ignore[misc]

        assert tuple(await asyncio.gather(worker.run(compute), asyncio.to_thread(compute))) == (6, 6)
        worker.close()

    assert run(program, program) == pytest.approx(4.0, abs=0.01)


def test_daemon_threads_keep_the_order_of_calls_and_raise_what_they_raise() -> None:
    async def program() -> None:
        thread = DaemonThread("one")
        begun: list[int] = []
        await asyncio.gather(*(thread.run(lambda n=n: begun.append(n)) for n in range(5)))  # type: ignore[misc]
        assert begun == sorted(begun)
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 / 0)
        thread.close()

    run(program)


def test_threads_that_wait_for_a_dead_process_end_with_the_simulation() -> None:
    before = threading.active_count()

    async def victim() -> None:
        bridge = LoopBridge()
        await asyncio.to_thread(bridge.call, lambda: asyncio.sleep(1000.0))

    loop = SimulationLoop(0, Trace())

    async def watch() -> None:
        process = SimulatedProcess("node 0", number=1, node=0)
        loop.start(process, victim())
        await asyncio.sleep(1.0)
        loop.kill(process)

    with simulated_machine(loop, 0):
        loop.run_until_complete(watch())
        loop.bury(1.0)
        loop.close()
    assert threading.active_count() == before


def test_a_loop_in_which_nothing_can_happen_says_so() -> None:
    async def program() -> None:
        await asyncio.get_running_loop().create_future()

    loop = SimulationLoop(0, Trace())
    task = loop.start(SimulatedProcess("node 0", number=1, node=0), program())
    with pytest.raises(SimulatedDeadlock):
        loop.run_until_complete(task)
    loop.bury(1.0)
    loop.close()


def test_the_machine_is_the_real_one_again_afterwards() -> None:
    clock = time.monotonic

    async def program() -> None:
        assert time.monotonic() < 1.0

    run(program)
    assert time.monotonic is clock
    assert time.monotonic() > 0.0
