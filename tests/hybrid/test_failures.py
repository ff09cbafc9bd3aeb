"""A rank that fails, is cancelled or dies ends the step on all of them, soon; and the next step is right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import PeerError, UsageError
from asyncpar.hybrid import HybridConfig, StepResult, StepTaken, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.pipeline.errors import ActionFailed
from asyncpar.zero import ZeROStage
from tests.hybrid.cases import small_buckets
from tests.hybrid.faults import Fault, FaultyModel, Moment
from tests.hybrid.ranks import Ranks, assert_has_taken, assert_names, outcomes_of, running
from tests.hybrid.worlds import RATE, TINY, make_config
from tests.products import in_turn
from tests.soak import chosen, first

MODEL = replace(TINY, layers=2, heads=2, tied_embeddings=True)
LAYOUTS = [(2, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1)]
STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE3]
ROUNDS = chosen(1, soak=2)
"""Times that a rank fails in a layer."""


def make(layout: tuple[int, int, int], stage: ZeROStage, **settings: Any) -> HybridConfig:
    return make_config(*layout, layers=2, micro_batches=2, zero=small_buckets(stage), clip_norm=0.3, **settings)


def assert_all_know(outcomes: list[Any], culprit: int, own: type[BaseException]) -> None:
    """A rank that raised, if not the culprit itself, names it."""
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            assert outcome is None or not isinstance(outcome, BaseException) or isinstance(outcome, own), repr(outcome)
        elif isinstance(outcome, BaseException):
            assert_names(outcome, culprit)


async def cancel_after(ranks: Ranks, culprit: int, turns: int, main: Any = None) -> list[Any]:
    """Do something on all ranks, by default a step, and cancel one of them after some turns of the loop."""
    tasks = ranks.start(main)
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[culprit].cancel()
    return await outcomes_of(tasks)


@pytest.mark.parametrize(("stage", "layout"), first(2, in_turn([ZeROStage.STAGE3, ZeROStage.NONE], LAYOUTS)))
async def test_a_rank_may_be_cancelled_at_any_moment(layout: tuple[int, int, int], stage: ZeROStage) -> None:
    async with running(MODEL, make(layout, stage)) as ranks:
        await ranks.take_step()
        for number, turns in enumerate(chosen((1, 12, 32, 70), soak=(1, 4, 12, 20, 32, 45, 70))):
            culprit = number % len(ranks.all)
            assert_all_know(await cancel_after(ranks, culprit, turns), culprit, asyncio.CancelledError)
            await ranks.take_step()
            assert len({one.steps for one in ranks.all}) == 1
            assert_has_taken(ranks, ranks.all[0].steps)


@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE2])
async def test_two_ranks_may_be_cancelled_and_the_next_step_too(stage: ZeROStage) -> None:
    async with running(MODEL, make((2, 1, 2), stage)) as ranks:
        for turns in chosen((2, 23), soak=(2, 9, 23, 40)):
            for culprits in ((0, 3), (1,), (2, 1)):
                tasks = ranks.start()
                for culprit in culprits:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    tasks[culprit].cancel()
                for outcome in await outcomes_of(tasks):
                    assert not isinstance(outcome, BaseException) or isinstance(
                        outcome, (asyncio.CancelledError, PeerError)
                    )
        await ranks.take_step()
        assert_has_taken(ranks, ranks.all[0].steps)


@pytest.mark.parametrize(("stage", "layout"), in_turn(ZeROStage, LAYOUTS))
async def test_a_rank_that_fails_when_others_take_the_step_takes_it_later(
    layout: tuple[int, int, int], stage: ZeROStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have the same slice of the same stage may fail with it; all ranks learn that the step was taken."""
    async with running(MODEL, make(layout, stage)) as ranks:
        await ranks.take_step()

        async def fail(norm: float, rate: float) -> None:
            for _ in range(50):
                await asyncio.sleep(0)
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(ranks.all[1]._session.runner, "update", fail)  # noqa: SLF001  # the coordinator makes its runner itself; the failure is put into one rank's update
            outcomes = await outcomes_of(ranks.start())
        assert_all_know(outcomes, 1, ZeroDivisionError)
        steps = {one.steps for one in ranks.all}
        again = await outcomes_of(ranks.start())
        if steps == {1}:
            assert not any(isinstance(outcome, BaseException) for outcome in again), again
        else:
            assert all(isinstance(outcome, StepTaken) for outcome in again), again
            assert "go on with step 2" in str(again[0])
        assert {one.steps for one in ranks.all} == {2}
        assert_has_taken(ranks, 2)
        await ranks.take_step()
        assert_has_taken(ranks, 3)
        assert layout[0] > 1 or steps == {1, 2}


@asynccontextmanager
async def faulty(
    layout: tuple[int, int, int], stage: ZeROStage, *, rank: int, **settings: Any
) -> AsyncIterator[tuple[Ranks, Fault]]:
    """Make coordinators, one of which has a fault that is yet to be set."""
    fault, model = Fault(), TransformerModel(config=MODEL)
    faults = {rank: fault}
    async with running(
        MODEL,
        make(layout, stage, **settings),
        lambda rank: FaultyModel(model=model, fault=faults.get(rank, Fault())),
    ) as ranks:
        yield ranks, fault


@pytest.mark.parametrize(("moment", "stage", "layout"), in_turn(Moment, STAGES, LAYOUTS))
async def test_a_rank_that_fails_in_a_layer_is_named_everywhere(
    layout: tuple[int, int, int], stage: ZeROStage, moment: Moment
) -> None:
    culprit = layout[0] * layout[1] * layout[2] - 1  # which has the last stage, and so the loss
    async with faulty(layout, stage, rank=culprit) as (ranks, fault):
        for taken in range(ROUNDS):
            fault.at = moment
            outcomes = await outcomes_of(ranks.start())
            assert all(isinstance(outcome, BaseException) for outcome in outcomes)
            assert_all_know(outcomes, culprit, ActionFailed)
            assert isinstance(outcomes[culprit].__cause__, ZeroDivisionError)
            fault.at = None
            assert_has_taken(ranks, taken) if stage is ZeROStage.NONE else None
            await ranks.take_step()
        assert_has_taken(ranks, ROUNDS)


