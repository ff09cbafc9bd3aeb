"""The cost model agrees with the schedules, and its choices make sense."""

from __future__ import annotations

import math

import pytest

from asyncpar.collectives.algorithms.catalog import ALGORITHMS, known_algorithms, schedule_of, work_of
from asyncpar.collectives.algorithms.check import verify
from asyncpar.collectives.cost import CostModel, choose
from asyncpar.collectives.policy import Policy, format_bytes, parse_pin
from asyncpar.core.config.transport import INPROC_COSTS, LaneCosts
from asyncpar.errors import UsageError
from asyncpar.net.transport.lane_kinds import lane_kind

TCP = lane_kind("tcp").costs
EXACT = [
    ("all_reduce", "ring"),
    ("all_reduce", "halving"),
    ("all_reduce", "doubling"),
    ("all_reduce", "tree"),
    ("reduce_scatter", "pairwise"),
    ("all_gather", "ring"),
    ("all_gather", "pairwise"),
    ("broadcast", "tree"),
    ("all_to_all", "pairwise"),
    ("barrier", "dissemination"),
    ("barrier", "tree"),
]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize(("operation", "algorithm"), EXACT)
def test_steps_and_bytes_of_the_model_are_those_of_the_schedules(operation: str, algorithm: str, size: int) -> None:
    report = verify(operation, [schedule_of(operation, algorithm, rank=rank, size=size) for rank in range(size)])
    work = work_of(operation, algorithm, size, 1680)
    assert report.steps <= work.steps <= report.steps + 1
    if size & (size - 1) == 0 and algorithm != "tree":
        assert work.moved == pytest.approx(max(report.bytes_sent(1680)))


EVERY = [(operation, algorithm) for operation in ALGORITHMS for algorithm in known_algorithms(operation)]
FLAT = [(operation, algorithm) for operation, algorithm in EVERY if not algorithm.startswith("hierarchical")]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize(("operation", "algorithm"), FLAT)
def test_what_all_ranks_send_is_what_the_schedules_send(operation: str, algorithm: str, size: int) -> None:
    report = verify(operation, [schedule_of(operation, algorithm, rank=rank, size=size) for rank in range(size)])
    assert work_of(operation, algorithm, size, 1680).total == pytest.approx(sum(report.bytes_sent(1680)))


def test_where_ranks_share_cores_what_counts_is_all_that_is_sent() -> None:
    def ratio(together: float | None) -> float:
        lane = LaneCosts(latency=1e-4, bandwidth=2e9, together=together)
        model = CostModel(size=4, hosts=((0, 1, 2, 3),), lane=lane, local=lane)
        return model.estimate("all_reduce", "tree", 16 << 20) / model.estimate("all_reduce", "ring", 16 << 20)

    assert ratio(None) == ratio(8e9) > 2.3, "each has a core"
    assert 1.0 < ratio(2e9) < 1.2, "a tree sends as much as a ring"


def test_operations_show_the_share_of_a_rank_where_ranks_share_cores() -> None:
    crowded = LaneCosts(latency=1e-4, bandwidth=2e9, together=2.5e9, is_measured=True)
    hosts = ((0, 1, 2, 3),)
    seen = CostModel(size=4, hosts=hosts, lane=crowded, local=crowded).learn(latency=2e-4, bandwidth=5e8)
    assert seen.lane == seen.local
    assert seen.lane == LaneCosts(latency=2e-4, bandwidth=2e9, together=2e9, is_measured=True)
    roomy = LaneCosts(latency=1e-4, bandwidth=2e9, together=8e9)
    assert CostModel(size=4, hosts=hosts, lane=roomy, local=roomy).learn(
        latency=None, bandwidth=1e9, is_measured=True
    ).lane == LaneCosts(latency=1e-4, bandwidth=1e9, together=8e9, is_measured=True)
    model = CostModel(size=4, hosts=((0, 1), (2, 3)), lane=TCP, local=crowded)
    assert model.learn(latency=None, bandwidth=None) is model
    assert model.learn(latency=None, bandwidth=5e8).local is crowded


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_every_algorithm_has_a_finite_cost_that_grows_with_the_payload(size: int) -> None:
    model = CostModel(size=size, hosts=(tuple(range(size)),), lane=TCP, local=TCP)
    for operation, algorithms in ((name, known_algorithms(name)) for name in ALGORITHMS):
        for algorithm in algorithms:
            small, large = (model.estimate(operation, algorithm, payload) for payload in (0, 1 << 30))
            assert 0 <= small <= large < math.inf


