"""Ranks, nodes and leaders on several nodes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from asyncpar.backends import CommunicationBackend
from asyncpar.errors import UsageError
from asyncpar.multinode import MultiNodeConfig
from asyncpar.zero import ZeROConfig, ZeROStage


def test_a_rank_is_counted_node_by_node() -> None:
    config = MultiNodeConfig.new(4, 8, 2, 3)
    assert (config.global_rank, config.world_size(), config.is_master(), config.is_leader) == (19, 32, False, False)


def test_the_local_ranks_of_a_node_are_ranks_of_the_world() -> None:
    config = MultiNodeConfig.new(3, 4, 1, 2)
    assert config.node_local_ranks() == [4, 5, 6, 7]
    assert config.node_ranks(2) == [8, 9, 10, 11]
    assert config.nodes() == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))


@pytest.mark.parametrize("rank", range(6))
def test_a_rank_of_the_world_has_one_place(rank: int) -> None:
    config = MultiNodeConfig.of_rank(3, 2, rank)
    assert (config.node_rank, config.local_rank, config.global_rank) == (rank // 2, rank % 2, rank)
    assert config.is_master() is (rank == 0)
    assert config.is_leader is (rank % 2 == 0)


def test_the_defaults_are_one_rank_alone() -> None:
    config = MultiNodeConfig()
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "num_nodes": 1,
        "devices_per_node": 1,
        "node_rank": 0,
        "local_rank": 0,
        "global_rank": 0,
        "zero_config": ZeROConfig(stage=ZeROStage.STAGE1),
        "gradient_compression": False,
        "comm_backend": CommunicationBackend.NATIVE,
        "overlap_comm_compute": True,
        "gradient_bucket_size_mb": 25,
    }
    assert config.world_size == 1
    assert config.is_master


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 0}, "num_nodes: expected an integer of at least 1, got 0"),
        ({"num_nodes": 2.0}, "num_nodes: expected an integer of at least 1, got 2.0"),
        ({"devices_per_node": -1}, "devices_per_node: expected an integer of at least 1, got -1"),
        ({"num_nodes": 2, "node_rank": 2}, r"node_rank: expected 0\.\.1, got 2"),
        ({"node_rank": -1}, r"node_rank: expected 0\.\.0, got -1"),
        ({"devices_per_node": 4, "local_rank": 4}, r"local_rank: expected 0\.\.3, got 4"),
        ({"num_nodes": 2, "global_rank": 2}, r"global_rank: expected 0\.\.1, got 2"),
        ({"gradient_bucket_size_mb": 0}, "gradient_bucket_size_mb: expected a positive number of MiB, got 0"),
        ({"gradient_bucket_size_mb": float("inf")}, "gradient_bucket_size_mb: expected a positive number"),
        ({"comm_backend": ""}, "comm_backend: expected the name of a backend, got ''"),
        ({"zero_config": 1}, "zero_config: expected a ZeROConfig, got 1"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MultiNodeConfig(**settings)


def test_a_rank_that_is_always_zero_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"global_rank: expected 3 \(node_rank 1 \* 2 devices \+ local_rank 1; .* got 0"
    ):
        MultiNodeConfig(num_nodes=2, devices_per_node=2, node_rank=1, local_rank=1)


@pytest.mark.parametrize("place", [(2, 2, 2, 0), (2, 2, 0, 2), (2, 2, -1, 0)])
def test_places_outside_of_the_world_are_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="expected 0"):
        MultiNodeConfig.new(*place)


def test_a_node_outside_of_the_world_has_no_ranks() -> None:
    with pytest.raises(UsageError, match=r"node_rank: expected 0\.\.1, got 2"):
        MultiNodeConfig.new(2, 2, 0, 0).node_ranks(2)


def test_the_description_differs_wherever_ranks_must_agree() -> None:
    plain = MultiNodeConfig.new(2, 2, 0, 0)
    assert plain.describe() == MultiNodeConfig.new(2, 2, 1, 1).describe()
    changes: list[dict[str, Any]] = [
        {"gradient_compression": True},
        {"overlap_comm_compute": False},
        {"gradient_bucket_size_mb": 24},
        {"zero_config": ZeROConfig(stage=ZeROStage.STAGE2)},
    ]
    for change in changes:
        assert MultiNodeConfig.new(2, 2, 0, 0, **change).describe() != plain.describe()
    assert MultiNodeConfig.new(4, 1, 0, 0).describe() != plain.describe()


@pytest.mark.parametrize(
    ("nodes", "stage", "setting"),
    [
        (1, ZeROStage.NONE, {"algorithm": "nonsense"}),
        (1, ZeROStage.NONE, {"reduce_bucket_size": 7}),
        (1, ZeROStage.NONE, {"max_memory_usage_mb": 7}),
        (2, ZeROStage.STAGE1, {"algorithm": "ring"}),
        (2, ZeROStage.NONE, {"algorithm": "ring"}),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(nodes: int, stage: ZeROStage, setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))} of ZeROConfig: expected .*, as .*, got"):
        MultiNodeConfig.new(nodes, 1, 0, 0, zero_config=ZeROConfig(stage=stage, **setting))
