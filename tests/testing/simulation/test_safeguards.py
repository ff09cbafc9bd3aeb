"""Each safeguard that is taken away is missed by a simulation, within 500 seeds."""

from __future__ import annotations

import itertools

import pytest

import asyncpar as ap
from asyncpar.net.transport.link import Link
from asyncpar.testing import simulate
from asyncpar.testing.simulation import SAFEGUARDS, SimulationFailed, without
from tests.soak import is_soak
from tests.testing.simulation.scenarios import SCENARIOS, Scenario

LIMIT = 500
FIRST = {
    "generation-check": 54,
    "frame-numbers": 6,
    "payload-checksums": 76,
    "header-checksums": 8,
    "leaving-is-announced": 1,
    "fresh-segments": 1,
    "dials-have-a-deadline": 27,
    "child-groups-are-revoked": 10,
    "proposals-are-inherited": 10,
    "arrival-is-taken-back": 43,
    "newcomers-are-caught-up": 23,
    "history-not-popularity": 46,
    "commit-lease": 4,
    "quarrels-end": 5,
    "vote-of-all": 46,
    "roll-forward": 46,
    "forward-if-all-prepared": 46,
    "revoke-interrupts": 8,
    "abort-restores-values": 1,
    "abort-restores-arrays": 46,
    "parts-are-mirrored": 2,
    "residuals-are-rekeyed": 2,
    "lent-arrays-stay": 6,
}
"""Seeds that are tried first, because they were found before; any other would do.

Safeguards that share a scenario have one seed where there is one: with all of them in place it runs once.
"""

# What others guard against, and has no row of its own here:
# - A quorum that was not reached is reported to those who wait for it.  Nobody waits for the answer of one: hosts that
#   reach none park by their own clocks ("parking", "lease-margin" in tests/launch/agents/safeguards.py).  The end of a
#   world is announced twice, by the director and by the links of those who leave it; who receives it:
#   "revoke-interrupts".
# - Heartbeats that do not come are acted on.  Between ranks the network ends links that are silent, here as elsewhere;
#   between agents it is "silence" in tests/launch/agents/safeguards.py.
# - A start of a process does not pass for the one before it.  Members are starts, by names that are never used again:
#   "incarnations" in tests/launch/agents/safeguards.py; ranks of a new world have its number: "generation-check".
# - A session of an earlier start is dropped.  Messages of agents name both starts, and those of a former one count for
#   nobody, so a session that goes on only delays the news that its agent is gone; between ranks a session is a lane of
#   one generation.  A newcomer that begins anew drops what came before: "arrival-is-taken-back".


def run(scenario: Scenario, seed: int) -> None:
    drawn = {"faults": scenario.faults, "kinds": scenario.kinds} if scenario.faults else {}
    simulate(
        scenario.main,
        size=scenario.size,
        seed=seed,
        elastic=scenario.elastic,
        check=scenario.check,
        shrinks=False,
        **drawn,  # type: ignore[arg-type]
        **scenario.settings,
    )


def fails(name: str, seed: int) -> bool:
    try:
        run(SCENARIOS[name], seed)
    except SimulationFailed:
        return True
    return False


_right: set[tuple[int, int]] = set()
"""Scenarios, by their places in memory, and seeds with which they were right."""


def is_right(name: str, seed: int) -> bool:
    """Run with all safeguards; a scenario that several of them have was seen before."""
    run_before = id(SCENARIOS[name]), seed
    if run_before not in _right and not fails(name, seed):
        _right.add(run_before)
    return run_before in _right


def seeds_until_found(name: str) -> int:
    """Return how many seeds it takes to miss the safeguard; more than ``LIMIT`` if it is not missed.

    A seed that fails with the safeguard in place, too, shows nothing of it.
    """
    order = range(LIMIT) if is_soak() else itertools.chain([FIRST.get(name, 0)], range(LIMIT))
    for count, seed in enumerate(order, start=1):
        with without(name):
            is_missed = fails(name, seed)
        if is_missed and is_right(name, seed):
            return count
    return LIMIT + 1


def test_every_safeguard_has_a_scenario_and_a_purpose() -> None:
    assert SCENARIOS.keys() == SAFEGUARDS.keys()
    assert all(safeguard.prevents for safeguard in SAFEGUARDS.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_a_safeguard_that_is_missing_is_found(name: str) -> None:
    assert seeds_until_found(name) <= LIMIT


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_with_the_safeguard_the_same_runs_are_right(name: str) -> None:
    for seed in range(200):
        run(SCENARIOS[name], seed)


def test_safeguards_are_back_afterwards() -> None:
    lend = Link.lend
    with without("generation-check"):
        assert Link.lend is not lend
    assert Link.lend is lend


def test_unknown_safeguards_are_refused() -> None:
    with (
        pytest.raises(ap.UsageError, match=r"without: expected some of generation-check, .*, got 'luck'"),
        without("luck"),
    ):
        pass
