"""Replicas that are cancelled, fail, die, differ or never come: nobody hangs, nobody goes on with half a step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import AsyncparError, NonFiniteValue, PeerCancelled, PeerError, PeerTimeout, UsageError
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD, Adam
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from asyncpar.zero import StepTorn, ZeROConfig, ZeroEngine, ZeROStage
from asyncpar.zero.buffers import BufferPool
from asyncpar.zero.step_state import EnginePhase
from asyncpar.zero.stepping import CommitVote
from tests.zero.layers import Replica, replicas
from tests.zero.replicas import (
    PATIENCE,
    draw_parameters,
    engines,
    give_gradients,
    on_all,
    outcomes,
    take_step,
    take_steps,
    whole_values,
)

STAGES = list(ZeROStage)


def own_values(engine: ZeroEngine) -> dict[str, bytes]:
    """Return what this rank keeps of all values and states."""
    return {f"{share.parameter.name}": share.value.tobytes() for share in engine._means.shares}  # noqa: SLF001  # what this rank owns is compared as bytes, at times at which no public call gives it


async def cancel_after(made: Sequence[ZeroEngine], culprit: int, turns: int, step: int) -> list[object]:
    """Take a step on all ranks, and cancel that of ``culprit`` after some turns of the loop."""
    tasks = [asyncio.ensure_future(take_step(engine, step)) for engine in made]
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[culprit].cancel()
    return list(await asyncio.gather(*tasks, return_exceptions=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [2, 3])
async def test_a_rank_may_be_cancelled_at_any_moment(size: int, stage: ZeROStage) -> None:
    """Then all ranks meet, go on with equal values, and never with half a step."""
    kinds: set[type] = set()
    async with engines(size, stage, bucket_size_mb=1e-4) as made:
        for turns in range(1, 70, 3):
            counts = {engine.step_count for engine in made}
            assert len(counts) == 1, "all have taken the same steps"
            results = await cancel_after(made, turns % size, turns, step=turns)
            for result in results:
                assert result is None or isinstance(result, (asyncio.CancelledError, PeerError)), repr(result)
            if any(result is not None for result in results):
                kinds.update(type(result) for result in results)
                if not await come_together(made):
                    return
            values = await on_all(made, whole_values)
            assert all(values[0][name].tobytes() == each[name].tobytes() for each in values for name in each)
    assert asyncio.CancelledError in kinds
    assert PeerCancelled in kinds


async def come_together(made: Sequence[ZeroEngine]) -> bool:
    """Resume on all ranks; where some have taken a step that others have not, all must report it."""
    results = await outcomes(made, ZeroEngine.resume)
    if results == [None] * len(made):
        return True
    assert len({engine.step_count for engine in made}) == 2
    assert all(isinstance(result, StepTorn) for result in results), results
    return False


async def test_a_torn_step_is_made_whole() -> None:
    """Rank 1 does not spread what it owns: values differ until replicas have met."""
    async with engines(2, ZeROStage.STAGE1) as made:
        await take_steps(made, 0)
        expected = await after_another_step()

        for engine in made:
            engine.zero_grad()
            give_gradients(engine.parameters, rank=engine.communicator.rank, step=1)
        await on_all(made, ZeroEngine.reduce)
        fail_once(made[1]._means.pool)  # noqa: SLF001  # the failure is put into the memory pool, which the engine makes itself
        results = await outcomes(made, lambda engine: engine.step(0.05))
        assert all(isinstance(result, StepTorn) for result in results), results
        with pytest.raises(UsageError, match=r"step: an earlier step failed .* await resume\(\) on all ranks first"):
            await made[0].step(0.05)
        await on_all(made, ZeroEngine.resume)
        for values in await on_all(made, whole_values):
            assert {name: array.tobytes() for name, array in values.items()} == expected


def fail_once(pool: BufferPool) -> None:
    """Let ``pool`` have no memory for the next bucket."""
    take = pool.take

    def fail(*_: Any) -> Any:
        pool.take = take  # type: ignore[method-assign]
        raise PeerError("no memory")

    pool.take = fail  # type: ignore[assignment,method-assign]


async def after_another_step() -> dict[str, bytes]:
    async with engines(2, ZeROStage.STAGE1) as made:
        await take_steps(made, 0, 1)
        return {name: array.tobytes() for name, array in (await whole_values(made[0])).items()}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_rank_that_fails_outside_tells_the_others(stage: ZeROStage) -> None:
    async def main(engine: ZeroEngine) -> None:
        engine.zero_grad()
        give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
        engine.ready("head")
        if engine.communicator.rank == 1:
            await engine.abandon("the backward pass failed")
            raise ZeroDivisionError
        await engine.reduce()

    async with engines(3, stage, bucket_size_mb=1e-4) as made:
        before = [own_values(engine) for engine in made]
        results = await outcomes(made, main)
        assert isinstance(results[1], ZeroDivisionError)
        for rank in (0, 2):
            assert isinstance(results[rank], PeerCancelled)
            assert results[rank].rank == 1  # type: ignore[attr-defined]
        assert [own_values(engine) for engine in made] == before
        await on_all(made, ZeroEngine.resume)
        await take_steps(made, 1)


async def test_memory_that_others_may_still_read_is_not_used_again() -> None:
    async def main(engine: ZeroEngine) -> None:
        await (engine.reduce() if engine.communicator.rank == 0 else engine.abandon())

    async with engines(2, bucket_size_mb=1e-4) as made:
        assert isinstance((await outcomes(made, main))[0], PeerCancelled)
        assert made[0].memory_stats().transient_peak > 0
        assert made[0].memory_stats().buffers == 0


async def test_a_rank_that_is_cancelled_in_the_middle_of_the_step_updates_all_it_owns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in other threads, parameters are updated in several turns of the loop."""

    async def off_loop(work: Callable[[], None], *, nbytes: int) -> None:
        await asyncio.sleep(0)
        work()

    monkeypatch.setattr("asyncpar.zero.stepping.off_loop", off_loop)
    async with engines(2, ZeROStage.STAGE1, bucket_size_mb=1e-5) as made:
        tasks = [asyncio.ensure_future(take_step(engine, 0)) for engine in made]
        while made[1]._state.phase is not EnginePhase.STEPPED:  # noqa: ASYNC110, SLF001  # the engine shows no phase; the test cancels exactly after the update
            await asyncio.sleep(0)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [StepTorn, asyncio.CancelledError]
        await on_all(made, ZeroEngine.resume)
        values = await on_all(made, whole_values)
    async with engines(2, ZeROStage.STAGE1) as untroubled:
        await take_steps(untroubled, 0)
        for name, expected in (await on_all(untroubled, whole_values))[0].items():
            assert values[0][name].tobytes() == values[1][name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("moment", ["global_norm", "step"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_rank_that_fails_between_reduction_and_step_tells_the_others(stage: ZeROStage, moment: str) -> None:
    async def main(engine: ZeroEngine) -> None:
        await engine.reduce()
        if engine.communicator.rank == 1:
            await engine.abandon("something else failed")
        elif moment == "step":
            await engine.step(0.1)
        else:
            await engine.global_norm()

    async with engines(3, stage) as made:
        before = [own_values(engine) for engine in made]
        results = await outcomes(made, main)
        assert [type(result) for result in results] == [PeerCancelled, type(None), PeerCancelled]
        assert [own_values(engine) for engine in made] == before
        await on_all(made, ZeroEngine.resume)
        await take_steps(made, 0)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_rank_that_missed_a_step_of_the_others_can_catch_up(
    stage: ZeROStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is cancelled when the others have learnt already that all are ready for the step."""
    run = CommitVote.run

    async def cancelled_on_rank_1(self: CommitVote) -> AsyncparError | None:
        objection = await run(self)
        if self._means.communicator.rank == 1:  # the rank whose agreement this is
            raise asyncio.CancelledError
        return objection

    async with engines(2, stage) as made:
        monkeypatch.setattr(CommitVote, "run", cancelled_on_rank_1)
        results = await outcomes(made, lambda engine: take_step(engine, 0))
        monkeypatch.undo()
        assert isinstance(results[1], asyncio.CancelledError)
        assert [engine.step_count for engine in made] == [1, 0]
        for result in await outcomes(made, ZeroEngine.resume):
            assert isinstance(result, StepTorn)
            assert "some replicas have taken step 1 and others, rank 1 for one, have not" in str(result)
        await made[1].catch_up(0.05)
        await on_all(made, lambda engine: engine.resume(attempt=1))
        values = await on_all(made, whole_values)
        await take_steps(made, 1)
    async with engines(2, stage) as untroubled:
        await take_steps(untroubled, 0)
        for name, expected in (await on_all(untroubled, whole_values))[0].items():
            assert values[0][name].tobytes() == values[1][name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("moment", ["reduce", "global_norm", "step"])
def test_a_rank_that_stays_away_is_told_of_by_all_in_time(moment: str) -> None:
    """On virtual time: rank 2 does not come for as long as operations may take."""

    acts: dict[str, Any] = {
        "reduce": ZeroEngine.reduce,
        "global_norm": ZeroEngine.global_norm,
        "step": lambda engine: engine.step(0.1),
    }

    async def main() -> None:
        async with engines(3, patience=500.0) as made:
            for engine in made:
                engine.communicator.timeout = 30.0
                give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
            if moment != "reduce":
                await on_all(made, ZeroEngine.reduce)
            before = [own_values(engine) for engine in made]
            for result in await outcomes(made[:2], acts[moment]):
                assert isinstance(result, (PeerTimeout, PeerCancelled)), result
                assert "rank 2" in str(result)
            assert [own_values(engine) for engine in made] == before

    run_virtual(main())


@pytest.mark.parametrize("stage", STAGES)
async def test_a_rank_that_leaves_is_lost_for_the_others(stage: ZeROStage) -> None:
    config = ZeROConfig(stage=stage)
    async with local_world(3, transport="tcp") as nodes, asyncio.timeout(PATIENCE):
        made = [ZeroEngine(draw_parameters(), Adam(), config, node.world) for node in nodes]
        await on_all(made, ZeroEngine.prepare)
        await take_steps(made, 0)
        running = [asyncio.ensure_future(take_step(engine, 1)) for engine in made[:2]]
        await asyncio.sleep(0)
        await nodes[2].stop()
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(result, PeerError), result
            assert result.rank == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("stage", STAGES)
async def test_gradients_that_are_not_finite_change_nothing_anywhere(stage: ZeROStage, bad: float) -> None:
    async with engines(3, stage) as made:
        before = [own_values(engine) for engine in made]
        for engine in made:
            give_gradients(engine.parameters, rank=engine.communicator.rank, step=0)
        made[1].parameters[0].grad[3, 2] = bad
        await on_all(made, ZeroEngine.reduce)
        assert sum(not engine.is_finite() for engine in made) == 1, "each looks at what it owns"
        assert not any(math.isfinite(norm) for norm in await on_all(made, ZeroEngine.global_norm))
        for result in await outcomes(made, lambda engine: engine.step(0.1)):
            assert isinstance(result, NonFiniteValue)
            assert str(result).startswith(
                "gradients: expected finite numbers at step 0, but rank 1 has NaN or infinity"
            )
            assert str(result).endswith(f" in {made[1].parameters[0].name}")
        assert [own_values(engine) for engine in made] == before
        await take_steps(made, 1)
        assert {engine.step_count for engine in made} == {1}


async def test_replicas_that_want_different_steps_are_refused_on_all() -> None:
    async with engines(3) as made:
        before = [own_values(engine) for engine in made]
        await on_all(made, ZeroEngine.reduce)
        for result in await outcomes(made, lambda engine: engine.step(0.1 * (engine.communicator.rank != 2))):
            assert isinstance(result, UsageError)
            assert str(result) == "step: expected one learning rate on all replicas, but rank 0 has 0.1, rank 2 0.0"
        for result in await outcomes(made, lambda engine: engine.step(math.nan if engine.communicator.rank else 0.1)):
            assert isinstance(result, UsageError)
            assert str(result) == "step: expected a finite learning rate >= 0, but rank 1 has nan"
        made[1].scale(0.5)
        for result in await outcomes(made, lambda engine: engine.step(0.1)):
            assert isinstance(result, UsageError)
            assert "expected one scale on all replicas, but rank 0 has 1.0, rank 1 0.5" in str(result)
        assert [own_values(engine) for engine in made] == before


def make_engine(parameters: list[Parameter], communicator: Any, **settings: Any) -> ZeroEngine:
    return ZeroEngine(parameters, Adam(), ZeROConfig(**settings), communicator)


def changed(kind: str, rank: int) -> tuple[list[Parameter], dict[str, Any]]:
    """Return parameters and settings, of which one thing is different on rank 1."""
    value = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    parameters = [Parameter("a", value), Parameter("b", value.copy())]
    settings: dict[str, Any] = {}
    if rank == 1:
        match kind:
            case "name":
                parameters[1] = Parameter("c", value.copy())
            case "shape":
                parameters[1] = Parameter("b", value.reshape(3, 2).copy())
            case "dtype":
                parameters[1] = Parameter("b", value.astype(np.float64))
            case "number":
                del parameters[1]
            case "order":
                parameters.reverse()
            case "values":
                parameters[1].value[1, 2] = 7.0
            case "settings":
                settings = {"bucket_size_mb": 3}
    return parameters, settings


DIFFERENCES = {
    "name": r"rank 0 has b float32\[2, 3\].*, rank 1 has c float32\[2, 3\]",
    "shape": r"rank 0 has b float32\[2, 3\].*, rank 1 has b float32\[3, 2\]",
    "dtype": r"rank 0 has b float32.*, rank 1 has b float64",
    "number": r"rank 0 has b float32.*, rank 1 has nothing more",
    "order": r"rank 0 has a float32.*, rank 1 has b float32",
    "values": r"rank 0 has b .* checksum \w+, rank 1 has b .* checksum \w+",
    "settings": r"rank 0 has ZeROConfig.*bucket_size_mb=25.*, rank 1 has ZeROConfig.*bucket_size_mb=3",
}


@pytest.mark.parametrize("kind", DIFFERENCES)
async def test_replicas_that_differ_are_refused_on_all_before_the_first_step(kind: str) -> None:
    async with local_world(3) as nodes, asyncio.timeout(PATIENCE):
        made = []
        for node in nodes:
            parameters, settings = changed(kind, node.rank)
            made.append(make_engine(parameters, node.world, stage=ZeROStage.STAGE3, **settings))
        results = await outcomes(made, ZeroEngine.prepare)
        for result in results:
            assert isinstance(result, UsageError), result
            with pytest.raises(UsageError, match=DIFFERENCES[kind]):
                raise result
        assert not any(parameter.is_released for engine in made for parameter in engine.parameters)
        with pytest.raises(UsageError, match=r"await prepare\(\) on all ranks first"):
            await made[0].reduce()


async def test_calls_out_of_order_are_refused() -> None:
    async with engines(2, ZeROStage.STAGE1) as made:
        first = made[0]
        with pytest.raises(UsageError, match="the gradients of this step are not reduced"):
            await first.step(0.1)
        with pytest.raises(UsageError, match="name: expected a parameter of this engine, got 'other'"):
            first.ready("other")
        for engine in made:
            engine.ready("head")
        with pytest.raises(UsageError, match="parameter head: its gradient was reported already"):
            first.ready("head")
        with pytest.raises(UsageError, match="zero_grad: gradients are on their way"):
            first.zero_grad()
        await on_all(made, ZeroEngine.reduce)
        with pytest.raises(UsageError, match="must not be averaged twice"):
            await first.reduce()
        with pytest.raises(UsageError, match="must not be averaged twice"):
            first.ready("head")
        with pytest.raises(UsageError, match="factor: expected a finite number, got inf"):
            first.scale(math.inf)
        await on_all(made, lambda engine: engine.step(0.1))
        with pytest.raises(UsageError, match="the gradients of the last step are used up"):
            await first.reduce()


async def test_settings_that_do_not_go_with_the_model_are_refused() -> None:
    async with local_world(2) as nodes:
        with pytest.raises(UsageError, match=r"algorithm: expected one of .*halving.*, got 'fastest'"):
            make_engine(draw_parameters(), nodes[0].world, algorithm="fastest")
        with pytest.raises(
            UsageError, match="gradient_compression: expected float32 or half parameters, got embedding"
        ):
            make_engine(draw_parameters(dtype="float64"), nodes[0].world, gradient_compression=True)
        with pytest.raises(UsageError, match="parameters: expected at least one"):
            ZeroEngine([], SGD(), ZeROConfig(), nodes[0].world)


async def compute_and_reduce(replica: Replica) -> None:
    await replica.worker.run(replica.compute, replica.draw_inputs(0))
    await replica.engine.reduce()


async def training(replica: Replica) -> None:
    """A step as a training loop takes it, which notifies the others when it fails."""
    try:
        await compute_and_reduce(replica)
    except BaseException:
        await replica.engine.abandon("the step failed")
        raise


async def test_a_rank_that_is_cancelled_while_its_thread_waits_ends_everywhere() -> None:
    """Rank 0 waits in its first layer for the values that rank 1, which does not compute, owns."""
    async with replicas(2) as made:
        running = asyncio.ensure_future(training(made[0]))
        while not made[0].engine._recovery.gatherer._gathering:  # type: ignore[union-attr]  # noqa: ASYNC110, SLF001  # no event tells that a rank's thread has begun to wait for values
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(PeerError):
            await training(made[1])
        for replica in made:
            replica.engine._bridge.resume()  # type: ignore[union-attr]  # noqa: SLF001  # the bridge, which a cancellation has stopped, was handed to the engine, which does not show it
        await on_all([replica.engine for replica in made], ZeroEngine.resume)
        assert made[0].engine.memory_stats().gathered == 0
        await on_all(made, lambda replica: replica.run(1))


async def test_a_rank_that_fails_in_a_layer_ends_the_pass_of_the_others() -> None:
    def fail(x: Array) -> tuple[Array, Any]:
        raise ZeroDivisionError

    async with replicas(2, prefetch_depth=1) as made:
        made[1].model.stages[2].inner.forward = fail  # type: ignore[attr-defined]
        results = await outcomes(made, training)
        assert isinstance(results[1], ZeroDivisionError)
        assert isinstance(results[0], AsyncparError)
        assert all(parameter.is_released for replica in made for parameter in replica.engine.parameters)
        del made[1].model.stages[2].inner.forward  # type: ignore[attr-defined]
        await on_all([replica.engine for replica in made], ZeroEngine.resume)
        await on_all(made, lambda replica: replica.run(1))
        assert made[0].engine.memory_stats().gathered == 0