def test_latency_decides_for_small_payloads_and_bandwidth_for_large_ones() -> None:
    assert choose("all_reduce", 4, size=8, lane=TCP) == "doubling"
    assert choose("all_reduce", 100 << 20, size=8, lane=TCP) in ("ring", "halving")
    assert choose("all_reduce", 100 << 20, size=7, lane=TCP) == "ring"
    assert choose("all_gather", 64, size=16, lane=TCP) in ("bruck", "halving")
    assert choose("all_gather", 100 << 20, size=16, lane=TCP) == "ring"
    assert choose("broadcast", 100 << 20, size=16, lane=TCP) == "chain"
    assert choose("all_to_all", 100 << 20, size=16, lane=TCP) == "pairwise"


def test_a_slow_network_between_fast_hosts_makes_the_hierarchy_pay() -> None:
    hosts = tuple(tuple(range(host * 8, host * 8 + 8)) for host in range(4))
    slow = LaneCosts(latency=2e-3, bandwidth=1e8)
    model = CostModel(size=32, hosts=hosts, lane=slow, local=INPROC_COSTS)
    assert model.choose("all_reduce", 25 << 20) == "hierarchical"


def test_arenas_inside_hosts_make_the_hierarchy_pay_on_fast_networks_too() -> None:
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    by_messages = CostModel(size=8, hosts=hosts, lane=TCP, local=TCP)
    in_arenas = CostModel(size=8, hosts=hosts, lane=TCP, local=TCP, has_arenas=True)
    for payload in (0, 1 << 10, 1 << 20, 64 << 20):
        for algorithm in ("hierarchical", "hierarchical-tree"):
            here, there = (model.estimate("all_reduce", algorithm, payload) for model in (in_arenas, by_messages))
            assert 0 < here < math.inf
            assert here < there or payload < 1 << 20
    assert in_arenas.choose("all_reduce", 64 << 20) == "hierarchical"
    assert in_arenas.choose("all_reduce", 64) != "hierarchical"
    across = work_of("all_reduce", "ring", 2, 64 << 20)
    assert in_arenas.estimate("all_reduce", "hierarchical", 64 << 20) < 1.4 * across.moved / TCP.bandwidth


def test_one_host_or_one_rank_per_host_is_no_hierarchy() -> None:
    for hosts in (((0, 1),), ((0,), (1,))):
        model = CostModel(size=2, hosts=hosts, lane=TCP, local=TCP)
        assert not any(name.startswith("hierarchical") for name in model.candidates("all_reduce"))


def test_a_pin_overrides_the_model_and_is_marked_in_the_table() -> None:
    model = CostModel(size=4, hosts=((0, 1, 2, 3),), lane=TCP, local=TCP)
    policy = Policy(model=model, pin=parse_pin("all_reduce:0-64k@tree"))
    assert policy.choose("all_reduce", 100) == "tree"
    assert policy.choose("all_reduce", 64 << 10) != "tree"
    lines = policy.table().splitlines()
    assert lines[0].split() == ["operation", "bytes", "algorithm", "us", "others", "(us)"]
    assert lines[1].split()[:4] == ["all_reduce", "4", "B", "tree*"]
    column = lines[0].index("algorithm")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="bandwidth: expected a positive number, got 0"):
        LaneCosts(latency=1e-5, bandwidth=0)
    with pytest.raises(UsageError, match="together: expected a positive number, got -1"):
        LaneCosts(latency=1e-5, bandwidth=1e9, together=-1)
    with pytest.raises(UsageError, match="lane: expected one of shm, tcp, grpc, got 'pigeon'"):
        lane_kind("pigeon")
    with pytest.raises(UsageError, match="operation"):
        choose("sort", 1, size=2, lane=TCP)


def test_bytes_are_shown_in_the_largest_unit_that_divides() -> None:
    assert [format_bytes(count) for count in (0, 4, 1024, 1536, 1 << 20, 3 << 30)] == [
        "0 B",
        "4 B",
        "1 KiB",
        "1536 B",
        "1 MiB",
        "3 GiB",
    ]
