"""The agent's machine, by conversation."""

from __future__ import annotations

import signal

import pytest

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.agent_machine import (
    AgentMachine,
    AgentTick,
    CoordinatorLost,
    Exit,
    KillRank,
    KillWorkers,
    OutputBroken,
    PrintText,
    ReportInterrupted,
    ReportStopped,
    Signalled,
    SignalWorkers,
    StartWorkers,
    WorkersGone,
)
from asyncpar.launch.protocol import AgentAssignment, GiveUpRank, JobOutcome, NotifyRanks, StopRanks

PLACE = AgentAssignment(generation=0, restart_count=0, group_rank=0, group_world_size=1, rank_offset=0, world_size=2)
AGAIN = AgentAssignment(generation=1, restart_count=1, group_rank=0, group_world_size=1, rank_offset=0, world_size=2)


def running() -> AgentMachine:
    machine = AgentMachine(grace=10.0)
    assert machine.handle(PLACE, now=0.0) == [StartWorkers(PLACE)]
    return machine


def without_words(commands: list[object]) -> list[object]:
    return [command for command in commands if not isinstance(command, PrintText)]


def test_a_good_end() -> None:
    machine = running()
    assert machine.handle(JobOutcome(0), now=1.0) == []  # output may still be on its way
    assert machine.handle(WorkersGone(0), now=1.1) == [ReportStopped(0), Exit(JobOutcome(0))]


def test_the_end_may_be_reported_after_the_ranks_are_gone() -> None:
    machine = running()
    assert machine.handle(WorkersGone(0), now=1.0) == [ReportStopped(0)]
    assert machine.next_deadline is None
    assert machine.handle(JobOutcome(3, "why"), now=2.0) == [Exit(JobOutcome(3, "why"))]
    assert machine.handle(AgentTick(), now=99.0) == []


def test_stop_then_restart() -> None:
    machine = running()
    stopping = machine.handle(StopRanks(0, signal.SIGTERM, "rank 1 failed"), now=1.0)
    assert stopping == [PrintText("rank 1 failed; stopping all ranks"), SignalWorkers(signal.SIGTERM)]
    assert machine.handle(StopRanks(0, signal.SIGTERM, "rank 1 failed"), now=1.1) == []
    assert machine.handle(WorkersGone(0), now=1.5) == [ReportStopped(0)]
    assert without_words([*machine.handle(AGAIN, now=2.0)]) == [StartWorkers(AGAIN)]
    assert machine.handle(WorkersGone(0), now=2.1) == []  # of the old generation
    assert machine.handle(StopRanks(0, signal.SIGTERM, "late"), now=2.2) == []


def test_ranks_that_do_not_end_are_killed_after_the_grace_period() -> None:
    machine = running()
    machine.handle(StopRanks(0, signal.SIGTERM, "why"), now=1.0)
    assert machine.next_deadline == 11.0
    assert machine.handle(AgentTick(), now=10.9) == []
    assert without_words([*machine.handle(AgentTick(), now=11.0)]) == [KillWorkers()]
    assert machine.next_deadline is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_ranks_and_to_the_coordinator(number: signal.Signals) -> None:
    machine = running()
    assert without_words([*machine.handle(Signalled(number), now=1.0)]) == [
        SignalWorkers(number),
        ReportInterrupted(number),
    ]
    assert machine.handle(StopRanks(0, number, "we know"), now=1.1) == []
    assert machine.handle(WorkersGone(0), now=1.2) == [ReportStopped(0)]
    (leave,) = machine.handle(JobOutcome(1, "whatever"), now=1.3)
    assert leave == Exit(JobOutcome(128 + number, f"ended by {number.name}"))


def test_a_second_ctrl_c_kills_at_once_and_the_agent_goes_even_if_the_kernel_does_not_help() -> None:
    machine = running()
    machine.handle(Signalled(signal.SIGINT), now=1.0)
    assert without_words([*machine.handle(Signalled(signal.SIGINT), now=1.5)]) == [KillWorkers()]
    deadline = machine.next_deadline
    assert deadline == 6.5
    (leave,) = machine.handle(AgentTick(), now=6.5)
    assert isinstance(leave, Exit)
    assert leave.outcome.exit_code == 130


def test_an_interrupted_agent_without_an_answer_goes_by_itself() -> None:
    machine = AgentMachine(grace=10.0)
    assert machine.handle(Signalled(signal.SIGTERM), now=1.0) == [ReportInterrupted(signal.SIGTERM)]
    assert machine.handle(PLACE, now=1.1) == [ReportStopped(0)]
    (leave,) = machine.handle(AgentTick(), now=4.0)
    assert isinstance(leave, Exit)
    assert leave.outcome.exit_code == 143


