"""A failure on any rank ends the run on all of them, soon and with its name; and the next run works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.agreement.errors import PipelineMismatch
from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.errors import PeerCancelled, PeerError, PeerLost, UsageError
from asyncpar.nn import Initializer, Linear, Sequential, Stage
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import InvalidSchedule, PipelineSchedule
from asyncpar.pipeline.alarm import StepAlarm, StepFailed
from asyncpar.pipeline.errors import ActionFailed
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.offload import MemoryManager
from asyncpar.pipeline.operation import OperationKind, PipelineOp
from tests.pipeline.real_stages import (
    FEATURES,
    InlineCompute,
    alone,
    cut_model,
    gradients_of,
    make_executors,
    make_samples,
    make_worker,
    run_all,
    square_loss,
)
from tests.pipeline.timed_stages import make_executor, run_one
from tests.pipeline.worlds import Ranks, in_virtual_time, open_ranks, outcomes
from tests.products import in_turn

MICRO_BATCHES = 4


def schedule_of(
    kind: Kind = Kind.ONE_FORWARD_ONE_BACKWARD, ranks: int = 3, *, micro_batches: int = MICRO_BATCHES
) -> PipelineSchedule:
    return PipelineSchedule(num_stages=ranks, num_microbatches=micro_batches, schedule_type=kind)


class Fault:
    """Fails once, at the chosen action."""

    def __init__(self, what: str, number: int) -> None:
        self.wanted = (what, number)
        self.is_due = True

    def __call__(self, what: str, number: int) -> None:
        if self.is_due and (what, number // 100) == self.wanted:
            self.is_due = False
            raise ZeroDivisionError("a fault")


def fails_on(ranks: Ranks, schedule: PipelineSchedule, faults: dict[int, Callable[[str, int], None]]) -> Any:
    """Return executors, some of which fail."""
    return [
        make_executor(schedule, communicator, fails=faults.get(rank))
        for rank, communicator in enumerate(ranks.communicators)
    ]


@pytest.mark.parametrize(
    ("kind", "what", "action", "culprit"),
    [
        (*done, culprit)
        for done, culprit in in_turn(
            [
                (Kind.ONE_FORWARD_ONE_BACKWARD, "forward", OperationKind.FORWARD),
                (Kind.ONE_FORWARD_ONE_BACKWARD, "backward", OperationKind.BACKWARD),
                (Kind.ZERO_BUBBLE, "backward", OperationKind.BACKWARD_INPUT),
                (Kind.ZERO_BUBBLE, "weight", OperationKind.BACKWARD_WEIGHT),
            ],
            [0, 1, 2],
        )
    ],
)
def test_an_exception_in_any_action_is_named_on_all_ranks(
    kind: Kind, what: str, action: OperationKind, culprit: int
) -> None:
    schedule = schedule_of(kind)

    async def main(ranks: Ranks) -> tuple[list[Any], float, list[Any]]:
        executors = fails_on(ranks, schedule, {culprit: Fault(what, 2)})
        errors = await outcomes([run_one(executor) for executor in executors])
        ended = asyncio.get_running_loop().time()
        return errors, ended, await asyncio.gather(*(run_one(executor) for executor in executors))

    errors, ended, results = in_virtual_time(3, main)
    assert ended < 30.0
    own = errors[culprit]
    assert isinstance(own, ActionFailed)
    assert (own.rank, own.stage, own.micro_batch, own.kind) == (culprit, culprit, 2, action)
    text = f"rank {culprit}: {action} of virtual stage {culprit}, micro-batch 2, failed: ZeroDivisionError: a fault"
    assert str(own) == text
    assert isinstance(own.__cause__, ZeroDivisionError)
    for rank, error in enumerate(errors):
        if rank != culprit:
            assert isinstance(error, StepFailed)
            assert error.rank == culprit
            assert text in str(error)
    assert results[2].losses == (0, 1, 2, 3)


def test_a_failure_in_the_very_last_action_ends_the_run_of_ranks_that_were_through() -> None:
    schedule = schedule_of()

    async def main(ranks: Ranks) -> list[Any]:
        executors = fails_on(ranks, schedule, {0: Fault("backward", 3)})
        return await outcomes([run_one(executor) for executor in executors])

    zero, one, two = in_virtual_time(3, main)
    assert isinstance(zero, ActionFailed)
    assert isinstance(one, StepFailed)
    assert isinstance(two, StepFailed)


def test_failures_on_two_ranks_at_once_are_both_named() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        executors = fails_on(ranks, schedule_of(Kind.GPIPE), {0: Fault("forward", 2), 2: Fault("forward", 0)})
        return await outcomes([run_one(executor) for executor in executors])

    zero, one, two = in_virtual_time(3, main)
    assert isinstance(zero, ActionFailed)
    assert isinstance(two, ActionFailed)
    assert isinstance(one, StepFailed)


@pytest.mark.parametrize(("moment", "culprit"), in_turn([0.0, 0.5, 3.5, 7.5, 11.0], [0, 1, 2]))
def test_a_cancelled_rank_ends_the_run_of_all_and_the_next_one_works(moment: float, culprit: int) -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float, list[Any]]:
        executors = fails_on(ranks, schedule_of(), {})
        tasks = [asyncio.create_task(run_one(executor)) for executor in executors]
        await asyncio.sleep(moment)
        tasks[culprit].cancel()
        errors = await outcomes(tasks)
        ended = asyncio.get_running_loop().time()
        return errors, ended, await asyncio.gather(*(run_one(executor) for executor in executors))

    errors, ended, results = in_virtual_time(3, main)
    assert ended == moment
    assert isinstance(errors[culprit], asyncio.CancelledError)
    for rank, error in enumerate(errors):
        if rank != culprit:
            assert isinstance(error, StepFailed)
            assert (error.rank, error.cause) == (culprit, "it was cancelled")
    assert results[2].losses == (0, 1, 2, 3)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_by_all_others(victim: int) -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float]:
        executors = fails_on(ranks, schedule_of(), {})
        tasks = [asyncio.create_task(run_one(executor)) for executor in executors]
        await asyncio.sleep(4.5)
        ranks.kill(victim)
        errors = await outcomes([task for rank, task in enumerate(tasks) if rank != victim])
        ended = asyncio.get_running_loop().time()
        tasks[victim].cancel()
        await asyncio.wait([tasks[victim]])
        return errors, ended

    errors, ended = in_virtual_time(3, main)
    assert ended == 4.5
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.rank == victim


def test_stages_that_do_not_fit_together_are_named() -> None:
    def cut(count: int) -> list[Stage[Any]]:
        initializer = Initializer.from_seed(1, "float64")
        return [Linear("one", FEATURES, 5, initializer=initializer), Linear("two", 6, 3, initializer=initializer)]

    async def main(ranks: Ranks) -> list[Any]:
        inputs, targets = make_samples(MICRO_BATCHES)
        executors, _ = make_executors(schedule_of(ranks=2), ranks, cut=cut)
        return await outcomes([executor.run(inputs, targets) for executor in executors])

    zero, one = in_virtual_time(2, main)
    assert isinstance(one, ActionFailed)
    assert isinstance(one.__cause__, UsageError)
    assert isinstance(zero, StepFailed)
    assert "rank 1: forward of virtual stage 1, micro-batch 0, failed: UsageError: two: expected an input" in str(zero)


class Odd(Stage[None]):
    """Gives what no stage may give."""

    def __init__(self, y: Any, dx: Any) -> None:
        self._y, self._dx = y, dx

    def forward(self, x: Any) -> tuple[Any, None]:
        return self._y(x), None

    def backward(self, saved: None, dy: Array, on_gradient: Any = None, deferred: Any = None) -> Any:
        return self._dx(dy)

    def parameters(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("odd", "place", "message"),
    [
        (Odd(lambda x: [1.0], lambda dy: dy), 0, "the output: expected an array, got list"),
        (Odd(lambda x: np.array([object()]), lambda dy: dy), 0, "x: expected a numeric dtype"),
        (Odd(lambda x: x, lambda dy: None), 1, "the gradient of the input: expected an array, .* got None"),
        (Odd(lambda x: x, lambda dy: 3.0), 1, "the gradient of the input: expected an array, got float"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_was_made(odd: Odd, place: int, message: str) -> None:
    async def main(ranks: Ranks) -> list[Any]:
        inputs, targets = make_samples(MICRO_BATCHES)
        stages = [odd, Odd(lambda x: x, lambda dy: dy)] if place == 0 else [Odd(lambda x: x, lambda dy: dy), odd]
        executors, _ = make_executors(schedule_of(ranks=2), ranks, cut=lambda _: list(stages))
        return await outcomes([executor.run(inputs, targets) for executor in executors])

    errors = in_virtual_time(2, main)
    assert isinstance(errors[place], ActionFailed)
    with pytest.raises(ActionFailed, match=message):
        raise errors[place]
    assert isinstance(errors[1 - place], StepFailed)


async def test_leftovers_of_a_failed_run_meet_no_later_one() -> None:
    """Messages of both sizes, sent eagerly and by grant, with other numbers in each run."""
    schedule = schedule_of(Kind.GPIPE, 2, micro_batches=6)
    for rows in (1, 900):
        first, targets = make_samples(6, rows=lambda number, rows=rows: rows + number)  # type: ignore[misc]
        second = [x + 1.0 for x in first]
        losses, expected = alone(cut_model(2), second, targets)
        async with open_ranks(2) as ranks:
            executors, held = make_executors(schedule, ranks)
            for culprit in (0, 1, 0):
                tasks = [asyncio.create_task(executor.run(first, targets)) for executor in executors]
                for _ in range(12 + 5 * culprit):
                    await asyncio.sleep(0)
                tasks[culprit].cancel()
                errors = await outcomes(tasks)
                assert all(isinstance(error, BaseException) for error in errors), errors
            for stage in (stage for stages in held for stage in stages):
                stage.zero_grad()
            results = await run_all(executors, second, targets)
            assert list(results[1].losses) == losses
            for stages in held:
                for name, gradient in gradients_of(stages).items():
                    np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12)


async def test_a_failing_thread_ends_the_run_over_sockets() -> None:
    schedule = schedule_of(ranks=2)
    inputs, targets = make_samples(MICRO_BATCHES, rows=lambda _: 900)
    targets[2] = targets[2][:1, :, :2]
    async with ap.testing.local_world(2, transport="tcp") as nodes:
        ranks: Any = type("Ranks", (), {"communicators": [node.world for node in nodes]})
        executors, _ = make_executors(schedule, ranks, compute=make_worker)
        zero, one = await asyncio.wait_for(outcomes([executor.run(inputs, targets) for executor in executors]), 20)
        assert isinstance(one, ActionFailed)
        assert isinstance(one.__cause__, ValueError)
        assert isinstance(zero, StepFailed)
        targets[2] = inputs[2]
        results = await asyncio.wait_for(run_all(executors, inputs, targets), 20)
        assert len(results[1].losses) == MICRO_BATCHES
        await asyncio.gather(*(executor.close() for executor in executors))


# -- ranks that do not fit together ------------------------------------------------------------------------------------


def run_different(make: Callable[[int, Any], PipelineExecutor], run: Any = run_one, size: int = 3) -> list[Any]:
    async def main(ranks: Ranks) -> list[Any]:
        executors = [make(rank, communicator) for rank, communicator in enumerate(ranks.communicators)]
        return await outcomes([run(executor) for executor in executors])

    return in_virtual_time(size, main)


def test_another_schedule_on_one_rank_is_refused_on_all_and_named() -> None:
    kinds = [Kind.GPIPE, Kind.GPIPE, Kind.ONE_FORWARD_ONE_BACKWARD]
    errors = run_different(lambda rank, communicator: make_executor(schedule_of(kinds[rank]), communicator))
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, PipelineMismatch)
        assert "rank 2 has run of one_forward_one_backward, 4 micro-batches" in str(error)
        assert "ranks 0, 1: run of gpipe, 4 micro-batches" in str(error)


def test_another_number_of_micro_batches_is_refused_on_all() -> None:
    errors = run_different(
        lambda rank, communicator: make_executor(schedule_of(micro_batches=5 if rank == 0 else 4), communicator)
    )
    for error in errors:
        with pytest.raises(PipelineMismatch, match="rank 0 has run of one_forward_one_backward, 5 micro-batches"):
            raise error


def test_inference_on_one_rank_and_training_on_others_is_refused_on_all() -> None:
    async def run(executor: PipelineExecutor) -> Any:
        return await (executor.run_forward() if executor.has_last_stage else run_one(executor))

    errors = run_different(lambda _, communicator: make_executor(schedule_of(), communicator), run)
    for error in errors:
        with pytest.raises(PipelineMismatch, match="rank 2 has run_forward of"):
            raise error


@pytest.mark.parametrize(
    ("options", "inputs", "targets", "message"),
    [
        ({"stages": []}, 4, 4, r"rank 0: stages: expected 1 \(virtual stages 0\), got 0"),
        ({}, None, 4, "rank 0: inputs: expected 4 micro-batches, got none"),
        ({}, 3, 4, "rank 0: inputs: expected 4 micro-batches, got 3"),
        ({}, iter([1]), 4, "rank 0: inputs: expected a sequence of 4 micro-batches, got list_iterator"),
        ({}, np.zeros((3, 2)), 4, "rank 0: inputs: expected 4 micro-batches, got 3"),
        ({}, 4, 5, "rank 1: targets: expected 4 micro-batches, got 5"),
        ({}, 4, None, "rank 1: targets: expected 4 micro-batches, got none"),
        ({"loss": None}, 4, 4, "rank 1: loss: expected a function on the rank with the last virtual stage, got None"),
    ],
)
def test_what_a_rank_lacks_is_named_on_all_before_anything_is_computed(
    options: dict[str, Any], inputs: Any, targets: Any, message: str
) -> None:
    def make(rank: int, communicator: Any) -> PipelineExecutor:
        return make_executor(schedule_of(ranks=2), communicator, **options)

    def batches(count: Any) -> Any:
        return [np.zeros(1)] * count if isinstance(count, int) else count

    async def run(executor: PipelineExecutor) -> Any:
        return await executor.run(batches(inputs), batches(targets))

    for error in run_different(make, run, 2):
        with pytest.raises(PipelineMismatch, match=message):
            raise error


async def test_after_a_refusal_a_fitting_run_works() -> None:
    inputs, targets = make_samples(MICRO_BATCHES)
    async with open_ranks(2) as ranks:
        executors, _ = make_executors(schedule_of(ranks=2), ranks)
        errors = await outcomes([executor.run(inputs[:3], targets) for executor in executors])
        assert all(isinstance(error, PipelineMismatch) for error in errors)
        results = await run_all(executors, inputs, targets)
    assert len(results[1].losses) == MICRO_BATCHES


class BackwardsFirst(PipelineSchedule):
    """Does everything the wrong way round."""

    def compute_order(self, rank: int) -> tuple[PipelineOp, ...]:
        return tuple(reversed(super().compute_order(rank)))


async def test_a_schedule_that_would_wait_for_ever_is_refused_before_it_runs() -> None:
    schedule = BackwardsFirst(num_stages=2, num_microbatches=2, schedule_type=Kind.GPIPE)
    async with open_ranks(2) as ranks:
        for communicator in ranks.communicators:
            with pytest.raises(InvalidSchedule, match="deadlock"):
                make_executor(schedule, communicator)


async def test_a_group_of_another_size_is_refused() -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match=r"communicator: expected a group of 3 ranks, .* got one of 2"):
            make_executor(schedule_of(ranks=3), ranks.communicators[0])


async def test_no_reception_ahead_is_refused() -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match="receive_ahead: expected 1 or more, got 0"):
            make_executor(schedule_of(ranks=2), ranks.communicators[0], receive_ahead=0)


@pytest.mark.parametrize("kind", list(Kind))
def test_one_reception_at_a_time_is_enough_for_every_schedule(kind: Kind) -> None:
    schedule = schedule_of(kind, micro_batches=6)

    async def main(ranks: Ranks) -> list[Any]:
        executors = [make_executor(schedule, one, receive_ahead=1) for one in ranks.communicators]
        return list(await asyncio.gather(*(run_one(executor) for executor in executors)))

    results = in_virtual_time(3, main)
    assert results[schedule.rank_of(schedule.num_virtual_stages - 1)].losses == tuple(range(6))


def test_a_layer_that_was_left_by_a_peer_passes_that_on_and_is_not_blamed() -> None:
    """Layers may talk to ranks outside the pipeline; that such a rank has failed is no fault of the layer's rank."""

    def left(what: str, number: int) -> None:
        raise PeerCancelled("rank 9 failed in it", rank=9, cause="failed")

    async def main(ranks: Ranks) -> list[Any]:
        executors = fails_on(ranks, schedule_of(), {1: left})
        return await outcomes([run_one(executor) for executor in executors])

    zero, one, two = in_virtual_time(3, main)
    assert type(one) is PeerCancelled
    assert one.__notes__ == ["in forward of virtual stage 1"]
    for error in (zero, two):
        assert isinstance(error, StepFailed)
        assert error.rank == 9


