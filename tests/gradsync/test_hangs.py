"""Ranks that are cancelled at any moment, fail, die or never come: nobody waits for them, and the next step works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.errors import AsyncparError, PeerError, PeerLost, PeerTimeout, UsageError
from asyncpar.gradsync import NonFinitePolicy
from asyncpar.testing.loop import run_virtual
from tests.gradsync.worlds import (
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all_failing,
    parallel_world,
)
from tests.products import in_turn
from tests.soak import chosen

SHAPES = [(2, 1, 1), (3, 1, 1), (2, 2, 2), (1, 1, 4)]


async def take_step(rank: Rank, *, in_forward_order: bool = False) -> None:
    """Report gradients one by one; forwards, which is not the order that was planned."""
    async with rank.synchronizer.step(rank.model.parameters()) as step:
        names = [parameter.name for parameter in rank.model.parameters()]
        for name in names if in_forward_order else reversed(names):
            step.ready(name)
            await asyncio.sleep(0)


async def cancel_after(ranks: Sequence[Rank], culprit: int, turns: int) -> list[BaseException | None]:
    """Take a step on all ranks, and cancel that of ``culprit`` after some turns of the loop; return who raised what."""
    before = [rank.model.gradients() for rank in ranks]
    tasks = [asyncio.ensure_future(take_step(rank, in_forward_order=True)) for rank in ranks]
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[culprit].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for rank, result, gradients in zip(ranks, results, before, strict=True):
        if result is not None:
            assert isinstance(result, (asyncio.CancelledError, AsyncparError)), repr(result)
            for name, gradient in rank.model.gradients().items():
                np.testing.assert_array_equal(gradient, gradients[name])
    return list(results)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "codec"), [(*shape, codec) for shape, codec in in_turn(SHAPES, ["none", "int8", "powersgd:2"])]
)
async def test_a_rank_may_be_cancelled_at_any_moment(dp: int, tp: int, pp: int, codec: str) -> None:
    """A rank that raised holds the gradients it had, no rank hangs, and the next step works.

    A rank that is cancelled while it learns that all are through may be the only one whose step failed.
    """
    policies = list(NonFinitePolicy) if tp == pp == 1 else [NonFinitePolicy.ABORT, NonFinitePolicy.SKIP_STEP]
    if dp * tp * pp > 3:
        policies = chosen(policies[-1:] if codec == "int8" else policies[:1], soak=policies)
    for place, policy in enumerate(policies):
        async with parallel_world(dp, tp, pp, compression=compressed(codec), when_not_finite=policy) as ranks:
            await draw_and_synchronize(ranks)
            number, has_split = 0, False
            for turns in range(1 + 10 * place, 120, chosen(50, soak=11)):
                number += 2
                for rank in ranks:
                    rank.draw(number)
                failed = [result is not None for result in await cancel_after(ranks, number // 2 % len(ranks), turns)]
                is_split = any(failed) and not all(failed)
                has_split |= is_split
                await settle(ranks, number + 1, may_disagree=is_split)
                if codec == "none":
                    for rank in ranks:
                        assert_right(rank, step=number + 1)
                elif not has_split:  # else some residuals are a step older than others
                    assert_copies_equal(ranks)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
async def test_a_rank_may_be_cancelled_where_hosts_reduce_first(codec: str) -> None:
    parallelism = {"comm_strategy": CommunicationStrategy.HIERARCHICAL_ALL_REDUCE}
    hosts = ["a", "b", "b", "a", "c"]
    async with parallel_world(5, hosts=hosts, parallelism=parallelism, compression=compressed(codec)) as ranks:
        await draw_and_synchronize(ranks)
        for number in range(1, 20, chosen(6, soak=1)):
            for rank in ranks:
                rank.draw(number)
            failed = [result is not None for result in await cancel_after(ranks, number % 5, 1 + 5 * number)]
            is_split = any(failed) and not all(failed)
            await settle(ranks, 100 + number, may_disagree=is_split)
            if is_split:
                return
            assert_copies_equal(ranks)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "hosts", "culprit"),
    [(*layout, culprit) for layout, culprit in in_turn([(3, 1, 1, "aab"), (2, 1, 1, "ab"), (2, 2, 1, "aabb")], [0, 1])],
)
async def test_a_rank_may_be_cancelled_while_auto_is_measured(
    dp: int, tp: int, pp: int, hosts: str, culprit: int
) -> None:
    for turns in chosen((1, 41, 540), soak=(*range(1, 60, 6), *range(60, 1000, 120))):
        async with parallel_world(dp, tp, pp, hosts=list(hosts), compression=compressed("auto")) as ranks:
            failed = [result is not None for result in await cancel_after(ranks, culprit, turns)]
            await settle(ranks, 1, may_disagree=any(failed) and not all(failed))
            assert_copies_equal(ranks)


@pytest.mark.parametrize(("dp", "tp", "pp"), SHAPES)
async def test_one_rank_may_refuse_a_step_in_which_another_is_cancelled(dp: int, tp: int, pp: int) -> None:
    """A rank that is cancelled while it learns of the refusal does not know that the others begin anew."""
    async with parallel_world(dp, tp, pp) as ranks:
        await draw_and_synchronize(ranks)
        for number, turns in enumerate(range(1, 40, chosen(13, soak=3))):
            tasks = [asyncio.ensure_future(refuse_or_step(rank, refuses=rank.node.rank == 1)) for rank in ranks]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[0].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, (asyncio.CancelledError, AsyncparError)) for result in results), results
            await settle(ranks, number, may_disagree=any(isinstance(result, SettingsDiffer) for result in results))
            for rank in ranks:
                assert_right(rank, step=number)


async def refuse_or_step(rank: Rank, *, refuses: bool) -> None:
    """Take a step, or try to with two parameters of one name."""
    parameters = list(rank.model.parameters())
    async with rank.synchronizer.step(parameters * 2 if refuses else parameters):
        await asyncio.sleep(0)


async def settle(ranks: Sequence[Rank], number: int, *, may_disagree: bool) -> None:
    """Take a step; where only some ranks saw the last one fail, they may first have to find out that they differ."""
    try:
        await draw_and_synchronize(ranks, number)
    except* UsageError:
        assert may_disagree
        await draw_and_synchronize(ranks, number)


@pytest.mark.parametrize(("dp", "tp", "pp", "place"), [(*shape, place) for shape, place in in_turn(SHAPES, [0, -1])])
async def test_a_block_that_raises_fails_the_step_on_all_ranks(dp: int, tp: int, pp: int, place: int) -> None:
    async with parallel_world(dp, tp, pp) as ranks:
        culprit = range(len(ranks))[place]

        async def main(rank: Rank) -> None:
            async with rank.synchronizer.step(rank.model.parameters()) as step:
                if rank.node.rank == culprit:
                    step.ready(next(iter(rank.model.parameters())).name)
                    raise ZeroDivisionError

        for _ in range(chosen(2, soak=3)):
            before = [rank.model.gradients() for rank in ranks]
            errors = await on_all_failing(ranks, main)
            for rank, error, gradients in zip(ranks, errors, before, strict=True):
                expected = ZeroDivisionError if rank.node.rank == culprit else PeerError
                assert isinstance(error, expected), repr(error)
                for name, gradient in rank.model.gradients().items():
                    np.testing.assert_array_equal(gradient, gradients[name])
        await draw_and_synchronize(ranks, 1)
        for rank in ranks:
            assert_right(rank, step=1)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "turns", "codec"),
    [(*shape, *more) for shape, *more in in_turn(SHAPES, [0, 5, 25], ["none", "int8", "topk:0.1+int8"])],
)
async def test_a_rank_that_dies_in_a_step_ends_it_everywhere(dp: int, tp: int, pp: int, turns: int, codec: str) -> None:
    async with parallel_world(dp, tp, pp, compression=compressed(codec)) as ranks:
        await draw_and_synchronize(ranks)
        for rank in ranks:
            rank.draw(1)
        before = [rank.model.gradients() for rank in ranks]
        tasks = [asyncio.ensure_future(hold_or_step(rank, holds=rank.node.rank == 1)) for rank in ranks]
        for _ in range(turns):
            await asyncio.sleep(0)
        await ranks[1].node.stop()
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for rank, result, gradients in zip(ranks, results, before, strict=True):
            if rank.node.rank != 1:
                assert isinstance(result, PeerError), repr(result)
                for name, gradient in rank.model.gradients().items():
                    np.testing.assert_array_equal(gradient, gradients[name])
        assert any(isinstance(result, PeerLost) and result.rank == 1 for result in results)


async def hold_or_step(rank: Rank, *, holds: bool) -> None:
    async with rank.synchronizer.step(rank.model.parameters()):
        if holds:
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("absent", [0, 3])
def test_a_rank_that_never_comes_is_named_when_time_is_up(absent: int) -> None:
    async def main() -> list[BaseException]:
        async with parallel_world(2, 2, 1, patience=1e6) as ranks:
            coming = [rank for rank in ranks if rank.node.rank != absent]
            return await on_all_failing(coming, lambda rank: rank.synchronize())

    errors = run_virtual(main())
    assert all(isinstance(error, PeerError) for error in errors)
    assert any(isinstance(error, PeerTimeout) for error in errors)
    assert all(f"rank {absent}" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("milliseconds", "seconds", "dp", "tp", "pp"),
    [(*time, *shape) for time, shape in in_turn([(2_000, 2.0), (None, 300.0)], [(2, 1, 1), (2, 2, 1)])],
)
def test_the_time_is_that_of_the_configuration_or_else_of_the_communicator(
    dp: int, tp: int, pp: int, milliseconds: int | None, seconds: float
) -> None:
    async def main() -> tuple[list[BaseException], float]:
        parallelism = {} if milliseconds is None else {"communication_timeout_ms": milliseconds}
        async with parallel_world(dp, tp, pp, patience=1e6, parallelism=parallelism) as ranks:
            begun = asyncio.get_running_loop().time()
            errors = await on_all_failing(ranks[:-1], lambda rank: rank.synchronize())
            assert all(rank.node.world.timeout == 300.0 for rank in ranks)
            return errors, asyncio.get_running_loop().time() - begun

    errors, waited = run_virtual(main())
    assert all(isinstance(error, PeerError) for error in errors)
    assert any(isinstance(error, PeerTimeout) for error in errors)
    assert seconds <= waited < seconds + 10.0


@pytest.mark.parametrize(("dp", "tp", "pp"), SHAPES)
async def test_an_observed_order_does_not_stand_in_the_way_after_a_failure(dp: int, tp: int, pp: int) -> None:
    """Buckets are rebuilt in the order in which gradients became final; a failure on one rank must not split plans."""
    async with parallel_world(dp, tp, pp) as ranks:
        for number in (1, 2):
            for rank in ranks:
                rank.draw(number)
            await asyncio.gather(*(take_step(rank, in_forward_order=True) for rank in ranks))
        for culprit in range(0, len(ranks), chosen(3, soak=1)):
            held = ranks[culprit].model
            broken = next(iter(held.parameters()))
            tensors = [broken, *held.parameters()]  # one name twice

            async def main(rank: Rank, culprit: int = culprit, tensors: Sequence[object] = tensors) -> None:
                parameters = tensors if rank.node.rank == culprit else rank.model.parameters()
                async with rank.synchronizer.step(parameters):  # type: ignore[arg-type]
                    pass

            await on_all_failing(ranks, main)
            for number in (3, 4):
                for rank in ranks:
                    rank.draw(number)
                await asyncio.gather(*(take_step(rank, in_forward_order=True) for rank in ranks))
                for rank in ranks:
                    assert_right(rank, step=number)
