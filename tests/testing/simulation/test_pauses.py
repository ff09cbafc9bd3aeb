"""A pause is not a death: jobs under a siege of pauses and cuts, with the agents of production."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpar.testing.simulation import Fault, SimulationFailed, simulate
from tests.products import sampled
from tests.soak import chosen, is_soak
from tests.testing.simulation.pauses import FIRST_AT, LEAVING, MISSING, Siege, besiege, besieged, without

SEEDS = chosen(5, soak=500)
"""How many seeds; all that was promised: 10000."""
LIMIT = 500
MOST_SECONDS = 2.0
"""Virtual seconds in which agents end that all leave."""
FIRST = {
    "addresses-once": 163,
    "last-holders": 1,
    "parked-hosts-wait": 5,
    "leaving-is-a-fact": 57,
    "leavers-keep-nothing": 17,
}
"""Seeds that are tried first, because they were found before; any other would do."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_pauses_and_cuts_end_no_rank_lose_no_step_and_stop_nothing_for_long(size: int) -> None:
    for seed in range(SEEDS // 3):
        besiege(seed, Siege(size=size))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [3, 4])
def test_hosts_that_leave_take_neither_the_state_nor_the_quorum_with_them(size: int) -> None:
    for seed in range(SEEDS // 3):
        besiege(seed, replace(LEAVING, size=size))


def test_a_rank_that_never_comes_into_a_world_answers_those_that_dial_it() -> None:
    besiege(2820)  # found among ten thousand: the dials waited for ever, and were left behind


@pytest.mark.parametrize(("size", "apart", "witnesses"), sampled([1, 2, 3, 4], [0.0, 0.01, 0.2], [0, 1]))
def test_agents_that_all_get_sigterm_end_in_order(size: int, apart: float, witnesses: int) -> None:
    faults = [Fault(at=FIRST_AT + node * apart, kind="leave", node=node) for node in range(size)]
    result = simulate(besieged, size=size, faults=faults, elastic=True, witnesses=witnesses)
    assert result.errors == {}
    assert set(result.results.values()) == {None}, "no rank has come to the end, and none has failed"
    worlds = {entry.content[1] for entry in result.notes if entry.content[0] == "changed"}
    assert len(worlds) <= (size if apart else 1), "each may leave by itself, or all together"
    assert result.seconds < FIRST_AT + size * apart + MOST_SECONDS


def seeds_until_found(name: str) -> int:
    """Return how many seeds it takes to miss the safeguard; more than ``LIMIT`` if it is not missed."""
    order = range(LIMIT) if is_soak() else [FIRST.get(name, 0), *range(LIMIT)]
    with without(name):
        for count, seed in enumerate(order, start=1):
            try:
                besiege(seed, MISSING[name].siege)
            except SimulationFailed:
                return count
    return LIMIT + 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MISSING)
def test_a_safeguard_that_is_missing_is_found(name: str) -> None:
    assert MISSING[name].prevents
    assert seeds_until_found(name) <= LIMIT
    besiege(FIRST.get(name, 0), MISSING[name].siege)