async def test_messages_beyond_all_tags_are_refused() -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match="num_microbatches: 70000 micro-batches make 70000 messages"):
            make_executor(schedule_of(Kind.GPIPE, 2, micro_batches=70_000), ranks.communicators[0])


async def test_two_runs_at_once_are_refused() -> None:
    inputs, targets = make_samples(MICRO_BATCHES)
    async with open_ranks(1) as ranks:
        executors, _ = make_executors(schedule_of(ranks=1), ranks)
        first = asyncio.create_task(executors[0].run(inputs, targets))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="run: expected one run at a time"):
            await executors[0].run(inputs, targets)
        assert len((await first).losses) == MICRO_BATCHES


def test_with_an_alarm_around_the_runs_that_one_ends_them() -> None:
    async def main(ranks: Ranks) -> list[Any]:
        schedule = schedule_of()
        alarms = [StepAlarm(communicator) for communicator in ranks.communicators]
        fault = Fault("backward", 1)
        executors = [
            make_executor(schedule, communicator, fails=fault if rank == 1 else None, alarm=alarms[rank])
            for rank, communicator in enumerate(ranks.communicators)
        ]

        async def run(rank: int) -> Any:
            async with alarms[rank].watch():
                return await run_one(executors[rank])

        errors = await outcomes([run(rank) for rank in range(3)])
        assert isinstance(errors[1], ActionFailed)
        assert isinstance(errors[0], PeerError)
        return await asyncio.gather(*(run(rank) for rank in range(3)))

    assert in_virtual_time(3, main)[2].losses == (0, 1, 2, 3)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_ranks_find_together_again_after_a_block_in_which_one_failed_before_its_run(culprit: int) -> None:
    async def main(ranks: Ranks) -> list[Any]:
        schedule = schedule_of()
        alarms = [StepAlarm(communicator) for communicator in ranks.communicators]
        executors = [
            make_executor(schedule, communicator, alarm=alarms[rank])
            for rank, communicator in enumerate(ranks.communicators)
        ]

        async def run(rank: int, *, fails: bool) -> Any:
            async with alarms[rank].watch():
                if fails and rank == culprit:
                    await asyncio.sleep(2.5)
                    raise ZeroDivisionError("before the run")
                await run_one(executors[rank])
                return await run_one(executors[rank])

        for _ in range(3):
            errors = await outcomes([run(rank, fails=True) for rank in range(3)])
            assert isinstance(errors.pop(culprit), ZeroDivisionError)
            assert all(isinstance(error, StepFailed) for error in errors)
        return await asyncio.gather(*(run(rank, fails=False) for rank in range(3)))

    assert in_virtual_time(3, main)[2].losses == (0, 1, 2, 3)


