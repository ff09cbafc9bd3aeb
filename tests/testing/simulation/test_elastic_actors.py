"""Actors of elastic jobs under every kind of fault: no number is given twice, and none is lost that was given."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.elastic_actor import ElasticActor
from asyncpar.errors import PeerError, StaleGeneration
from asyncpar.hosts.messages import WorldChange
from asyncpar.testing.simulation import Fault, SimulationResult, explore, note, simulate
from asyncpar.testing.simulation.faults import KINDS
from tests.soak import chosen

SEEDS = chosen(4, soak=500)
UNTIL = 6


class Numbers(ElasticActor):
    """Gives out numbers, and notes where it lives and which worlds are announced to it."""

    def __init__(self) -> None:
        self.given = 0

    async def on_start(self) -> None:
        note(("starts", self.given))

    def state(self) -> object:
        return self.given

    def restore(self, state: Any) -> None:
        self.given = state

    async def on_world(self, change: WorldChange) -> None:
        note(("world", change.generation))

    @ap.endpoint
    async def draw(self) -> int:
        self.given += 1
        return self.given


async def draws() -> int | None:
    """Train, and draw a number in each step, and between steps by a task beside them.

    Returns None where the job was complete before this rank had the state.
    """

    async def beside(numbers: Any) -> None:
        while True:
            try:
                note(("given", await numbers.draw()))
            except (PeerError, StaleGeneration) as error:
                note(("failed", type(error).__name__))
            await asyncio.sleep(0.007)

    total = np.zeros(1)
    async with ap.elastic(portions=4, seed=5) as job:
        numbers = job.actors.declare("numbers", Numbers, save_every=1, mirrors=2)
        state = job.state({"total": total})
        drawing = asyncio.ensure_future(beside(numbers))
        try:
            async for step in job.steps(state, until=UNTIL):
                async with step:
                    for portion in step.portions:
                        step.add(portion, {"total": np.array([float(1 << portion)])})
                        await asyncio.sleep(0.001)
                    total += (await step.reduce("sum"))["total"]
                    if not step.is_replay:
                        try:
                            note(("given", await numbers.draw()))
                        except BaseException as error:
                            note(("failed", type(error).__name__))
                            raise
        finally:
            drawing.cancel()
            await asyncio.wait({drawing})
        if job.is_drained:
            return None
    return int(total[0])


def check(result: SimulationResult) -> None:
    """Numbers are given once; a caller is notified of what it did not get."""
    given = [entry.content[1] for entry in result.notes if entry.content[0] == "given"]
    assert len(set(given)) == len(given), sorted(number for number in given if given.count(number) > 1)
    assert given
    for value in result.results.values():
        assert value in (UNTIL * 15, None)
    lives: dict[tuple[int, int], list[int]] = {}
    for entry in result.notes:
        if entry.content[0] == "world":
            lives.setdefault((entry.node, entry.incarnation), []).append(entry.content[1])
    for received in lives.values():
        assert received == sorted(set(received)), "a world is announced once, in order"


@pytest.mark.timeout(1800)
def test_no_number_is_given_twice_under_every_kind_of_fault() -> None:
    kinds = [kind for kind in KINDS if kind != "disk"]  # nothing of the job is on a disk
    explore(draws, size=3, seeds=range(SEEDS), elastic=True, faults=2, kinds=kinds, check=check)


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        pytest.param(
            22, [Fault(at=0.146, kind="replay", node=2, peer=1)], id="an actor reports to its caller a lost mirror"
        ),
        pytest.param(
            6,
            [Fault(at=0.045, kind="damage", node=2, peer=1), Fault(at=0.05, kind="isolate", node=0, seconds=0.02)],
            id="an actor reports to its caller a damaged link to a mirror",
        ),
        pytest.param(148, [Fault(at=0.14, kind="crash", node=1, seconds=2.8)], id="an actor saves as its node closes"),
    ],
)
def test_what_once_hung_or_ended_the_job(seed: int, faults: list[Fault]) -> None:
    simulate(draws, size=3, seed=seed, elastic=True, faults=faults, check=check)
