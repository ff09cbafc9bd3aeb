"""The bridge from compute threads to the loop."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.core.concurrency.bridge import BridgeInterrupted, LoopBridge


async def value_of(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_a_thread_gets_the_result_of_a_coroutine() -> None:
    bridge = LoopBridge()
    assert await asyncio.to_thread(bridge.call, lambda: value_of(7)) == 7


async def test_a_thread_gets_the_error_of_a_coroutine() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await asyncio.to_thread(LoopBridge().call, fail)


async def test_coroutines_begin_in_the_order_of_the_calls() -> None:
    bridge, order = LoopBridge(), list[int]()

    async def note(number: int) -> None:
        order.append(number)

    def work() -> None:
        pending = [bridge.start(lambda number=number: note(number)) for number in range(20)]  # type: ignore[misc]
        for one in pending:
            one.wait()

    await asyncio.to_thread(work)
    assert order == list(range(20))


async def test_interrupting_ends_a_waiting_thread_and_lasts_until_resumed() -> None:
    bridge, begun = LoopBridge(), asyncio.Event()

    async def hang() -> int:
        begun.set()
        await asyncio.Event().wait()
        return 0

    waiting = asyncio.ensure_future(asyncio.to_thread(bridge.call, hang))
    await begun.wait()
    bridge.interrupt()
    with pytest.raises(BridgeInterrupted, match="interrupted"):
        await waiting
    with pytest.raises(BridgeInterrupted, match="interrupted"):
        await asyncio.to_thread(bridge.call, lambda: value_of(1))
    bridge.resume()
    assert await asyncio.to_thread(bridge.call, lambda: value_of(2)) == 2
