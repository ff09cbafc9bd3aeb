"""A launcher that is an agent of a group takes part in the job of the group only."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from asyncpar.errors import UsageError
from asyncpar.launch.agents.agent_process import compare_job
from asyncpar.launch.agents.job_record import OF_ONE_LAUNCHER, OPTIONS, ElasticMode, SubmittedJob, encode_record
from asyncpar.launch.cli import main
from asyncpar.net.membership.world_messages import JobOpened, WorldStatus
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
