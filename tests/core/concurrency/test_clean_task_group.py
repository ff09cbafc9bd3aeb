"""A group of tasks that fails leaves the count of cancellations as it was."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.core.concurrency.tasks import CleanTaskGroup


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def fail_after(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    raise ZeroDivisionError


async def wait_for_failure(turns: int, body: int) -> None:
    async with CleanTaskGroup() as tasks:
        tasks.create_task(fail_after(turns))
        tasks.create_task(asyncio.sleep(3600))
        for _ in range(body):
            await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("body", [0, 3])
async def test_a_task_that_fails_at_any_moment_is_raised_and_nothing_seems_cancelled(turns: int, body: int) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await wait_for_failure(turns, body)
    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]
    assert cancelling() == 0
    await asyncio.sleep(0)


async def test_tasks_that_end_well_end_the_block() -> None:
    async with CleanTaskGroup() as tasks:
        made = [tasks.create_task(asyncio.sleep(0, result)) for result in range(3)]
    assert [task.result() for task in made] == [0, 1, 2]


@pytest.mark.parametrize("turns", [1, 3])
async def test_who_is_cancelled_while_it_waits_for_tasks_is_cancelled_once(turns: int) -> None:
    async def main() -> None:
        async with CleanTaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(3600))

    running = asyncio.create_task(main())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert running.cancelling() == 1


async def test_tasks_may_begin_others() -> None:
    ended: list[str] = []

    async with CleanTaskGroup() as tasks:

        async def second() -> None:
            await asyncio.sleep(0)
            ended.append("second")

        async def first() -> None:
            tasks.create_task(second())

        tasks.create_task(first())
    assert ended == ["second"]
