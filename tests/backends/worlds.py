"""Runtimes of all ranks of a world in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from asyncpar.backends import BackendConfig, CommunicationRuntime, ThreadBackend

T = TypeVar("T")


@asynccontextmanager
async def open_runtimes(size: int, **settings: Any) -> AsyncIterator[Sequence[CommunicationRuntime]]:
    """Yield a runtime for each of ``size`` ranks, its thread backend initialized with ``settings``."""
    meeting = ThreadBackend(size)
    async with AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(CommunicationRuntime()) for _ in range(size)]
        for runtime in runtimes:
            runtime.register_backend("thread", meeting)
        configs = [BackendConfig(rank=rank, world_size=size, **settings) for rank in range(size)]
        opening = (runtime.initialize("thread", config) for runtime, config in zip(runtimes, configs, strict=True))
        await asyncio.gather(*opening)
        yield runtimes


async def on_all(
    runtimes: Sequence[CommunicationRuntime], operation: Callable[[CommunicationRuntime], Awaitable[T]]
) -> list[T]:
    """Run ``operation`` on all ranks at once and return the results in their order."""
    return list(await asyncio.gather(*(operation(runtime) for runtime in runtimes)))
