"""Agents, their leaders and their worlds under faults on virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from asyncpar.hosts.messages import HostParked
from asyncpar.launch.agents.host_protocol import NotifyLeader
from asyncpar.launch.agents.job_record import ElasticMode
from asyncpar.launch.agents.restarted_ranks import RestartedRanks
from asyncpar.testing.simulation import Fault
from tests.launch.agents.safeguards import ALL, LAST, MISSING, without
from tests.launch.agents.simulated_hosts import Committed, Decided, Leads, Received
from tests.launch.agents.simulation import Group, Run, Stuck, Unsafe, check, check_restarted, simulate_hosts
from tests.soak import chosen, is_soak

LIMIT = 500
SEEDS = chosen(1, soak=300)
GROUPS = {
    "three": Group(),
    "dying-writers": Group(death_chance=0.02),
    "two-and-a-witness": Group(hosts=(1, 2), idle=(2,), faults=8),
    "spare-hosts": Group(size=5, hosts=(1, 2)),
    "two-and-a-spare-host": Group(hosts=(2, 2), rank_death_chance=0.005),
    "all-of-two": ALL,
    "all-of-three": Group(hosts=(3, 3), faults=4, rank_death_chance=0.01),
    "two-at-least": Group(size=4, hosts=(2, 3), faults=10, death_chance=0.01),
    "a-host-alone": Group(hosts=(1, 1)),
    "one-stops-for-good": LAST,
}
FIRST = {
    "accepted-is-kept": 105,
    "votes-are-read": 1,
    "votes-are-whole": 1,
    "incarnations": 1,
    "echo": 2,
    "facts-are-told-again": 1,
    "own-members": 1,
    "healed-of-the-lost": 4,
    "late-newcomers": 1,
    "a-surplus-spare-waits": 1,
    "who-is-healing": 1,
}
"""Seeds that are tried first, because they were found before; any other would do.

