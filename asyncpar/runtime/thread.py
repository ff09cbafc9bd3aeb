"""The threads in which the plain ``def`` endpoints of one actor run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from asyncpar.runtime.execution import ENDS_PROGRAM

T = TypeVar("T")


class ActorThread:
    """One thread (or more), started when first needed: an actor's blocking code always runs there."""

    __slots__ = ("_executor", "_name", "_threads")

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns.  A cancellation takes effect when it has ended, not before."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix=self._name)
        outcome = asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, _outcome, work)
        cancellation: asyncio.CancelledError | None = None
        while not outcome.done():
            try:
                await asyncio.wait({outcome})
            except asyncio.CancelledError as error:
                cancellation = error
        if cancellation is not None:
            raise cancellation
        value, failure = outcome.result()
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end.  Nothing is running in it any more."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run ``work`` and return (value, None) or (None, error): some exceptions cannot pass through a future."""
    try:
        return work(), None
    except ENDS_PROGRAM:
        raise
    except BaseException as error:  # noqa: BLE001  # raised again in the actor's task
        return None, error
