"""Parameters that backward passes do not reach, everywhere or here."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, PeerCancelled, UsageError
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.parallel import DDPConfig
from asyncpar.testing.world import local_world
from tests.parallel.replicas import (
    Branches,
    accumulate,
    assert_same,
    gradients_alone,
    gradients_of,
    make_batch,
    on_all,
    on_all_failing,
    open_replica,
    train_step,
)

FINDING = {
    "find": DDPConfig(find_unused_parameters=True),
    "find, overlapping": DDPConfig(find_unused_parameters=True, delay_all_reduce=False),
    "find, views": DDPConfig(find_unused_parameters=True, gradient_as_bucket_view=True),
    "static": DDPConfig(static_graph=True),
    "static, overlapping": DDPConfig(static_graph=True, delay_all_reduce=False),
    "static, views": DDPConfig(static_graph=True, gradient_as_bucket_view=True),
}
STOPPED = (PeerCancelled, NonFiniteValue)
"""What others get from a rank that gives up: it aborts its buckets, or spoils them where all others were first."""

NAMES = ("everywhere", "here", "nowhere")


def chosen_by(rank: int) -> tuple[str, ...]:
    return ("everywhere", "here") if rank == 0 else ("everywhere",)


def expected_gradients(size: int, seed: int) -> dict[str, Array]:
    """Return the means of all ranks, where who has not reached a parameter counts as zero."""
    model = Branches(*NAMES)
    total: dict[str, Array] = {name: np.zeros((4, 3)) for name in NAMES}
    for rank in range(size):
        model.chosen = chosen_by(rank)
        for name, gradient in gradients_alone(model, *make_batch(2, seed=seed + rank)).items():
            total[name] += gradient / size
    return total


@pytest.mark.parametrize("delays", [True, False])
async def test_other_ranks_name_who_left_out_which_parameter_and_the_remedy(delays: bool) -> None:
    async def main(node: Node) -> None:
        model = Branches(*NAMES)
        if node.rank == 1:
            model.chosen = chosen_by(1)
        async with open_replica(node, model, config=DDPConfig(delay_all_reduce=delays)) as ddp:
            await train_step(ddp, *make_batch(2))

    async with local_world(3) as nodes:
        errors = await on_all_failing(nodes, main)
    assert isinstance(errors[1], UsageError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerCancelled), repr(error)
        assert error.rank == 1
        assert "rank 1" in str(error)
        assert "none of here, nowhere; allow it with DDPConfig(find_unused_parameters=True)" in str(error)


@pytest.mark.parametrize("config", FINDING.values(), ids=FINDING.keys())
@pytest.mark.parametrize("size", [1, 3])
async def test_unused_here_counts_as_zero_and_unused_everywhere_is_left_alone(size: int, config: DDPConfig) -> None:
    async def main(node: Node) -> None:
        model = Branches(*NAMES)
        model.chosen = chosen_by(node.rank)
        async with open_replica(node, model, config=config) as ddp:
            for step in range(3):
                ddp.zero_grad()
                model.parameters()[2].grad[...] = 5.0 + node.rank  # what was there before
                await accumulate(ddp, *make_batch(2, seed=step + node.rank))
                expected = expected_gradients(size, step)
                expected["nowhere"] += 5.0 + node.rank
                assert_same(gradients_of(model), expected)
                assert ddp.unused_parameters() == ("nowhere",)

    async with local_world(size) as nodes:
        await on_all(nodes, main)


async def test_an_old_gradient_does_not_count_where_a_parameter_was_not_reached() -> None:
    async def main(node: Node) -> None:
        model = Branches("a", "b")
        async with open_replica(node, model, config=FINDING["find"]) as ddp:
            model.parameters()[1].grad[...] = 100.0
            model.chosen = ("a", "b") if node.rank == 0 else ("a",)
            if node.rank == 0:
                ddp.zero_grad()
            await accumulate(ddp, *make_batch(2))
            assert np.abs(model.parameters()[1].grad).max() < 10.0

    async with local_world(2) as nodes:
        await on_all(nodes, main)


async def test_what_an_earlier_micro_step_has_reached_is_used() -> None:
    async def main(node: Node) -> None:
        model = Branches("a", "b")
        async with open_replica(node, model, config=FINDING["find, overlapping"]) as ddp:
            with ddp.no_sync():
                await accumulate(ddp, *make_batch(2))
            model.chosen = ("a",)
            await accumulate(ddp, *make_batch(2))
            assert ddp.unused_parameters() == ()
            found = gradients_of(model)
        both = gradients_alone(Branches("a", "b"), *make_batch(2))
        alone = Branches("a", "b")
        alone.chosen = ("a",)
        one = gradients_alone(alone, *make_batch(2))
        assert_same(found, {"a": (both["a"] + one["a"]) / 2, "b": both["b"] / 2})

    async with local_world(2) as nodes:
        await on_all(nodes, main)


async def test_without_finding_an_unused_parameter_is_an_error_that_names_it_and_ends_the_step_everywhere() -> None:
    async def main(node: Node) -> None:
        model = Branches("a", "b", "c")
        model.chosen = ("a",) if node.rank == 1 else model.chosen
        async with open_replica(node, model) as ddp:
            await train_step(ddp, *make_batch(2))

    async with local_world(2) as nodes:
        other, culprit = await on_all_failing(nodes, main)
    assert isinstance(culprit, UsageError)
    assert "got none of b, c; allow it with DDPConfig(find_unused_parameters=True)" in str(culprit)
    assert isinstance(other, STOPPED)


@pytest.mark.parametrize(
    ("later", "message"),
    [(("a",), "left out b"), (("a", "b", "c"), "reached c"), (("a", "c"), "reached c and left out b")],
)
async def test_a_static_graph_that_changes_is_an_error(later: tuple[str, ...], message: str) -> None:
    async def main(node: Node) -> None:
        model = Branches("a", "b", "c")
        model.chosen = ("a", "b")
        async with open_replica(node, model, config=FINDING["static"]) as ddp:
            await train_step(ddp, *make_batch(2))
            assert ddp.unused_parameters() == ("c",)
            if node.rank == 0:
                model.chosen = later
            await train_step(ddp, *make_batch(2))

    async with local_world(2) as nodes:
        culprit, other = await on_all_failing(nodes, main)
    assert isinstance(culprit, UsageError)
    assert str(culprit).endswith(message)
    assert isinstance(other, STOPPED)


async def test_a_static_graph_asks_only_once_and_does_not_send_what_is_unused() -> None:
    async def main(node: Node) -> list[int]:
        model = Branches("a", "b")
        model.chosen = ("a",)
        sent = []
        async with open_replica(node, model, config=FINDING["static"]) as ddp:
            for _ in range(4):
                before = node.world.traffic.payload_bytes
                await train_step(ddp, *make_batch(2))
                sent.append(node.world.traffic.payload_bytes - before)
        return sent

    async with local_world(2) as nodes:
        for first, second, third, fourth in await on_all(nodes, main):
            assert first - second >= 4 * 3 * 8  # the gradient of b
            assert second >= third  # gradients are other ones than in the first step, which ranks compare
            assert third == fourth


@pytest.mark.parametrize(("names", "message"), [(("a", "x"), "got 'x'"), (("a", "a"), "'a' was reported twice")])
async def test_a_model_that_reports_wrong_names_is_an_error(names: tuple[str, ...], message: str) -> None:
    class Wrong(Branches):
        def backward(self, saved: object, dy: Array, on_gradient: object = None) -> Array | None:
            assert callable(on_gradient)
            for name in names:
                on_gradient(name)
            return None

    async with local_world(1) as (node,), open_replica(node, Wrong("a")) as ddp:
        with pytest.raises(UsageError, match=message):
            await train_step(ddp, *make_batch(2))
