"""Histograms of operations, read from rings whose records have known times."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterable
from zlib import crc32

import numpy as np
import pytest

from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind, EventState, RankIdentity, image_bytes
from asyncpar.observe.durations import BOUNDS, OperationTimes, cumulate
from asyncpar.observe.rank_view import _nodes, make_summary, watch_node
from asyncpar.observe.summary import DurationSummary
from asyncpar.testing import local_world

CAPACITY = 64


class Ring:
    """A ring whose events take the time that a test says."""

    def __init__(self) -> None:
        self._now = 100.0
        self._memory = mmap.mmap(-1, image_bytes(CAPACITY))
        self.start_node()

    def start_node(self) -> None:
        identity = RankIdentity(rank=0, size=1)
        self.recorder = Recorder(self._memory, identity, capacity=CAPACITY, clock=lambda: self._now)

    def begin(self, name: str, kind: EventKind = EventKind.COLLECTIVE) -> int:
        return self.recorder.begin(
            kind, self.recorder.operation(f"{name}(float32[8], sum)", "ring", crc32(name.encode()))
        )

    def end(self, ticket: int, seconds: float, state: EventState = EventState.COMPLETED) -> None:
        self._now += seconds
        self.recorder.end(ticket, state)

    def run(self, name: str, seconds: Iterable[float], kind: EventKind = EventKind.COLLECTIVE) -> None:
        for each in seconds:
            self.end(self.begin(name, kind), each)

    def watch(self) -> OperationTimes:
        return OperationTimes(CAPACITY, self.recorder.first)


def found(summaries: Iterable[DurationSummary]) -> dict[str, tuple[dict[float, int], float]]:
    """Return the buckets that have anything, by their upper bounds, and the sum, by name."""
    bounds = (*BOUNDS, float("inf"))
    return {
        one.name: ({bound: count for bound, count in zip(bounds, one.counts, strict=True) if count}, one.seconds)
        for one in summaries
    }


def test_operations_are_counted_in_the_bucket_of_their_time() -> None:
    ring = Ring()
    times = ring.watch()
    ring.run("all_reduce", [0.0, 0.0002, 0.03, 0.03, 7.0, 30.0])
    ring.run("barrier", [0.3])
    shown = found(times.add(ring.recorder.snapshot()))
    assert set(shown) == {"all_reduce", "barrier"}
    buckets, seconds = shown["all_reduce"]
    assert buckets == {0.0001: 1, 0.00025: 1, 0.05: 2, 10.0: 1, float("inf"): 1}
    assert seconds == pytest.approx(37.0602)
    assert shown["barrier"][0] == {0.5: 1}
    assert shown["barrier"][1] == pytest.approx(0.3)


def test_each_operation_counts_once_however_often_the_ring_is_looked_at_and_goes_round() -> None:
    ring = Ring()
    times = ring.watch()
    for turn in range(1, 12):
        ring.run("all_reduce", [0.01] * 50)
        for _ in range(3):
            (one,) = times.add(ring.recorder.snapshot())
        assert sum(one.counts) == 50 * turn
    assert one.seconds == pytest.approx(5.5)


def test_an_operation_counts_when_it_is_over_and_only_if_it_has_completed() -> None:
    ring = Ring()
    times = ring.watch()
    slow, failed = ring.begin("all_gather"), ring.begin("all_gather")
    ring.run("all_gather", [0.2])
    ring.end(failed, 0.1, EventState.FAILED)
    assert found(times.add(ring.recorder.snapshot()))["all_gather"][0] == {0.25: 1}
    ring.run("all_gather", [0.01] * (2 * CAPACITY))  # the ring goes round what is under way
    ring.end(slow, 3.0)
    assert found(times.add(ring.recorder.snapshot()))["all_gather"][0][5.0] == 1


@pytest.mark.parametrize("before", [5, CAPACITY, 2 * CAPACITY + 7])
def test_other_events_and_those_of_the_node_before_count_for_nothing(before: int) -> None:
    ring = Ring()
    ring.run("all_reduce", [0.1] * before)
    ring.recorder.close()
    ring.start_node()
    times = ring.watch()
    ring.run("load", [0.1], EventKind.SPAN)
    ring.run("recv", [0.1], EventKind.RECEIVE)
    assert times.add(ring.recorder.snapshot()) == ()
    ring.run("all_reduce", [0.1] * 3)
    (one,) = times.add(ring.recorder.snapshot())
    assert sum(one.counts) == 3


def test_buckets_are_cumulative_for_prometheus() -> None:
    assert cumulate((1, 0, 2)) == (1, 1, 3)
    assert list(BOUNDS) == sorted(BOUNDS)


async def test_the_summary_of_a_rank_has_its_operations() -> None:
    async with local_world(2) as nodes:
        node = nodes[0]
        forget = watch_node(node.links, node.actor_system, None)
        try:
            assert _nodes[-1].times.add(node.links.recorder.snapshot()) == ()
            for _ in range(3):
                await asyncio.gather(*(one.world.all_reduce(np.ones(4, np.float32)) for one in nodes))
            await asyncio.gather(*(one.world.barrier() for one in nodes))
            durations = make_summary().durations
        finally:
            forget()
    assert {one.name: sum(one.counts) for one in durations} == {"all_reduce": 3, "barrier": 1}
    assert all(one.seconds > 0.0 for one in durations)


async def test_a_node_starts_without_a_copy_of_its_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would take all pages of a ring in which nothing has been written."""

    def refuse(_: Recorder) -> bytes:
        raise AssertionError("the ring was copied")

    monkeypatch.setattr(Recorder, "snapshot", refuse)
    async with local_world(2) as nodes:
        await asyncio.gather(*(node.world.all_reduce(np.ones(3)) for node in nodes))
