"""The culprit of a hang, and its cause, are found in the images of the ranks: each of the planted ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from asyncpar.core.observe.whereabouts import describe_task
from asyncpar.node import Node
from asyncpar.observe.explain import HangCause, HangFinding, RankFacts, explain
from asyncpar.observe.image import RankImage, read_image
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.observe.planted import CULPRIT, PLANTED, WORLD, Planted, Program, absent, warm

HANG_SECONDS = 3.0


def images_of(nodes: tuple[Node, ...]) -> dict[int, RankImage]:
    return {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}


async def _run(program: Program, node: Node) -> None:
    await program(node)


async def hang(program: Program, facts: dict[int, RankFacts] | None = None) -> list[HangFinding]:
    """Run ``program`` on all ranks until nothing goes on, and explain that."""
    async with local_world(WORLD) as nodes:
        tasks = {node.rank: asyncio.create_task(_run(program, node)) for node in nodes}
        await asyncio.sleep(HANG_SECONDS)
        known = {rank: RankFacts(doing=describe_task(task)) for rank, task in tasks.items()} | (facts or {})
        found = explain(images_of(nodes), known)
        for task in tasks.values():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        return found


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_culprit_and_cause_of_a_planted_hang(planted: Planted) -> None:
    found = run_virtual(hang(planted.program))
    assert found, "nothing was found"
    assert (found[0].cause, found[0].culprits) == (planted.cause, planted.culprits), found
    if planted.cause is HangCause.LINK:
        assert "the link from rank 1 to rank 2" in found[0].text


@pytest.mark.parametrize(
    ("condition", "cause"), [("stopped", HangCause.STOPPED), ("ended", HangCause.DEAD), ("hung", HangCause.BLOCKED)]
)
def test_what_the_agent_sees_explains_an_absent_rank(condition: str, cause: HangCause) -> None:
    (found,) = run_virtual(hang(absent, {CULPRIT: RankFacts(condition=condition, detail="the agent says so")}))
    assert (found.cause, found.culprits, found.waiting) == (cause, (CULPRIT,), (0, 1, 3))
    assert "the agent says so" in found.text
    assert "planted.py:" in found.text


async def test_a_blocked_loop_is_in_the_ring_of_its_rank() -> None:
    async with local_world(WORLD) as nodes:
        from asyncpar.core.observe.loop_watch import Blocked, BlockedEvents

        stack = '  File "train.py", line 57, in work\n    time.sleep(9)\n'
        blocked = Blocked(rank=CULPRIT, seconds=1.0, what="the main task", stack=stack, is_over=False)
        BlockedEvents(nodes[CULPRIT].links.recorder).record(blocked)
        waiting = [asyncio.create_task(node.world.barrier()) for node in nodes if node.rank != CULPRIT]
        await asyncio.sleep(0.01)
        (found,) = explain(images_of(nodes))
        assert (found.cause, found.culprits) == (HangCause.BLOCKED, (CULPRIT,))
        assert "it blocks its event loop by the main task at train.py:57" in found.text
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_rank_without_an_image_is_taken_for_dead() -> None:
    async with local_world(2) as nodes:
        waiting = asyncio.create_task(nodes[0].world.barrier())
        await asyncio.sleep(0.01)
        images = images_of(nodes)
        del images[1]
        (found,) = explain(images)
        assert (found.cause, found.culprits, found.waiting) == (HangCause.DEAD, (1,), (0,))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def test_a_job_that_goes_on_is_not_explained() -> None:
    async def healthy() -> None:
        async with local_world(WORLD) as nodes:
            await asyncio.gather(*(warm(node) for node in nodes))
            assert explain(images_of(nodes)) == []

    run_virtual(healthy())


def test_no_images_say_nothing() -> None:
    assert explain({}) == []
