"""States that are cut into parts, in simulations: the bits of one rank, or all who are left know what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.errors import StaleGeneration, StateLost
from asyncpar.testing import run_virtual
from asyncpar.testing.simulation import SimulationResult, explore
from tests.elasticity.pipeline_training import train_pipeline
from tests.elasticity.round_training import train_rounds
from tests.elasticity.sharded_training import train_sharded
from tests.soak import chosen

SEEDS = chosen(4, soak=500)
FAULTS = 2
KINDS = ("kill", "crash", "restart", "pause", "isolate", "reset", "half_open", "slow", "clock", "replay", "damage")

PROGRAMS: dict[str, Callable[[], Awaitable[Any]]] = {
    "zero1": lambda: train_sharded(None, zero=1, clip_norm=20.0),
    "zero2, topk": lambda: train_sharded(None, zero=2, codec="topk:0.1"),
    "zero3": lambda: train_sharded(None, zero=3),
    "codec": lambda: train_sharded(None, codec="int8", residual_codec="bf16"),
    "rounds": lambda: train_rounds(None),
    "pipeline": lambda: train_pipeline(None, stages=2),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_with_faults_come_to_the_same_as_runs_without(program: str) -> None:
    main = PROGRAMS[program]
    alone: Any = run_virtual(main())  # type: ignore[arg-type]
    ended = 0

    def check(result: SimulationResult) -> None:
        nonlocal ended
        for value in result.results.values():
            if value.is_drained:  # the job was complete before it had the state
                continue
            ended += 1
            assert value.digest == alone.digest
            if value.parameters:  # a newcomer may come too late for a step of its own
                assert value.parameters == alone.parameters

    explore(
        main,
        size=4,
        seeds=range(SEEDS // 6),
        elastic=True,
        faults=FAULTS,
        kinds=KINDS,
        check=check,
        expected=(StaleGeneration, StateLost),
    )
    assert ended >= SEEDS // 6


@pytest.mark.timeout(1800)
def test_operations_of_the_program_itself_end_with_the_world_and_not_the_job() -> None:
    """A rank whose block was ended cancels its operation: another may receive that before it receives the change."""

    async def main() -> list[float]:
        async with ap.elastic(portions=4) as job:
            state = job.state({}, sums=[])
            async for step in job.steps(state, until=6):
                async with step:
                    for portion in step.portions:
                        step.add(portion, [np.full(3, float(portion))])
                    total = np.zeros(1)
                    if not step.is_replay:
                        for _ in range(8):
                            total = await step.world.all_reduce(np.array([float(len(step.portions))]))
                            await asyncio.sleep(0.005)
                        assert total[0] == 4.0
                    state["sums"].append(float((await step.reduce())[0][0]))
            return [] if job.is_drained else list(state["sums"])

    def check(result: SimulationResult) -> None:
        assert all(sums in ([6.0] * 6, []) for sums in result.results.values())

    explore(main, size=4, seeds=range(SEEDS // 2), elastic=True, faults=FAULTS, kinds=KINDS, check=check)
