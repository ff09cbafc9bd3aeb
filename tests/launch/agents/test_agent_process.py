"""A launcher that is an agent of a group takes part in the job of the group only."""

from __future__ import annotations

import re
import signal
from typing import Any, cast

import msgspec
import pytest

from asyncpar.errors import UsageError
from asyncpar.hosts.messages import JobOpened, WorldStatus
from asyncpar.launch.agents.agent_options import AgentOptions
from asyncpar.launch.agents.agent_process import AgentProcess, compare_job
from asyncpar.launch.agents.job_record import OF_ONE_LAUNCHER, OPTIONS, ElasticMode, SubmittedJob, encode_record
from asyncpar.launch.cli import main
from tests.launch.agents.simulated_hosts import record

JOB = record((1, 2))
RUNS = WorldStatus(leader=None, hosts=(), job=JobOpened(number=1, terms=JOB.terms, record=encode_record(JOB)))


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("name", "another", "--rdzv-id"),
        ("program", "other.py", "the program"),
        ("arguments", ("--fast",), "the arguments of the program"),
        ("slots", 2, "--nproc-per-node"),
        ("most_hosts", 3, "--nnodes, the largest number of hosts"),
        ("max_restarts", 1, "--max-restarts"),
        ("mode", "restart", "--elastic"),
        ("version", "0", "the version of asyncpar"),
    ],
)
def test_a_launcher_with_other_options_learns_which(name: str, value: Any, option: str) -> None:
    other = msgspec.structs.replace(JOB, **{name: value})
    with pytest.raises(UsageError, match=f"^{option}: expected .*, as the job that runs has it, got"):
        compare_job(RUNS, other)


def test_every_field_that_launchers_must_agree_on_has_an_option() -> None:
    assert set(SubmittedJob.__struct_fields__) - OF_ONE_LAUNCHER == OPTIONS.keys()
    known = {word for option in main.commands["launch"].params for word in option.opts}
    for text in OPTIONS.values():
        assert set(re.findall(r"--[a-z-]+", text)) <= known, text


def test_ranks_that_start_again_may_be_more_on_one_host_than_on_another() -> None:
    ours = msgspec.structs.replace(JOB, mode=ElasticMode.RESTART)
    runs = msgspec.structs.replace(RUNS, job=JobOpened(number=1, terms=ours.terms, record=encode_record(ours)))
    compare_job(runs, msgspec.structs.replace(ours, slots=5, log_directory="/own/logs"))


def test_where_a_launcher_is_started_does_not_matter() -> None:
    compare_job(RUNS, msgspec.structs.replace(JOB, directory="/elsewhere", environment={"ASYNCPAR_TIMEOUT": "1"}))
    compare_job(WorldStatus(leader=None, hosts=()), JOB)


class Asked:
    """An agent with a job, and its group: what they are asked to do."""

    number = 1
    failure = (0, "")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **_: self.calls.append(" ".join([name, *(str(one) for one in given if name != "report")]))


def launcher_with(asked: Asked) -> AgentProcess:
    """Return the process of a launcher whose ranks start again with every world."""
    job = msgspec.structs.replace(JOB, mode=ElasticMode.RESTART)
    options = AgentOptions(listen="127.0.0.1:0")
    credentials = cast("Any", type("Credentials", (), {"rpc": None}))
    process = AgentProcess(options, credentials, cast("Any", None), {}, job=job)
    process.ending.attach(cast("Any", asked), cast("Any", asked))  # it does so itself as it enters the group
    return process


def test_the_second_ctrl_c_kills_the_ranks_of_a_launcher_and_ends_it_though_it_has_entered_the_group_anew() -> None:
    asked = Asked()
    process = launcher_with(asked)
    process.ending.signalled(signal.SIGINT)
    assert asked.calls == ["report", f"interrupt {signal.SIGINT}", "report"]
    anew = cast("Any", Asked())
    process.ending.attach(anew, anew)
    process.ending.signalled(signal.SIGINT)
    assert anew.calls == ["report", f"interrupt {signal.SIGINT}", "kill", "leave_at_once"]


async def test_a_launcher_that_was_interrupted_does_not_enter_again_a_group_that_has_gone_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, lives = launcher_with(Asked()), 0

    async def live(*_: Any) -> tuple[None, tuple[str, ...]]:
        nonlocal lives
        lives += 1
        process.ending.signalled(signal.SIGINT)
        return None, ("127.0.0.1:1",)

    monkeypatch.setattr(process, "_live", live)
    assert await process.run() is None
    assert lives == 1
    assert process.exit_code == 130
