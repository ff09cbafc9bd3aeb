"""A launcher that is an agent of a group takes part in the job of the group only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncpar.errors import UsageError
from asyncpar.launch.agents.agent_process import compare_job
from asyncpar.launch.agents.job_record import ElasticMode, encode_record
from asyncpar.net.membership.world_messages import JobOpened, WorldStatus
from tests.launch.agents.simulated_hosts import record

JOB = record((1, 2))
RUNS = WorldStatus(leader=None, hosts=(), job=JobOpened(number=1, terms=JOB.terms, record=encode_record(JOB)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("program", "other.py"),
        ("arguments", ("--fast",)),
        ("slots", 2),
        ("most_hosts", 3),
        ("max_restarts", 1),
        ("mode", "restart"),
        ("version", "0"),
    ],
)
def test_a_launcher_with_other_options_learns_which(name: str, value: Any) -> None:
    other = msgspec.structs.replace(JOB, **{name: value})
    with pytest.raises(UsageError, match=f"launch: expected {name} .*, as the job that runs, got"):
        compare_job(RUNS, other)


def test_ranks_that_start_again_may_be_more_on_one_host_than_on_another() -> None:
    ours = msgspec.structs.replace(JOB, mode=ElasticMode.RESTART)
    runs = msgspec.structs.replace(RUNS, job=JobOpened(number=1, terms=ours.terms, record=encode_record(ours)))
    compare_job(runs, msgspec.structs.replace(ours, slots=5, log_directory="/own/logs"))


def test_where_a_launcher_is_started_does_not_matter() -> None:
    compare_job(RUNS, msgspec.structs.replace(JOB, directory="/elsewhere", environment={"ASYNCPAR_TIMEOUT": "1"}))
    compare_job(WorldStatus(leader=None, hosts=()), JOB)
