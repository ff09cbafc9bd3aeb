"""An event loop on virtual time: a test that waits an hour takes a millisecond, and always the same one.

When nothing is ready to run, the clock jumps to the next timer.  Real file descriptors and threads still work, but time
does not pass while they are awaited; a loop with neither a timer nor a ready callback and no registered file would
sleep forever, and raises ``VirtualDeadlock``, a ``RuntimeError``, instead (a deadlock in the test).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualDeadlock(RuntimeError):  # noqa: N818
    """Nothing can ever wake the loop again."""


class _JumpingSelector(selectors.BaseSelector):
    """Wraps a selector so that waiting advances the loop's clock instead of the world's."""

    def __init__(self, advance: Callable[[float], None], is_waited_for: Callable[[], bool]) -> None:
        self._inner = selectors.DefaultSelector()
        self._advance = advance
        self._is_waited_for = is_waited_for

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if ready or timeout == 0:
            return ready
        if self._is_waited_for():  # a thread will call back: wait for it in real time, at a standing virtual clock
            return self._inner.select(1.0)
        if timeout is None:
            raise VirtualDeadlock("deadlock: no callback is ready, no timer is set, and nothing can wake the loop")
        self._advance(timeout)
        return []

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Any:
        return self._inner.get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop whose ``time()`` starts at 0 and advances only while all tasks wait."""

    clock_domain = "virtual"
    """The name of the clock of ``time()``, by which events are recorded instead of real time."""

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__(_JumpingSelector(self._move, lambda: self._threads > 0))

    def time(self) -> float:
        return self._now

    def _move(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Do the same as the base class; the clock stands still while the call runs."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Shut it down like the base class, which waits for a thread of its own; the clock stands still meanwhile.

        There is no limit: ``timeout`` has no meaning here.
        """
        self._threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads -= 1

    def _thread_ended(self, _future: asyncio.Future[Any]) -> None:
        self._threads -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a fresh ``VirtualTimeLoop`` and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
