"""Processes share bandwidth."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.errors import UsageError
from asyncpar.estimate.job import Machine

FOUR_PER_HOST = Machine(ranks_per_host=4, bandwidth=1e9, host_bandwidth=10e9)


def test_rings_inside_of_hosts_have_the_hosts_bandwidth() -> None:
    assert FOUR_PER_HOST.rings_bandwidth([(0, 1), (2, 3), (4, 5, 6, 7)]) == 10e9
    assert FOUR_PER_HOST.rings_bandwidth([]) == 10e9


def test_one_ring_over_hosts_has_all_of_the_link() -> None:
    assert FOUR_PER_HOST.rings_bandwidth([tuple(range(8))]) == 1e9


def test_rings_that_leave_a_host_share_its_link() -> None:
    assert FOUR_PER_HOST.rings_bandwidth([(0, 4), (1, 5), (2, 6), (3, 7)]) == 0.25e9


def test_a_link_between_hosts_is_never_quicker_than_ranks_are() -> None:
    quick = Machine(ranks_per_host=1, bandwidth=100e9, host_bandwidth=10e9)
    assert quick.rings_bandwidth([(0, 1)]) == 10e9


def test_hops_that_leave_a_host_share_its_link_one_way() -> None:
    assert FOUR_PER_HOST.hops_bandwidth([(0, 1), (1, 2)]) == 10e9
    assert FOUR_PER_HOST.hops_bandwidth([(0, 4), (4, 0)]) == 1e9
    assert FOUR_PER_HOST.hops_bandwidth([(0, 4), (1, 5)]) == 0.5e9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks_per_host": 0}, "ranks_per_host: expected a positive number, got 0"),
        ({"flops": 0.0}, "flops: expected a positive number of operations per second"),
        ({"bandwidth": -1.0}, "bandwidth: expected a positive number of bytes per second"),
        ({"host_bandwidth": float("inf")}, "host_bandwidth: expected a positive number of bytes per second"),
    ],
)
def test_impossible_machines_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Machine(**{"ranks_per_host": 1, **settings})
