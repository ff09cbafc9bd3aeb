"""Messages that are not handled."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.declaration import MailboxPolicy
from asyncpar.actors.runtime.window import WINDOW
from asyncpar.errors import MailboxFull, UsageError

MEBIBYTE = np.zeros(1 << 20, np.uint8)


class Busy(Actor):
    mailbox: ClassVar[MailboxPolicy] = MailboxPolicy(limit=1, when_full="fail")

    def __init__(self, entered: asyncio.Event, gate: asyncio.Event) -> None:
        self.entered = entered
        self.gate = gate

    @endpoint
    async def swallow(self, array: np.ndarray) -> int:
        self.entered.set()
        await self.gate.wait()
        return array.size


@pytest.mark.parametrize("home", [0, 1])
async def test_messages_that_are_declined_take_no_room(open_ranks: Any, home: int) -> None:
    """More of them than fit into a window: if they took room, the last would never leave."""
    entered, gate = asyncio.Event(), asyncio.Event()
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Busy, entered, gate, name="b")
        ref = ranks.systems[0].ref("b", rank=home)
        waiting = [asyncio.ensure_future(ref.swallow(MEBIBYTE))]
        await entered.wait()
        waiting.append(asyncio.ensure_future(ref.swallow(MEBIBYTE)))
        await asyncio.sleep(0)
        for _ in range(2 * WINDOW // MEBIBYTE.size):
            with pytest.raises(UsageError, match="'nothing' is no endpoint of Busy"):
                await ref.nothing(MEBIBYTE)
            with pytest.raises(UsageError, match=r"swallow\(\) returns one result"):
                await anext(ref.swallow.stream(MEBIBYTE))
            with pytest.raises(MailboxFull):
                await ref.swallow(MEBIBYTE)
        gate.set()
        assert await asyncio.gather(*waiting) == [MEBIBYTE.size] * 2
