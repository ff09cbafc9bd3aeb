"""A program is found: the place in the user's code, from tasks and from stacks."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path

from asyncpar.core.observe.whereabouts import describe_frame, describe_program

HERE = Path(__file__)


def line_of(mark: str) -> str:
    number = next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {mark}"))
    return f"{HERE.name}:{number}"


async def inner() -> None:
    await asyncio.sleep(3600)  # sleeping


async def outer() -> None:
    await inner()


def test_a_task_that_sleeps_is_named_by_its_innermost_user_frame() -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return describe_program(asyncio.get_running_loop())

    async def with_task() -> str:
        sleeping = asyncio.create_task(outer(), name="Task-0")
        try:
            return await asyncio.create_task(main(), name="Task-9")
        finally:
            sleeping.cancel()

    assert asyncio.run(with_task()) == f"sleeps at {line_of('sleeping')}"


def test_a_task_that_waits_for_a_future() -> None:
    async def main() -> str:
        gate = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await gate  # waiting

        waiting = asyncio.create_task(wait(), name="Task-0")
        await asyncio.sleep(0)
        try:
            return describe_program(asyncio.get_running_loop())
        finally:
            waiting.cancel()

    assert asyncio.run(main()) == f"waits at {line_of('waiting')}"


def test_the_stack_of_the_main_thread_counts_where_the_loop_has_another() -> None:
    texts: list[str] = []
    has_begun = threading.Event()

    async def look() -> None:
        has_begun.wait()
        texts.append(describe_program(asyncio.get_running_loop()))

    thread = threading.Thread(target=lambda: asyncio.run(look()))
    thread.start()
    has_begun.set()
    while not texts:
        time.sleep(0)  # computing
    thread.join()
    file, _, number = texts[0].removeprefix("is in user code at ").partition(":")
    assert file == HERE.name
    assert int(number) > 0


def test_no_frame_is_nowhere() -> None:
    assert describe_frame(None) == ""
    assert describe_frame(inspect.currentframe()).startswith(f"is in user code at {HERE.name}:")


def test_every_thread_finds_the_task_of_a_program_that_only_waits_for_its_loop() -> None:
    """The observer of a rank and the rank's answers to others say the same."""

    async def main() -> str:
        sleeping = asyncio.create_task(outer(), name="Task-0")
        await asyncio.sleep(0)
        try:
            return await asyncio.to_thread(describe_program, asyncio.get_running_loop())
        finally:
            sleeping.cancel()

    assert asyncio.run(main()) == f"sleeps at {line_of('sleeping')}"
