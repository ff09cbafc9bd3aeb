"""Random numbers of a module of torch, also when a forward pass is done again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from asyncpar.errors import UsageError
from asyncpar.hybrid.step import StepRandomness
from asyncpar.nn import Sequential
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import Recomputed
from asyncpar.torch.stage.stage import ModuleStage, alone

pytestmark = pytest.mark.usefixtures("one_thread")

X = np.ones((40, 50), np.float32)


def draw(stage: ModuleStage) -> Array:
    return stage.forward(X)[0].copy()


def make(name: str = "it", **options: Any) -> ModuleStage:
    return ModuleStage(name, torch.nn.Dropout(0.5), **options)


def test_what_is_drawn_follows_from_seed_name_and_number_of_the_pass() -> None:
    stage, twin = make(), make()
    first, second = draw(stage), draw(stage)
    torch.manual_seed(3)
    np.testing.assert_array_equal(draw(twin), first)
    torch.rand(5)
    np.testing.assert_array_equal(draw(twin), second)
    assert np.any(first != second)
    assert np.any(draw(make("other")) != first)
    assert np.any(draw(make(seed=1)) != first)


def test_what_the_program_draws_is_the_same_with_and_without_a_pass() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    draw(make())
    assert torch.equal(torch.rand(4), want)


def test_in_evaluation_nothing_is_drawn() -> None:
    stage = make()
    stage.module.eval()
    np.testing.assert_array_equal(draw(stage), X)
    stage.module.train()
    np.testing.assert_array_equal(draw(stage), draw(make()))


def test_our_randomness_by_step_reaches_modules() -> None:
    stage = make()
    by_step = StepRandomness([stage])
    by_step.begin(7)
    wanted = draw(stage)
    draw(stage)
    again = make()
    StepRandomness([again]).begin(7)
    np.testing.assert_array_equal(draw(again), wanted)
    by_step.begin(7)
    np.testing.assert_array_equal(draw(stage), wanted)


def test_a_module_that_draws_needs_a_seed() -> None:
    with pytest.raises(
        UsageError, match="seed: expected a number for it, because its 0 draws random numbers, got None"
    ):
        ModuleStage("it", torch.nn.Sequential(torch.nn.Dropout(0.5)), seed=None)
    with pytest.raises(UsageError, match="because its module draws random numbers"):
        ModuleStage("it", torch.nn.MultiheadAttention(4, 2, dropout=0.1), seed=None)
    stage = ModuleStage("it", torch.nn.Dropout(0.0), seed=None)
    assert stage.generators() == ()
    np.testing.assert_array_equal(draw(stage), X)


def test_passes_of_several_threads_draw_what_each_draws_alone() -> None:
    wanted = {name: _all_of(make(name)) for name in ("a", "b")}
    found: dict[str, list[Array]] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: _all_of(make(name))})) for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, draws in wanted.items():
        np.testing.assert_array_equal(np.stack(found[name]), np.stack(draws))


def _all_of(stage: ModuleStage) -> list[Array]:
    return [draw(stage) for _ in range(20)]


def test_modules_that_wait_for_each_other_are_told_so_instead_of_waiting_for_ever() -> None:
    refused: list[BaseException] = []

    def enter() -> None:
        try:
            with alone("other", patience=0.01):
                pass
        except UsageError as error:
            refused.append(error)

    with alone("it"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "other: another module of this process has used torch's random numbers for 0.01 s" in str(refused[0])
    enter()
    assert len(refused) == 1


# -- done again --------------------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """A layer that drops, and one that averages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(50, 50), torch.nn.Linear(50, 3)
        self.norm = torch.nn.BatchNorm1d(50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.nn.functional.dropout(self.norm(self.first(x)), 0.4, self.training))
        return y


class Checkpointed(Layers):
    """Computes its layers again by torch's own means."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def pass_through(wrap: Any, kind: Any, *, is_split: bool) -> tuple[list[Any], torch.nn.Module]:
    """Return all numbers of two micro-batches that are in flight at once, and the module."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = kind()
    stage = Sequential([wrap(ModuleStage("it", module))])
    rng = np.random.default_rng(1)
    found: list[Any] = []
    passes = [stage.forward(rng.normal(size=X.shape).astype(np.float32)) for _ in range(2)]
    for y, saved in passes:
        found.append(y.copy())
        if is_split:
            dx, deferred = stage.backward_input(saved, y)
            stage.backward_weight(deferred)
        else:
            dx = stage.backward(saved, y)
        found.append(dx)
    found += [one.grad.copy() for one in stage.parameters()]
    found += [stage.forward(X)[0]]
    return found, module


@pytest.mark.parametrize("is_split", [False, True])
def test_a_recomputed_module_gives_the_same_bits_and_averages_once(is_split: bool) -> None:
    found, module = pass_through(Recomputed, Layers, is_split=is_split)
    wanted, other = pass_through(lambda stage: stage, Layers, is_split=is_split)
    for one, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, want)
    for mine, theirs in zip(module.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_module_that_computes_again_by_itself_draws_the_same(is_split: bool) -> None:
    found, _ = pass_through(lambda stage: stage, Checkpointed, is_split=is_split)
    wanted, _ = pass_through(lambda stage: stage, Layers, is_split=is_split)
    for one, want in zip(found[:-1], wanted[:-1], strict=True):
        np.testing.assert_array_equal(one, want)
