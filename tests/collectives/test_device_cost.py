"""Estimates of device arrays: by the published figures, as the formulas say, and the choice only by figures of ours."""

from __future__ import annotations

import dataclasses

import pytest

from asyncpar.collectives.cost import CostModel
from asyncpar.collectives.device_cost import DeviceCostModel, device_operation, measured_lane
from asyncpar.collectives.policy import Policy, parse_pin
from asyncpar.core.config.device_lanes import BUILT_IN_LANES, NVLINK_COSTS, DeviceLanes
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError

TCP = LaneCosts(latency=30e-6, bandwidth=2e9)
GIB = 1 << 30
WAYS = ("nccl", "hierarchical", "staged")


def model(*hosts: int, lanes: DeviceLanes = BUILT_IN_LANES) -> DeviceCostModel:
    """Return the model of so many ranks on each host."""
    starts = [sum(hosts[:place]) for place in range(len(hosts))]
    places = tuple(tuple(range(start, start + count)) for start, count in zip(starts, hosts, strict=True))
    return DeviceCostModel(model=CostModel(size=sum(hosts), hosts=places, lane=TCP, local=TCP), lanes=lanes)


@pytest.mark.parametrize(
    ("operation", "multiple"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_gather", 7 / 8),
        ("all_gather_v", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_large_operations_by_nccl_move_what_its_benchmark_divides_by(operation: str, multiple: float) -> None:
    fast = dataclasses.replace(NVLINK_COSTS, reduction=1e30)
    inside = model(8, lanes=DeviceLanes(within=fast)).estimate(operation, "nccl", GIB)
    assert inside == pytest.approx(multiple * GIB / 450e9, rel=0.02)
    across = model(4, 4, lanes=DeviceLanes(within=fast)).estimate(operation, "nccl", GIB)
    assert across == pytest.approx(multiple * GIB / 50e9, rel=0.02)


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_by_host_an_array_per_host_goes_over_the_lanes_of_the_network(operation: str) -> None:
    found = model(8, 8).estimate(operation, "hierarchical", GIB)
    network = min(
        CostModel(size=2, hosts=((0,), (1,)), lane=TCP, local=TCP).estimate(operation, name, GIB)
        for name in (("ring", "halving", "doubling", "tree") if operation == "all_reduce" else ("tree", "chain"))
    )
    assert network < found < network + 0.3
    assert found > model(8, 8).estimate(operation, "nccl", GIB)


def test_through_the_host_adds_copies_to_what_the_host_takes() -> None:
    there = model(2).estimate("all_reduce", "staged", GIB)
    host = CostModel(size=2, hosts=((0, 1),), lane=TCP, local=TCP)
    assert there > host.estimate("all_reduce", host.choose("all_reduce", GIB), GIB) + 2 * GIB / 64e9
    gathered = model(2).estimate("all_gather", "staged", GIB)
    assert gathered < there


@pytest.mark.parametrize("payload", [0, 4, 1 << 20, GIB])
@pytest.mark.parametrize("hosts", [(1,), (2,), (8,), (1, 1), (3, 2), (8, 8, 8)])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "gather", "scatter", "all_to_all_v"])
def test_every_way_of_every_group_has_an_estimate(operation: str, hosts: tuple[int, ...], payload: int) -> None:
    for way in WAYS if operation in ("all_reduce", "broadcast") else ("nccl", "staged"):
        assert 0 < model(*hosts).estimate(operation, way, payload) < 60


def test_built_in_figures_choose_nothing_and_others_the_cheapest() -> None:
    assert model(4, 4).choose("all_reduce", 4, WAYS) == "nccl"
    assert model(4, 4).choose("all_reduce", 4, WAYS[1:]) == "hierarchical"
    slow = LaneCosts(latency=1e-3, bandwidth=1e9)
    assert model(4, 4, lanes=DeviceLanes(within=slow)).choose("all_reduce", 4, WAYS) == "staged"
    assert model(4, 4, lanes=DeviceLanes(between=slow)).choose("all_reduce", 4, WAYS) == "hierarchical"
    assert model(4, 4, lanes=DeviceLanes()).choose("all_reduce", GIB, WAYS) == "nccl"
    slow_copies = DeviceLanes(between=slow, copy=slow)
    assert model(4, 4, lanes=slow_copies).choose("all_reduce", GIB, WAYS) == "nccl"
    assert model(4, lanes=slow_copies).choose("no operation", 4, WAYS) == "nccl"


def test_messages_and_unknown_ways_have_no_estimates() -> None:
    assert device_operation("send") is None
    with pytest.raises(UsageError, match="operation: expected one of"):
        model(2).estimate("send", "nccl", 4)
    with pytest.raises(UsageError, match="all_gather of device arrays has no 'hierarchical'"):
        model(2, 2).estimate("all_gather", "hierarchical", 4)
    with pytest.raises(UsageError, match="within: expected LaneCosts"):
        DeviceLanes(within=3.0)  # type: ignore[arg-type]


def test_a_lane_is_what_was_measured_on_it() -> None:
    lane = measured_lane(30e-6, 30e-6 + 1e-3, 2e6, steps=3, reduction=1e12)
    assert lane.is_measured
    assert lane.latency == pytest.approx(10e-6)
    assert lane.bandwidth == pytest.approx(2e9)
    assert measured_lane(1e-3, 5e-4, 2e6, steps=1, reduction=1e12).bandwidth == pytest.approx(4e10)


def test_the_table_shows_choice_estimates_what_cannot_be_and_whose_figures() -> None:
    policy = Policy(model=model(2, 2).model, pin=parse_pin("all_reduce:1m-inf@staged"))
    table = policy.device_table({"all_reduce": ("hierarchical", "staged"), "send": ("nccl",)}).splitlines()
    assert len(table) == 10 + 1
    assert table[0].split()[:6] == ["all_reduce", "on", "devices", "4", "B", "hierarchical"]
    assert "no nccl" in table[0]
    assert "staged*" in table[-2]
    assert table[-1] == (
        "lanes of devices (published, not measured here): within 450 GB/s, 3 us; between 50 GB/s, 5 us; "
        "copy 64 GB/s, 10 us"
    )
    own = dataclasses.replace(policy, device_lanes=DeviceLanes(copy=dataclasses.replace(TCP, is_measured=True)))
    assert own.device_table({"broadcast": ("nccl",)}).endswith("copy 2 GB/s, 30 us, measured")
    assert policy.device_table({}) == ""
