"""A rank that closes a collective owes it no more, and no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.collectives.call import cancel_reason
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled
from asyncpar.node import Node
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.parallel.replicas import on_all

BEGIN: dict[str, Callable[[Communicator], Coroutine[Any, Any, Any]]] = {
    "all_gather": lambda world: world.all_gather(np.ones(3), key="owed"),
    "all_reduce": lambda world: world.all_reduce(np.ones(3), key="owed"),
    "all_to_all": lambda world: world.all_to_all(np.ones((world.size, 2)), key="owed"),
    "all_gather_object": lambda world: world.all_gather_object("x", key="owed", wanted=str),
    "barrier": lambda world: world.barrier(key="owed"),
}


@pytest.mark.parametrize("operation", BEGIN)
@pytest.mark.parametrize("reason", ["", "the disk is full"])
def test_a_closed_collective_ends_on_all_ranks_with_the_reason_and_the_key_goes_on(operation: str, reason: str) -> None:
    async def on_rank(node: Node) -> str:
        world = node.world

        def begin() -> Coroutine[Any, Any, Any]:
            return BEGIN[operation](world)

        outcome = "closed"
        if node.rank == 1:
            owed = OwedCollective(begin)
            with cancel_reason() as why:
                if reason:
                    why.take(OSError(reason))
                owed.close()
                owed.close()
        else:
            with pytest.raises(PeerCancelled) as caught:
                await OwedCollective(begin).run()
            assert caught.value.rank == 1
            outcome = str(caught.value.cause)
        await begin()
        return outcome

    async def main() -> list[str]:
        async with local_world(3) as nodes:
            return await on_all(nodes, on_rank)

    cause = f"OSError: {reason}" if reason else "CancelledError, before it began"
    assert run_virtual(main()) == [cause, "closed", cause]


def test_a_collective_that_has_begun_is_not_closed() -> None:
    async def on_rank(node: Node) -> float:
        owed = OwedCollective(lambda: node.world.all_reduce(np.ones(1), key="owed"))
        total: np.ndarray[Any, Any] = await owed.run()
        owed.close()
        return float(total[0])

    async def main() -> list[float]:
        async with local_world(2) as nodes:
            return await on_all(nodes, on_rank)

    assert run_virtual(main()) == [2.0, 2.0]
