"""Effects of options of what only decides: configurations, plans, schedules, estimates, codecs.  Nothing is sent."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncpar.actors.supervision.policy import Backoff
from asyncpar.codecs import Int8, RandomK, TopK
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.estimate import (
    ActivationModel,
    Job,
    Machine,
    ModelShape,
    Search,
    estimate_layouts,
    find_layouts,
    memory_requirements,
)
from asyncpar.estimate.job import Precision as StatePrecision
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, TuningConfig
from asyncpar.gradsync.plan import plan_buckets, spec_of
from asyncpar.hybrid import (
    LossScaler,
    LossScaling,
    Performance3DMonitor,
    Placement,
    Precision,
    Replication,
    StepMeasure,
)
from asyncpar.nn import Parameter, TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW
from asyncpar.pipeline import UNIT_COSTS, Costs, CustomSchedule, PipelineSchedule, simulate
from asyncpar.tensors import DeviceMesh, ModelParallelConfig
from asyncpar.train.language_model import LanguageModel, TrainingConfig
from asyncpar.train.parallel_layout import ParallelLayout, Recompute
from asyncpar.zero import ZeROStage
from tests.options.effects import Refused, With, digest, effects

SHAPE = ModelShape(layers=8, hidden=64, heads=4, vocabulary=1000, sequence=128)
TWO_HOSTS = Machine(ranks_per_host=2)


def job_found(**settings: Any) -> Any:
    made = Job(**{"model": SHAPE, "machine": TWO_HOSTS, "batch": 8, **settings})
    found = find_layouts(made, Search(world=4, memory=1e9))
    return [(one.config, one.zero, one.step_seconds, one.memory.total) for one in found.layouts]


def machine(**settings: Any) -> Any:
    return job_found(machine=Machine(ranks_per_host=2, **settings))


def shape(**settings: Any) -> Any:
    return job_found(model=replace(SHAPE, **settings))


def search(**settings: Any) -> Any:
    wide = Job(model=replace(SHAPE, layers=12), machine=TWO_HOSTS, batch=8)
    found = find_layouts(wide, Search(**{"world": 8, "memory": 1e9, **settings}))
    return [(one.config, one.zero) for one in found.layouts], found.misfits


def activations(**settings: Any) -> Any:
    model = ActivationModel(shape=SHAPE, **settings)
    return model.layer, model.layers(4, 2), model.input_end, model.output_end


def costs(**settings: Any) -> Any:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=PipelineScheduleType.ZERO_BUBBLE)
    whole = replace(schedule, schedule_type=PipelineScheduleType.GPIPE)
    made = Costs(**settings)
    return simulate(schedule, made).makespan, simulate(whole, made).makespan


def schedule(**settings: Any) -> Any:
    made = PipelineSchedule(
        num_stages=2, num_microbatches=4, schedule_type=PipelineScheduleType.INTERLEAVED_ONE_F1B, **settings
    )
    return made.digest(), simulate(made, UNIT_COSTS).makespan


def placed(**settings: Any) -> Any:
    lone, other = (
        spec_of(Parameter(name, np.zeros(2), placement=place))
        for name, place in (("lone", Placement(**settings)), ("other", Placement()))
    )
    plan = plan_buckets((lone, other), bucket_bytes=1 << 20, max_buckets=16)
    return [bucket.slots for bucket in plan.buckets], str(lone)


def custom(**settings: Any) -> Any:
    try:
        CustomSchedule([["0F0", "0B1"]], **settings)
    except UsageError as error:
        return str(error)
    return CustomSchedule([["0F0", "0B0"]], **settings).name


def three_d(**settings: Any) -> Any:
    config = ThreeDParallelismConfig(**settings)
    rough = config.memory_requirements()
    layouts = estimate_layouts(
        Job(model=replace(SHAPE, layers=config.num_layers), machine=TWO_HOSTS, batch=8 * config.micro_batch_size),
        config,
        (ZeROStage.NONE,),
    )
    real = memory_requirements(config, replace(SHAPE, layers=config.num_layers), micro_batches=4)
    places = [config.rank_order().coordinates(rank) for rank in range(config.world_size)]
    return rough, config.virtual_stage_layers(), places, [one.step_seconds for one in layouts], real


def model_parallel(**settings: Any) -> Any:
    config = ModelParallelConfig(**settings)
    return config.mesh(), config.stages, config.split_dim, config.parallelism()


def mesh(**settings: Any) -> Any:
    made = DeviceMesh((2, 2), **settings)
    return made.axes, made.devices, made.groups(made.axes[0])


def codec_of(kind: Any, *arguments: Any) -> Any:
    def run(**settings: Any) -> Any:
        codec, values = kind(*arguments, **settings), np.random.default_rng(1).normal(size=1000).astype(np.float32)
        encoded = np.zeros(codec.encoded_bytes(values.size), np.uint8)
        codec.encode(values, encoded)
        return encoded.size, digest(encoded)

    return run


def scaling(**settings: Any) -> Any:
    scaler = LossScaler(LossScaling(**settings))
    seen = [scaler.scale]
    for overflow in (True, False, False, *[True] * 20):
        scaler.update(has_overflowed=overflow)
        seen.append(scaler.scale)
    for _ in range(2000):
        scaler.update(has_overflowed=False)
    return [*seen, scaler.scale]


def monitor(**settings: Any) -> Any:
    made = Performance3DMonitor(**settings)
    for step in range(3):
        made.record(StepMeasure(step=step, seconds=1.0, tokens=1))
    return made.performance().rank, len(made.measures)


def backoff(**settings: Any) -> Any:
    made = Backoff(**settings)
    return [made.delay(failures, draw=0.5) for failures in range(1, 9)]


TRAINING = TrainingConfig(
    model=TransformerConfig(layers=4),
    rule=AdamW(),
    schedule=WarmupCosine(peak=1e-3, steps=4),
    steps=4,
    rows=16,
)


def training(**settings: Any) -> Any:
    model = LanguageModel(
        replace(TRAINING, model=TransformerConfig(length=8, features=8, layers=1, heads=1), **settings)
    )
    windows = np.arange(18, dtype=np.int64).reshape(2, 9)
    for step in range(3):  # Adam divides gradients by their size: only a change of the norm between steps shows
        model.accumulate(windows, scale=10.0**step)
        model.update(step)
    return model.digest()


def run_in_a_layout(**settings: Any) -> Any:
    """Return a run's settings, or that it is refused."""
    training_config = replace(TRAINING, **settings)
    try:
        return ParallelLayout().make_config(
            training_config,
            world_size=4,
            compression=GradientCompressionConfig(),
            bucketing=GradientBucketingConfig(),
        )
    except UsageError:
        return "refused"


