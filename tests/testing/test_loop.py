"""The virtual-time loop."""

import asyncio
import threading

import pytest

from asyncpar.testing.loop import run_virtual


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.sleep(3600)
        return loop.time() - started

    assert run_virtual(main()) == 3600


def test_timers_fire_in_order_of_their_time() -> None:
    fired: list[int] = []

    async def wait(seconds: int) -> None:
        await asyncio.sleep(seconds)
        fired.append(seconds)

    async def main() -> None:
        await asyncio.gather(*(wait(seconds) for seconds in (30, 10, 20)))

    run_virtual(main())
    assert fired == [10, 20, 30]


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        release = threading.Event()
        timer = loop.call_later(5, lambda: None)
        work = asyncio.create_task(asyncio.to_thread(release.wait))
        await asyncio.sleep(0)
        release.set()
        assert await work
        timer.cancel()
        return loop.time()

    assert run_virtual(main()) == 0


def test_a_deadlock_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())