@pytest.mark.parametrize("stage", STAGES)
async def test_halves_of_a_step_and_the_forward_pass_fail_on_all_ranks_too(stage: ZeROStage) -> None:
    async with faulty((2, 1, 2), stage, rank=2) as (ranks, fault):

        async def backward(one: ThreeDParallelismCoordinator) -> float:
            return await one.backward_pass(*ranks.batch_of(one))

        async def forward(one: ThreeDParallelismCoordinator) -> Any:
            return await one.forward_pass(ranks.batch_of(one)[0])

        async def update(one: ThreeDParallelismCoordinator) -> Any:
            return await one.optimizer_step(RATE)

        for main in (backward, forward):
            fault.at = Moment.FORWARD
            assert_all_know(await outcomes_of(ranks.start(main)), 2, ActionFailed)
            fault.at = None
        for outcome in await outcomes_of(ranks.start(update)):  # there is nothing to update by
            assert isinstance(outcome, (UsageError, PeerError))
        losses = await outcomes_of(ranks.start(backward))
        assert len(set(losses)) == 1
        assert isinstance(losses[0], float)
        results = await outcomes_of(ranks.start(update))
        assert [result.loss for result in results] == losses
        assert_has_taken(ranks, 1)


@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE2])
async def test_halves_of_a_step_may_be_cancelled(stage: ZeROStage) -> None:
    """A half that fails leaves nothing to go on with; one that was done all the same is reported.

    A rank that is cancelled while it waits for the others at the end of the first half has failed in what they have
    done: they wait for it in the second half.  So each goes on as a program does, with the next step.
    """
    async with running(MODEL, make((2, 1, 2), stage)) as ranks:

        async def both_and_step(one: ThreeDParallelismCoordinator) -> Any:
            task = asyncio.current_task()
            assert task is not None
            try:
                await one.backward_pass(*ranks.batch_of(one))
                await one.optimizer_step(RATE)
                await has_cancelled.wait()  # no step is cancelled
            except asyncio.CancelledError:
                assert task.uncancel() == 0
            except (PeerError, UsageError):
                pass
            try:
                return await ranks.step(one)
            except StepTaken:
                pass
            except UsageError as error:
                assert "expected it to be called on all ranks" in str(error)  # noqa: PT017  # some ranks have this error
            return await ranks.step(one)

        for number, turns in enumerate(chosen((3, 24, 55), soak=(3, 11, 24, 39, 55, 70))):
            has_cancelled = asyncio.Event()
            tasks = ranks.start(both_and_step)
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[number % 4].cancel()
            has_cancelled.set()
            for outcome in await outcomes_of(tasks):
                assert isinstance(outcome, StepResult), repr(outcome)
            assert_has_taken(ranks, ranks.all[0].steps)


@pytest.mark.parametrize(
    ("turns", "stage", "layout"), in_turn([0, 6, 18, 35], [ZeROStage.NONE, ZeROStage.STAGE2], LAYOUTS)
)
async def test_a_rank_that_dies_is_named_everywhere(layout: tuple[int, int, int], stage: ZeROStage, turns: int) -> None:
    async with running(MODEL, make(layout, stage)) as ranks:
        await ranks.take_step()
        tasks = ranks.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[1].cancel()
        await ranks.nodes[1].stop()
        outcomes = await outcomes_of(tasks)
        assert_all_know(outcomes, 1, BaseException)
        others = [outcome for rank, outcome in enumerate(outcomes) if rank != 1]
        if not any(isinstance(outcome, PeerError) for outcome in others):  # it had sent all that they needed
            assert turns == 35, "a step takes more turns than that"
            assert all(isinstance(outcome, StepResult) for outcome in others)
        survivors = [ranks.step(one) for rank, one in enumerate(ranks.all) if rank != 1]
        for outcome in await outcomes_of([asyncio.create_task(step) for step in survivors]):
            assert_names(outcome, 1)


async def test_ranks_that_do_different_things_are_told_so() -> None:
    async with running(MODEL, make((1, 1, 2), ZeROStage.NONE)) as ranks:
        first, second = ranks.all
        outcomes = await outcomes_of(
            [asyncio.create_task(ranks.step(first)), asyncio.create_task(second.forward_pass(None))]
        )
        for outcome in outcomes:
            assert isinstance(outcome, UsageError)
            assert "train_step: expected it to be called on all ranks, got forward_pass on rank 1" in str(outcome)
        await ranks.take_step()
        assert_has_taken(ranks, 1)


@pytest.mark.parametrize(
    ("rates", "text"), [((0.1, 0.2), "got 0.1 on rank 0, 0.2 on rank 1"), ((0.1, -1.0), "got -1.0")]
)
async def test_learning_rates_that_differ_or_make_no_sense_are_refused_everywhere(
    rates: tuple[float, float], text: str
) -> None:
    async with running(MODEL, make((2, 1, 1), ZeROStage.NONE)) as ranks:
        steps = [
            one.train_step(*ranks.batch_of(one), learning_rate=rate) for one, rate in zip(ranks.all, rates, strict=True)
        ]
        for outcome in await outcomes_of([asyncio.create_task(step) for step in steps]):
            assert isinstance(outcome, UsageError)
            assert text in str(outcome)
        await ranks.take_step()
        assert_has_taken(ranks, 1)
