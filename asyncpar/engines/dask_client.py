"""Run coroutines on the event loop of a Dask client, for callers on another loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from asyncpar.errors import UsageError

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")


async def on_loop_of(client: Client, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that ``make`` returns on the client's event loop; when cancelled, cancel and await it."""
    here, there = asyncio.get_running_loop(), client.loop.asyncio_loop
    if here is there:
        return await make()
    ended, tasks = asyncio.Event(), list[asyncio.Task[T]]()

    def begin() -> None:
        task = there.create_task(make())
        tasks.append(task)
        task.add_done_callback(lambda _: here.call_soon_threadsafe(ended.set))

    def cancel() -> None:
        tasks[0].cancel()

    there.call_soon_threadsafe(begin)
    was_cancelled: asyncio.CancelledError | None = None
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            was_cancelled = error
            there.call_soon_threadsafe(cancel)
    if was_cancelled is not None:
        if not tasks[0].cancelled():
            tasks[0].exception()
        raise was_cancelled
    return tasks[0].result()


async def value_of_future(found: Any) -> Any:
    """Return the value of ``found``; a Dask future is awaited on the event loop of its client."""
    from distributed import Future

    if isinstance(found, Future):
        client = found.client
        if client is None:
            raise UsageError(f"client: the one of {found!r} is closed; keep it open until the job has its arguments")
        return await on_loop_of(client, lambda: client.gather(found, asynchronous=True))
    return await found
