"""Replicas that are not of one kind are refused, on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Parameter
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DDPConfig, DistributedDataParallel
from asyncpar.testing.world import local_world
from tests.parallel.replicas import (
    Branches,
    assert_equal_bits,
    make_batch,
    make_model,
    on_all,
    on_all_failing,
    open_replica,
    open_runtime,
    values_of,
)


async def refuse_to_start(*models: Branches) -> list[object]:
    """Return the error of each rank, after a check that no value has changed."""

    async def main(node: Node) -> object:
        model = models[node.rank]
        before = values_of(model)
        try:
            async with open_replica(node, model):
                return None
        except UsageError as error:
            assert_equal_bits([before, values_of(model)])
            return error

    async with local_world(len(models)) as nodes:
        return list(await on_all(nodes, main))


async def test_another_order_is_an_error_on_all_that_names_parameter_and_rank() -> None:
    for error in await refuse_to_start(Branches("a", "b"), Branches("a", "b"), Branches("b", "a")):
        assert isinstance(error, UsageError)
        assert "rank 0 has a float64[4, 3], rank 2 has b float64[4, 3]" in str(error)


async def test_a_missing_parameter_is_an_error_on_all() -> None:
    for error in await refuse_to_start(Branches("a", "b"), Branches("a")):
        assert "rank 0 has b float64[4, 3], rank 1 has nothing more" in str(error)


async def test_another_shape_is_an_error_on_all() -> None:
    other = Branches("a")
    other.parameters()[0]._value = np.zeros((3, 4))  # noqa: SLF001  # parameters see to it that shapes stay: there is no other way
    for error in await refuse_to_start(Branches("a"), other):
        assert "rank 0 has a float64[4, 3], rank 1 has a float64[3, 4] with a gradient of a float64[4, 3]" in str(error)


async def test_other_settings_are_an_error_on_all() -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model(), config=DDPConfig(static_graph=node.rank == 1)):
            pass

    async with local_world(2) as nodes:
        for error in await on_all_failing(nodes, main):
            assert isinstance(error, UsageError)
            assert "static_graph=True" in str(error)


async def test_a_name_that_occurs_twice_is_refused() -> None:
    class Double(Branches):
        def parameters(self) -> list[Parameter]:
            return [*super().parameters(), *super().parameters()]

    for error in await refuse_to_start(Double("a"), Double("a")):
        assert "two are named 'a'" in str(error)


async def test_a_group_that_does_not_exist_and_no_device_are_refused() -> None:
    async with local_world(1) as (node,), open_runtime(node) as runtime:
        with pytest.raises(UsageError, match="'nowhere'"):
            DistributedDataParallel(make_model(), "cpu:0", "nowhere", runtime)
        with pytest.raises(UsageError, match="device: expected a name"):
            DistributedDataParallel(make_model(), "", DDP_GROUP, runtime)
        with pytest.raises(UsageError, match="bucket_size: expected a positive number of bytes, got 0"):
            DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime, bucket_size=0)
        with pytest.raises(UsageError, match="it is not running"):
            await DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime).forward(make_batch(1)[0])