def test_a_lost_coordinator_ends_the_ranks_and_then_the_agent() -> None:
    machine = running()
    assert machine.handle(CoordinatorLost("it is gone"), now=1.0) == [SignalWorkers(signal.SIGTERM)]
    assert machine.handle(WorkersGone(0), now=1.5) == [ReportStopped(0), Exit(JobOutcome(1, "it is gone"))]


def test_a_coordinator_that_goes_after_the_word_is_no_news() -> None:
    machine = running()
    machine.handle(JobOutcome(0), now=1.0)
    assert machine.handle(CoordinatorLost("it is gone"), now=1.1) == []
    assert machine.handle(WorkersGone(0), now=1.2)[-1] == Exit(JobOutcome(0))


def test_a_coordinator_that_never_was_there_is_the_outcome() -> None:
    machine = AgentMachine(grace=10.0)
    assert machine.handle(CoordinatorLost("nobody answers"), now=9.0) == [Exit(JobOutcome(1, "nobody answers"))]


def test_a_bad_end_does_not_wait_for_ranks_that_run() -> None:
    machine = running()
    assert machine.handle(JobOutcome(1, "we gave you up"), now=1.0) == [SignalWorkers(signal.SIGTERM)]
    assert without_words([*machine.handle(AgentTick(), now=11.0)]) == [KillWorkers()]
    assert machine.handle(AgentTick(), now=16.0) == [Exit(JobOutcome(1, "we gave you up"))]


def test_a_reader_that_left_ends_the_job_without_a_word() -> None:
    machine = running()
    commands = machine.handle(OutputBroken(""), now=1.0)
    assert commands == [SignalWorkers(signal.SIGTERM), ReportInterrupted(signal.SIGPIPE)]
    assert machine.handle(OutputBroken(""), now=1.1) == []
    machine.handle(WorkersGone(0), now=1.2)
    assert machine.handle(JobOutcome(1, "x"), now=1.3) == [Exit(JobOutcome(141, ""))]


def test_output_that_cannot_be_written_is_explained() -> None:
    commands = running().handle(OutputBroken("no space left"), now=1.0)
    assert commands[0] == PrintText("no space left")


LOSS = Loss(1, "host", "was killed by SIGKILL")


def test_ranks_hear_who_is_lost_before_they_are_asked_to_end() -> None:
    machine = running()
    commands = machine.handle(StopRanks(0, signal.SIGTERM, "rank 1 failed", LOSS), now=1.0)
    assert without_words(list(commands)) == [NotifyRanks(LOSS)]
    at = machine.next_deadline
    assert at is not None
    assert 1.0 < at < 1.5
    assert machine.handle(AgentTick(), now=at) == [SignalWorkers(signal.SIGTERM)]
    assert machine.next_deadline == at + 10.0
    assert without_words(list(machine.handle(AgentTick(), now=at + 10.0))) == [KillWorkers()]


def test_nobody_is_signalled_when_all_have_ended_by_themselves() -> None:
    machine = running()
    machine.handle(StopRanks(0, signal.SIGTERM, "rank 1 failed", LOSS), now=1.0)
    assert machine.handle(WorkersGone(0), now=1.1) == [ReportStopped(0)]
    assert machine.next_deadline is None


def test_a_signal_does_not_wait_until_the_reason_arrives() -> None:
    machine = running()
    machine.handle(StopRanks(0, signal.SIGTERM, "rank 1 failed", LOSS), now=1.0)
    commands = machine.handle(Signalled(signal.SIGINT), now=1.1)
    assert SignalWorkers(signal.SIGINT) in commands
    assert machine.next_deadline == 11.1


def test_a_condemned_rank_is_announced_to_the_others_and_killed() -> None:
    machine = running()
    assert without_words(list(machine.handle(GiveUpRank(0, LOSS), now=1.0))) == [NotifyRanks(LOSS), KillRank(1)]
    assert machine.handle(GiveUpRank(7, LOSS), now=1.0) == []


def test_orders_and_news_of_another_generation_change_nothing() -> None:
    machine = running()
    machine.handle(WorkersGone(0), now=1.0)
    assert machine.handle(AGAIN, now=1.1)[-1] == StartWorkers(AGAIN)
    for stale in (0, 2):
        for event in (GiveUpRank(stale, LOSS), StopRanks(stale, signal.SIGTERM, "rank 1 failed"), WorkersGone(stale)):
            assert machine.handle(event, now=1.2) == []
    assert machine.next_deadline is None
