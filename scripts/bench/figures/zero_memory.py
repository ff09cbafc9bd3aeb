"""Show the memory of replicas by ZeRO stage: the formula, the estimate, the count of arrays, and the system's figure.

    scripts/bench/run zero_memory                        # 19 M parameters on 4 ranks, stages 0 to 3
    scripts/bench/run zero_memory --codec int8           # with a codec; of ZeRO: 8-bit gradients
    scripts/bench/run zero_memory --pp 2 --micro-batches 4

The system's figure is the growth of the proportional set size (PSS) of each rank, in which memory that ranks share is
divided among them, from before the model is made to after some steps.  Figures are of the rank that has most.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import asyncpar as ap
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.estimate import ActivationModel, ModelShape
from asyncpar.estimate.job import Precision
from asyncpar.estimate.memory import ActivationPolicy, bytes_per_parameter, rank_activations, rank_memories
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.zero.config import ZeROConfig

_STEPS = 6
_MEGA = 1e6
_MARK = "figures: "


def main() -> None:
    """Measure all stages, or be a rank of one."""
    options = _options()
    if options.stage is not None:
        ap.run(lambda: _train(options))
        return
    print("| stage | formula | estimate of arrays | arrays | estimate in all | PSS | PSS / estimate | ms a step |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for stage in range(4):
        found = measure(stage, sys.argv[1:], ranks=options.ranks)
        megabytes = (found[name] / _MEGA for name in ("formula", "held", "counted", "between_steps", "pss"))
        ratio = found["pss"] / found["between_steps"]
        cells = [str(stage), *(f"{figure:.0f}" for figure in megabytes), f"{ratio:.2f}", f"{found['ms']:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def measure(stage: int, arguments: list[str], *, ranks: int) -> dict[str, float]:
    """Run ranks with ZeRO ``stage``, and return what rank 0 found of all of them."""
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, str(Path(__file__)), *arguments, "--stage", str(stage)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    (line,) = (line for line in done.stdout.splitlines() if _MARK in line)
    found: dict[str, float] = json.loads(line.partition(_MARK)[2])
    return found


async def _train(options: argparse.Namespace) -> None:
    shape = ModelShape(
        layers=options.layers,
        hidden=options.hidden,
        heads=8,
        vocabulary=256,
        sequence=64,
        is_tied=False,
        has_query_bias=False,
    )
    async with ap.init() as node:
        await node.world.barrier()
        before = _pss()
        config = _config(options, node.world.size)
        model = TransformerModel(
            config=TransformerConfig(
                vocabulary=shape.vocabulary,
                length=shape.sequence,
                features=shape.hidden,
                layers=shape.layers,
                heads=shape.heads,
                dtype="float32",
            )
        )
        async with await ThreeDParallelismCoordinator.create(config, model, node.world) as coordinator:
            batch = np.random.default_rng(1).integers(0, 256, (config.micro_batches, 1, shape.sequence + 1))
            seconds = []
            for _ in range(_STEPS):
                began = time.perf_counter()
                await coordinator.train_step(list(batch[..., :-1]), list(batch[..., 1:]), learning_rate=1e-3)
                seconds.append(time.perf_counter() - began)
            gc.collect()
            await node.world.barrier()
            grown = _pss() - before
            await node.world.barrier()  # what a rank frees at its end counts for the others
            found = _figures(shape, config, coordinator) | {"pss": grown, "ms": 1e3 * statistics.median(seconds[2:])}
            everyone: list[dict[str, float]] = await node.world.all_gather_object(found)
            if node.rank == 0:
                print(_MARK + json.dumps(max(everyone, key=lambda one: one["pss"])), flush=True)


def _config(options: argparse.Namespace, ranks: int) -> HybridConfig:
    stage = ZeROStage.of(options.stage)
    compresses = options.codec is not None
    return HybridConfig(
        parallelism=ThreeDParallelismConfig(
            dp_size=ranks // options.pp,
            pp_size=options.pp,
            num_layers=options.layers,
            memory_strategy=MemoryOptimizationStrategy.BASIC,
            pipeline_schedule=PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD,
        ),
        micro_batches=options.micro_batches,
        zero=ZeROConfig(stage=stage, gradient_compression=compresses and stage.shards_states),
        compression=GradientCompressionConfig(codec=None if stage.shards_states else options.codec),
    )


def _figures(shape: ModelShape, config: HybridConfig, coordinator: ThreeDParallelismCoordinator) -> dict[str, float]:
    """Return the formula, the estimate and the count of this rank."""
    parallelism = config.parallelism
    activations = rank_activations(
        parallelism,
        ActivationModel.of(shape, parallelism, value_bytes=4, sequence_parallel=False),
        ActivationPolicy(),
        micro_batches=config.micro_batches,
    )
    memories = rank_memories(
        shape,
        parallelism,
        activations,
        stage=config.zero,
        precision=Precision.FP32,
        compression=config.compression,
    )
    mine = memories[coordinator.groups.mapping.pp_rank]
    values = sum(parameter.size for parameter in coordinator.parameters())
    return {
        "formula": values * bytes_per_parameter(config.zero.stage, parallelism.dp_size).total,
        "held": mine.held,
        "between_steps": mine.between_steps,
        "counted": coordinator._session.assembly.flow.memory().total,  # shown to nobody else
    }


def _pss() -> int:
    """Return the proportional set size of this process, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return 1024 * int(rest.split()[0])
    raise AssertionError("smaps_rollup has the sum")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks, all on this host")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the transformer")
    parser.add_argument("--hidden", type=int, default=512, help="its width")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of each replica")
    parser.add_argument("--codec", help="how gradients travel; with ZeRO any codec stands for its own")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
