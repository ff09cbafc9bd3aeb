"""Receives of what may never come are no waits: while a service beside a program is idle, none of its is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest

from asyncpar.errors import PeerTimeout
from asyncpar.nn import Parameter
from asyncpar.node import Node
from asyncpar.observe.explain import explain
from asyncpar.observe.holdups import describe_holdups, find_waits
from asyncpar.observe.image import read_image
from asyncpar.observe.summary import HostSummary, JobSummary, RankReport
from asyncpar.parallel.clock import StalenessClock
from asyncpar.parallel.exchange import UpdateExchange
from asyncpar.parallel.update import AsyncUpdate, UpdateLayout
from asyncpar.pipeline.alarm import StepAlarm
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world

LONG = 40.0
"""Seconds of virtual time, far more than any wait takes to be reported."""

Service = Callable[[Node], AbstractAsyncContextManager[object]]


@asynccontextmanager
async def alarm(node: Node) -> AsyncIterator[StepAlarm]:
    """The alarm of pipelines, coordinators and trainers, after one block."""
    one = StepAlarm(node.world)
    try:
        async with one.watch():
            await one.exchange("what", node.rank, one.ranks)
        yield one
    finally:
        await one.close()


@asynccontextmanager
async def exchange(node: Node) -> AsyncIterator[None]:
    """The exchange of updates between ranks that do not wait for each other, after one of them."""
    layout = UpdateLayout([Parameter("w", np.zeros(7))])
    group = node.world.subgroup(range(node.size), name="updates")
    assert group is not None
    one = UpdateExchange(group, layout, StalenessClock(rank=node.rank, size=node.size, max_staleness=3))
    await one.start()
    try:
        await one.begin_step()
        one.publish(AsyncUpdate(layout))
        await one.settle()
        await group.barrier()
        yield
    finally:
        await one.close(failed=False)


def job_of(nodes: tuple[Node, ...]) -> JobSummary:
    reports = tuple(
        RankReport(rank=node.rank, host="here", pid=1, summary=node.observe.status(), phase="member") for node in nodes
    )
    return JobSummary(job="test", pid=1, time=0.0, hosts=(HostSummary(host="here", ranks=reports),))


def reported_waits(nodes: tuple[Node, ...]) -> dict[int, str]:
    """Return what the ranks have reported to their launcher as their waits, by rank."""
    return {node.rank: str(notice) for node in nodes for notice in node.links.observer._waiting.values()}  # noqa: SLF001


@pytest.mark.parametrize("service", [alarm, exchange])
def test_an_idle_service_is_seen_nowhere(service: Service) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            done = asyncio.Event()

            async def run(node: Node) -> None:
                async with service(node):
                    await done.wait()

            tasks = [asyncio.create_task(run(node)) for node in nodes]
            await asyncio.sleep(LONG)
            images = {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}
            assert [node.observe.status().operations for node in nodes] == [(), (), ()]
            assert [event for image in images.values() for event in image.pending] == []
            assert (describe_holdups(job_of(nodes)), explain(images), reported_waits(nodes)) == ([], [], {})
            assert [node.world.describe_waits() for node in nodes] == [[], [], []]
            done.set()
            await asyncio.gather(*tasks)

    run_virtual(main())


@pytest.mark.parametrize("service", [alarm, exchange])
def test_the_wait_beside_a_service_is_the_one_that_is_reported(service: Service) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            errors: list[PeerTimeout] = []
            for node in nodes:
                node.world.timeout = LONG

            async def run(node: Node) -> None:
                async with service(node):
                    if node.rank == 2:
                        await asyncio.sleep(2 * LONG)
                        return
                    with pytest.raises(PeerTimeout) as caught:
                        await node.world.recv(2)
                    errors.append(caught.value)
                    await asyncio.sleep(LONG)

            tasks = [asyncio.create_task(run(node)) for node in nodes]
            await asyncio.sleep(LONG / 2)
            waits = find_waits(job_of(nodes))
            assert {rank: (wait.operation, wait.culprit) for rank, wait in waits.items()} == {
                0: ("recv from rank 2 (tag 0)", 2),
                1: ("recv from rank 2 (tag 0)", 2),
            }
            assert {rank: text.partition(" (called at")[0] for rank, text in reported_waits(nodes).items()} == {
                0: "recv from rank 2 (tag 0)",
                1: "recv from rank 2 (tag 0)",
            }
            await asyncio.gather(*tasks)
            assert [error.rank for error in errors] == [2, 2]
            assert not any("any rank" in str(error) for error in errors)

    run_virtual(main())


def test_a_wait_for_a_certain_rank_comes_before_a_receive_from_any() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            serving = [asyncio.create_task(node.world.recv_any(tag=5)) for node in nodes[:2]]
            await asyncio.sleep(1.0)
            waiting = [asyncio.create_task(node.world.barrier()) for node in nodes[:2]]
            await asyncio.sleep(LONG)
            [sentence] = describe_holdups(job_of(nodes))
            assert sentence.startswith("ranks 0, 1 wait for rank 2 (here), ")
            assert "barrier #1" in sentence
            assert all(node.observe.status().operations[0].label == "barrier #1" for node in nodes[:2])
            await asyncio.gather(*waiting, nodes[2].world.barrier())
            await asyncio.gather(*(nodes[2].world.send(np.zeros(1), node.rank, tag=5) for node in nodes[:2]))
            await asyncio.gather(*serving)

    run_virtual(main())
