"""The coordinator's machine, by conversation."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TypeVar

import pytest

from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.core.observe.rank_reports import Phase as Phase_
from asyncpar.core.observe.waits import CONDITION_WORDS
from asyncpar.launch.coordinator_machine import CoordinatorMachine, JobPhase, JobSettings
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.protocol import (
    AgentArrived,
    AgentAssignment,
    AgentHello,
    AgentLost,
    AgentStopped,
    AnnounceCondition,
    AnnounceExit,
    Announcement,
    Command,
    CoordinatorTick,
    GiveUpRank,
    JobInterrupted,
    JobOutcome,
    OpenGeneration,
    Order,
    RankChanged,
    RankEnded,
    SendOrder,
    StopRanks,
)
from asyncpar.launch.vitals import NO_LIMITS, Condition, RankState, SilenceLimits


def hello(node_rank: int | None = None, *, nproc: int = 2, nnodes: int = 2, job: str = "job") -> AgentHello:
    return AgentHello(job=job, nnodes=nnodes, nproc=nproc, node_rank=node_rank, host=f"host{node_rank}")


def failure(rank: int, *, at: float = 0.0, code: int = 1, blames: int | None = None, report: bool = False) -> RankEnd:
    found = None
    if report or blames is not None:
        found = FailureReport(
            type_name="PeerLost" if blames is not None else "ValueError",
            message="oh",
            traceback="oh",
            is_peer_error=blames is not None,
            blames=blames,
        )
    return RankEnd(generation=0, rank=rank, local_rank=0, host="h", pid=1, returncode=code, at=at, report=found)


LIMITED = SilenceLimits(silent=30.0)


def machine(*, nnodes: int = 2, restarts: int = 0, silence: SilenceLimits = LIMITED) -> CoordinatorMachine:
    settings = JobSettings(job="job", nnodes=nnodes, max_restarts=restarts, timeout=30.0, grace=10.0, silence=silence)
    return CoordinatorMachine(settings, now=0.0)


def running(*, restarts: int = 0, silence: SilenceLimits = LIMITED) -> CoordinatorMachine:
    """Agents 0 and 1 run ranks 0, 1 and 2, 3."""
    coordinator = machine(restarts=restarts, silence=silence)
    coordinator.handle(AgentArrived(0, hello(0)), now=0.0)
    coordinator.handle(AgentArrived(1, hello(1)), now=0.0)
    assert coordinator.phase == JobPhase.RUNNING
    return coordinator


def ended(agent: int, generation: int, rank: int, end: RankEnd | None) -> RankEnded:
    """``end`` None: with code 0."""
    return RankEnded(agent, replace(end or failure(rank, code=0), generation=generation))


Kind = TypeVar("Kind", bound=Order)


def orders(commands: list[Command], kind: type[Kind]) -> list[tuple[int, Kind]]:
    sent = [command for command in commands if isinstance(command, SendOrder)]
    return [(command.agent, command.order) for command in sent if isinstance(command.order, kind)]


def finishes(commands: list[Command]) -> dict[int, JobOutcome]:
    return dict(orders(commands, JobOutcome))


def stops(commands: list[Command]) -> list[int]:
    return [agent for agent, _ in orders(commands, StopRanks)]


def test_ranks_are_numbered_in_the_order_of_places_when_all_agents_are_there() -> None:
    coordinator = machine(nnodes=3)
    assert coordinator.handle(AgentArrived(7, hello(2, nproc=1, nnodes=3)), now=0.0) == []
    assert coordinator.handle(AgentArrived(8, hello(None, nproc=4, nnodes=3)), now=0.0) == []
    commands = coordinator.handle(AgentArrived(9, hello(0, nproc=2, nnodes=3)), now=0.0)
    assert commands[0] == OpenGeneration(0, 7)
    assigned = orders(commands, AgentAssignment)
    assert [(agent, assignment.rank_offset) for agent, assignment in assigned] == [(9, 0), (8, 2), (7, 6)]
    assert {assignment.world_size for _, assignment in assigned} == {7}
    assert [assignment.group_rank for _, assignment in assigned] == [0, 1, 2]


def test_an_agent_speaks_for_its_own_ranks_only() -> None:
    coordinator = running()
    assert coordinator.handle(ended(1, 0, 0, failure(0)), now=1.0) == []
    assert coordinator.handle(ended(0, 0, 2, None), now=1.0) == []
    early = machine()
    early.handle(AgentArrived(0, hello(0)), now=0.0)
    assert early.handle(ended(0, 0, 0, failure(0)), now=1.0) == []


def test_agents_that_do_not_fit_are_refused_alone() -> None:
    coordinator = machine()
    coordinator.handle(AgentArrived(0, hello(0)), now=0.0)
    for agent, stranger, reason in (
        (1, hello(1, nnodes=3), "--nnodes: the coordinator expects 2"),
        (2, hello(1, job="other"), "--rdzv-id"),
        (3, hello(0), "--node-rank: 0 is taken"),
        (5, replace(hello(1), version="9.9"), "this agent 9.9; install the same"),
    ):
        finish, *announced = coordinator.handle(AgentArrived(agent, stranger), now=0.0)
        assert [each.agent for each in announced if isinstance(each, SendOrder)] == [0], "those that are there get it"
        outcome = finishes([finish])[agent]
        assert outcome.exit_code == 2
        assert reason in outcome.message
    assert len(coordinator.handle(AgentArrived(4, hello(1)), now=0.0)) == 3


def test_one_agent_too_many_is_refused() -> None:
    finish, *_ = running().handle(AgentArrived(2, hello(None)), now=1.0)
    assert "all 2 agents" in finishes([finish])[2].message


def test_missing_agents_are_named_when_time_is_up() -> None:
    coordinator = machine(nnodes=3)
    coordinator.handle(AgentArrived(0, hello(0, nnodes=3)), now=0.0)
    assert coordinator.next_deadline == 2.0  # launchers say whom they wait for
    coordinator.handle(CoordinatorTick(), now=2.0)
    assert coordinator.next_deadline == 30.0
    assert coordinator.handle(CoordinatorTick(), now=29.0) == []
    outcome = finishes(coordinator.handle(CoordinatorTick(), now=30.0))[0]
    assert outcome.exit_code == 1
    assert "missing: node rank 1, 2; present: host0" in outcome.message


def test_an_agent_that_leaves_while_others_are_awaited_may_come_back() -> None:
    coordinator = machine()
    coordinator.handle(AgentArrived(0, hello(0)), now=0.0)
    assert coordinator.handle(AgentLost(0, "gone"), now=1.0) == []
    coordinator.handle(AgentArrived(1, hello(0)), now=2.0)
    assert len(coordinator.handle(AgentArrived(2, hello(1)), now=2.0)) == 3


def test_the_job_ends_well_when_every_rank_has() -> None:
    coordinator = running()
    for rank in range(3):
        assert coordinator.handle(ended(rank // 2, 0, rank, None), now=1.0) == [
            AnnounceExit(0, rank, "exited with code 0")
        ]
    commands = coordinator.handle(ended(1, 0, 3, None), now=1.0)
    assert finishes(commands) == {0: JobOutcome(0), 1: JobOutcome(0)}
    assert coordinator.outcome == JobOutcome(0)


def test_a_failure_stops_all_hosts_and_gives_the_exit_code() -> None:
    coordinator = running()
    commands = coordinator.handle(ended(1, 0, 3, failure(3, code=-9)), now=1.0)
    assert AnnounceExit(0, 3, "was killed by SIGKILL") in commands
    assert stops(commands) == [0, 1]
    coordinator.handle(ended(0, 0, 0, failure(0, code=-15)), now=1.1)
    assert coordinator.handle(AgentStopped(1, 0), now=1.2) == []
    outcome = finishes(coordinator.handle(AgentStopped(0, 0), now=1.3))[1]
    assert outcome.exit_code == 137
    assert outcome.message.startswith("rank 3 failed first: was killed by SIGKILL")
    assert "then rank" not in outcome.message  # it ended because we asked for it


def test_a_rank_that_blames_another_is_given_a_second_for_the_culprit_to_show() -> None:
    coordinator = running()
    commands = coordinator.handle(ended(0, 0, 0, failure(0, at=1.0, blames=3)), now=1.0)
    assert stops(commands) == []
    assert coordinator.next_deadline == 2.0
    assert stops(coordinator.handle(ended(1, 0, 3, failure(3, at=1.5, code=5)), now=1.5)) == [0, 1]
    coordinator.handle(AgentStopped(0, 0), now=2.0)
    outcome = finishes(coordinator.handle(AgentStopped(1, 0), now=2.0))[0]
    assert outcome.exit_code == 5
    assert outcome.message.startswith("rank 3 failed first")
    assert "then rank 0" in outcome.message


def test_if_nobody_else_fails_within_a_second_the_blaming_rank_counts() -> None:
    coordinator = running()
    coordinator.handle(ended(0, 0, 0, failure(0, at=1.0, blames=3)), now=1.0)
    assert coordinator.handle(CoordinatorTick(), now=1.9) == []
    assert stops(coordinator.handle(CoordinatorTick(), now=2.0)) == [0, 1]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_leaves_with_code_0_is_the_first_failure_whenever_its_end_is_seen(is_late: bool) -> None:
    coordinator = running()
    quiet = ended(0, 0, 1, failure(1, at=1.0, code=0))
    victims = [ended(0, 0, 0, failure(0, at=1.1, blames=1)), ended(1, 0, 2, failure(2, at=1.2, blames=1))]
    stopped: list[int] = []
    for event in [*victims, quiet] if is_late else [quiet, *victims]:
        assert not stopped or not is_late
        stopped += stops(coordinator.handle(event, now=1.3))
    assert stopped == [0, 1]  # at once: nobody else is to blame
    coordinator.handle(AgentStopped(0, 0), now=1.4)
    outcome = finishes(coordinator.handle(AgentStopped(1, 0), now=1.4))[0]
    assert outcome.exit_code == 1
    assert outcome.message.startswith(
        "rank 1 failed first: exited with code 0 while other ranks still needed it\n  on h (local rank 0, pid 1)\n"
    )
    assert [end.rank for end in coordinator.failures] == [1, 0, 2]


@pytest.mark.parametrize("was_member", [True, False])
def test_a_rank_that_has_left_the_world_and_still_runs_is_the_first_failure_if_it_was_ever_there(
    was_member: bool,
) -> None:
    coordinator = running()
    for phase in (Phase_.FORMING, *([Phase_.MEMBER] if was_member else []), Phase_.LEFT):
        coordinator.handle(RankChanged(0, RankState(generation=0, rank=1, phase=phase)), now=1.0)
    assert stops(coordinator.handle(ended(0, 0, 0, failure(0, at=1.1, blames=1)), now=1.1)) == []
    assert stops(coordinator.handle(CoordinatorTick(), now=2.2)) == [0, 1]
    first = coordinator.failures[0]
    left = (1, "left the world while other ranks still needed it")
    assert (first.rank, first.ending) == (left if was_member else (0, "exited with code 1"))


def test_a_rank_that_is_done_early_explains_nothing_that_names_another() -> None:
    coordinator = running()
    coordinator.handle(ended(0, 0, 1, None), now=1.0)
    coordinator.handle(ended(0, 0, 0, failure(0, at=5.0, code=3)), now=5.0)
    coordinator.handle(ended(1, 0, 2, failure(2, at=5.1, blames=0)), now=5.1)
    coordinator.handle(ended(1, 0, 3, None), now=5.2)
    assert [end.rank for end in coordinator.failures] == [0, 2]


def test_a_failure_reported_before_the_stop_counts_though_its_process_ends_later() -> None:
    coordinator = running()
    coordinator.handle(ended(0, 0, 1, failure(1, at=2.0, code=4)), now=2.0)
    coordinator.handle(ended(1, 0, 2, failure(2, at=1.5, code=6, report=True)), now=2.2)
    coordinator.handle(ended(1, 0, 3, failure(3, at=2.1, code=7, report=True)), now=2.2)
    coordinator.handle(AgentStopped(0, 0), now=2.3)
    outcome = finishes(coordinator.handle(AgentStopped(1, 0), now=2.3))[0]
    assert outcome.exit_code == 6
    assert outcome.message.startswith("rank 2 failed first")
    assert "then rank 3" in outcome.message  # its failure came after the order to stop: a consequence


def test_ranks_start_again_with_the_next_generation_while_restarts_are_left() -> None:
    coordinator = running(restarts=1)
    coordinator.handle(ended(0, 0, 0, failure(0)), now=1.0)
    coordinator.handle(AgentStopped(0, 0), now=1.1)
    commands = coordinator.handle(AgentStopped(1, 0), now=1.2)
    announced, commands = commands[:2], commands[2:]
    words = Announcement("rank 0 failed first: exited with code 1\n  on h (local rank 0, pid 1)")
    assert announced == [SendOrder(agent, words) for agent in (0, 1)]
    assert commands[0] == OpenGeneration(1, 4, restarts=1, reason="rank 0 on h exited with code 1")
    assigned = [assignment for _, assignment in orders(commands, AgentAssignment)]
    assert [(place.generation, place.restart_count) for place in assigned] == [(1, 1), (1, 1)]
    assert coordinator.handle(ended(0, 0, 1, failure(1)), now=1.3) == []  # of the old generation
    coordinator.handle(ended(0, 1, 1, failure(1, code=8)), now=2.0)
    coordinator.handle(AgentStopped(0, 1), now=2.1)
    assert finishes(coordinator.handle(AgentStopped(1, 1), now=2.1))[0].exit_code == 8


def test_a_lost_agent_is_a_failure_of_its_ranks_and_cannot_restart() -> None:
    coordinator = running(restarts=3)
    commands = coordinator.handle(AgentLost(1, "its connection closed"), now=1.0)
    assert stops(commands) == [0]
    outcome = finishes(coordinator.handle(AgentStopped(0, 0), now=1.1))[0]
    assert outcome.exit_code == 1
    assert outcome.message.startswith("rank 2 failed first: was lost with the agent on host1 (its connection closed)")


def test_an_interrupt_stops_all_and_restarts_nothing() -> None:
    coordinator = running(restarts=3)
    commands = coordinator.handle(JobInterrupted(1, signal.SIGINT), now=1.0)
    assert [(agent, order.signal_number) for agent, order in orders(commands, StopRanks)] == [
        (0, signal.SIGINT),
        (1, signal.SIGINT),
    ]
    coordinator.handle(AgentStopped(0, 0), now=1.1)
    commands = coordinator.handle(AgentStopped(1, 0), now=1.1)
    assert finishes(commands)[0] == JobOutcome(130, "the agent on host1 got SIGINT")


def test_a_rank_that_ends_by_the_signal_of_the_job_does_not_fail_those_that_still_join() -> None:
    coordinator = running()
    coordinator.handle(JobInterrupted(0, signal.SIGTERM), now=1.0)
    commands = coordinator.handle(ended(1, 0, 3, failure(3, code=143)), now=1.1)
    assert not any(isinstance(command, AnnounceExit) for command in commands)


def test_an_interrupt_before_all_are_there_ends_the_job() -> None:
    coordinator = machine()
    coordinator.handle(AgentArrived(0, hello(0)), now=0.0)
    assert finishes(coordinator.handle(JobInterrupted(0, signal.SIGTERM), now=1.0))[0].exit_code == 143


def test_restarts_before_the_window_do_not_count() -> None:
    settings = JobSettings(job="job", nnodes=1, max_restarts=1, restart_window=60.0)
    coordinator = CoordinatorMachine(settings, now=0.0)
    coordinator.handle(AgentArrived(0, hello(0, nnodes=1, nproc=1)), now=0.0)
    for generation, (now, is_end) in enumerate([(1.0, False), (100.0, False), (120.0, True)]):
        coordinator.handle(ended(0, generation, 0, failure(0, code=3)), now=now)
        commands = coordinator.handle(AgentStopped(0, generation), now=now)
        assert bool(finishes(commands)) is is_end


def test_agents_that_never_stop_are_not_waited_for_for_ever() -> None:
    coordinator = running(restarts=1)
    coordinator.handle(ended(0, 0, 0, failure(0, code=3)), now=1.0)
    coordinator.handle(AgentStopped(0, 0), now=1.1)
    deadline = coordinator.next_deadline
    assert deadline is not None
    assert 11.0 < deadline < 60.0
    assert finishes(coordinator.handle(CoordinatorTick(), now=deadline))[0].exit_code == 3


def test_an_agent_that_comes_after_the_end_is_notified() -> None:
    coordinator = machine()
    coordinator.handle(CoordinatorTick(), now=30.0)
    assert finishes(coordinator.handle(AgentArrived(5, hello(1)), now=31.0))[5].exit_code == 1


def stopped(rank: int, condition: Condition = Condition.STOPPED) -> RankState:
    return RankState(generation=0, rank=rank, phase=Phase_.MEMBER, condition=condition)


def test_a_rank_that_is_stopped_for_too_long_is_condemned_everywhere_and_blamed() -> None:
    coordinator = running()
    announced = AnnounceCondition(0, 2, "is stopped (SIGSTOP, or a debugger)")  # ranks that ask it get no answer
    assert coordinator.handle(RankChanged(1, stopped(2)), now=1.0) == [SendOrder(agent, announced) for agent in (0, 1)]
    assert coordinator.next_deadline == 31.0
    commands = coordinator.handle(CoordinatorTick(), now=31.0)
    assert commands == [SendOrder(agent, GiveUpRank(0, Loss(2, "host1", "was stopped for 30.0 s"))) for agent in (0, 1)]
    assert coordinator.handle(RankChanged(1, stopped(2)), now=31.1) == []
    stopping = coordinator.handle(ended(1, 0, 2, failure(2, code=-9)), now=32.0)
    reasons = {order.reason for _, order in orders(stopping, StopRanks)}
    assert reasons == {"rank 2 on h was stopped for 30.0 s, so the launcher killed it"}
    assert {order.loss.rank for _, order in orders(stopping, StopRanks) if order.loss} == {2}


@pytest.mark.parametrize("condition", [each for each in Condition if each is not Condition.WELL])
def test_a_rank_without_a_sign_of_life_is_never_condemned_unless_the_user_asks(condition: Condition) -> None:
    coordinator = running(silence=NO_LIMITS)
    announced = [
        order.how
        for _, order in orders(coordinator.handle(RankChanged(1, stopped(2, condition)), now=1.0), AnnounceCondition)
    ]
    assert announced == [CONDITION_WORDS[condition]] * 2, "the others are notified"
    assert coordinator.next_deadline is None
    assert coordinator.handle(CoordinatorTick(), now=1e6) == []


def test_the_others_learn_where_a_rank_is_stopped() -> None:
    coordinator = running()
    state = replace(stopped(2), place="train.py:9")
    [first, _] = orders(coordinator.handle(RankChanged(1, state), now=1.0), AnnounceCondition)
    assert first[1].how == "is stopped (SIGSTOP, or a debugger), at train.py:9"


def test_a_rank_that_runs_again_in_time_is_kept_and_an_agent_speaks_for_its_own_only() -> None:
    coordinator = running()
    coordinator.handle(RankChanged(1, stopped(0)), now=0.5)  # rank 0 is not its own
    coordinator.handle(RankChanged(1, stopped(3)), now=1.0)
    assert coordinator.next_deadline == 31.0
    coordinator.handle(RankChanged(1, stopped(3, Condition.WELL)), now=30.0)
    assert coordinator.next_deadline is None


def test_news_of_another_generation_change_nothing() -> None:
    coordinator = running(restarts=1)
    coordinator.handle(ended(0, 0, 0, failure(0)), now=1.0)
    for agent in (0, 1):
        coordinator.handle(AgentStopped(agent, 0), now=1.1)
    for event in (ended(0, 0, 1, failure(1)), AgentStopped(0, 0), RankChanged(0, stopped(1))):
        assert coordinator.handle(event, now=1.2) == []
    assert coordinator.phase == JobPhase.RUNNING
