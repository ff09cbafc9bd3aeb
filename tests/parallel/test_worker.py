"""The compute thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncpar.parallel.worker import ComputeWorker


async def test_functions_run_in_one_named_thread_in_order() -> None:
    worker, seen = ComputeWorker("cpu:0"), []

    def note(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(worker.run(note, number) for number in range(5)))
    assert seen == list(range(5))
    assert set(names) == {"compute cpu:0_0"}
    worker.close()


async def test_an_exception_is_raised() -> None:
    worker = ComputeWorker("cpu:0")
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    worker.close()


async def test_a_cancelled_caller_is_kept_until_the_function_has_ended() -> None:
    worker, may_end = ComputeWorker("cpu:0"), threading.Event()

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