def layout(**settings: Any) -> Any:
    made = ParallelLayout(**settings)
    return made.make_config(
        TRAINING, world_size=4, compression=GradientCompressionConfig(), bucketing=GradientBucketingConfig()
    )


def written_schedule() -> Path:
    """Return the file of a schedule for one stage and one micro-batch."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "schedule.csv"
    path.write_text("0F0,0B0\n")
    return path


BASE = {"initial": 1.0}
TWO_STAGES = {"pp_size": 2}

EFFECTS = [
    *effects(
        "estimate.Job",
        job_found,
        micro_batch_size=2,
        precision=list(StatePrecision)[1],
        optimizer_states=0,
        memory_strategy=MemoryOptimizationStrategy.AGGRESSIVE,
        recompute=True,
        sequence_parallel=True,
        order="dp-tp-pp",
    ),
    *effects("train.TrainingConfig", training, clip_norm=None),
    *effects("train.TrainingConfig", run_in_a_layout, tuning=TuningConfig()),
    *effects("estimate.Machine", machine, flops=1e9, bandwidth=1e8, host_bandwidth=1e8),
    *effects("estimate.ModelShape", shape, ffn_multiple=2, is_tied=False, has_query_bias=False),
    *effects(
        "estimate.Search",
        search,
        schedules=(PipelineScheduleType.GPIPE,),
        zero_stages=(ZeROStage.STAGE3,),
        chunks=3,
        is_uneven=True,
    ),
    *effects(
        "estimate.ActivationModel",
        activations,
        micro_batch_size=2,
        tp_size=2,
        sequence_parallel=With(True, {"tp_size": 2}),
        value_bytes=4,
    ),
    *effects(
        "pipeline.Costs",
        costs,
        forward=2.0,
        backward_input=2.0,
        backward_weight=2.0,
        backward=5.0,
        stage_factors=(1.0, 3.0),
    ),
    *effects("pipeline.PipelineSchedule", schedule, num_model_chunks=2),
    *effects("hybrid.Placement", placed, replicated=Replication.PARTIAL, tied="embedding"),
    *effects("pipeline.CustomSchedule", custom, name="mine"),
    *effects(
        "hybrid.ThreeDParallelismConfig",
        three_d,
        dp_size=2,
        tp_size=2,
        pp_size=2,
        num_layers=12,
        micro_batch_size=2,
        memory_strategy=MemoryOptimizationStrategy.EXTREME,
        enable_gradient_checkpointing=True,
        pipeline_schedule=With(PipelineScheduleType.GPIPE, TWO_STAGES),
        num_model_chunks=With(2, TWO_STAGES),
        order=With("dp-tp-pp", {"dp_size": 2, "tp_size": 2}),
        layers_per_stage=With((20, 4), TWO_STAGES),
    ),
    *effects(
        "tensors.ModelParallelConfig",
        model_parallel,
        num_devices=Refused(2, "device_ids: expected 2"),
        strategy="tensor",
        device_ids=(3,),
        pipeline_depth=2,
        tensor_split_dim=1,
        gradient_checkpointing=True,
    ),
    *effects("tensors.DeviceMesh", mesh, axes=("a", "b"), devices=(3, 1, 2, 0)),
    *effects("codecs.RandomK", codec_of(RandomK, 0.1), seed=1, values=Int8()),
    *effects("codecs.TopK", codec_of(TopK, 0.1), values=Int8()),
    *effects("hybrid.LossScaling", scaling, initial=1024.0, growth=4.0, backoff=0.25, interval=100, least=64.0),
    *effects("hybrid.Performance3DMonitor", monitor, rank=2, capacity=2),
    *effects(
        "Backoff",
        backoff,
        initial=1.0,
        factor=With(3.0, BASE),
        maximum=With(4.0, BASE),
        jitter=With(0.5, BASE),
    ),
    *effects(
        "train.ParallelLayout",
        layout,
        dp=Refused(3, "--dp, --tp, --pp: expected dp 3"),
        tp=2,
        pp=2,
        schedule=written_schedule(),
        chunks=With(2, {"pp": 2, "schedule": PipelineScheduleType.INTERLEAVED_ONE_F1B}),
        zero=1,
        micro_batches=2,
        recompute=Recompute.ALL,
        precision=Precision.BFLOAT16,
    ),
]
