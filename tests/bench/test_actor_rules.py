"""The rules by which actor libraries are measured, kept by a library that is a stand-in."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import pytest

from scripts.bench.peers import actor_rules
from scripts.bench.peers.actor_rules import (
    IN_FLIGHT,
    LEAST_CALLS,
    Array,
    Subject,
    expected,
    measure,
    resident_bytes,
    time_array,
    time_calls,
    time_concurrent,
    time_first,
    weigh_idle,
)

BUDGET = 0.002


class StandIn(Subject):
    """Answers at once, all right except for what is wrong on purpose."""

    def __init__(self, *, off_by: int = 0) -> None:
        self.off_by = off_by
        self.arrays: set[int] = set()
        self.idle = 0

    async def ask(self, number: int) -> int:
        return number + 1 + self.off_by

    async def take(self, array: Array) -> int:
        self.arrays.add(int(array[0]))
        return expected(array) + self.off_by

    async def ask_local(self, number: int) -> int:
        return number + 1

    async def spawn_idle(self, count: int) -> None:
        self.idle += count


def options(**changes: object) -> argparse.Namespace:
    given: dict[str, object] = {"figures": "ask", "sizes": "1000", "budget": BUDGET, "idle": 7, "first": 100}
    return argparse.Namespace(**(given | changes))


async def test_every_figure_is_taken_and_shown() -> None:
    records: list[dict[str, Any]] = []
    subject = StandIn()
    wanted = "ask,concurrent,concurrent 300,first,array,local,idle"
    await measure(subject, options(figures=wanted, sizes="2,1000"), records.append)
    names = [record["figure"] for record in records]
    assert names == ["ask", "concurrent", "concurrent 300", "first", "array 2", "array 1000", "local", "idle"]
    assert all(record["wrong"] == 0 for record in records)
    assert all(record["seconds"] > 0 for record in records[:-1])
    assert subject.idle == 7


async def test_what_a_library_has_not_is_left_out() -> None:
    class Remote(StandIn):
        has_local = has_idle = False

    records: list[dict[str, Any]] = []
    await measure(Remote(), options(figures="ask,local,idle"), records.append)
    assert [record["figure"] for record in records] == ["ask"]


@pytest.mark.parametrize("off_by", [1, -1])
async def test_wrong_answers_are_found_out(off_by: int) -> None:
    subject = StandIn(off_by=off_by)
    asked = await time_calls(subject.ask, lambda number: number + 1, BUDGET)
    assert isinstance(asked["calls"], int)
    assert isinstance(asked["wrong"], int)
    assert asked["wrong"] > asked["calls"] >= LEAST_CALLS
    assert (await time_concurrent(subject, BUDGET))["wrong"] == 3
    assert (await time_array(subject, 10, BUDGET))["wrong"] != 0


async def test_arrays_differ_from_call_to_call() -> None:
    subject = StandIn()
    await time_array(subject, 100, BUDGET)
    assert len(subject.arrays) >= LEAST_CALLS


async def test_a_hundred_calls_are_under_way() -> None:
    class Counting(StandIn):
        now = most = 0

        async def ask(self, number: int) -> int:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return number + 1

    subject = Counting()
    assert await subject.ask_many(1000) == 500_500
    assert subject.most == IN_FLIGHT
    assert await subject.ask_many(1000, 300) == 500_500
    assert subject.most == 300


async def test_first_calls_stand_beside_later_ones() -> None:
    class Warming(StandIn):
        calls = 0

        async def take(self, array: Array) -> int:
            self.calls += 1
            if self.calls == 1:
                await asyncio.sleep(0.02)
            return await super().take(array)

    record = await time_first(Warming(), 1000, BUDGET)
    assert record["wrong"] == 0
    assert isinstance(record["first"], list)
    assert record["first"][0] == record["seconds"] == max(record["first"]) >= 0.02
    assert isinstance(record["later"], float)
    assert record["later"] < 0.02
    assert (await time_first(StandIn(off_by=1), 1000, BUDGET))["wrong"] != 0


async def test_idle_actors_are_weighed_by_what_the_process_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = StandIn()
    monkeypatch.setattr(actor_rules, "resident_bytes", lambda: 1000 + 30 * subject.idle)
    record = await weigh_idle(subject, 5)
    assert record == {"bytes": 150, "resident": 1150, "actors": 5, "wrong": 0}


def test_the_memory_of_this_process_is_known() -> None:
    assert resident_bytes() > 10_000_000
