"""A node shows its own program what it does: a summary, and events as they end; each of several nodes its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.core.observe.recorder import open_recorder
from asyncpar.core.observe.records import EventKind, RankIdentity
from asyncpar.node import Node
from asyncpar.observe import Event, RankSummary
from asyncpar.observe.node_observer import EndedEvents
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world


async def test_each_of_several_nodes_reports_itself() -> None:
    async with local_world(3) as nodes:
        waiting = [asyncio.create_task(node.world.barrier()) for node in nodes[:2]]
        for _ in range(20):
            await asyncio.sleep(0)
        first, second, third = (node.observe.status() for node in nodes)
        assert [each.rank for each in (first, second, third)] == [0, 1, 2]
        assert [len(each.operations) for each in (first, second, third)] == [1, 1, 0]
        assert first.longest is not None
        assert first.longest.label == "barrier #1"
        assert 2 in first.longest.waits_for
        assert (first.world_size, first.rss > 0, first.blocked) == (3, True, None)
        await asyncio.gather(*waiting, nodes[2].world.barrier())
        assert nodes[0].observe.status().operations == ()


def test_in_virtual_time_a_status_is_the_same_in_every_run() -> None:
    async def main() -> list[RankSummary]:
        async with local_world(2) as nodes:
            waiting = asyncio.create_task(nodes[0].world.all_reduce(np.zeros(4, np.float32)))
            await asyncio.sleep(5.0)
            reported = [node.observe.status() for node in nodes]
            await asyncio.gather(waiting, nodes[1].world.all_reduce(np.zeros(4, np.float32)))
            return reported

    first, second = run_virtual(main()), run_virtual(main())
    assert first == second
    assert first[0].time == 5.0
    assert first[0].longest is not None
    assert first[0].longest.seconds == 5.0


async def follow(node: Node, into: list[Event]) -> None:
    into.extend([event async for event in node.observe.events(every=1.0)])


def test_events_come_as_they_end_until_the_node_stops() -> None:
    seen: tuple[list[Event], list[Event]] = ([], [])

    async def main() -> None:
        async with local_world(2) as nodes:
            with nodes[0].span("before"):
                await asyncio.sleep(1.0)
            with nodes[0].span("long"):
                following = [asyncio.create_task(follow(node, into)) for node, into in zip(nodes, seen, strict=True)]
                early = nodes[0].observe.events(every=1.0)
                await asyncio.sleep(1.5)
                await asyncio.gather(*(node.world.barrier() for node in nodes))
                assert (await anext(early)).name == "barrier"
            with nodes[1].span("last"):
                pass
        await asyncio.gather(*following)

    run_virtual(main())
    assert [event.name for event in seen[0] if event.kind.name != "WORLD"] == ["barrier", "long"]
    assert [event.name for event in seen[1] if event.kind.name != "WORLD"] == ["barrier", "last"]
    assert all(event.is_over for events in seen for event in events)


def test_thousands_of_events_come_once_each_whatever_goes_on_meanwhile() -> None:
    seen: list[Event] = []

    async def main() -> None:
        async with local_world(1) as (node,):
            events = node.observe.events(every=1.0)
            with node.span("whole"):
                following = asyncio.create_task(collect(events))
                for step in range(10):
                    for _ in range(1000):
                        with node.span("step", number=step):
                            pass
                    await asyncio.sleep(1.0)
        seen.extend(await following)

    async def collect(events: AsyncIterator[Event]) -> list[Event]:
        return [event async for event in events]

    run_virtual(main())
    tickets = [event.ticket for event in seen if event.name in ("step", "whole")]
    assert len(tickets) == len(set(tickets)) == 10_001


def test_events_that_others_have_overwritten_before_an_inspection_are_counted_as_lost() -> None:
    recorder = open_recorder(RankIdentity(rank=0, size=1))
    ended, step = EndedEvents(recorder), recorder.name("step")

    def take_steps(count: int) -> int:
        for _ in range(count):
            recorder.end(recorder.begin(EventKind.SPAN, step))
        return len(ended.take())

    assert (take_steps(4096), ended.lost) == (4096, 0)
    assert (take_steps(4100), ended.lost) == (4096, 4)
    long = [recorder.begin(EventKind.SPAN, step) for _ in range(3)]
    assert (take_steps(10), ended.lost) == (10, 4)
    assert (take_steps(3 * 4096), ended.lost) == (4093, 4 + 3 * 4096 - 4093), "places of those that go on are no events"
    for ticket in long:
        recorder.end(ticket)
    assert (take_steps(0), ended.lost) == (3, 4 + 3 * 4096 - 4093)
    evicted = [recorder.begin(EventKind.SPAN, step) for _ in range(4096)]
    assert (take_steps(0), take_steps(1), ended.lost) == (0, 1, 4 + 3 * 4096 - 4093 + 1)
    for ticket in evicted:
        recorder.end(ticket)
    assert (take_steps(0), ended.lost) == (4095, 4 + 3 * 4096 - 4093 + 1)


def test_a_stream_of_events_says_how_many_are_missing() -> None:
    async def main() -> tuple[int, int]:
        async with local_world(1) as (node,):
            events = node.observe.events(every=1.0)
            for _ in range(5000):
                with node.span("step"):
                    pass
            assert events.lost == 0, "nothing was read so far"
            first = await anext(events)
            assert first.name == "step"
            return events.lost, first.ticket

    lost, first = run_virtual(main())
    assert 900 < lost <= first


async def test_inspections_that_come_too_often_are_refused() -> None:
    async with local_world(1) as (node,):
        with pytest.raises(ap.UsageError, match=r"every: expected at least 0\.01 s, got 0"):
            node.observe.events(every=0.0)
