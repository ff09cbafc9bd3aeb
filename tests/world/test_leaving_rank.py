"""A rank that leaves amid an operation is named to all others at once, also to those who only wait for the root."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.errors import PeerCancelled, PeerLost
from tests.products import sampled

SMALL, LARGE = 4, 300_000

OPERATIONS: dict[str, Callable[[ap.Communicator, int], Any]] = {
    "reduce": lambda comm, n: comm.reduce(np.ones(n), root=0),
    "gather": lambda comm, n: comm.gather(np.ones(n), root=0),
    "scatter": lambda comm, n: comm.scatter(
        np.ones((3, n)) if comm.rank == 0 else None, root=0, out=None if comm.rank == 0 else np.empty(n)
    ),
    "broadcast": lambda comm, n: comm.broadcast(np.ones(n), root=0),
    "all_reduce": lambda comm, n: comm.all_reduce(np.ones(n)),
    "all_gather": lambda comm, n: comm.all_gather(np.ones(n)),
    "reduce_scatter": lambda comm, n: comm.reduce_scatter(np.ones((3, n))),
    "all_to_all": lambda comm, n: comm.all_to_all(np.ones((3, n))),
    "broadcast_object": lambda comm, n: comm.broadcast_object(np.ones(n) if comm.rank == 0 else None, root=0),
    "gather_object": lambda comm, n: comm.gather_object(np.ones(n), root=0),
    "all_gather_object": lambda comm, n: comm.all_gather_object(np.ones(n)),
    "barrier": lambda comm, n: comm.barrier(),
}


@pytest.mark.parametrize(("name", "transport", "n"), sampled(list(OPERATIONS), ["shm", "tcp"], [SMALL, LARGE]))
async def test_a_rank_that_leaves_is_named_to_all(name: str, transport: str, n: int) -> None:
    async with ap.testing.local_world(3, transport=transport) as nodes, asyncio.timeout(45):
        for node in nodes:
            node.world.timeout = 60.0  # a rank that waits for it has failed
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        calls = [asyncio.ensure_future(OPERATIONS[name](node.world, n)) for node in nodes[:2]]
        await asyncio.sleep(0.05)
        await nodes[2].stop()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, PeerLost | PeerCancelled), repr(outcome)
            assert outcome.rank == 2
