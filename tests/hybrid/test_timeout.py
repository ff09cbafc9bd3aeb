"""``communication_timeout_ms`` bounds how long ranks wait for one that does nothing, in every kind of group."""

from __future__ import annotations

import asyncio
import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import PeerError, PeerTimeout
from asyncpar.hybrid import ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn.parameter import Array
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.faults import Fault, FaultyModel, Moment
from tests.hybrid.ranks import PATIENCE, running
from tests.hybrid.worlds import TINY, make_config

MILLISECONDS = 400
OF_THE_WORLD = 300.0
"""Seconds that other groups of the world wait, which is longer than a test may take."""

LAYOUTS: dict[str, tuple[tuple[int, int, int], ZeROStage]] = {
    "dp": ((2, 1, 1), ZeROStage.NONE),
    "zero2": ((2, 1, 1), ZeROStage.STAGE2),
    "tp": ((1, 2, 1), ZeROStage.NONE),
    "pp": ((1, 1, 2), ZeROStage.NONE),
}


def config_of(layout: str) -> Any:
    sizes, stage = LAYOUTS[layout]
    return make_config(*sizes, zero=ZeROConfig(stage=stage), communication_timeout_ms=MILLISECONDS)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_that_does_not_come_is_named_in_time(layout: str) -> None:
    async with running(TINY, config_of(layout)) as ranks:
        await ranks.take_step()
        ranks.nodes[0].world.timeout = OF_THE_WORLD
        with pytest.raises(PeerTimeout) as raised:
            async with asyncio.timeout(PATIENCE):
                await ranks.step(ranks.all[0])
        assert raised.value.rank == 1
        assert ranks.nodes[0].world.timeout == OF_THE_WORLD, "other groups of the world have their own"


@pytest.mark.parametrize(
    ("of_world", "of_config", "seconds"),
    [
        ({}, {}, 30.0),
        ({"timeout": 7.0}, {}, 7.0),
        ({"timeout": 300.0}, {}, 300.0),
        ({"timeout": None}, {}, None),
        ({}, {"communication_timeout_ms": 400}, 0.4),
        ({"timeout": 7.0}, {"communication_timeout_ms": 400}, 0.4),
        ({"timeout": 7.0}, {"communication_timeout_ms": 30_000}, 30.0),
        ({"timeout": None}, {"communication_timeout_ms": 30_000}, 30.0),
        ({"timeout": 300.0}, {"communication_timeout_ms": 30_000}, 30.0),
    ],
)
async def test_of_two_timeouts_the_one_that_was_set_is_used_even_if_it_equals_the_default(
    of_world: dict[str, float | None], of_config: dict[str, int], seconds: float | None
) -> None:
    config = make_config(1, 1, 2, **of_config)
    config = replace(config, parallelism=pickle.loads(pickle.dumps(replace(config.parallelism))))
    async with local_world(2) as nodes:
        for node in nodes:
            node.world.timeout = of_world.get("timeout", node.world.timeout)
        made = [
            ThreeDParallelismCoordinator.create(config, TransformerModel(config=TINY), node.world) for node in nodes
        ]
        for coordinator in await asyncio.gather(*made):
            assert {group.timeout for group in coordinator.groups.names.values()} == {seconds}
            await coordinator.close()


@pytest.mark.parametrize("layout", ["dp", "pp"])
async def test_a_rank_that_hangs_in_its_compute_ends_the_step_in_time(layout: str) -> None:
    is_awake = threading.Event()

    def hang(_: Array) -> None:
        is_awake.wait()

    def make_model(rank: int) -> FaultyModel:
        fault = Fault(at=Moment.FORWARD if rank else None, what=hang)
        return FaultyModel(model=TransformerModel(config=TINY), fault=fault)

    async with running(TINY, config_of(layout), make_model) as ranks:
        hung = asyncio.create_task(ranks.step(ranks.all[1]))
        with pytest.raises(PeerError):
            async with asyncio.timeout(PATIENCE):
                await ranks.step(ranks.all[0])
        is_awake.set()
        await asyncio.gather(hung, return_exceptions=True)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_group_has_the_timeout(layout: str) -> None:
    async with running(TINY, config_of(layout)) as ranks:
        for one in ranks.all:
            for name, group in one.groups.names.items():
                assert group.timeout == MILLISECONDS / 1000, name
            assert one.groups.world.timeout == MILLISECONDS / 1000
