"""Work that all ranks do at once: all learn how it ended, and no rank continues in vain."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from asyncpar.checkpoint.group import CheckpointGroup
from asyncpar.checkpoint.threads import Stopped, WorkProgress
from asyncpar.errors import CheckpointError
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.worlds import each, each_fails


def test_all_get_what_each_has_made() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            savers = [CheckpointGroup(node.world, "testing") for node in nodes]
            for number in range(2):
                results = await each(
                    nodes,
                    lambda node: savers[node.rank].run_on_all(lambda _: [node.rank, number], wanted=list[int]),  # noqa: B023
                )
                assert results == [[[0, number], [1, number], [2, number]]] * 3

    run_virtual(main())


def test_work_that_is_not_wanted_any_more_is_stopped() -> None:
    """One rank fails; the thread of the other ends with it, not when it is through.  In real time."""
    ends: list[BaseException] = []

    def go_on(progress: WorkProgress) -> None:
        end = time.monotonic() + 45.0
        try:
            while time.monotonic() < end:
                progress.advance(1)
        except Stopped as stopped:
            ends.append(stopped)
            raise

    def fail(_progress: WorkProgress) -> None:
        raise CheckpointError("the disk is on fire")

    async def main() -> None:
        async with local_world(2) as nodes:
            savers = [CheckpointGroup(node.world, "testing") for node in nodes]
            errors = await each_fails(
                nodes, lambda node: savers[node.rank].run_on_all(fail if node.rank else go_on, wanted=None)
            )
            assert str(errors[0]) == "testing: rank 1 failed: the disk is on fire"
            assert str(errors[1]) == "the disk is on fire"
            assert len(ends) == 1

    asyncio.run(main())


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_errors_name_ranks_of_the_group_rather_than_of_the_world(culprit: int) -> None:
    def fail(_progress: WorkProgress) -> None:
        raise OSError(5, "Input/output error")

    async def main() -> None:
        async with local_world(5) as nodes:
            members = nodes[4:1:-1]
            groups = [node.world.subgroup([4, 3, 2]) for node in members]
            savers = [CheckpointGroup(group, "testing") for group in groups if group is not None]
            errors = await each_fails(
                members,
                lambda node: savers[4 - node.rank].run_on_all(
                    fail if 4 - node.rank == culprit else lambda _: None, wanted=None
                ),
            )
            for rank, error in enumerate(errors):
                if rank == culprit:
                    assert isinstance(error, OSError)
                else:
                    assert str(error) == f"testing: rank {culprit} failed: OSError: [Errno 5] Input/output error"

    run_virtual(main())


def test_work_may_take_longer_than_the_timeout_while_it_goes_on() -> None:
    """Ranks that are through wait for one that makes progress, in real time."""

    def plod(progress: WorkProgress) -> None:
        for _ in range(12):
            waiting.wait(0.05)
            progress.advance(1)

    waiting = threading.Event()

    async def main() -> None:
        async with local_world(2) as nodes:
            for node in nodes:
                node.world.timeout = 0.3
            savers = [CheckpointGroup(node.world, "testing") for node in nodes]
            await each(
                nodes, lambda node: savers[node.rank].run_on_all(plod if node.rank else lambda _: None, wanted=None)
            )

    asyncio.run(main())


def test_a_rank_that_leaves_twice_says_it_once_and_a_group_of_one_says_nothing() -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            savers = [CheckpointGroup(node.world, "testing") for node in nodes]
            savers[1].leave("first")
            savers[1].leave("second")
            with pytest.raises(CheckpointError, match="rank 1 failed: first"):
                await savers[0].run_on_all(lambda _: None, wanted=None)
            alone = nodes[0].world.subgroup([0])
            assert alone is not None
            CheckpointGroup(alone, "testing").leave("nobody hears")

    run_virtual(main())
