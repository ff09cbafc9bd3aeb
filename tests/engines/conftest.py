"""Conformance of engines: whole by ranks on this host; by default, the others show what differs most.

Tests share a cluster of Dask: its workers take seconds to start and to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.dask_workers import start_cluster

HERE = Path(__file__).parent
SURVIVAL = "test_an_elastic_job_goes_on_when_a_rank_is_killed"
BOUNDS = "test_bounds_that_make_no_sense_are_refused"
CANCELLING = "test_cancelling_ends_all_ranks_before_it_returns"
ALWAYS = {
    "TestDask": set[str](),
    "TestElasticDask": set[str](),
    "TestGrowingDask": {"test_an_elastic_job_outlives_the_loss_of_a_place_and_gets_another"},
    "TestElasticLocal": {SURVIVAL, BOUNDS},
    "TestMpi": set[str](),
    "TestSlurm": {CANCELLING},
}
"""What each suite shows by default: places of MPI and of Slurm are programs of the same kind, and ``test_mpi.py`` and
``test_dask.py`` have jobs of their own.  Who starts a lost rank again is an agent, wherever it runs: see
``tests/launch/agents/test_host_agent.py``."""


@pytest.fixture(scope="package")
def two_workers() -> Iterator[Any]:
    """Yield a cluster of Dask with two workers; what loses one waits until there are two again.

    It ends with this folder: it has threads that open files, which tests of other folders may count.
    """
    with start_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_workers() -> Iterator[Any]:
    """Yield a cluster of Dask with three workers, which no test loses."""
    with start_cluster(3) as cluster:
        yield cluster


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _, _, name = item.nodeid.partition("::")
        suite, _, case = name.partition("::")
        if item.path.parent == HERE and case not in ALWAYS.get(suite, {case}):
            item.add_marker(pytest.mark.soak)
