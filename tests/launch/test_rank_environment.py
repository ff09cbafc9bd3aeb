"""Contents of a rank's environment."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.errors import UsageError
from asyncpar.launch.rank_process import rank_environment
from asyncpar.net.checked_settings import check_settings

PLACE = LaunchEnvironment(
    rank=0,
    local_rank=0,
    world_size=2,
    local_world_size=2,
    group_rank=0,
    group_world_size=1,
    master_addr="127.0.0.1",
    master_port=1,
    rendezvous="127.0.0.1:2",
    secret_file="/s",
    job="j",
    generation=0,
    restart_count=0,
    host="h",
    host_id="h-1",
    bind="127.0.0.1",
    timeout=1.0,
)


def test_the_place_is_added_to_what_is_inherited() -> None:
    environment = rank_environment({"HOME": "/root", "RANK": "9"}, PLACE)
    assert (environment["HOME"], environment["RANK"]) == ("/root", "0")
    assert LaunchEnvironment.from_mapping(environment) == PLACE


def test_threads_are_limited_with_several_ranks_unless_somebody_chose() -> None:
    assert rank_environment({}, PLACE)["OPENBLAS_NUM_THREADS"] == "1"
    assert rank_environment({"OMP_NUM_THREADS": "4"}, PLACE)["OMP_NUM_THREADS"] == "4"
    alone = replace(PLACE, world_size=1, local_world_size=1)
    assert "OMP_NUM_THREADS" not in rank_environment({}, alone)


def test_nothing_of_an_outer_launch_shines_through() -> None:
    outer = {"ASYNCPAR_TRANSPORT": "grpc", "ASYNCPAR_REPORT_FD": "7"}
    environment = rank_environment(outer, PLACE)
    assert "ASYNCPAR_TRANSPORT" not in environment
    assert "ASYNCPAR_REPORT_FD" not in environment


def test_the_pin_of_algorithms_reaches_the_ranks() -> None:
    assert rank_environment({"ASYNCPAR_ALGORITHM": "seed"}, PLACE)["ASYNCPAR_ALGORITHM"] == "seed"


def test_every_variable_that_the_documentation_recommends_reaches_the_ranks() -> None:
    root = Path(__file__).parents[2]
    texts = [path.read_text() for path in (root / "README.md", root / "SECURITY.md", *(root / "docs").glob("*.md"))]
    found = {name for text in texts for name in re.findall(r"ASYNCPAR_[A-Z_]+", text)}
    of_the_launcher = {"ASYNCPAR_CERTS", "ASYNCPAR_ELASTIC_FD", "ASYNCPAR_SECRET_FILE"}
    of_launchers_of_others = {"ASYNCPAR_MEETING_DIR", *PLACE.to_mapping()}  # ours sets these itself
    assert {"ASYNCPAR_NCCL_BETWEEN_HOSTS", "ASYNCPAR_TORCH_CUDA"} <= found
    for name in found - of_the_launcher - of_launchers_of_others:
        assert rank_environment({name: "it"}, PLACE).get(name) == "it", name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ASYNCPAR_ARENA_BYTES", "16"),
        ("ASYNCPAR_ARENA_WAIT", "sleep"),
        ("ASYNCPAR_CALIBRATE", "yes"),
        ("ASYNCPAR_CHECKSUMS", "maybe"),
        ("ASYNCPAR_CONNECTIONS", "17"),
        ("ASYNCPAR_LINK_TIMEOUT", "1"),
    ],
)
def test_a_setting_that_every_rank_would_refuse_is_refused_before_ranks_start(name: str, value: str) -> None:
    check_settings({name: ""})
    with pytest.raises(UsageError, match=f"^{name}: expected "):
        check_settings({name: value})