async def test_an_alarm_that_is_not_watching_or_lacks_ranks_is_refused() -> None:
    async with open_ranks(2) as ranks:
        alarm = StepAlarm(ranks.communicators[0])
        executor = make_executor(schedule_of(ranks=2), ranks.communicators[0], alarm=alarm)
        with pytest.raises(UsageError, match="alarm: expected to be used within a block that it watches"):
            await run_one(executor)
        alone = ranks.communicators[0].subgroup([0])
        with pytest.raises(UsageError, match=r"alarm: expected one over ranks \(0, 1\), got one over \(0,\)"):
            make_executor(schedule_of(ranks=2), ranks.communicators[0], alarm=StepAlarm(alone))  # type: ignore[arg-type]


def test_memory_is_free_again_after_a_failure() -> None:
    async def main(ranks: Ranks) -> list[int]:
        memories = [MemoryManager(), MemoryManager()]
        inputs, targets = make_samples(MICRO_BATCHES)
        executors = []
        for rank, communicator in enumerate(ranks.communicators):
            stage = Sequential([cut_model(2)[rank]])
            executors.append(
                PipelineExecutor(
                    schedule_of(Kind.GPIPE, 2),
                    [stage],
                    communicator=communicator,
                    compute=InlineCompute(),
                    loss=square_loss,
                    memory=memories[rank],
                )
            )
        targets[3] = targets[3][..., :2]
        await outcomes([executor.run(inputs, targets) for executor in executors])
        assert all(memory.stats.peak_bytes > 0 for memory in memories)
        return [memory.stats.current_bytes for memory in memories]

    assert in_virtual_time(2, main) == [0, 0]


def test_a_rank_that_never_runs_is_named_after_the_timeout_and_meets_the_failure_when_it_comes() -> None:
    async def main(ranks: Ranks) -> tuple[list[Any], float, Any, list[Any]]:
        executors = fails_on(ranks, schedule_of(), {})
        errors = await outcomes([run_one(executors[0]), run_one(executors[2])])
        ended = asyncio.get_running_loop().time()
        (late,) = await outcomes([run_one(executors[1])])
        return errors, ended, late, await asyncio.gather(*(run_one(executor) for executor in executors))

    errors, ended, late, results = in_virtual_time(3, main, timeout=30.0)
    assert 30.0 <= ended <= 32.0
    for error in errors:
        assert isinstance(error, PeerError)
        assert error.rank == 1
    assert isinstance(late, StepFailed)
    assert "PeerTimeout" in str(late)
    assert results[2].losses == (0, 1, 2, 3)
