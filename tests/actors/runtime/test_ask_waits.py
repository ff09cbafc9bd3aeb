"""An ask that waits for long is reported once, with actor, rank and what that does; a deadlock with its cycle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ask_waits import WaitChase
from asyncpar.actors.runtime.message import AskAnswer, AskLink
from asyncpar.testing.loop import run_virtual
from tests.actors.runtime.conftest import OpenRanks, Ranks


class Worker(Actor):
    @endpoint
    async def work(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    @endpoint
    async def forward(self, names: list[Any]) -> str:
        """Let the first of ``names`` (rank and name) do it, which gets the others."""
        rank, name = names[0]
        other = self.system.ref(name, rank=rank, actor_class=Worker)
        await asyncio.sleep(1.0)
        result: str = await (other.forward(names[1:]) if len(names) > 1 else other.work(60.0))
        return result

    @endpoint
    async def items(self) -> AsyncIterator[int]:
        await asyncio.sleep(60.0)
        yield 1

    def __init__(self, system: Any = None) -> None:
        self.system = system


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "asyncpar.runtime"]


async def spawn_workers(ranks: Ranks) -> list[Worker]:
    return [await system.spawn(Worker, system, name=f"w{rank}") for rank, system in enumerate(ranks.systems)]


@pytest.mark.parametrize("home", [0, 1])
def test_a_long_ask_is_reported_once_with_the_place_of_its_actor_and_when_it_goes_on(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture, home: int
) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            await spawn_workers(ranks)
            ref = ranks.systems[0].ref(f"w{home}", rank=home, actor_class=Worker)
            assert await ref.work(1.0) == "done"
            await asyncio.gather(*(ref.work(40.0) for _ in range(3)))

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    first, second = logged(caplog)
    assert first.startswith(f"rank 0: work() of actor 'w{home}' (called at test_ask_waits.py:")
    assert f" s for actor 'w{home}' on rank {home} (localhost), which sleeps at test_ask_waits.py:" in first
    assert 10.0 <= float(first.partition("has waited ")[2].partition(" s")[0]) <= 12.5
    assert second == f"rank 0: work() of actor 'w{home}' goes on"


def test_a_chain_of_asks_names_the_actor_at_its_end(open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await spawn_workers(ranks)
            first = ranks.systems[0].ref("w1", rank=1, actor_class=Worker)
            await first.forward([(2, "w2")])

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    [warning] = [
        text for text in logged(caplog) if text.startswith("rank 0: forward() of actor 'w1'") and "waited" in text
    ]
    assert "for actor 'w2' on rank 2 (localhost), which sleeps at test_ask_waits.py:" in warning


def test_a_cycle_of_asks_is_named_alike_on_all_its_ranks(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await spawn_workers(ranks)
            first = ranks.systems[0].ref("w0", rank=0, actor_class=Worker)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(40.0):
                    await first.forward([(1, "w1"), (2, "w2"), (0, "w0")])

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    cycles = {text.partition("; deadlock: ")[2] for text in logged(caplog) if "deadlock" in text}
    assert len(cycles) == 1, logged(caplog)
    [cycle] = cycles
    steps = [step.partition(" at ")[0] for step in cycle.split(", ")]
    assert steps == [
        "actor 'w0' on rank 0 waits for actor 'w1' on rank 1 in forward()",
        "actor 'w1' on rank 1 waits for actor 'w2' on rank 2 in forward()",
        "actor 'w2' on rank 2 waits for actor 'w0' on rank 0 in work()",
    ]
    assert sum("waited" in text for text in logged(caplog)) == 4  # the program of rank 0, and one wait of each actor


def test_an_ask_behind_a_busy_actor_says_what_that_is_busy_with(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await spawn_workers(ranks)
            two = ranks.systems[2].ref("w1", rank=1, actor_class=Worker)
            busy = asyncio.ensure_future(two.forward([(2, "w2")]))
            await asyncio.sleep(0.5)
            await ranks.systems[0].ref("w1", rank=1, actor_class=Worker).work(0.0)
            await busy

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    [warning] = [
        text for text in logged(caplog) if text.startswith("rank 0: work() of actor 'w1'") and "waited" in text
    ]
    assert "for actor 'w2' on rank 2 (localhost), which sleeps at" in warning  # it is what 'w1' waits for


def test_streams_and_short_asks_are_not_reported(open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            await spawn_workers(ranks)
            ref = ranks.systems[0].ref("w1", rank=1, actor_class=Worker)
            for _ in range(10):
                await ref.work(9.0)
            assert [item async for item in ref.items.stream()] == [1]
            ranks.links[0].observer.warn_after = None
            await ref.work(100.0)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert logged(caplog) == []


def test_a_rank_that_does_not_answer_is_reported_as_silent(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_ranks(2) as ranks:
            await spawn_workers(ranks)
            ref = ranks.systems[0].ref("w1", rank=1, actor_class=Worker)
            asking = asyncio.ensure_future(ref.work(60.0))
            await asyncio.sleep(1.0)
            ranks.links[1].on_message = lambda rank, payload, release: release()
            await asyncio.sleep(20.0)
            asking.cancel()
            await asyncio.wait({asking})

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    [warning] = [text for text in logged(caplog) if "has waited" in text]
    assert "for actor 'w1' on rank 1 (localhost), which has not answered for 0.5 s" in warning


def test_a_chase_ends_where_an_actor_works_for_a_tell_that_asks_back() -> None:
    chase = WaitChase(0, "a", AskLink(1, 7, "b", "go"))
    assert chase.receive(AskAnswer(0, "", 0, 7, AskLink(0, 3, "a", "back")))
    assert chase.culprit == (0, "a")
    assert not chase.receive(AskAnswer(0, "", None, None, AskLink(1, 7, "b", "go")))
    assert [(edge.actor, edge.awaited_actor) for edge in chase.cycle] == [("a", "b"), ("b", "a")]


def test_a_chase_that_leads_into_a_cycle_names_only_the_cycle() -> None:
    chase = WaitChase(5, "", AskLink(0, 1, "a", "go"))
    assert chase.receive(AskAnswer(0, "", 9, 4, AskLink(1, 2, "b", "go")))  # it works for another call than ours
    assert chase.receive(AskAnswer(0, "", 0, 2, AskLink(0, 3, "a", "go")))
    assert not chase.receive(AskAnswer(0, "", 9, 4, AskLink(1, 2, "b", "go")))
    assert [(edge.actor, edge.awaited_actor) for edge in chase.cycle] == [("a", "b"), ("b", "a")]
