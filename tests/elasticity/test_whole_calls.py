"""A call of an elastic actor is done whole or not at all, wherever the world ends while it waits in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.elastic_actor import ElasticActor
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import AsyncparError, StaleGeneration
from asyncpar.hosts.messages import WorldChange
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.soak import chosen

TOTAL = 800
UNTIL = 14


class Bank(ElasticActor):
    """Two accounts, between which money is on its way for a while."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self.accounts = [TOTAL // 2, TOTAL // 2]
        self.done: list[int] = []
        self.seen = seen

    def state(self) -> object:
        return {"accounts": self.accounts, "done": self.done}

    def restore(self, state: Any) -> None:
        self.accounts, self.done = list(state["accounts"]), list(state["done"])

    async def on_world(self, change: WorldChange) -> None:
        self._note()
        self.accounts[0] -= 1
        await asyncio.sleep(0.002)
        self.accounts[1] += 1

    @ap.endpoint
    async def transfer(self, number: int, amount: int, seconds: float) -> int:
        self._note()
        self.accounts[0] -= amount
        await asyncio.sleep(seconds)
        self.accounts[1] += amount
        self.done.append(number)
        return number

    @ap.endpoint
    async def by_another(self, number: int, amount: int, seconds: float, other: str) -> int:
        """Ask another bank in the middle, whose rank may be lost."""
        self._note()
        self.accounts[0] -= amount
        await self.named(other).transfer(-number, amount, seconds)
        self.accounts[1] += amount
        self.done.append(number)
        return number

    @ap.endpoint
    async def clean_up(self, number: int, amount: int, seconds: float) -> int:
        """Try to save in the middle, when it is cut."""
        self._note()
        self.accounts[0] -= amount
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await self.save()
            raise
        self.accounts[1] += amount
        self.done.append(number)
        return number

    @ap.endpoint
    async def saving(self, number: int, amount: int, seconds: float) -> int:
        """Save by itself once all is done, and take some time before the answer."""
        self._note()
        self.accounts[0] -= amount
        await asyncio.sleep(seconds / 2)
        self.accounts[1] += amount
        self.done.append(number)
        await self.save()
        await asyncio.sleep(seconds / 2)
        return number

    @ap.endpoint
    async def read(self) -> tuple[list[int], list[int]]:
        self._note()
        return self.accounts, self.done

    def _note(self) -> None:
        self.seen.append((sum(self.accounts), len(self.done) - len(set(self.done))))


class Run:
    """Calls of all ranks, each with a number of its own, and how they ended."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: list[tuple[int, int]] = []
        self.answered: list[int] = []
        self.number = 0
        self.finals: list[tuple[list[int], list[int]]] = []

    async def call(self, banks: list[Any], *, in_time: float | None = None) -> None:
        self.number += 1
        number, bank = self.number, self.random.choice(banks)
        amount, seconds = self.random.randrange(1, 40), self.random.choice([0.001, 0.02, 0.2, 3.0])
        kinds = ["transfer", "clean_up", "saving"]
        if bank == banks[0]:  # the second asks nobody, or the two could wait for each other
            kinds.append("by_another")
        kind = self.random.choice(kinds)
        arguments = (number, amount, seconds, *([banks[1].name] if kind == "by_another" else []))
        async with asyncio.timeout(in_time):
            answer = await getattr(bank, kind)(*arguments)
        if bank == banks[0]:
            self.answered.append(answer)


def program(run: Run, save_every: int | None) -> Callable[[WorldSource], Any]:
    async def main(source: WorldSource) -> None:
        parameter = Parameter("w", np.zeros(4, np.float32))
        async with ap.elastic(portions=8, source=source) as job:
            banks = [
                job.actors.declare(name, Bank, run.seen, save_every=save_every, mirrors=2)
                for name in ("first", "second")
            ]
            state = job.state([parameter], Optimizer([parameter], SGD()))
            async for step in job.steps(state, until=UNTIL):
                async with step:
                    for portion in step.portions:
                        step.add(portion, {"w": np.ones(4, np.float32)})
                    if not step.is_replay:
                        with contextlib.suppress(TimeoutError):
                            await run.call(banks, in_time=run.random.choice([None, None, 0.1]))
                    await step.reduce()
            await read_all(job, banks, run)

    return main


async def read_all(job: ElasticJob, banks: list[Any], run: Run) -> None:
    """Read the accounts when no call is under way any more, unless this rank's world has ended before."""
    with contextlib.suppress(AsyncparError, StaleGeneration):
        async with asyncio.timeout(30.0):
            run.finals.append(await banks[0].read())


@pytest.mark.parametrize("save_every", [1, None])
@pytest.mark.parametrize("seed", range(chosen(2, soak=50)))
def test_transfers_that_are_cut_anywhere_keep_the_sum(seed: int, save_every: int | None) -> None:
    run = Run(seed)

    async def main() -> None:
        async with ElasticWorlds(4) as worlds:
            tasks = {f"m{n}": worlds.start(f"m{n}", program(run, save_every)) for n in range(4)}
            await worlds.formed(1)
            for number in range(4, 8):
                await asyncio.sleep(run.random.uniform(0.3, 2.0))
                running = [name for name in tasks if worlds.is_running(name)]
                if len(running) > 2:
                    end = run.random.choice([worlds.kill, worlds.kill, worlds.drain])
                    end(run.random.choice(running))
                tasks[f"m{number}"] = worlds.start(f"m{number}", program(run, save_every))
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            failures = [task.exception() for task in tasks.values() if not task.cancelled() and task.exception()]
            assert not failures, failures
            assert len(worlds.worlds) > 2

    run_virtual(main())
    assert {total for total, _ in run.seen} == {TOTAL}, "money is on its way only within a call"
    assert {twice for _, twice in run.seen} == {0}, "no call is done twice"
    assert run.finals
    assert len(run.seen) > 40
    if save_every == 1:
        _, done = run.finals[-1]
        assert set(run.answered) <= set(done), "what was answered is kept"
