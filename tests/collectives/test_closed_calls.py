"""A call that is closed before it is awaited was ended on purpose."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled
from asyncpar.testing import local_world

CALLS: dict[str, Callable[[Communicator], Coroutine[Any, Any, Any]]] = {
    "small all_reduce": lambda c: c.all_reduce(np.ones(4)),
    "all_gather": lambda c: c.all_gather(np.ones(4)),
    "all_gather_v": lambda c: c.all_gather_v(np.ones(4)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_it_is_not_reported_as_forgotten(
    transport: str, call: Callable[[Communicator], Coroutine[Any, Any, Any]]
) -> None:
    async def main(communicator: Communicator) -> None:
        for _ in range(3):
            await call(communicator)  # the third one goes the quickest way there is
        if communicator.rank == 1:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(communicator).close()
            assert [str(one.message) for one in caught] == []
        else:
            with pytest.raises(PeerCancelled, match="rank 1 failed in it: it was called there, but never awaited"):
                await call(communicator)

    async with local_world(2, transport=transport) as nodes, asyncio.timeout(30):
        await asyncio.gather(*(main(node.world) for node in nodes))
