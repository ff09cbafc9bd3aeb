"""Launchers talk while they wait for hosts: how many are there, who is missing, and who was refused."""

from __future__ import annotations

from asyncpar.launch.coordinator_machine import CoordinatorMachine, JobSettings
from asyncpar.launch.protocol import (
    AgentArrived,
    AgentHello,
    Announcement,
    CallerRefused,
    Command,
    CoordinatorTick,
    SendOrder,
)
from asyncpar.net.membership.host_arrivals import AGAIN_SECONDS, FIRST_SECONDS, HostArrivals


def hello(host: str, place: int | None = None, *, job: str = "j", version: str = "1") -> AgentHello:
    return AgentHello(job=job, nnodes=3, nproc=1, node_rank=place, host=host, version=version)


def reported(commands: list[Command]) -> list[str]:
    return [
        each.order.text for each in commands if isinstance(each, SendOrder) and isinstance(each.order, Announcement)
    ]


def test_hosts_that_are_there_and_missing_are_reported_and_again_after_a_while() -> None:
    gathering = HostArrivals()
    gathering.change(0.0)
    assert gathering.next_deadline == FIRST_SECONDS
    assert gathering.report(["a"], 3, 1.0, absent=[1, 2]) == ""
    text = "waiting for hosts: 1 of 3 are here (a); missing: --node-rank 1, 2"
    assert gathering.report(["a"], 3, 2.0, absent=[1, 2]) == text
    assert gathering.next_deadline == 2.0 + AGAIN_SECONDS
    gathering.change(3.0)
    assert gathering.report(["a", "b"], 3, 5.0) == "waiting for hosts: 2 of 3 are here (a, b)"
    gathering.end()
    assert gathering.next_deadline is None


def test_a_refusal_is_reported_once_and_not_for_ever() -> None:
    gathering = HostArrivals()
    assert gathering.refuse("an agent at 10.0.0.9", "it has another secret").startswith("refused an agent at 10.0.0.9")
    assert gathering.refuse("an agent at 10.0.0.9", "it has another secret") == ""
    assert sum(bool(gathering.refuse(f"an agent at {number}", "x")) for number in range(1000)) == 19


def test_the_launchers_are_notified_of_waiting_and_of_refusals() -> None:
    machine = CoordinatorMachine(JobSettings(job="j", nnodes=3, version="1"), now=0.0)
    machine.handle(AgentArrived(0, hello("a", 0)), now=0.0)
    assert machine.next_deadline == FIRST_SECONDS
    [text] = reported(machine.handle(CoordinatorTick(), now=2.0))
    assert text.startswith("waiting for hosts: 1 of 3")
    [text] = reported(machine.handle(AgentArrived(1, hello("b", 1, job="other")), now=3.0))
    assert text == "refused the agent on b: --rdzv-id: the coordinator runs job 'j', this agent came for 'other'"
    [text] = reported(machine.handle(AgentArrived(2, hello("c", 1, version="2")), now=3.0))
    assert text == "refused the agent on c: the coordinator has asyncpar 1, this agent 2; install the same"
    [text] = reported(machine.handle(CallerRefused("an agent at 10.0.0.9", "it has another secret"), now=3.0))
    assert text == "refused an agent at 10.0.0.9: it has another secret"


def test_nothing_is_reported_of_hosts_that_come_at_once() -> None:
    machine = CoordinatorMachine(JobSettings(job="j", nnodes=3, version="1"), now=0.0)
    commands = [c for place in range(3) for c in machine.handle(AgentArrived(place, hello("h", place)), now=0.1)]
    assert reported(commands) == []
    assert machine.next_deadline is None


def test_a_job_that_ended_while_hosts_were_missing_has_nothing_to_do() -> None:
    machine = CoordinatorMachine(JobSettings(job="j", nnodes=3, version="1", timeout=1.0), now=0.0)
    machine.handle(AgentArrived(0, hello("a", 0)), now=0.0)
    machine.handle(CoordinatorTick(), now=1.0)
    assert machine.outcome is not None
    assert machine.next_deadline is None
