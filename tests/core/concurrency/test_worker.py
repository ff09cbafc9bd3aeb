"""Threads that run functions for the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from asyncpar.core.concurrency.tasks import INLINE_BYTES, off_loop
from asyncpar.core.concurrency.worker import DaemonThread, WorkerThread, call_in_daemon_thread


async def test_functions_run_in_one_named_thread_in_order() -> None:
    worker, seen = WorkerThread("compute cpu:0"), []

    def note(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(worker.run(note, number) for number in range(5)))
    assert seen == list(range(5))
    assert set(names) == {"compute cpu:0_0"}
    worker.close()


async def test_an_exception_is_raised() -> None:
    worker = WorkerThread("cpu:0")
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    worker.close()


async def test_a_cancelled_caller_is_kept_until_the_function_has_ended() -> None:
    worker, may_end = WorkerThread("cpu:0"), threading.Event()

    def fail() -> None:
        assert may_end.wait(10.0)
        raise ZeroDivisionError

    task = asyncio.ensure_future(worker.run(fail))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    worker.close()


Run = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


async def run_in_worker(work: Callable[[], Any]) -> Any:
    worker = WorkerThread("kept")
    try:
        return await worker.run(work)
    finally:
        worker.close()


KEPT: dict[str, Run] = {
    "worker": run_in_worker,
    "off_loop": lambda work: off_loop(work, nbytes=INLINE_BYTES + 1),
}
LEFT: dict[str, Run] = {
    "daemon": DaemonThread("left").run,
    "call": lambda work: call_in_daemon_thread(work, "left"),
}


@pytest.mark.parametrize("run", KEPT.values(), ids=KEPT)
async def test_a_caller_that_is_cancelled_again_and_again_is_kept(
    run: Run,
) -> None:
    may_end = threading.Event()
    task = asyncio.ensure_future(run(lambda: may_end.wait(10.0)))
    for _ in range(5):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("run", LEFT.values(), ids=LEFT)
async def test_a_daemon_thread_lets_go_of_a_cancelled_caller(run: Run) -> None:
    may_end = threading.Event()
    task = asyncio.ensure_future(run(lambda: may_end.wait(10.0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()


async def test_errors_that_futures_refuse_are_raised() -> None:
    worker = WorkerThread("worker")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.run(next, iter(()))
    worker.close()


async def test_a_function_sees_the_context_of_its_caller() -> None:
    variable, worker = ContextVar("variable", default=0), WorkerThread("worker")
    variable.set(3)
    assert await worker.run(variable.get) == 3
    worker.close()


async def test_a_closed_worker_takes_no_calls() -> None:
    worker = WorkerThread("worker")
    await worker.run(int)
    worker.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        await worker.run(int)


async def test_daemon_threads_run_calls_in_order_and_raise_their_errors() -> None:
    thread = DaemonThread("daemon")
    seen: list[int] = []
    await asyncio.gather(*(thread.run(partial(seen.append, number)) for number in range(5)))
    assert seen == list(range(5))
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    thread.close(patience=10.0)
    assert "daemon" not in [other.name for other in threading.enumerate()]


@pytest.mark.parametrize("in_worker", [True, False])
async def test_a_thread_holds_nothing_of_work_whose_caller_goes_on(
    in_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held up between the announcement of the result and its next search for work."""
    settle, may_go_on = concurrent.futures.Future.set_result, threading.Event()

    def settle_and_wait(future: concurrent.futures.Future[Any], result: Any) -> None:
        settle(future, result)
        if threading.current_thread() is not threading.main_thread():
            may_go_on.wait(30)

    class Owner:
        def work(self) -> int:
            return 7

    worker, owner = WorkerThread("cpu:0"), Owner()
    owned = weakref.ref(owner)
    with monkeypatch.context() as patched:
        patched.setattr(concurrent.futures.Future, "set_result", settle_and_wait)
        if in_worker:
            assert await worker.run(owner.work) == 7
        else:
            assert await off_loop(owner.work, nbytes=INLINE_BYTES + 1) == 7
        del owner
        assert owned() is None
        may_go_on.set()
    worker.close()
