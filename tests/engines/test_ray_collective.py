"""Groups of Ray's actors whose collectives are asyncpar's; ``scripts/test-ray`` has ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import asyncpar as ap

ray = pytest.importorskip("ray", reason="ray (extra ray) is not installed; scripts/test-ray has it")

from ray.util import collective  # noqa: E402

from tests.engines.ray_members import OPERATIONS, Member  # noqa: E402

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SIX = [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def members() -> Iterator[list[Any]]:
    made = [ray.remote(Member).options(num_cpus=0.5).remote() for _ in range(2)]
    yield made
    for member in made:
        ray.kill(member)


def rows(value: float) -> list[list[float]]:
    return [[value] * 3] * 2


def join(members: list[Any], group: str) -> None:
    seen = ray.get([member.join.remote(2, rank, group) for rank, member in enumerate(members)])
    assert seen == [(0, 2), (1, 2)]


@pytest.mark.parametrize("library", ["numpy", "torch", "torch strided", "torch bfloat16"])
def test_every_operation_of_a_group(members: list[Any], library: str) -> None:
    join(members, "all")
    first, second = ray.get([member.move.remote("all", library) for member in members])
    for op, value in OPERATIONS.items():
        assert first[f"allreduce {op.name}"] == second[f"allreduce {op.name}"] == rows(value)
    assert (first["reduce"], second["reduce"]) == (rows(2.0), rows(5.0))
    assert first["broadcast"] == second["broadcast"] == rows(3.0)
    assert first["allgather"] == second["allgather"] == [rows(2.0), rows(3.0)]
    assert (first["reducescatter"], second["reducescatter"]) == (rows(5.0), rows(50.0))
    assert (first["parts"], second["parts"]) == ([rows(2.0), rows(20.0)], [rows(3.0), rows(30.0)])
    assert second["recv"] == rows(2.0)


def test_a_group_that_the_driver_declares_forms_itself(members: list[Any]) -> None:
    ap.ray.register_collective_backend()
    ap.ray.register_collective_backend()  # without effect
    collective.create_collective_group(members, 2, [0, 1], backend="asyncpar", group_name="declared")
    ray.get([member.wait.remote("declared") for member in members])


def test_two_groups_of_the_same_actors_and_one_of_a_name_that_was_used_before(members: list[Any]) -> None:
    for name in ("one", "other"):
        join(members, name)
    ray.get([member.wait.remote("one") for member in members])
    ray.get([member.leave.remote("one") for member in members])
    join(members, "one")
    for name in ("one", "other"):
        ray.get([member.wait.remote(name) for member in members])


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("differ", ap.OperationMismatch, r"float64\[3\].*float64\[4\]"),
        ("dtype", ap.UsageError, r"dtype"),
        ("list", ap.UsageError, r"tensor_list\[1\]: expected shape \(3,\)"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(
    members: list[Any], what: str, error: type[Exception], text: str
) -> None:
    join(members, "refusing")
    for call in [member.refuse.remote("refusing", what) for member in members]:
        with pytest.raises(error, match=text):
            ray.get(call)


def test_the_death_of_an_actor_is_reported_with_its_rank(members: list[Any]) -> None:
    join(members, "mortal")
    waiting = members[0].wait.remote("mortal")
    os.kill(ray.get(members[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(ap.PeerLost) as lost:
        ray.get(waiting, timeout=60)
    error: Any = lost.value  # Ray's, whose cause is ours
    assert error.cause.rank == 1


def test_a_rank_that_does_not_come_is_waited_for_and_then_reported() -> None:
    environment = {"env_vars": {"ASYNCPAR_RENDEZVOUS_TIMEOUT": "0.5"}}
    alone = ray.remote(Member).options(num_cpus=0.5, runtime_env=environment).remote()
    with pytest.raises(ap.LaunchError, match=r"rank 1 of group 'alone' has not found rank 0 for 0.5 s"):
        ray.get(alone.join.remote(2, 1, "alone"), timeout=60)
    with pytest.raises(ap.AsyncparError, match=r"rank 1"):
        ray.get(alone.join.remote(2, 0, "alone"), timeout=60)
    ray.kill(alone)


def test_a_hook_of_the_job_registers_the_backend_in_all_workers() -> None:
    """The last test: it ends the cluster of the others."""
    ray.shutdown()
    hook = {"worker_process_setup_hook": ap.ray.register_collective_backend}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=hook)
    assert ray.get(ray.remote(collective.is_backend_available).remote("asyncpar"))
