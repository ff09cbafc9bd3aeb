"""Training is in the event rings: buckets of gradients, actions of pipelines, checkpoints, and changes of the world."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import CodecChoice
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.errors import PeerLost
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.hybrid import HybridConfig, ThreeDParallelismConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import Parameter, TransformerConfig
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.observe.figures import figures_of
from asyncpar.observe.image import Event, read_image
from asyncpar.observe.pipeline_runs import draw_run, summarize_pipeline
from asyncpar.observe.timeline import make_timeline
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import save


def events(node: Node, kind: EventKind) -> list[Event]:
    return [event for event in read_image(node.links.recorder.snapshot()).events if event.kind is kind]


class Gradient:
    name = "weight"

    def __init__(self) -> None:
        self.grad = np.ones(1000, np.float32)


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.1", "powersgd:2"])
async def test_a_bucket_of_gradients_is_recorded_with_its_codec(codec: CodecChoice) -> None:
    compression = GradientCompressionConfig(codec=codec)
    async with local_world(2) as nodes:

        async def step(node: Node) -> None:
            synchronizer = GradientSynchronizer.data_parallel(node.world, compression=compression)
            async with synchronizer.step([Gradient()]):
                pass

        await asyncio.gather(*(step(node) for node in nodes))
        for node in nodes:
            (bucket,) = events(node, EventKind.BUCKET)
            assert (bucket.name, bucket.state, bucket.nbytes) == ("bucket 0", EventState.COMPLETED, 4000)
            assert bucket.algorithm == codec
            timeline = make_timeline({0: read_image(node.links.recorder.snapshot())})
            (shown,) = [one for one in timeline.slices if one.track == "gradients"]
            assert shown.name == "bucket 0"
            assert shown.facts == {"codec": codec, "bytes": 4000, "at": shown.facts["at"]}
            (figure,) = [one for one in figures_of([bucket]) if one.what == "bucket"]
            assert (figure.name, figure.algorithm) == ("bucket 0", codec)


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("stage", [stage for stage in ZeROStage if stage is not ZeROStage.NONE])
async def test_buckets_of_an_optimizer_with_shards_are_recorded(stage: ZeROStage, is_compressed: bool) -> None:
    config = ZeROConfig(stage=stage, gradient_compression=is_compressed)
    async with local_world(2) as nodes:

        async def step(node: Node) -> None:
            optimizer = ZeROOptimizer(SGD(), config, node.world)
            await optimizer.register_parameters([Parameter("w", np.ones(1000, np.float32))])
            optimizer.update_gradients({"w": np.ones(1000, np.float32)})
            await optimizer.optimizer_step()

        await asyncio.gather(*(step(node) for node in nodes))
        for node in nodes:
            (bucket,) = events(node, EventKind.BUCKET)
            assert (bucket.name, bucket.state, bucket.nbytes) == ("bucket 0", EventState.COMPLETED, 4000)
            assert bucket.algorithm == ("int8" if is_compressed else "none")


async def test_actions_of_a_pipeline_are_recorded() -> None:
    config = HybridConfig(parallelism=ThreeDParallelismConfig(pp_size=2, num_layers=2), micro_batches=2)
    model = TransformerModel(config=TransformerConfig(vocabulary=16, length=8, features=8, layers=2))
    tokens = [np.random.default_rng(number).integers(0, 16, (2, 9)) for number in range(2)]
    inputs, targets = [rows[:, :-1] for rows in tokens], [rows[:, 1:] for rows in tokens]

    async def step(node: Node) -> None:
        async with await ThreeDParallelismCoordinator.create(config, model, node.world) as coordinator:
            await coordinator.train_step(inputs, targets, learning_rate=1e-3)

    async with local_world(2) as nodes:
        await asyncio.gather(*(step(node) for node in nodes))
        for node in nodes:
            actions = [(event.name, event.text) for event in events(node, EventKind.PIPELINE)]
            wanted = [
                (name, f"stage={node.rank}, micro-batch={number}")
                for name in ("forward", "backward")
                for number in (0, 1)
            ]
            assert sorted(actions) == sorted(wanted)
        run = draw_run([summarize_pipeline(read_image(node.links.recorder.snapshot())) for node in nodes])
        assert run is not None
        assert [(row["rank"], row["stages"], len(row["actions"])) for row in run["rows"]] == [(0, [0], 4), (1, [1], 4)]
        assert (run["run"], run["total"]) == (1, 2)


def test_a_checkpoint_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images: list[Any] = []
    stop = Node.stop

    async def look(node: Node) -> None:
        images.append(events(node, EventKind.CHECKPOINT))
        await stop(node)

    monkeypatch.setattr(Node, "stop", look)
    run_virtual(save(tmp_path, small_model(), Layout(dp=2)))
    assert images
    assert {event.name for image in images for event in image} == {"saving step 1"}
    assert all(event.state is EventState.COMPLETED for image in images for event in image)


async def test_changes_of_the_world_are_recorded() -> None:
    async with local_world(2, generation=3) as nodes:
        with pytest.raises(PeerLost):
            await asyncio.gather(nodes[0].world.barrier(), _lose(nodes[0]))
        changes = [(event.name, event.peer) for event in events(nodes[0], EventKind.WORLD)]
        assert changes == [("world 3 of 2 ranks", None), ("a rank is lost", 1)]


async def _lose(node: Node) -> None:
    await asyncio.sleep(0.01)
    node.links.report_lost(1, "a test says so")
