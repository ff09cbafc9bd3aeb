"""A pipeline schedule from outside the package: a subclass of ``Schedule``, passed as it is or registered by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.schedule_type import SCHEDULES
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.estimate import Job, Machine, ModelShape, Search, find_layouts, memory_requirements
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import (
    CustomSchedule,
    PipelineOp,
    Schedule,
    ScheduleKind,
    check_schedule,
    make_schedule,
    register_schedule,
    simulate,
    unregister_schedule,
)
from asyncpar.pipeline.errors import InvalidSchedule
from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.operation import OperationKind
from asyncpar.pipeline.result import PipelineResult
from asyncpar.train.options import make_config, make_layout, parse_arguments
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.worlds import TINY, assert_same, on_ranks, train_alone, train_together
from tests.hybrid.worlds import make_config as make_training
from tests.pipeline.real_stages import alone, cut_model, gradients_of, make_executors, make_samples, run_all
from tests.pipeline.worlds import Ranks, in_virtual_time

MICRO_BATCHES = 5


@dataclass(frozen=True, kw_only=True)
class TwoByTwo(Schedule):
    """Two micro-batches forward, then the same two backward, and so on."""

    num_stages: int
    num_microbatches: int
    num_model_chunks: int = 1

    @property
    def name(self) -> str:
        return "two by two"

    @property
    def layout(self) -> StageLayout:
        return StageLayout.looped(self.num_stages)

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        order = []
        for first in range(0, self.num_microbatches, 2):
            pair = range(first, min(first + 2, self.num_microbatches))
            for kind in (OperationKind.FORWARD, OperationKind.BACKWARD):
                order += [PipelineOp(kind=kind, stage=rank, micro_batch=number, chunk=0) for number in pair]
        return tuple(order)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_computes_what_one_process_computes(ranks: int) -> None:
    schedule = TwoByTwo(num_stages=ranks, num_microbatches=MICRO_BATCHES)
    inputs, targets = make_samples(MICRO_BATCHES)

    async def main(world: Ranks) -> tuple[list[PipelineResult], dict[str, Array]]:
        executors, held = make_executors(schedule, world)
        results = await run_all(executors, inputs, targets)
        return results, {name: gradient for stages in held for name, gradient in gradients_of(stages).items()}

    results, gradients = in_virtual_time(ranks, main)
    losses, expected = alone(cut_model(ranks), inputs, targets)
    assert results[-1].losses == tuple(losses)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_it_can_be_simulated_and_set_for_training() -> None:
    schedule = TwoByTwo(num_stages=2, num_microbatches=4)
    assert simulate(schedule).makespan > 0
    parallelism = ThreeDParallelismConfig(pp_size=2, num_layers=2)
    assert HybridConfig(parallelism=parallelism, micro_batches=4, schedule=schedule).schedule is schedule
    with pytest.raises(UsageError, match=r"schedule: expected .* 8"):
        HybridConfig(parallelism=parallelism, micro_batches=8, schedule=schedule)


def test_a_schedule_that_lacks_a_method_cannot_be_made() -> None:
    class Unfinished(Schedule):
        num_stages, num_microbatches, num_model_chunks = 2, 4, 1

    with pytest.raises(TypeError, match="compute_order"):
        Unfinished()  # type: ignore[abstract]


@dataclass(frozen=True, kw_only=True)
class Forgetful(TwoByTwo):
    """Leaves out the last backward pass of rank 1."""

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        order = TwoByTwo.compute_order(self, rank)
        return order[:-1] if rank == 1 else order


@dataclass(frozen=True, kw_only=True)
class Impatient(TwoByTwo):
    """Rank 0 computes backward before forward."""

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        order = TwoByTwo.compute_order(self, rank)
        return tuple(reversed(order)) if rank == 0 else order


@pytest.mark.parametrize("kind", [Forgetful, Impatient])
def test_one_that_cannot_run_is_refused_by_rank_and_operation(kind: type[TwoByTwo]) -> None:
    schedule = kind(num_stages=2, num_microbatches=2)
    with pytest.raises(InvalidSchedule, match="rank") as caught:
        check_schedule(schedule)
    assert caught.value.rank in (0, 1)


# -- by name -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Backwards(TwoByTwo):
    """The same order, with stage 0 on the last rank."""

    @property
    def layout(self) -> StageLayout:
        return StageLayout(ranks=tuple(reversed(range(self.num_stages))), num_stages=self.num_stages)

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        return TwoByTwo.compute_order(self, self.num_stages - 1 - rank)


def one_chunk_only(make: Callable[..., Schedule]) -> Callable[..., Schedule]:
    def checked(*, num_stages: int, num_microbatches: int, num_model_chunks: int) -> Schedule:
        if num_model_chunks != 1:
            raise UsageError(f"num_model_chunks: expected 1, got {num_model_chunks}")
        return make(num_stages=num_stages, num_microbatches=num_microbatches)

    return checked


@pytest.fixture
def registered() -> Iterator[None]:
    register_schedule(ScheduleKind(name="two-by-two", make=one_chunk_only(TwoByTwo)))
    register_schedule(ScheduleKind(name="backwards", make=one_chunk_only(Backwards)))
    yield
    unregister_schedule("two-by-two")
    unregister_schedule("backwards")


@pytest.mark.usefixtures("registered")
def test_a_registered_one_is_used_by_its_name() -> None:
    parallelism = ThreeDParallelismConfig(
        pp_size=2, num_layers=3, layers_per_stage=(2, 1), pipeline_schedule="backwards"
    )
    parallelism.validate(2)
    assert parallelism.stage_layers() == (1, 2), "stage 0, of two layers, is on the last rank"
    assert parallelism.end_stages == (1, 0)
    made = HybridConfig(parallelism=parallelism, micro_batches=4).make_schedule()
    assert made == make_schedule("backwards", num_stages=2, num_microbatches=4)
    assert made == Backwards(num_stages=2, num_microbatches=4)


@pytest.mark.usefixtures("registered")
def test_training_by_name_computes_what_one_process_computes() -> None:
    schedule = make_schedule("two-by-two", num_stages=2, num_microbatches=MICRO_BATCHES)
    inputs, targets = make_samples(MICRO_BATCHES)

    async def main(world: Ranks) -> list[PipelineResult]:
        executors, _ = make_executors(schedule, world)
        return await run_all(executors, inputs, targets)

    losses, _ = alone(cut_model(2), inputs, targets)
    assert in_virtual_time(2, main)[-1].losses == tuple(losses)


@dataclass(frozen=True, kw_only=True)
class Rotated(TwoByTwo):
    """The same order, with stage 0 on rank 1 and so on, the last stage on rank 0."""

    @property
    def layout(self) -> StageLayout:
        ranks = tuple((stage + 1) % self.num_stages for stage in range(self.num_stages))
        return StageLayout(ranks=ranks, num_stages=self.num_stages)

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        return TwoByTwo.compute_order(self, (rank - 1) % self.num_stages)


@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE1])
async def test_tied_embeddings_are_added_up_wherever_its_layout_puts_both_ends(stage: ZeROStage) -> None:
    model = replace(TINY, layers=3, tied_embeddings=True)
    with SCHEDULES.registered(ScheduleKind(name="rotated", make=one_chunk_only(Rotated))):
        config = make_training(
            1, 1, 3, layers=3, micro_batches=4, zero=ZeROConfig(stage=stage), clip_norm=0.3, pipeline_schedule="rotated"
        )
        together = await train_together(model, config, rows=8)
    assert_same(together, train_alone(model, config, rows=8), tolerance=1e-12)


async def test_a_schedule_whose_ends_are_not_those_of_the_configuration_is_refused_where_they_are_tied() -> None:
    model = replace(TINY, layers=4, tied_embeddings=True)
    schedule = Rotated(num_stages=4, num_microbatches=4)
    config = make_training(1, 1, 4, layers=4, micro_batches=4, schedule=schedule)

    async def main(world: Communicator) -> BaseException:
        with pytest.raises((UsageError, PeerCancelled), match="tokens: expected a tie only on ranks with") as caught:
            await ThreeDParallelismCoordinator.create(config, TransformerModel(config=model), world)
        return caught.value

    errors = await on_ranks(4, main, patience=10)
    assert [type(error) for error in errors] == [PeerCancelled, UsageError, PeerCancelled, PeerCancelled]


@pytest.mark.usefixtures("registered")
def test_estimates_and_the_search_for_layouts_take_it() -> None:
    model = ModelShape(layers=4, hidden=8, heads=2, vocabulary=16, sequence=4)
    config = ThreeDParallelismConfig(pp_size=2, num_layers=4, pipeline_schedule="two-by-two")
    needed = memory_requirements(config, model=model, micro_batches=64, rough=False)
    assert needed.activation_memory_mb > 0
    job = Job(model=model, machine=Machine(ranks_per_host=2), batch=64)
    found = find_layouts(job, Search(world=2, memory=1e9, schedules=("two-by-two", "gpipe")))
    named = {layout.config.pipeline_schedule: layout for layout in found.layouts if layout.config.pp_size == 2}
    assert named.keys() == {"two-by-two", "gpipe"}
    assert named["two-by-two"].memory.activations < named["gpipe"].memory.activations, "it keeps two micro-batches"
    assert named["two-by-two"].pipeline.makespan > named["gpipe"].pipeline.makespan, "it drains after each pair"


@pytest.mark.usefixtures("registered")
def test_what_a_registered_one_cannot_have_is_refused_by_the_configuration() -> None:
    config = ThreeDParallelismConfig(pp_size=2, num_layers=4, num_model_chunks=2, pipeline_schedule="two-by-two")
    with pytest.raises(UsageError, match="num_model_chunks: expected 1, got 2"):
        config.validate(2)


@pytest.mark.usefixtures("registered")
def test_training_programs_take_it() -> None:
    layout = make_layout(parse_arguments(["--schedule", "TWO_BY_TWO", "--pp", "2"]))
    config = layout.make_config(
        make_config(parse_arguments([])),
        world_size=2,
        compression=GradientCompressionConfig(),
        bucketing=GradientBucketingConfig(),
    )
    assert isinstance(config.make_schedule(), TwoByTwo)


def test_a_name_is_known_between_register_and_unregister_only() -> None:
    kind = ScheduleKind(name="for-a-while", make=one_chunk_only(TwoByTwo))
    register_schedule(kind)
    with pytest.raises(UsageError, match="'for-a-while' is taken"):
        register_schedule(kind)
    unregister_schedule("for-a-while")
    with pytest.raises(UsageError, match=r"pipeline_schedule: expected one of .*zbv.*, got 'for-a-while'"):
        ThreeDParallelismConfig(pipeline_schedule="for-a-while")
    with pytest.raises(UsageError, match=r"schedules: expected one of .*zbv.*, got 'for-a-while'"):
        Search(world=2, memory=1e9, schedules=("for-a-while",))
    with pytest.raises(UsageError, match="belongs to the package"):
        unregister_schedule("gpipe")


def shuffled(*, num_stages: int, num_microbatches: int, num_model_chunks: int) -> Schedule:
    """Take micro-batches in an order of chance."""
    order = random.sample(range(num_microbatches), num_microbatches)
    cells = [[f"{rank}{kind}{number}" for kind in "FB" for number in order] for rank in range(num_stages)]
    return CustomSchedule(cells)


def half_of_it(*, num_stages: int, num_microbatches: int, num_model_chunks: int) -> Schedule:
    """All ranks but the first leave out their backward passes."""
    kinds = ["FB", *["F"] * (num_stages - 1)]
    return CustomSchedule(
        [
            [f"{rank}{kind}{number}" for kind in kinds[rank] for number in range(num_microbatches)]
            for rank in range(num_stages)
        ]
    )


def wandering(*, num_stages: int, num_microbatches: int, num_model_chunks: int) -> Schedule:
    kind = Backwards if num_microbatches > 4 else TwoByTwo
    return kind(num_stages=num_stages, num_microbatches=num_microbatches)


def short(*, num_stages: int, num_microbatches: int, num_model_chunks: int) -> Schedule:
    return TwoByTwo(num_stages=num_stages, num_microbatches=min(num_microbatches, 4))


def refusing(**numbers: Any) -> Schedule:
    raise UsageError(f"numbers: got {numbers}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            one_chunk_only(Forgetful),
            "make: wrong for 2 stages with 1 chunks: .*rank 1.*; correct the order",
        ),
        (one_chunk_only(Impatient), "make: wrong for 1 stages with 1 chunks: .*; correct the order"),
        (half_of_it, "make: wrong for 2 stages with 1 chunks: custom schedule: row 2 .*; correct the order"),
        (shuffled, "expected the same orders from equal numbers, got different ones"),
        (wandering, "expected one layout for any number of micro-batches, got another for 2 stages, 5 micro-batches"),
        (short, "expected a schedule of 1 stages, 5 micro-batches, 1 chunks, got 1, 4 and 1"),
        (refusing, "expected it to take some number of stages from 1 to 8, but it refused them all"),
        (lambda ranks: None, "make: expected a function of num_stages, num_microbatches and num_model_chunks"),
    ],
)
def test_what_the_proof_at_registration_refuses(make: Callable[..., Schedule], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register_schedule(ScheduleKind(name="broken", make=make))
    assert "broken" not in SCHEDULES


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "Two By Two"])
def test_a_name_that_the_package_has_or_that_is_malformed_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        register_schedule(ScheduleKind(name=name, make=TwoByTwo))
