"""Conformance of engines: whole by ranks on this host; by default, the others show what differs most."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALWAYS = {
    "test_values_come_in_the_order_of_ranks_each_from_a_process_of_its_own",
    "test_the_first_failure_comes_first_with_its_cause",
    "test_cancelling_ends_all_ranks_before_it_returns",
    "test_nothing_is_left_of_a_job",
    "test_an_elastic_job_goes_on_when_a_rank_is_killed",
    "test_an_elastic_job_outlives_the_loss_of_a_place_and_gets_another",
}
OTHERS = {"TestDask", "TestElasticDask", "TestGrowingDask", "TestMpi", "TestSlurm"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _, _, name = item.nodeid.partition("::")
        suite, _, case = name.partition("::")
        if item.path.parent == HERE and suite in OTHERS and case not in ALWAYS:
            item.add_marker(pytest.mark.soak)
