"""A backend from outside the package: a function of a configuration, registered by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from asyncpar.backends import BackendConfig, BackendNotRegistered, CommunicationRuntime, existing
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.node import Node
from asyncpar.parallel import init_process_group
from asyncpar.testing import local_world


class Counted:
    """The world of a node that runs already; counts how often it is open."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.opened = 0

    @asynccontextmanager
    async def __call__(self, config: BackendConfig) -> AsyncIterator[Communicator]:
        config.refuse("counted", "transport", "rendezvous")
        config.check_place("counted", rank=self.node.rank, world_size=self.node.size)
        self.opened += 1
        try:
            yield self.node.world
        finally:
            self.opened -= 1


async def reduce_in(runtime: CommunicationRuntime, rank: int) -> np.ndarray:
    result = await runtime.collective_op("all_reduce", np.full(100, rank + 1.0))
    assert result.value is not None
    return np.asarray(result.value)


async def test_it_reduces_arrays_of_three_ranks() -> None:
    async with local_world(3) as nodes:
        backends = [Counted(node) for node in nodes]

        async def main(backend: Counted) -> np.ndarray:
            async with CommunicationRuntime() as runtime:
                runtime.register_backend("counted", backend)
                assert "counted" in runtime.backends
                await runtime.initialize("counted", BackendConfig(world_size=3))
                assert backend.opened == 1
                return await reduce_in(runtime, backend.node.rank)

        results = await asyncio.gather(*map(main, backends))
        assert all((result == 6.0).all() for result in results)
        assert [backend.opened for backend in backends] == [0, 0, 0]


async def test_a_process_group_takes_it() -> None:
    async with local_world(1) as (node,):
        runtime = CommunicationRuntime()
        runtime.register_backend("counted", existing(node.world))
        _, group = await init_process_group("counted", 0, 1, runtime=runtime)
        assert (group.rank, group.size) == (0, 1)
        await runtime.finalize()


async def test_a_wrong_registration_is_refused_and_says_what_to_change() -> None:
    async with local_world(1) as (node,), CommunicationRuntime() as runtime:
        backend = Counted(node)
        with pytest.raises(UsageError, match="name: expected a name of at least one character, got ''"):
            runtime.register_backend("", backend)
        with pytest.raises(UsageError, match=r"backend: expected a function that takes a BackendConfig .*, got 3"):
            runtime.register_backend("counted", 3)  # type: ignore[arg-type]
        with pytest.raises(BackendNotRegistered, match=r"backend: expected one of .*native.*, got 'counted'"):
            await runtime.initialize("counted")
        runtime.register_backend("counted", backend)
        with pytest.raises(UsageError, match="transport: the counted backend has no use for it, got 'tcp'"):
            await runtime.initialize("counted", BackendConfig(transport="tcp"))
        await runtime.initialize("counted")
        with pytest.raises(UsageError, match="the backend 'counted' is open; finalize the runtime first"):
            runtime.register_backend("counted", backend)


async def test_what_opens_no_communicator_is_refused() -> None:
    @asynccontextmanager
    async def empty(config: BackendConfig) -> AsyncIterator[Communicator]:
        yield None  # type: ignore[misc]

    async with CommunicationRuntime() as runtime:
        runtime.register_backend("empty", empty)
        with pytest.raises(UsageError, match="backend 'empty': expected a Communicator when it is entered, got None"):
            await runtime.initialize("empty")
        runtime.register_backend("function", lambda config: 7)  # type: ignore[arg-type, return-value]
        with pytest.raises(UsageError, match="backend 'function': expected an asynchronous context manager, got 7"):
            await runtime.initialize("function")
