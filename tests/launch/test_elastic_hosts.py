"""Hosts that come and go while a job runs: the coordinator's machine by conversation."""

from __future__ import annotations

import random
import signal

import pytest

from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.launch.coordinator_machine import CoordinatorMachine, JobPhase, JobSettings
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.host_arrivals import FIRST_SECONDS
from asyncpar.launch.protocol import (
    AgentArrived,
    AgentAssignment,
    AgentHello,
    AgentLost,
    AgentStopped,
    Command,
    CoordinatorTick,
    JobInterrupted,
    JobOutcome,
    OpenGeneration,
    RankEnded,
    SendOrder,
    StopRanks,
)


class Conversation:
    """A conversation with the machine of a job of ``least`` to ``most`` hosts, with two ranks each."""

    def __init__(self, least: int, most: int, *, restarts: int = 0, timeout: float = 30.0) -> None:
        self.settings = JobSettings(
            job="job", nnodes=most, least_nnodes=least, last_call=5.0, max_restarts=restarts, timeout=timeout
        )
        self.machine = CoordinatorMachine(self.settings, now=0.0)
        self.now = 0.0

    def arrive(self, agent: int, *, place: int | None = None) -> list[Command]:
        hello = AgentHello(
            job="job",
            nnodes=self.settings.nnodes,
            least_nnodes=self.settings.least_nnodes,
            nproc=2,
            node_rank=place,
            host=f"host{agent}",
        )
        return self.machine.handle(AgentArrived(agent, hello), now=self.now)

    def lose(self, agent: int) -> list[Command]:
        return self.machine.handle(AgentLost(agent, "gone"), now=self.now)

    def wait(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.machine.handle(CoordinatorTick(), now=self.now)

    def stop(self, agent: int, generation: int) -> list[Command]:
        return self.machine.handle(AgentStopped(agent, generation), now=self.now)

    def end(self, agent: int, generation: int, rank: int, code: int, *, blames: int | None = None) -> list[Command]:
        report = None
        if blames is not None:
            report = FailureReport(
                type_name="PeerLost", message="oh", traceback="oh", is_peer_error=True, blames=blames
            )
        end = RankEnd(
            generation=generation, rank=rank, local_rank=0, host="h", pid=7, returncode=code, at=self.now, report=report
        )
        return self.machine.handle(RankEnded(agent, end), now=self.now)


def world(commands: list[Command]) -> tuple[int, int] | None:
    """Return generation and size of the world that ``commands`` begin."""
    return next(((c.generation, c.world_size) for c in commands if isinstance(c, OpenGeneration)), None)


def assigned(commands: list[Command]) -> dict[int, AgentAssignment]:
    return {c.agent: c.order for c in commands if isinstance(c, SendOrder) and isinstance(c.order, AgentAssignment)}


def stopped(commands: list[Command]) -> dict[int, str]:
    return {c.agent: c.order.reason for c in commands if isinstance(c, SendOrder) and isinstance(c.order, StopRanks)}


def outcomes(commands: list[Command]) -> dict[int, JobOutcome]:
    return {c.agent: c.order for c in commands if isinstance(c, SendOrder) and isinstance(c.order, JobOutcome)}


def pair() -> Conversation:
    """Hosts 0 and 1 of at most 3 run generation 0."""
    conversation = Conversation(1, 3)
    conversation.arrive(0, place=0)
    conversation.arrive(1)
    assert world(conversation.wait(5.0)) == (0, 4)
    return conversation


def test_all_hosts_start_at_once_and_fewer_after_the_last_call() -> None:
    conversation = Conversation(2, 3)
    assert conversation.arrive(0) == []
    assert conversation.machine.next_deadline == FIRST_SECONDS  # launchers say whom they wait for
    assert conversation.arrive(1) == []
    assert world(conversation.arrive(2)) == (0, 6)
    conversation = Conversation(2, 3)
    conversation.arrive(0)
    conversation.arrive(1)
    assert world(conversation.wait(4.9)) is None
    commands = conversation.wait(0.2)
    assert world(commands) == (0, 4)
    assert [assignment.rank_offset for assignment in assigned(commands).values()] == [0, 2]


def test_the_last_call_is_over_when_a_host_leaves_too_few() -> None:
    conversation = Conversation(2, 3)
    conversation.arrive(0)
    conversation.arrive(1)
    conversation.lose(1)
    assert outcomes(conversation.wait(6.0)) == {}
    outcome = outcomes(conversation.wait(24.0))[0]
    assert "waited 30 s for 2 agents (--nnodes); missing: 1 of 2 agents; present: host0" in outcome.message


def test_hosts_that_come_while_ranks_run_are_taken_together_without_counting_a_restart() -> None:
    conversation = Conversation(1, 4)
    conversation.arrive(0)
    assert world(conversation.wait(5.0)) == (0, 2)
    conversation.now = 100.0
    assert conversation.arrive(1) == []
    conversation.wait(0.3)
    assert conversation.arrive(2) == []
    assert stopped(conversation.wait(0.3)) == {0: "host1, host2 joined the job"}
    conversation.end(0, 0, 0, -signal.SIGTERM)
    conversation.end(0, 0, 1, -signal.SIGTERM)
    commands = conversation.stop(0, 0)
    assert world(commands) == (1, 6)
    assert {agent: a.restart_count for agent, a in assigned(commands).items()} == {0: 0, 1: 0, 2: 0}


def test_a_host_that_comes_and_goes_at_once_disturbs_nobody() -> None:
    conversation = pair()
    conversation.arrive(2)
    assert conversation.lose(2) == []
    assert conversation.wait(1.0) == []
    assert conversation.machine.phase == JobPhase.RUNNING


def test_survivors_of_a_lost_host_go_on_without_counting_a_restart() -> None:
    conversation = pair()
    assert set(stopped(conversation.lose(1))) == {0}
    conversation.end(0, 0, 0, 1, blames=2)
    conversation.end(0, 0, 1, 1, blames=2)
    commands = conversation.stop(0, 0)
    assert world(commands) == (1, 2)
    assert assigned(commands)[0].restart_count == 0


def test_a_rank_that_blames_a_host_that_is_lost_a_moment_later_counts_for_nothing() -> None:
    conversation = pair()
    conversation.end(0, 0, 0, 1, blames=2)
    assert set(stopped(conversation.lose(1))) == {0}
    assert world(conversation.stop(0, 0)) == (1, 2)


def test_too_few_survivors_wait_for_others() -> None:
    conversation = Conversation(2, 3)
    conversation.arrive(0)
    conversation.arrive(1)
    conversation.wait(5.0)
    conversation.now = 50.0
    conversation.lose(1)
    assert conversation.stop(0, 0) == []
    assert conversation.machine.phase == JobPhase.FORMING
    assert conversation.machine.next_deadline == 80.0
    conversation.arrive(5)
    assert world(conversation.wait(5.0)) == (1, 4)


def test_a_crash_is_counted_though_hosts_come_and_go() -> None:
    conversation = pair()
    conversation.end(0, 0, 0, 3)
    conversation.stop(1, 0)
    outcome = outcomes(conversation.stop(0, 0))
    assert {agent: o.exit_code for agent, o in outcome.items()} == {0: 3, 1: 3}


def test_a_crash_that_ends_what_a_new_host_was_about_to_end_is_counted() -> None:
    conversation = Conversation(1, 2, restarts=1)
    conversation.arrive(0)
    conversation.wait(5.0)
    conversation.arrive(1)
    conversation.end(0, 0, 0, 3)
    commands = conversation.stop(0, 0)
    assert world(commands) == (1, 4)
    assert assigned(commands)[1].restart_count == 1


def test_one_host_too_many_is_refused_until_there_is_a_place() -> None:
    conversation = Conversation(1, 2)
    conversation.arrive(0)
    conversation.arrive(1)
    assert outcomes(conversation.arrive(2))[2].exit_code == 2
    conversation.lose(1)
    conversation.stop(0, 0)
    assert outcomes(conversation.arrive(3)) == {}


def test_other_limits_are_refused() -> None:
    conversation = Conversation(1, 3)
    hello = AgentHello(job="job", nnodes=3, least_nnodes=2, nproc=2, node_rank=None, host="h")
    outcome = outcomes(conversation.machine.handle(AgentArrived(0, hello), now=0.0))[0]
    assert outcome.message == "--nnodes: the coordinator goes on with 1, this agent says 2"


@pytest.mark.parametrize(("place", "goes_on"), [(1, True), (None, True), (0, False)])
def test_a_host_whose_agent_is_asked_to_end_leaves_the_others_unless_it_serves_the_coordinator(
    place: int | None, goes_on: bool
) -> None:
    conversation = Conversation(1, 2)
    other = 1 if place == 0 else 0
    conversation.arrive(0, place=other)
    conversation.arrive(1, place=place)
    commands = conversation.machine.handle(JobInterrupted(1, signal.SIGTERM), now=1.0)
    if goes_on:
        assert outcomes(commands)[1] == JobOutcome(143, "left the job: got SIGTERM")
        assert set(stopped(commands)) == {0}
        assert world(conversation.stop(0, 0)) == (1, 2)
    else:
        conversation.stop(0, 0)
        assert set(outcomes(conversation.stop(1, 0))) == {0, 1}


def test_ctrl_c_on_any_host_ends_the_job() -> None:
    conversation = pair()
    assert set(stopped(conversation.machine.handle(JobInterrupted(1, signal.SIGINT), now=1.0))) == {0, 1}
    conversation.stop(1, 0)
    assert {o.exit_code for o in outcomes(conversation.stop(0, 0)).values()} == {130}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_and_goes_worlds_are_never_too_small_and_the_job_goes_on(seed: int) -> None:
    """Joins and losses alone never end a job; each world has a generation of its own, and only hosts that are there."""
    chance = random.Random(seed)
    most = chance.randint(2, 5)
    least = chance.randint(1, most - 1)
    conversation = Conversation(least, most, timeout=1e6)
    present: dict[int, int | None] = {}  # agent: the generation it runs, None before
    numbers = iter(range(1000))
    worlds: list[tuple[int, int]] = []

    def obey(commands: list[Command]) -> None:
        assert not [o for o in outcomes(commands).values() if o.exit_code != 2]
        begun = world(commands)
        if begun is not None:
            given = assigned(commands)
            assert set(given) == set(present)
            assert least <= len(given) <= most
            assert sorted(a.rank_offset for a in given.values()) == [2 * place for place in range(len(given))]
            worlds.append(begun)
            for agent in given:
                present[agent] = begun[0]
        for agent in stopped(commands):
            generation = present.get(agent)
            if generation is not None:
                obey(conversation.stop(agent, generation))

    for _ in range(60):
        if chance.random() < 0.4 and len(present) < most:
            agent = next(numbers)
            present[agent] = None
            obey(conversation.arrive(agent))
        elif chance.random() < 0.3 and present:
            agent = chance.choice(sorted(present))
            del present[agent]
            obey(conversation.lose(agent))
        else:
            obey(conversation.wait(chance.choice((0.2, 1.0, 6.0))))
    while len(present) < least:
        agent = next(numbers)
        present[agent] = None
        obey(conversation.arrive(agent))
    obey(conversation.wait(6.0))
    obey(conversation.wait(6.0))
    generations = [generation for generation, _ in worlds]
    assert generations == sorted(set(generations))
    assert conversation.machine.phase == JobPhase.RUNNING
    assert worlds[-1][1] == 2 * len(present)
