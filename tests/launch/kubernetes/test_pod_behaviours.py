"""The behaviours of the suite of engines (``asyncpar.testing.engines``) in simulated pods.

Pods have no caller, which could not reach them from outside a cluster: the launcher of each pod tells what an engine
tells its caller, and Kubernetes does what callers do.  So the suite itself does not run; a test of pods stands for each
of its tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncpar.testing.engines import EngineConformance
from scripts.bench.pods import finish
from tests.launch.kubernetes import test_manifests, test_pods
from tests.launch.kubernetes.test_pods import LIMIT, make_names_known, pods_of
from tests.soak import first

PROGRAM = Path(__file__).with_name("telling_rank.py")
pytestmark = test_pods.pytestmark


def reports_in(output: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"\{.*\}", output)]


@pytest.fixture(scope="module")
def ended() -> Iterator[list[tuple[int, str]]]:
    """Two pods, whose names come late, and whose ranks have reported what they see."""
    with pods_of("tell", program=PROGRAM, names_after=None) as pods:
        assert [pod.spec.host_name for pod in pods] == ["train-ranks-0-0", "train-ranks-0-1"]
        make_names_known(pods, waits_for="train-ranks-0-0.train")
        yield finish(pods, timeout=LIMIT)


def test_ranks_of_pods_know_their_places_and_count_without_gaps(ended: list[tuple[int, str]]) -> None:
    assert [code for code, _ in ended] == [0, 0], ended
    for pod, (_, output) in enumerate(ended):
        seen = sorted(reports_in(output), key=lambda one: one["rank"])
        assert [one["rank"] for one in seen] == [2 * pod, 2 * pod + 1]
        for local, one in enumerate(seen):
            assert (one["RANK"], one["WORLD_SIZE"], one["size"], one["sum"]) == (2 * pod + local, 4, 4, 6)
            assert (one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) == (local, 2)
            assert (one["GROUP_RANK"], one["GROUP_WORLD_SIZE"]) == (pod, 2)
        assert len({one["pid"] for one in seen}) == 2


def test_what_ranks_print_and_their_progress_is_in_the_log_of_their_pod(ended: list[tuple[int, str]]) -> None:
    for rank in range(4):
        _, output = ended[rank // 2]
        assert f"rank {rank} says hello\n" in output
        assert f"{rank}] rank {rank} complains\n" in output
    assert "speaking 1/7" in ended[0][1]


def test_ranks_of_pods_find_the_secret_in_a_file_of_theirs_only(ended: list[tuple[int, str]]) -> None:
    for _, output in ended:
        for one in reports_in(output):
            assert (one["secret"]["file_mode"], one["secret"]["is_shown"]) == (0o600, False)
            assert one["secret"]["length"] >= 32


@pytest.mark.parametrize("ranks", first(1, [1, 2]))
def test_all_pods_end_when_a_rank_fails_and_the_first_reports_the_cause(ranks: int) -> None:
    with pods_of("fail", program=PROGRAM, ranks=ranks, names_after=0.1) as pods:
        ended = finish(pods, timeout=LIMIT)
    assert all(code != 0 for code, _ in ended), ended
    assert "rank 1 divides by zero" in ended[0][1]


@pytest.mark.soak
def test_two_jobs_of_pods_do_not_meet() -> None:
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(pods_of("tell", program=PROGRAM, name=name, names_after=0.1))
            for name in ("one", "other")
        ]
        ended = [finish(pods, timeout=LIMIT) for pods in jobs]
    for name, pods in zip(("one", "other"), ended, strict=True):
        reports = [one for _, output in pods for one in reports_in(output)]
        assert [(one["job"], one["size"], one["sum"]) for one in reports] == [(name, 4, 6)] * 4, pods


@pytest.mark.soak
def test_ranks_of_an_indexed_job_start_again_in_their_pods() -> None:
    with pods_of("fail_once", program=PROGRAM, is_jobset=False, max_restarts=1, names_after=0.1) as pods:
        ended = finish(pods, timeout=LIMIT)
    assert [code for code, _ in ended] == [0, 0], ended
    assert [reports_in(output) for _, output in ended] == [[{"attempt": 1}] * 2] * 2


BEHAVIOURS = {
    "test_values_come_in_the_order_of_ranks_each_from_a_process_of_its_own": (
        test_ranks_of_pods_know_their_places_and_count_without_gaps
    ),
    "test_places_that_are_not_full_number_their_ranks_without_gaps": (
        test_ranks_of_pods_know_their_places_and_count_without_gaps  # pods are always full
    ),
    "test_ranks_have_the_environment_of_their_place_and_of_the_caller": (
        test_ranks_of_pods_know_their_places_and_count_without_gaps
    ),
    "test_the_first_failure_comes_first_with_its_cause": (
        test_all_pods_end_when_a_rank_fails_and_the_first_reports_the_cause
    ),
    "test_cancelling_ends_all_ranks_before_it_returns": (
        test_pods.test_when_pods_are_asked_to_end_all_ranks_write_their_checkpoints
    ),
    "test_what_ranks_print_comes_to_the_caller": (test_what_ranks_print_and_their_progress_is_in_the_log_of_their_pod),
    "test_progress_comes_to_the_caller": test_what_ranks_print_and_their_progress_is_in_the_log_of_their_pod,
    "test_the_secret_is_in_a_private_file_and_nowhere_else": (
        test_ranks_of_pods_find_the_secret_in_a_file_of_theirs_only
    ),
    "test_two_jobs_at_once_do_not_meet": test_two_jobs_of_pods_do_not_meet,
    "test_a_job_that_may_starts_again": test_ranks_of_an_indexed_job_start_again_in_their_pods,
    "test_nothing_is_left_of_a_job": test_manifests.test_what_belongs_to_a_job_is_deleted_with_it,
    "test_bad_input_is_told_before_anything_starts": (test_manifests.test_what_kubernetes_would_refuse_is_refused_here),
}
"""A test of the suite, and the one that shows its behaviour on pods."""

WITHOUT_ARGUMENTS = {"test_arguments_that_have_no_value_yet_are_awaited"}
"""Pods run a program of the image, which nobody calls with arguments."""


def test_every_behaviour_of_the_suite_is_shown_on_pods() -> None:
    assert set(BEHAVIOURS) | WITHOUT_ARGUMENTS == {name for name in dir(EngineConformance) if name.startswith("test_")}
