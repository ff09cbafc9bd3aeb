"""Frozen parameters take no part in the traffic of ZeRO, from the step on in which they are frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from tests.products import in_turn

SIZE = 4
SIZES = {"first": 400, "second": 96, "third": 1200, "fourth": 64}
TURNS: Sequence[frozenset[str]] = (
    frozenset(),
    frozenset({"third"}),
    frozenset({"first", "fourth"}),
    frozenset(SIZES),
    frozenset(),
)

"""What is frozen in each step."""
SETTINGS: Mapping[str, dict[str, Any]] = {
    "one bucket": {},
    "a bucket each": {"bucket_size_mb": 0.0001},
    "8 bits": {"gradient_compression": True},
    "8 bits, a bucket each": {"gradient_compression": True, "bucket_size_mb": 0.0001},
}


class Rank:
    """An engine of the parameters ``names``, which takes steps."""

    def __init__(self, node: Node, names: Collection[str], **settings: Any) -> None:
        self._node = node
        self.parameters = [Parameter(name, np.ones(SIZES[name], np.float32)) for name in SIZES if name in names]
        self.engine = ZeroEngine(self.parameters, SGD(momentum=0.9), ZeROConfig(**settings), node.world)

    async def step(self, number: int, frozen: Collection[str] = ()) -> int:
        """Take a step, and return the bytes that this rank has sent in it."""
        before = self._node.world.traffic.payload_bytes
        self.engine.zero_grad()
        for parameter in self.parameters:
            parameter.requires_grad = parameter.name not in frozen
            if parameter.requires_grad:
                rng = np.random.default_rng([number, self._node.rank, *parameter.name.encode()])
                parameter.grad[...] = rng.normal(size=parameter.size)
        await self.engine.reduce()
        await self.engine.step(0.1)
        return self._node.world.traffic.payload_bytes - before


async def on_all(main: Any) -> list[Any]:
    async with local_world(SIZE, transport="inproc") as nodes, asyncio.timeout(60.0):
        return list(await asyncio.gather(*map(main, nodes)))


@pytest.mark.parametrize(("stage", "settings"), in_turn(ZeROStage, SETTINGS))
async def test_a_step_sends_what_it_would_if_frozen_parameters_were_none(stage: ZeROStage, settings: str) -> None:
    async def expected(node: Node) -> list[int]:
        sent = []
        for number, frozen in enumerate(TURNS):
            if frozen == SIZES.keys():  # ranks still have to hear of each other
                sent.append(0)
                continue
            rank = Rank(node, SIZES.keys() - frozen, stage=stage, **SETTINGS[settings])
            await rank.engine.prepare()
            sent.append(await rank.step(number))
            rank.engine.close()
        return sent

    async def main(node: Node) -> list[int]:
        rank = Rank(node, SIZES, stage=stage, **SETTINGS[settings])
        await rank.engine.prepare()
        return [await rank.step(number, frozen) for number, frozen in enumerate(TURNS)]

    for got, alone in zip(await on_all(main), await on_all(expected), strict=True):
        for number, (sent, wanted) in enumerate(zip(got, alone, strict=True)):
            assert 0 <= sent - wanted < (1 if wanted else 400), f"step {number}"


@pytest.mark.parametrize("bucket_size_mb", [1.0, 0.0001])
@pytest.mark.parametrize("stage", ZeROStage)
async def test_residuals_of_frozen_parameters_wait_for_them(stage: ZeROStage, bucket_size_mb: float) -> None:
    async def main(node: Node) -> list[dict[str, Array]]:
        rank = Rank(node, SIZES, stage=stage, gradient_compression=True, bucket_size_mb=bucket_size_mb)
        await rank.engine.prepare()
        kept = []
        for number, frozen in enumerate(TURNS):
            await rank.step(number, frozen)
            kept.append(rank.engine.residuals())
        return kept

    for kept in await on_all(main):
        for number, frozen in enumerate(TURNS[1:], 1):
            for name in SIZES:
                is_same = np.array_equal(kept[number][name], kept[number - 1][name])
                assert is_same == (name in frozen), f"{name} in step {number}"