Safeguards that share a group have one seed where there is one: with all of them in place it runs once.
"""


@pytest.mark.timeout(chosen(120, soak=1800))
@pytest.mark.parametrize("name", GROUPS)
def test_nothing_unsafe_happens_and_steps_go_on_when_faults_are_over(name: str) -> None:
    for seed in range(SEEDS):
        run = simulate_hosts(seed, GROUPS[name])
        try:
            check(run)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {', '.join(map(repr, run.faults))}")
            raise


RESTARTED = {
    "three": Group(mode=ElasticMode.RESTART),
    "crashing-ranks": Group(mode=ElasticMode.RESTART, rank_death_chance=0.01),
    "dying-writers": Group(mode=ElasticMode.RESTART, death_chance=0.02, rank_death_chance=0.005),
    "all-of-three": Group(mode=ElasticMode.RESTART, hosts=(3, 3), faults=4, rank_death_chance=0.01),
}


@pytest.mark.timeout(chosen(120, soak=1800))
@pytest.mark.parametrize("name", RESTARTED)
def test_jobs_that_start_again_with_every_world_run_on_all_hosts_when_faults_are_over(name: str) -> None:
    for seed in range(SEEDS):
        run = simulate_hosts(seed, RESTARTED[name])
        try:
            check_restarted(run)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {', '.join(map(repr, run.faults))}")
            raise


def test_restarts_that_hosts_do_not_announce_to_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = RestartedRanks._ready  # noqa: SLF001

    def without_restarts(ranks: RestartedRanks, generation: int, *, port: int) -> NotifyLeader:
        known, ranks._restarts = ranks._restarts, 0  # noqa: SLF001
        notice = ready(ranks, generation, port=port)
        ranks._restarts = known  # noqa: SLF001
        return notice

    monkeypatch.setattr(RestartedRanks, "_ready", without_restarts)

    def check_some() -> None:
        for seed in range(20):
            check_restarted(simulate_hosts(seed, RESTARTED["crashing-ranks"]))

    with pytest.raises(Unsafe, match="ranks differ in the size of the world and restarts"):
        check_some()


def test_equal_seeds_do_the_same() -> None:
    group = replace(GROUPS["dying-writers"], faults=3, calm_from=7.0, seconds=10.0)
    one, other = (simulate_hosts(3, group) for _ in range(2))
    assert one.trace_hash == other.trace_hash
    assert one.notes == other.notes
    assert one.trace_hash != simulate_hosts(4, group).trace_hash


def seeds_until_found(name: str) -> int:
    """Return how many seeds it takes to miss the safeguard; more than ``LIMIT`` if it is not missed."""
    with without(name) as group:
        order = range(LIMIT) if is_soak() else [FIRST.get(name, 0), *range(LIMIT)]
        for count, seed in enumerate(order, start=1):
            try:
                check(simulate_hosts(seed, group))
            except (Unsafe, Stuck):
                return count
    return LIMIT + 1


@cache
def check_with_all_safeguards(seed: int, group: Group) -> None:
    """Check that nothing is found in a run where nothing is missing; safeguards share groups, and seeds of them."""
    check(simulate_hosts(seed, group))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MISSING)
def test_a_safeguard_that_is_missing_is_found(name: str) -> None:
    assert MISSING[name].prevents
    assert seeds_until_found(name) <= LIMIT
    check_with_all_safeguards(FIRST.get(name, 0), MISSING[name].group)


@pytest.mark.parametrize(
    ("seed", "group"),
    [
        pytest.param(5, replace(GROUPS["three"], death_chance=0.1), id="newcomers-that-never-begin-are-no-voters"),
        pytest.param(1058, GROUPS["all-of-three"], id="what-a-candidate-is-told-is-kept"),
    ],
)
def test_what_was_found_once(seed: int, group: Group) -> None:
    check(simulate_hosts(seed, group))


# Single faults.


def after(run: Run, seconds: float) -> list[tuple[int, Committed]]:
    return [(one.node, one.content) for one in run.of(Committed) if one.at > seconds]


def alone(*faults: Fault, **settings: object) -> Run:
    group = replace(Group(faults=0, planned=faults, calm_from=12.0, seconds=20.0), **settings)  # type: ignore[arg-type]
    run = simulate_hosts(1, group)
    check(run)
    return run


def test_a_minority_of_one_commits_nothing_and_comes_back() -> None:
    run = alone(Fault(at=5.0, kind="isolate", node=1, seconds=5.0))
    apart = [node for node, _ in after(run, 5.1) if run.notes]
    assert apart
    within = [(one.node, one.at) for one in run.of(Committed) if 5.1 < one.at < 9.9]
    assert {node for node, _ in within} == {0, 2}
    assert {node for node, _ in after(run, 18.0)} == {0, 1, 2}


def test_of_two_hosts_either_may_go_with_a_witness() -> None:
    for lost in (0, 1):
        run = alone(Fault(at=5.0, kind="crash", node=lost, seconds=8.0), hosts=(1, 2), idle=(2,))
        within = {one.node for one in run.of(Committed) if 9.0 < one.at < 12.0}
        assert within == {1 - lost}
        assert all(one.node != 2 for one in run.of(Committed))


def test_a_group_whose_agents_all_start_again_goes_on_with_its_votes() -> None:
    run = alone(*(Fault(at=5.0 + node / 100, kind="restart", node=node) for node in range(3)))
    before, afterwards = (
        [one.content.entry for one in run.of(Decided) if (one.at < 5.0) == is_before] for is_before in (True, False)
    )
    assert set(afterwards[-1].voters) & set(before[-1].voters)
    assert {node for node, _ in after(run, 18.0)} == {0, 1, 2}


def test_the_founder_that_starts_again_founds_no_second_group() -> None:
    run = alone(Fault(at=5.0, kind="restart", node=0))
    assert all(one.content.entry.generation > 3 for one in run.of(Decided) if one.at > 5.0)
    assert len({one.content.term.node for one in run.of(Leads)}) < 4


def test_a_full_disk_under_the_votes_ends_one_agent_only() -> None:
    full = Fault(at=5.0, kind="disk", node=2, seconds=4.0)
    run = alone(full, Fault(at=5.5, kind="kill", node=3), size=4, hosts=(1, 4))
    assert {one.node for one in run.of(Committed) if 8.5 < one.at < 9.0} == {0, 1}
    assert {node for node, _ in after(run, 18.0)} == {0, 1, 2, 3}


def test_a_group_has_one_leader_from_its_beginning_while_nothing_fails() -> None:
    run = alone()
    assert len({one.content.term for one in run.of(Leads)}) == 1
    assert not any(isinstance(one.content.command, HostParked) for one in run.of(Received))
    assert min(one.at for one in run.of(Committed)) < 1.5, "the job is opened after a second"


def test_a_clock_that_is_set_changes_nothing() -> None:
    jumps = (Fault(at=5.0, kind="jump", node=node, seconds=seconds) for node, seconds in ((0, 3600.0), (1, -3600.0)))
    run, calm = alone(*jumps), alone()
    assert {one.content.term for one in run.of(Leads)} == {one.content.term for one in calm.of(Leads)}
    assert not [one for one in (*run.of(Decided), *calm.of(Decided)) if one.at > 5.0]


def test_a_leader_that_was_stopped_holds_nobody_for_lost_when_it_wakes() -> None:
    run = alone(Fault(at=5.0, kind="pause", node=0, seconds=6.0), size=2, hosts=(1, 2))
    assert {node for node, _ in after(run, 18.0)} == {0, 1}


@pytest.mark.parametrize("seconds", [3.0, 6.0])
def test_a_host_that_was_stopped_commits_nothing_that_the_others_do_not_go_on_from(seconds: float) -> None:
    run = alone(Fault(at=5.0, kind="pause", node=0, seconds=seconds), size=3, hosts=(1, 1))
    commits = [one for one in run.of(Committed) if 4.5 < one.at < 5.0]
    assert {one.node for one in commits} == {0}, "it was the whole world"
