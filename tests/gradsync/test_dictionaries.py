"""Gradients in plain dictionaries, also nested: the same sums, names by path, and refusals on every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.node import Node
from asyncpar.testing.world import local_world

SIZE = 3


async def on_all(main: Callable[[Node], Any], size: int = SIZE) -> list[Any]:
    async with local_world(size) as nodes:
        return list(await asyncio.gather(*map(main, nodes), return_exceptions=True))


def tree(rank: int) -> dict[str, Any]:
    return {
        "w": np.full((3, 4), rank + 1.0, np.float32),
        "layer": {"b": np.arange(5.0) * rank, "turned": (np.arange(6.0).reshape(2, 3) * rank).T},
        "scalar": np.array(float(rank)),
        "empty": np.zeros((0, 2)),
    }


def check(gradients: dict[str, Any]) -> None:
    np.testing.assert_array_equal(gradients["w"], np.full((3, 4), 2.0))
    np.testing.assert_array_equal(gradients["layer"]["b"], np.arange(5.0))
    np.testing.assert_array_equal(gradients["layer"]["turned"], np.arange(6.0).reshape(2, 3).T)
    assert gradients["scalar"] == 1.0
    assert gradients["empty"].shape == (0, 2)


async def test_arrays_of_dictionaries_become_their_means_in_place() -> None:
    async def main(node: Node) -> None:
        synchronizer = GradientSynchronizer.data_parallel(node.world)
        for _ in range(2):
            gradients = tree(node.rank)
            array = gradients["layer"]["b"]
            outcome = await synchronizer.synchronize_gradients(gradients)
            assert not outcome.is_skipped
            assert gradients["layer"]["b"] is array
            check(gradients)

    assert await on_all(main) == [None] * SIZE


async def test_a_step_names_gradients_by_their_path() -> None:
    async def main(node: Node) -> None:
        synchronizer = GradientSynchronizer.data_parallel(node.world)
        gradients = tree(node.rank)
        async with synchronizer.step(gradients) as step:
            for name in ("layer/b", "w", "scalar"):
                step.ready(name)
        check(gradients)

    assert await on_all(main) == [None] * SIZE


async def test_views_of_buckets_are_put_into_the_dictionary() -> None:
    async def main(node: Node) -> None:
        bucketing = GradientBucketingConfig(gradient_as_bucket_view=True)
        synchronizer = GradientSynchronizer.data_parallel(node.world, bucketing=bucketing)
        gradients = {"w": np.full(4, float(node.rank))}
        await synchronizer.synchronize_gradients(gradients)
        np.testing.assert_array_equal(gradients["w"], np.ones(4))

    assert await on_all(main) == [None] * SIZE


async def test_micro_steps_and_codecs_take_dictionaries() -> None:
    async def main(node: Node) -> None:
        compression = GradientCompressionConfig(codec="bf16")
        synchronizer = GradientSynchronizer.data_parallel(node.world, compression=compression)
        gradients: dict[str, Any] = {"w": np.full(4, float(node.rank)), "v": {"b": np.full(2, 2.0)}}
        await synchronizer.reserve(gradients)
        synchronizer.accumulate(gradients)
        assert not gradients["w"].any()
        gradients["w"] += 2.0
        await synchronizer.synchronize_gradients(gradients)
        np.testing.assert_allclose(gradients["w"], np.full(4, 1.5))
        assert set(synchronizer.residuals()) == {"w", "v/b"}

    assert await on_all(main) == [None] * SIZE


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False
WRONG: dict[str, tuple[dict[Any, Any], str]] = {
    "number": ({"w": {"b": 1.0}}, "gradients: w/b: expected an array, whose mean is written into it, got 1.0"),
    "list": ({"w": [1.0]}, "gradients: w: expected an array"),
    "read-only": ({"w": READ_ONLY}, "gradients: w: expected an array that can be written"),
    "key": ({"w": {3: np.zeros(2)}}, "gradients: expected texts as keys, got 3 in w"),
    "twice": ({"w/b": np.zeros(2), "w": {"b": np.zeros(2)}}, "two are named 'w/b'"),
    "integers": ({"w": np.zeros(2, np.int32)}, "parameter w: expected a gradient of a floating dtype, got int32"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_what_is_no_gradient_on_one_rank_is_refused_on_all(case: str) -> None:
    wrong, reason = WRONG[case]

    async def main(node: Node) -> None:
        synchronizer = GradientSynchronizer.data_parallel(node.world)
        gradients: dict[Any, Any] = wrong if node.rank == 1 else {"w": np.zeros(2)}
        await synchronizer.synchronize_gradients(gradients)

    errors = await on_all(main, 2)
    assert all(isinstance(error, UsageError) for error in errors), errors
    assert reason in str(errors[1])
