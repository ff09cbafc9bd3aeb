"""Real groups of a 3D-parallel world."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.parallel import PipelineScheduleType, ProcessGroupIds, RankMapping, ThreeDParallelismConfig
from asyncpar.errors import PeerError, UsageError
from asyncpar.node import Node
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.soak import chosen

FACTORIZATIONS = [(dp, tp, 8 // dp // tp) for dp, tp in itertools.product((1, 2, 4, 8), repeat=2) if dp * tp <= 8]
ORDERS = ["-".join(axes) for axes in itertools.permutations(("dp", "tp", "pp"))]


def cube(**settings: Any) -> ThreeDParallelismConfig:
    return ThreeDParallelismConfig(**{"dp_size": 2, "tp_size": 2, "pp_size": 2, **settings})


async def create(nodes: Sequence[Node], config: ThreeDParallelismConfig, **more: Any) -> list[ProcessGroups]:
    return await asyncio.gather(*(ProcessGroups.create(config, node.world, **more) for node in nodes))


async def create_all(nodes: Sequence[Node], configs: Sequence[ThreeDParallelismConfig]) -> list[Any]:
    """Return what each rank gets, groups or the error."""
    calls = [ProcessGroups.create(config, node.world) for node, config in zip(nodes, configs, strict=True)]
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30.0)


async def sum_over_each(groups: ProcessGroups) -> dict[str, int]:
    """Return the sum of 2**rank over every group of this rank, all running at once, the last one first."""
    marks = {name: np.array([1 << groups.world.rank], np.int64) for name in groups.names}
    names = list(groups.names)[:: 1 if groups.world.rank % 2 else -1]
    await asyncio.gather(*(groups.names[name].all_reduce(marks[name]) for name in names))
    return {name: int(mark[0]) for name, mark in marks.items()}


@pytest.mark.parametrize("sizes", FACTORIZATIONS, ids=str)
def test_each_group_sums_exactly_its_ranks(sizes: tuple[int, int, int]) -> None:
    """In every third order by default, in others for other sizes."""
    place = FACTORIZATIONS.index(sizes) % 3

    async def main() -> None:
        dp, tp, pp = sizes
        async with local_world(8) as nodes:
            for order in chosen(ORDERS[place::3], soak=ORDERS):
                config = ThreeDParallelismConfig(dp_size=dp, tp_size=tp, pp_size=pp, order=order)
                everyone = await create(nodes, config, purpose=order)
                sums = await asyncio.gather(*map(sum_over_each, everyone))
                expected = ProcessGroupIds(config).groups()
                for rank, found in enumerate(sums):
                    mine = {name: sum(1 << member for member in ranks) for name, ranks in expected.items()}
                    assert found == {name: total for name, total in mine.items() if rank in expected[name]}

    run_virtual(main())


@pytest.mark.parametrize("order", ["pp-tp-dp", "tp-cp-dp-pp"])
async def test_the_groups_of_a_rank_are_those_of_its_mapping(order: str) -> None:
    config = cube(order=order)
    async with local_world(8) as nodes:
        for rank, groups in enumerate(await create(nodes, config)):
            mapping = RankMapping(config, rank)
            assert groups.dp.ranks == mapping.dp_group_ranks()
            assert groups.tp.ranks == mapping.tp_group_ranks()
            assert groups.pp.ranks == mapping.pp_group_ranks()
            assert (groups.dp.rank, groups.tp.rank, groups.pp.rank) == (
                mapping.dp_rank,
                mapping.tp_rank,
                mapping.pp_rank,
            )
            assert groups.dp.name == ProcessGroupIds(config).get_dp_group_id(mapping.tp_rank, mapping.pp_rank)
            assert groups.model.size == 4
            assert groups.mapping.local_rank == rank


async def test_only_the_ends_of_a_pipeline_share_embeddings() -> None:
    async with local_world(4) as nodes:
        looped = await create(nodes, ThreeDParallelismConfig(pp_size=4), purpose="looped")
        v_shaped = await create(
            nodes, ThreeDParallelismConfig(pp_size=4, pipeline_schedule=PipelineScheduleType.ZBV), purpose="v-shaped"
        )
        joined = [None if groups.embedding is None else groups.embedding.ranks for groups in looped]
        assert joined == [(0, 3), None, None, (0, 3)]
        assert [None if groups.embedding is None else groups.embedding.ranks for groups in v_shaped] == [
            (0,),
            None,
            None,
            None,
        ]


async def test_groups_of_different_purposes_do_not_meet() -> None:
    async with local_world(2) as nodes:
        config = ThreeDParallelismConfig(dp_size=2)
        one, other = await create(nodes, config, purpose="one"), await create(nodes, config, purpose="other")
        assert one[0].dp.group == one[1].dp.group != other[0].dp.group


async def test_a_world_of_one_has_all_its_groups() -> None:
    async with local_world(1) as nodes:
        (groups,) = await create(nodes, ThreeDParallelismConfig())
        assert [group.ranks for group in groups.names.values()] == [(0,)] * 5
        assert groups.embedding is not None


async def test_one_rank_with_another_configuration_is_named_on_every_rank() -> None:
    async with local_world(8) as nodes:
        results = await create_all(nodes, [*[cube()] * 5, cube(micro_batch_size=3), *[cube()] * 2])
        for result in results:
            assert isinstance(result, SettingsDiffer)
            assert "parallelism.micro_batch_size is 1 on ranks 0, 1, 2, 3, 4 and 2 more and 3 on rank 5" in str(result)


async def test_the_world_can_be_used_after_a_difference() -> None:
    async with local_world(2) as nodes:
        pair = ThreeDParallelismConfig(dp_size=2)
        await create_all(nodes, [pair, ThreeDParallelismConfig(tp_size=2)])
        groups = await create(nodes, pair)
        assert [one.dp.ranks for one in groups] == [(0, 1), (0, 1)]


async def test_a_configuration_for_another_world_is_refused_on_every_rank() -> None:
    async with local_world(4) as nodes:
        for result in await create_all(nodes, [cube()] * 4):
            assert isinstance(result, UsageError)
            assert "expected 8 devices (2*2*2), got 4" in str(result)


async def test_sizes_that_fit_one_rank_only_are_a_difference_on_all() -> None:
    async with local_world(2) as nodes:
        results = await create_all(nodes, [ThreeDParallelismConfig(dp_size=2), cube()])
        assert [type(result) for result in results] == [SettingsDiffer] * 2
        assert "parallelism.tp_size is 1 on rank 0 and 2 on rank 1" in str(results[0])


async def test_other_settings_are_compared_too() -> None:
    async with local_world(3) as nodes:
        config = ThreeDParallelismConfig(dp_size=3)
        calls = [ProcessGroups.create(config, node.world, settings={"seed": node.rank // 2}) for node in nodes]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert (
                str(result) == "settings: expected the same on all ranks, but seed is 0 on ranks 0, 1 and 1 on rank 2"
            )


def test_a_rank_that_never_comes_is_named_when_time_is_up() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            for node in nodes:
                node.world.timeout = 5.0
            config = ThreeDParallelismConfig(dp_size=3)
            calls = [ProcessGroups.create(config, node.world) for node in nodes[:2]]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, PeerError)
                assert "waited 5.0 s for rank 2" in str(result)

    run_virtual(main())
