"""The test that a failed simulation prints fails as the simulation did; so does its seed alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.testing.simulation import (
    Conditions,
    Fault,
    SimulationFailed,
    SimulationResult,
    explore,
    simulate,
    without,
)
from tests.soak import chosen
from tests.testing.simulation.scenarios import SCENARIOS
from tests.testing.simulation.test_safeguards import FIRST


async def barriers(node: ap.Node) -> int:
    for _ in range(60):
        await node.world.barrier()
    return node.rank


async def unhappy(node: ap.Node) -> None:
    await node.world.barrier()
    raise ZeroDivisionError("planted")


def unharmed(result: SimulationResult) -> None:
    assert not result.errors, "it is not meant to bear any fault"


def impossible(result: SimulationResult) -> None:
    assert result.events < 0, "nothing is ever so"


def run_printed(failed: SimulationFailed) -> SimulationFailed:
    """Execute the printed text as a program, and its test; return how it fails."""
    text = str(failed)
    printed = text[text.index("import asyncpar as ap") :]
    assert printed == failed.as_test()
    scope: dict[str, Any] = {}
    exec(compile(printed, "printed", "exec"), scope)
    with pytest.raises(SimulationFailed) as again:
        scope[f"test_seed_{failed.seed}"]()
    return again.value


def assert_same(again: SimulationFailed, failed: SimulationFailed) -> None:
    assert again.trace_hash == failed.trace_hash
    assert set(again.faults) == set(failed.faults)
    assert type(again.cause) is type(failed.cause)
    assert str(again.cause).splitlines()[0] == str(failed.cause).splitlines()[0]


CASES: dict[str, dict[str, Any]] = {
    "a check": {"main": barriers, "check": impossible},
    "a check, with faults": {"main": barriers, "check": unharmed, "faults": 6},
    "an error": {"main": unhappy, "size": 3},
    "an error that is none of those expected": {"main": unhappy, "expected": (KeyError, ap.PeerLost)},
    "conditions": {"main": barriers, "check": impossible, "conditions": Conditions(latency=0.01)},
    "a core": {"main": barriers, "check": unharmed, "faults": 6, "core": 2},
    "a bound": {"main": barriers, "faults": [Fault(at=0.001, kind="pause", node=1, seconds=5.0)], "bound": 0.001},
    "a pin": {"main": barriers, "check": impossible, "pin": "ring"},
    "an elastic program": {"main": SCENARIOS["commit-lease"].main, "elastic": True, "check": impossible},
    "an elastic program, with faults": {
        "main": SCENARIOS["commit-lease"].main,
        "elastic": True,
        "check": impossible,
        "faults": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_printed_test_and_the_seed_alone_fail_as_the_simulation_did(name: str) -> None:
    with pytest.raises(SimulationFailed) as caught:
        explore(seeds=itertools.count(3), **CASES[name])
    assert_same(run_printed(caught.value), caught.value)
    with pytest.raises(SimulationFailed) as alone:
        simulate(seed=caught.value.seed, **CASES[name])
    assert_same(alone.value, caught.value)


@pytest.mark.parametrize("name", chosen(["vote-of-all"], soak=["vote-of-all", "fresh-segments", "generation-check"]))
def test_the_printed_test_has_the_safeguards_that_were_taken_away(name: str) -> None:
    scenario = SCENARIOS[name]
    drawn: dict[str, Any] = {"faults": scenario.faults, "kinds": scenario.kinds} if scenario.faults else {}
    with without(name), pytest.raises(SimulationFailed) as caught:
        explore(
            scenario.main,
            size=scenario.size,
            seeds=itertools.chain([FIRST[name]], range(500)),
            elastic=scenario.elastic,
            check=scenario.check,
            **drawn,
            **scenario.settings,
        )
    assert_same(run_printed(caught.value), caught.value)
