"""No part of a gradient is lost over changes of layout, whatever compresses it: residuals go over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import Name
from asyncpar.core.config.parallel import CommunicationStrategy, RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import (
    GradientBucketingConfig,
    GradientCompressionConfig,
    GradientSynchronizer,
    HostGroups,
)
from asyncpar.multinode.node_sum import NodeSums
from asyncpar.nn import Parameter
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage
from asyncpar.zero.checkpointing import load_flow, save_flow, wanted_by
from asyncpar.zero.flow import GradientFlow, ReplicatedFlow
from asyncpar.zero.sharded_flow import ShardedFlow
from tests.soak import chosen

SHAPES = {"w": (9, 7), "b": (5,), "v": (40,)}
UNIT = 2.0**10
"""Gradients are multiples of it, so that means of means over 2 or 4 ranks are exact."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``hosts`` have as many ranks each."""

    size: int
    codec: str = "topk:0.2"
    hosts: int = 1
    stage: ZeROStage = ZeROStage.NONE
    bucket_size_mb: float = 1.0
    average: bool = True
    error_feedback: bool = True

    @property
    def names(self) -> list[str]:
        return [f"host{rank * self.hosts // self.size}" for rank in range(self.size)]

    async def make(self, node: Node) -> GradientFlow:
        parameters = [Parameter(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()]
        if self.stage is not ZeROStage.NONE:
            return await self._sharded(node, parameters)
        strategy = CommunicationStrategy.ALL_REDUCE
        if self.hosts > 1:
            strategy = CommunicationStrategy.HIERARCHICAL_ALL_REDUCE
        config = ThreeDParallelismConfig(dp_size=self.size, comm_strategy=strategy)
        synchronizer = GradientSynchronizer(
            config,
            RankMapping(config, node.rank),
            communicator=node.world,
            bucketing=GradientBucketingConfig(bucket_size_mb=self.bucket_size_mb),
            compression=GradientCompressionConfig(codec=Name(self.codec), error_feedback=self.error_feedback),
        )
        weight = 1 if self.average else self.size
        return ReplicatedFlow(parameters, SGD(), synchronizer, replicas=self.size, rank=node.rank, weight=weight)

    async def _sharded(self, node: Node, parameters: Sequence[Parameter]) -> GradientFlow:
        config = ZeROConfig(
            stage=self.stage, gradient_compression=True, average=self.average, bucket_size_mb=self.bucket_size_mb
        )
        sums = None
        if self.hosts > 1:
            sums = NodeSums(HostGroups.of(node.world, node.world.hosts), is_compressed=True)
        engine = ZeroEngine(parameters, SGD(), config, node.world, row_sums=sums)
        await engine.prepare()
        return ShardedFlow(engine, None)


Totals = dict[str, Any]


@dataclass(kw_only=True)
class Run:
    """A run over layouts, with a checkpoint between one and the next."""

    folder: Path
    step: int = 0
    saves: int = 0

    def __post_init__(self) -> None:
        self.true: Totals = {name: np.zeros(np.prod(shape)) for name, shape in SHAPES.items()}
        self.values: Totals = {}
        self.lacking: Totals = {}

    async def train(self, layout: Layout, steps: int) -> None:
        """Train with ``layout``, from the last checkpoint on, and save one."""
        first, is_later = self.step, bool(self.values)
        self.saves += 1

        async def main(node: Node) -> tuple[Totals, Totals]:
            flow = await layout.make(node)
            if is_later:
                loaded = await load_flow(
                    self.folder,
                    wanted_by(flow),
                    flow.parameters,
                    layout=str(layout),
                    model={},
                    communicator=node.world,
                )
                await flow.restore(loaded.arrays, first, loaded.skipped)
                loaded.restore_reduction(flow)
            for step in range(first, first + steps):
                flow.zero_grad()
                for parameter in flow.parameters:
                    parameter.grad[...] = draw(parameter.name, step, node.rank).reshape(parameter.shape)
                async with flow.reducing():
                    pass
                if isinstance(flow, ReplicatedFlow) and not layout.average:
                    flow.scale(layout.size)
                await flow.step(1.0)
            await save_flow(
                self.folder,
                flow,
                step=self.saves,
                run={},
                layout=str(layout),
                model={},
                communicator=node.world,
                extra=None,
                keep=1,
            )
            return values_of(flow), lacking_of(flow)

        async with local_world(layout.size, hosts=layout.names) as nodes, asyncio.timeout(60.0):
            results = await asyncio.gather(*map(main, nodes))
        for step in range(first, first + steps):
            for name, total in self.true.items():
                drawn = [draw(name, step, rank).astype(np.float64) for rank in range(layout.size)]
                total += np.mean(drawn, axis=0) if layout.average else np.sum(drawn, axis=0)
        self.step += steps
        self.values, self.lacking = {}, {name: np.zeros_like(total) for name, total in self.true.items()}
        for values, lacking in results:
            for name, (start, array) in values.items():
                self.values.setdefault(name, np.zeros(self.true[name].size))[start : start + array.size] = array
            for name, array in lacking.items():
                self.lacking[name] += array

    def check(self, *, tolerance: float) -> None:
        """Assert that what parameters have moved by, and what they will, are all gradients that there were."""
        for name, true in self.true.items():
            moved = -self.values[name] + self.lacking[name]
            scale = float(np.abs(true).max())
            np.testing.assert_allclose(moved, true, rtol=0, atol=tolerance * scale, err_msg=name)


def draw(name: str, step: int, rank: int) -> Any:
    """Return a gradient: most of it is the same in all steps and on all ranks."""
    size = int(np.prod(SHAPES[name]))
    common = np.random.default_rng([*name.encode(), 7]).integers(-40, 40, size)
    noise = np.random.default_rng([*name.encode(), step, rank]).integers(-9, 9, size)
    return ((common + noise) * UNIT).astype(np.float32)


def values_of(flow: GradientFlow) -> Totals:
    """Return what this rank has of the values, and where it begins."""
    return {piece.parameter: (piece.flat[0], piece.array.copy()) for piece in flow.pieces() if piece.kind == "value"}


def lacking_of(flow: GradientFlow) -> Totals:
    """Return this rank's part of what reduced gradients lack."""
    state = flow.reduction_state()
    return {name: state.arrays[key].astype(np.float64) * weight for key, (name, weight) in state.parts.items()}


FLAT = Layout(size=2)
ZERO1, ZERO3 = Layout(size=2, stage=ZeROStage.STAGE1), Layout(size=3, stage=ZeROStage.STAGE3)
WAYS: Mapping[str, tuple[Sequence[Layout], float]] = {
    "more ranks, fewer, other buckets, by host": (
        (FLAT, Layout(size=4), Layout(size=2, bucket_size_mb=0.0001), Layout(size=4, hosts=2)),
        0.0,
    ),
    "by host, and back": ((Layout(size=4, hosts=2), Layout(size=4), Layout(size=4, hosts=2), FLAT), 0.0),
    "other codecs": (
        (FLAT, Layout(size=3, codec="int8"), Layout(size=4, codec="sign"), Layout(size=2, codec="powersgd:2"), FLAT),
        1e-5,
    ),
    "summed encoded values": (
        (Layout(size=3, codec="fp16"), Layout(size=4, codec="fp16", hosts=2), Layout(size=2, codec="bf16")),
        1e-5,
    ),
    "sharded": ((FLAT, ZERO1, ZERO3, Layout(size=4, stage=ZeROStage.STAGE2, hosts=2), FLAT, ZERO3), 1e-5),
    "sums, no means": (
        (
            Layout(size=2, average=False),
            Layout(size=4, average=False),
            Layout(size=3, average=False, stage=ZeROStage.STAGE2),
            Layout(size=4, average=False, stage=ZeROStage.STAGE1, hosts=2),
        ),
        1e-5,
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_no_part_of_a_gradient_is_lost_over_changes_of_layout(way: str, tmp_path: Path) -> None:
    layouts, tolerance = WAYS[way]
    run = Run(folder=tmp_path)
    for layout in layouts:
        await run.train(layout, chosen(2, soak=3))
        run.check(tolerance=tolerance)


async def test_a_layout_in_which_no_step_was_taken_hands_on_what_it_was_given(tmp_path: Path) -> None:
    run = Run(folder=tmp_path)
    for layout, steps in ((Layout(size=4, hosts=2), 3), (FLAT, 0), (Layout(size=4, hosts=2), 0), (FLAT, 2)):
        await run.train(layout, steps)
        run.check(tolerance=0.0)


async def test_what_would_be_lost_is_many_gradients(tmp_path: Path) -> None:
    """With a fiftieth of the values in each step, parameters lack most of 20 gradients: they get it after a change."""
    sparse = Layout(size=4, codec="topk:0.02")
    run = Run(folder=tmp_path)
    await run.train(sparse, 20)
    gradient = np.linalg.norm(draw("w", 0, 0))
    owed = np.linalg.norm(run.lacking["w"])
    assert owed > 5 * gradient
    await run.train(Layout(size=2, codec="topk:0.5"), 8)
    run.check(tolerance=0.0)
    assert np.linalg.norm(run.lacking["w"]) < 0.2 * owed


@pytest.mark.parametrize(
    "layout",
    [
        Layout(size=2, codec="none"),
        Layout(size=2, error_feedback=False),
        Layout(size=1),
        Layout(size=1, stage=ZeROStage.STAGE1),
    ],
    ids=["no codec", "no feedback", "one rank", "one rank, sharded"],
)
async def test_what_nothing_can_make_up_for_is_named(
    layout: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(folder=tmp_path)
    await run.train(FLAT, 2)
    with caplog.at_level(logging.WARNING, "asyncpar"):
        await run.train(layout, 1)
    (text,) = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert "what compression still owes" in text
    assert all(name in text.split("dropped: ")[1] for name in SHAPES)
