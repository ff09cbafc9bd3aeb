"""Calls that block, in a thread of their own each, so that no number of them keeps others waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_NAME = "asyncpar store"


async def call_in_thread(function: Callable[[], T]) -> T:
    """Return what ``function`` returns, in a new thread.  Cancelled, this returns at once, and the thread goes on."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():  # cancelled
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # T, when there is no error

    def call() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001  # raised again where it is awaited
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=call, name=_NAME, daemon=True).start()
    return await outcome


def leave_to_thread(function: Callable[[], object], on_error: Callable[[Exception], object]) -> None:
    """Have ``function`` called in a new thread, and do not wait."""

    def call() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001  # handed on
            on_error(error)

    threading.Thread(target=call, name=_NAME, daemon=True).start()
