"""Elastic jobs in simulations: runs under faults end with the bits of a run without."""

from __future__ import annotations

import pytest

import asyncpar as ap
from asyncpar.testing import run_virtual, simulate
from asyncpar.testing.simulation import Conditions, Fault, SimulationResult, explore
from tests.elasticity.training import Result, check_equal, train
from tests.soak import chosen
from tests.testing.simulation.programs import UNTIL, bits, check_bits
from tests.testing.simulation.scenarios import check_prompt_bits

SEEDS = chosen(9, soak=1000)

ELASTIC = (
    *("kill", "crash", "restart", "pause", "isolate", "reset", "half_open", "slow", "clock", "replay", "damage"),
    *("one_way", "silence"),
)


def test_without_faults_all_worlds_come_to_the_same() -> None:
    ends = set()
    for size in (1, 2, 3, 5, 8):
        result = simulate(bits, size=size, elastic=True, check=check_bits)
        assert len(result.results) == size
        ends |= set(result.results.values())
    assert len(ends) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_runs_with_faults_come_to_the_same_as_runs_without(size: int) -> None:
    ended = 0
    for result in explore(
        bits, size=size, seeds=range(SEEDS // 3), elastic=True, faults=3, kinds=ELASTIC, check=check_bits
    ):
        ended += len(result.results)
    assert ended > SEEDS // 3


def test_training_with_every_kind_of_state_has_the_same_bits() -> None:
    alone = run_virtual(train(None))

    async def main() -> Result:
        return await train(None)

    def check(result: SimulationResult) -> None:
        for value in result.results.values():
            check_equal(value, alone)

    explore(main, size=3, seeds=range(max(3, SEEDS // 20)), elastic=True, faults=2, kinds=ELASTIC, check=check)


def test_one_of_two_members_that_do_not_reach_each_other_is_lost_and_the_others_go_on() -> None:
    silence = Fault(at=0.0, kind="silence", node=0, peer=1, seconds=18.1)
    result = simulate(bits, size=3, seed=51, elastic=True, faults=[silence], check=check_bits)
    assert {0, 2} <= set(result.results)


def test_a_killed_member_is_missed_within_ten_seconds() -> None:
    result = simulate(
        bits, size=4, seed=3, elastic=True, faults=[Fault(at=0.05, kind="kill", node=1)], check=check_bits
    )
    assert {0, 2, 3} <= set(result.results)
    assert result.seconds < 10.0


@pytest.mark.parametrize("kind", ["crash", "pause", "isolate"])
def test_a_silent_member_is_missed_within_ten_seconds_and_the_others_end(kind: str) -> None:
    fault = Fault(at=0.06, kind=kind, node=2, seconds=60.0)
    result = simulate(bits, size=3, seed=3, elastic=True, faults=[fault], check=check_bits)
    ends = [entry.at for entry in result.notes if entry.content[:2] == ("committed", UNTIL - 1) and entry.node != 2]
    assert len(ends) == 2
    assert max(ends) < 10.0
    assert {0, 1} <= set(result.results)


async def slow_bits() -> object:
    return await bits(seconds=0.1)


@pytest.mark.parametrize("kind", ["pause", "pause_agent", "pause_rank"])
def test_a_pause_of_the_only_host_that_has_the_state_is_no_death(kind: str) -> None:
    for at in (0.115, 0.13, 0.145):
        fault = Fault(at=at, kind=kind, node=0, seconds=10.0)
        result = simulate(bits, size=1, elastic=True, faults=[fault], check=check_bits)
        commits = [entry for entry in result.notes if entry.content[0] == "committed"]
        assert [entry.content[1] for entry in commits] == list(range(UNTIL)), "each step once"
        assert {entry.incarnation for entry in commits} == {0}, "by the process that had begun"


def test_a_process_that_starts_again_joins_and_replays_what_it_missed() -> None:
    fault = Fault(at=0.05, kind="restart", node=1)
    result = simulate(slow_bits, size=3, seed=1, elastic=True, faults=[fault], check=check_bits)
    assert sorted(result.results) == [0, 1, 2]
    notes = [entry for entry in result.notes if (entry.node, entry.incarnation) == (1, 1)]
    newcomer = [entry.content[4] for entry in notes if entry.content[0] == "committed"]
    assert newcomer
    assert newcomer == sorted(newcomer, reverse=True), "first replays, then steps of its own"


def test_a_job_whose_members_are_all_killed_ends() -> None:
    faults = [Fault(at=0.08, kind="kill", node=node) for node in (0, 1)]
    result = simulate(bits, size=2, elastic=True, faults=faults, record=True)
    assert result.results == {}
    assert any("all members are lost, and with them" in line for line in result.lines)


def test_a_rank_that_comes_too_late_for_a_step_of_its_own_repeats_the_last_one_and_ends_well() -> None:
    late = 0
    for at in range(1500, 2300, 100):
        killed = Fault(at=at / 1000, kind="kill", node=0)
        result = simulate(slow_bits, size=2, seed=at, elastic=True, faults=[killed], check=check_bits)
        last = [entry for entry in result.notes if entry.content[:2] == ("committed", UNTIL - 1)]
        late += any(entry.content[4] for entry in last)
    assert late, "none was too late"


def test_a_fault_of_the_program_is_raised() -> None:
    async def main() -> None:
        async with ap.elastic(portions=2) as job:
            state = job.state({}, value=1.0)
            async for step in job.steps(state, until=3):
                async with step:
                    raise ZeroDivisionError("in the program")

    with pytest.raises(AssertionError, match="ZeroDivisionError: in the program"):
        simulate(main, size=2, elastic=True)


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        pytest.param(
            3027,
            [
                Fault(at=0.114002, kind="half_open", node=1, peer=2),
                Fault(at=0.126987, kind="restart", node=0),
                Fault(at=0.143179, kind="kill", node=1),
            ],
            id="all donors of a newcomer that was about to be a member end",
        ),
        pytest.param(
            4275,
            [
                Fault(at=0.031773, kind="one_way", node=1, peer=2, seconds=17.2438),
                Fault(at=0.12593, kind="reset", node=0, peer=1),
                Fault(at=0.132316, kind="damage", node=0, peer=2),
            ],
            id="connections of several pairs break in turn",
        ),
        pytest.param(
            9382,
            [
                Fault(at=0.001759, kind="damage", node=2, peer=1),
                Fault(at=0.034959, kind="silence", node=2, peer=1, seconds=6.1438),
                Fault(at=0.13543, kind="one_way", node=0, peer=1, seconds=19.0168),
            ],
            id="pairs are silent one after another",
        ),
        pytest.param(
            3305,
            [
                Fault(at=0.0085, kind="isolate", node=1, seconds=2.7991),
                Fault(at=0.1, kind="restart", node=0),
            ],
            id="a member that was there before the job began arrives after its end",
        ),
    ],
)
def test_what_once_hung_or_ended_the_job(seed: int, faults: list[Fault]) -> None:
    simulate(bits, size=3, seed=seed, elastic=True, faults=faults, check=check_bits)


def test_a_rank_is_dismissed_whose_wait_for_a_world_is_taken_back_as_the_job_completes() -> None:
    faults = [
        Fault(at=0.024354, kind="restart", node=2),
        Fault(at=0.16463, kind="restart", node=0),
        Fault(at=0.288205, kind="restart", node=2),
        Fault(at=0.370211, kind="restart", node=2),
        Fault(at=0.403078, kind="kill", node=0),
        Fault(at=0.418233, kind="kill", node=2),
    ]
    conditions = Conditions(spread=0.01)
    simulate(
        bits,
        size=4,
        seed=109,
        elastic=True,
        faults=faults,
        conditions=conditions,
        check=check_prompt_bits,
        shrinks=False,
    )
