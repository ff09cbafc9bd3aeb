"""Run a program's main coroutine: uvloop if installed, orderly exit on signals, failures reported to the launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncpar.core.concurrency.tasks import new_loop
from asyncpar.core.observe.reporting import Reporter, find_peer_error, open_closed_streams, record_failures
from asyncpar.core.signals import TERMINATION, OwnHandler, Termination
from asyncpar.core.system_errors import note_limit
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.net.transport.links import LEFT

T = TypeVar("T")
SIGTERM_EXIT = 128 + signal.SIGTERM
SIGINT_EXIT = 128 + signal.SIGINT
SIGNAL_SECONDS = 0.3
"""Seconds for which a launched program, after a rank left in good order, waits for a signal that may explain it.

A launcher sends Ctrl-C to all ranks, but they do not all receive it at the same time.
"""
REASON_SECONDS = 0.1
"""Seconds for which a launched program runs on after SIGTERM, so that errors that explain it arrive first.

Time in which the loop is busy does not count.
"""
LATE_SECONDS = 0.02
"""A timer this late shows that the loop was busy: errors that explain a signal may only just have arrived."""
MOST_DELAYS = 20
"""How many times a signal waits again for a busy loop."""
READ_SECONDS = 0.001
"""Seconds in which the loop reads a signal that preceded an error: one poll of the sockets may find both."""


def run(main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T]) -> T:
    """Run ``main`` (a coroutine function without arguments, or a coroutine) on a fresh event loop; return its result.

    For programs, not for use inside a running loop.  Ctrl-C and SIGTERM cancel ``main``, so its ``finally`` blocks
    leave the world in good order; the process then exits with status 130 or 143.  In an elastic job with agents, a rank
    that receives SIGTERM leaves at the end of its step (``job.is_drained``); a second SIGTERM cancels it, as does the
    first if no other rank would go on.  Under ``asyncpar launch`` an exception that ends the program is reported to the
    agent with its traceback, while Ctrl-C, which every rank receives, ends it without one.  Raises ``UsageError`` if
    ``main`` is anything else, or if a loop is already running.

    Example::

        async def main() -> int:
            async with ap.init() as node:
                return node.rank

        rank = ap.run(main)
    """
    if _is_loop_running():
        if asyncio.iscoroutine(main):
            main.close()
        raise UsageError("run: an event loop runs already (in a notebook or a service); await Node.start() there")
    open_closed_streams()
    reporter = Reporter.from_environment(os.environ)
    record_failures(reporter)
    coroutine = main() if callable(main) else main
    if not asyncio.iscoroutine(coroutine):
        raise UsageError(f"main: expected a coroutine, or a function without arguments that makes one, got {main!r}")
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(_until_terminated(coroutine, interrupt, reporter))
    except OSError as error:
        note_limit(error)
        raise
    except KeyboardInterrupt:
        if reporter.is_connected:
            raise SystemExit(SIGINT_EXIT) from None
        raise


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_left_behind(error: Exception) -> bool:
    """Return whether ``error`` comes from ranks that left in good order or were cancelled, perhaps by Ctrl-C to all."""
    peer = find_peer_error(error)
    return peer is not None and (peer.cause == LEFT or isinstance(peer, PeerCancelled))


async def _until_terminated(main: Coroutine[Any, Any, T], interrupt: Any, reporter: Reporter) -> T:
    """Await ``main``; SIGTERM cancels it and ends the process with status 143, unless it may leave in good order.

    ``interrupt`` is the handler of SIGINT before the loop ran.
    """
    task = asyncio.current_task()
    assert task is not None
    is_terminated = False

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        if reporter.is_connected:
            _call_when_quiet(task.cancel)
        else:
            task.cancel()

    termination = Termination(terminate)
    TERMINATION.set(termination)
    try:
        with _handling_signals(termination.handle, interrupt):
            try:
                return await main
            except Exception as error:
                if reporter.is_connected and is_left_behind(error):
                    await asyncio.sleep(READ_SECONDS)
                    if is_terminated or task.cancelling():  # it saw the signal's effect on others first
                        raise asyncio.CancelledError from error
                    reporter.failure(error)
                    await _listen(lambda: is_terminated)
                raise
    except asyncio.CancelledError:
        if is_terminated:
            raise SystemExit(SIGTERM_EXIT) from None
        raise


def _call_when_quiet(end: Callable[[], object], delays: int = MOST_DELAYS) -> None:
    """Call ``end`` after ``REASON_SECONDS`` in which the loop was not busy, or after ``delays`` more tries."""
    loop = asyncio.get_running_loop()
    due = loop.time() + REASON_SECONDS

    def check() -> None:
        if loop.time() - due > LATE_SECONDS and delays > 0:
            _call_when_quiet(end, delays - 1)
        else:
            end()

    loop.call_at(due, check)


async def _listen(is_terminated: Callable[[], bool]) -> None:
    """Wait for Ctrl-C, which raises here; SIGTERM explains nothing."""
    try:
        await asyncio.sleep(SIGNAL_SECONDS)
    except asyncio.CancelledError:
        if not is_terminated():
            raise


@contextmanager
def _handling_signals(terminate: Callable[[], None], interrupt: Any) -> Iterator[None]:
    """Have SIGTERM call ``terminate`` on the loop, in the main thread; forked children inherit no handler of ours.

    For SIGINT they inherit ``interrupt`` in place of asyncio's handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM), signal.SIGINT: interrupt}
    try:
        loop.add_signal_handler(signal.SIGTERM, terminate)
    except NotImplementedError:  # on Windows, where no process forks either
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(terminate))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before[signal.SIGTERM] or signal.SIG_DFL)
        return
    on_loop = {number: signal.getsignal(number) for number in before}
    for number, handler in on_loop.items():
        if callable(handler) and handler is not before[number]:
            signal.signal(number, OwnHandler(handler, before[number]))
            signal.siginterrupt(number, False)  # as asyncio has it
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if before[signal.SIGTERM] is not None:  # a handler in C, which cannot be restored
            signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        if isinstance(signal.getsignal(signal.SIGINT), OwnHandler):
            signal.signal(signal.SIGINT, on_loop[signal.SIGINT])  # asyncio's, which asyncio removes itself
