"""A rank reads its settings from its environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.errors import UsageError

PLACE = LaunchEnvironment(
    rank=3,
    local_rank=1,
    world_size=4,
    local_world_size=2,
    group_rank=1,
    group_world_size=2,
    master_addr="127.0.0.1",
    master_port=29500,
    rendezvous="127.0.0.1:4000",
    secret_file="/tmp/secret",
    job="demo",
    generation=2,
    restart_count=2,
    host="left",
    host_id="left-1",
    bind="127.0.0.1",
    timeout=30.0,
)


def test_the_launchers_and_the_ranks_side_agree() -> None:
    whole = replace(PLACE, certs="/certs", transport="tcp", report_descriptor=7)
    certified = replace(PLACE, certs="/certs", certified=(4, 5, 0, 1), rendezvous_role="agent-2")
    assert LaunchEnvironment.from_mapping(PLACE.to_mapping()) == PLACE
    assert LaunchEnvironment.from_mapping(whole.to_mapping()) == whole
    assert LaunchEnvironment.from_mapping(certified.to_mapping()) == certified


def test_nobody_launched_means_none() -> None:
    assert LaunchEnvironment.from_mapping({"HOME": "/root"}) is None
    assert LaunchEnvironment.from_mapping({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_a_world_made_by_another_launcher_is_refused() -> None:
    with pytest.raises(UsageError, match=r"WORLD_SIZE: it is 4 .* `asyncpar launch`"):
        LaunchEnvironment.from_mapping({"RANK": "1", "WORLD_SIZE": "4"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "ASYNCPAR_SECRET_FILE", "ASYNCPAR_JOB"])
def test_a_missing_variable_is_named(name: str) -> None:
    environment = PLACE.to_mapping()
    del environment[name]
    with pytest.raises(UsageError, match=rf"^{name}: expected a value"):
        LaunchEnvironment.from_mapping(environment)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", r"RANK: expected 0\.\.3, got 4"),
        ("RANK", "-1", "RANK: expected a whole number, got '-1'"),
        ("RANK", "one", "RANK: expected a whole number, got 'one'"),
        ("LOCAL_RANK", "2", r"LOCAL_RANK: expected 0\.\.1, got 2"),
        ("GROUP_RANK", "2", r"GROUP_RANK: expected 0\.\.1, got 2"),
        ("WORLD_SIZE", "0", "WORLD_SIZE: expected at least 1, got 0"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE: expected at most WORLD_SIZE"),
        ("MASTER_PORT", "0", r"MASTER_PORT: expected 1\.\.65535, got 0"),
        ("MASTER_PORT", "99999", r"MASTER_PORT: expected 1\.\.65535, got 99999"),
        ("ASYNCPAR_RENDEZVOUS_TIMEOUT", "soon", "ASYNCPAR_RENDEZVOUS_TIMEOUT: expected a number, got 'soon'"),
        ("ASYNCPAR_RENDEZVOUS_TIMEOUT", "nan", "ASYNCPAR_RENDEZVOUS_TIMEOUT"),
        ("ASYNCPAR_REPORT_FD", "x", "ASYNCPAR_REPORT_FD: expected a whole number, got 'x'"),
        ("ASYNCPAR_CERTIFIED", "4,5,-1,1", "ASYNCPAR_CERTIFIED: expected a whole number, got '-1'"),
        ("ASYNCPAR_CERTIFIED", "4,5,0", r"ASYNCPAR_CERTIFIED: expected WORLD_SIZE \(4\) numbers, got 3"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LaunchEnvironment.from_mapping(PLACE.to_mapping() | {name: value})
