"""A pause is not a death: jobs under a siege of pauses and cuts, with the agents of production."""

from __future__ import annotations

import os

import pytest

from asyncpar.testing.simulation import SimulationFailed
from tests.products import IS_WHOLE
from tests.testing.simulation.pauses import MISSING, Siege, besiege, without

SEEDS = int(os.environ.get("ASYNCPAR_SIMULATION_SEEDS", "24"))
"""How many seeds; all that was promised: 10000."""
LIMIT = 500
FIRST = {"addresses-once": 163, "last-holders": 1, "parked-hosts-wait": 5}
"""Seeds that are tried first, because they were found before; any other would do."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_pauses_and_cuts_end_no_rank_lose_no_step_and_stop_nothing_for_long(size: int) -> None:
    for seed in range(SEEDS // 3):
        besiege(seed, Siege(size=size))


def seeds_until_found(name: str) -> int:
    """Return how many seeds it takes to miss the safeguard; more than ``LIMIT`` if it is not missed."""
    order = range(LIMIT) if IS_WHOLE else [FIRST.get(name, 0), *range(LIMIT)]
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
