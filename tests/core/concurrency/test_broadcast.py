"""Listeners receive what is sent after they came, each all of it, until the end."""

from __future__ import annotations

import asyncio
import gc

from asyncpar.core.concurrency.broadcast import Broadcast
from asyncpar.testing import run_virtual


def test_a_listener_receives_what_is_sent_before_its_first_step() -> None:
    async def main() -> None:
        broadcast = Broadcast[int]()
        broadcast.send(0)
        early = broadcast.listen()
        broadcast.send(1)
        late = broadcast.listen()
        broadcast.send(2)
        broadcast.close()
        assert [item async for item in early] == [1, 2]
        assert [item async for item in late] == [2]
        assert [item async for item in early] == [], "it stays at its end"
        assert [item async for item in broadcast.listen()] == []

    run_virtual(main())


def test_a_listener_waits_for_what_comes() -> None:
    async def main() -> None:
        broadcast = Broadcast[str | None]()
        listener = broadcast.listen()
        receiving = asyncio.ensure_future(anext(listener))
        await asyncio.sleep(1)
        assert not receiving.done()
        broadcast.send(None)  # an item as any other
        assert await receiving is None

    run_virtual(main())


def test_listeners_that_nobody_holds_are_forgotten() -> None:
    async def main() -> None:
        broadcast = Broadcast[int]()
        for _ in range(10):
            broadcast.listen()
        kept = broadcast.listen()
        gc.collect()
        assert len(broadcast._listeners) == 1  # noqa: SLF001  # that they are forgotten shows nowhere else
        del kept

    run_virtual(main())
