"""Arrays on their way: an ask lends them until it ends, whatever else copies them at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

import asyncpar as ap
from asyncpar.actors.runtime.window import WINDOW
from asyncpar.testing import local_world
from tests.products import in_turn

LARGE = 3 << 20
TRANSPORTS = ("inproc", "tcp", "shm", "grpc")

Numbers = npt.NDArray[np.int64]


class Keeper(ap.Actor):
    """Keeps sums, and an array of its own."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.own = np.full(LARGE // 8, 1, np.int64)
        self.may_go = asyncio.Event()

    @ap.endpoint
    async def add(self, array: Numbers) -> int:
        assert array.min() == array.max()
        self.sums.append(int(array[0]))
        array[:] = -1  # it is the actor's
        return int(array.size)

    @ap.endpoint
    async def wait(self, array: Numbers) -> int:
        assert array.min() == array.max()
        self.sums.append(int(array[0]))
        await self.may_go.wait()
        return 0

    @ap.endpoint(concurrency=1)
    async def go(self) -> None:
        self.may_go.set()

    @ap.endpoint
    async def give(self) -> Numbers:
        asyncio.get_running_loop().call_soon(self.own.fill, 2)
        return self.own

    @ap.endpoint
    async def flow(self, count: int) -> AsyncIterator[Numbers]:
        for number in range(count):
            self.own.fill(number)
            yield self.own

    @ap.endpoint
    async def seen(self) -> list[int]:
        return self.sums


def numbers(value: int, size: int = LARGE) -> Numbers:
    return np.full(size // 8, value, np.int64)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.promise("lent")
async def test_an_array_can_be_changed_as_soon_as_the_ask_has_ended(transport: str) -> None:
    async with local_world(2, transport=transport) as nodes:
        await nodes[1].spawn(Keeper, name="keeper")
        keeper = nodes[0].ref("keeper", rank=1, actor_class=Keeper)
        array = numbers(0)
        for turn in range(5):
            array.fill(turn)
            assert await keeper.add(array) == array.size
            assert array.min() == array.max() == turn
        assert await keeper.seen() == list(range(5))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.promise("lent")
async def test_what_is_told_returned_or_streamed_can_be_changed_at_once(transport: str) -> None:
    async with local_world(2, transport=transport) as nodes:
        await nodes[1].spawn(Keeper, name="keeper")
        keeper = nodes[0].ref("keeper", rank=1, actor_class=Keeper)
        array = numbers(0)
        for turn in range(2 * WINDOW // LARGE):
            array.fill(turn)
            keeper.add.tell(array)
        array.fill(-1)
        assert (await keeper.give()).max() == 1
        assert await keeper.seen() == list(range(2 * WINDOW // LARGE))
        items = [(int(item.min()), int(item.max())) async for item in keeper.flow.stream(5)]
        assert items == [(number, number) for number in range(5)]


@pytest.mark.parametrize(("turns", "transport"), in_turn([0, 1, 2, 3, 5, 8, 13, 50], TRANSPORTS))
@pytest.mark.promise("lent")
async def test_a_cancelled_ask_gives_its_array_back_and_it_arrives_whole_or_not_at_all(
    transport: str, turns: int
) -> None:
    async with local_world(2, transport=transport) as nodes:
        await nodes[1].spawn(Keeper, name="keeper")
        keeper = nodes[0].ref("keeper", rank=1, actor_class=Keeper)
        await keeper.seen()
        array = numbers(7, 4 * LARGE)
        ask = asyncio.ensure_future(keeper.add(array))
        for _ in range(turns):
            await asyncio.sleep(0)
        ask.cancel()
        await asyncio.wait({ask})
        array.fill(-5)
        assert await keeper.add(numbers(8)) == LARGE // 8
        assert await keeper.seen() in ([8], [7, 8])


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.promise("lent")
async def test_cancelled_asks_that_wait_for_room_leave_room_for_others(transport: str) -> None:
    async with local_world(2, transport=transport) as nodes:
        await nodes[1].spawn(Keeper, name="keeper")
        keeper = nodes[0].ref("keeper", rank=1, actor_class=Keeper)
        for _ in range(2):
            asks = [asyncio.ensure_future(keeper.wait(numbers(1, WINDOW))) for _ in range(4)]
            await asyncio.sleep(0)
            for ask in asks:
                ask.cancel()
            await asyncio.wait(asks)
        await keeper.go()
        assert await keeper.add(numbers(3)) == LARGE // 8
        assert set(await keeper.seen()) <= {1, 3}
        assert nodes[0]._actors.pending == 0  # noqa: SLF001  # asks that are left pending show nowhere else
