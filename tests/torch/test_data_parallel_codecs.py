"""Codecs with error feedback under ``asyncpar.torch.DistributedDataParallel``."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.names import Name
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.torch import DistributedDataParallel, GradientHook, gradient_hook
from tests.torch.hooked import (
    SIZES,
    SMALL_BUCKETS_MB,
    Linears,
    assert_same_everywhere,
    flat,
    flat_gradients,
    hooked,
    make_inputs,
    make_mlp,
    mean_over_ranks,
    train,
)
from tests.torch.worlds import on_ranks

CODECS = ("bf16", "int8", "int4", "topk:0.1", "topk:0.1+int8", "powersgd:2")


def compressed(module: nn.Module, **settings: Any) -> tuple[DistributedDataParallel, GradientHook]:
    """Return ``module`` in small buckets, all of them compressed, and what does it."""
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
    state = GradientHook(**{"minimum_bytes": 0, "parameters": module.named_parameters(), **settings})
    model.register_comm_hook(state, gradient_hook)
    return model, state


@on_ranks(2)
@pytest.mark.parametrize("codec", CODECS)
def test_gradients_of_static_buckets_are_those_of_the_hook_under_torchs_class(codec: str) -> None:
    """One bucket of one parameter: both classes have the same buckets then, from the first step on."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(60, 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    ours, theirs = One(), One()
    (mine, _), (other, _) = compressed(ours, codec=codec), hooked(theirs, codec=codec)
    for step in range(4):
        x = torch.randn(60, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model, module in ((mine, ours), (other, theirs)):
            module.zero_grad()
            model(x).backward()
        torch.testing.assert_close(flat_gradients(ours), flat_gradients(theirs), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_end_with_the_same_bits_that_are_near_the_mean(codec: str) -> None:
    model, state = compressed(make_mlp(), codec=codec)
    exact = DistributedDataParallel(make_mlp())
    losses, wanted = train(model, steps=12), train(exact, steps=12)
    assert_same_everywhere(flat(model))
    assert losses[-1] == pytest.approx(wanted[-1], rel=0.2)
    statistics = state.statistics()
    assert statistics.steps == 12
    assert statistics.buckets_compressed == statistics.buckets > 12


@on_ranks(4)
@pytest.mark.parametrize("hosts", [True, [[0, 1], [2, 3]]])
@pytest.mark.parametrize("codec", ["int8", "topk:0.25"])
def test_four_ranks_end_with_the_same_bits(codec: str, hosts: Any) -> None:
    model, state = compressed(make_mlp(), codec=codec, hosts=hosts)
    train(model, steps=3)
    assert_same_everywhere(flat(model))
    assert state.statistics().buckets_compressed > 0


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2"])
def test_nothing_is_lost_for_good_though_buckets_are_rebuilt_and_steps_fail(codec: str) -> None:
    """What was applied and what residuals hold add up to all gradients, after each step that has succeeded."""
    module = Linears()
    model, state = compressed(module, codec=codec)
    applied, wanted = torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
    for step in range(6):
        if step % 2:
            before = state.state_dict()["residuals"]
            fail_on_one_rank(model, module, where=step)
            for name, values in state.state_dict()["residuals"].items():
                torch.testing.assert_close(values, before[name], rtol=0, atol=0)
        module.zero_grad()
        model(make_inputs(dist.get_rank(), step)).backward()
        applied += flat_gradients(module).double()
        wanted += torch.cat(make_inputs(0, step) + make_inputs(1, step)).view(2, -1).double().mean(0)
        residuals = state.state_dict()["residuals"]
        owed = mean_over_ranks(torch.cat([residuals[name] for name, _ in module.named_parameters()]))
        torch.testing.assert_close(applied + owed, wanted, rtol=0, atol=1e-4)
    assert codec != "topk:0.1" or state.statistics().residual_norm > 1


def fail_on_one_rank(model: nn.Module, module: Linears, *, where: int) -> None:
    """Let the backward pass of rank 1 fail at a parameter, and check that both ranks get the reason."""
    handle: Any = None
    if dist.get_rank() == 1:
        handle = module.weights[where % len(SIZES)].register_hook(_raise)
    with pytest.raises((ArithmeticError, PeerCancelled), match=r"breaks|exception has ended") as caught:
        model(make_inputs(dist.get_rank(), 50)).backward()
    assert isinstance(caught.value, ArithmeticError) == (dist.get_rank() == 1)
    if handle is not None:
        handle.remove()


def _raise(_: object) -> None:
    raise ArithmeticError("it breaks")


@on_ranks(2)
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("settings", [{}, {"warm_up_steps": 1}, {"codec": "auto"}, {"minimum_bytes": 4000}])
def test_a_step_that_one_rank_cannot_begin_ends_on_all_and_the_next_ones_work(
    when: int, settings: dict[str, Any]
) -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_mlp()
            self.is_broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_broken and dist.get_rank() == 1:
                raise ArithmeticError("it breaks")
            return self.body(x)

    module = Breaking()
    model, _ = compressed(module, **settings)
    train(model, steps=when)
    for _ in range(2):
        module.is_broken = True
        with pytest.raises((ArithmeticError, PeerCancelled), match="it breaks"):
            train(model, steps=1)
        module.is_broken = False
        train(model, steps=2)
        assert_same_everywhere(flat(model))


@on_ranks(2)
def test_gradients_accumulate_and_parts_may_be_unused() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused = make_mlp(), nn.Linear(3, 3)
            self.other = nn.Linear(20, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + self.other(x) if dist.get_rank() else self.body(x)

    torch.manual_seed(1)
    module = Parts()
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB, find_unused_parameters=True, codec="int8")
    for step in range(3):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        assert_same_everywhere(flat_gradients(module))
        assert module.unused.weight.grad is None


@on_ranks(2)
def test_training_continues_from_the_saved_states_of_both_ranks_bit_for_bit() -> None:
    module = make_mlp()
    model, state = compressed(module, codec="topk:0.2")
    train(model, steps=4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "feedback": state.state_dict()}, file)
    train(model, steps=3, first=4)
    file.seek(0)
    saved = torch.load(file)
    again, fresh = compressed(make_mlp(1), codec="topk:0.2")
    again.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["feedback"])
    assert set(saved["feedback"]["residuals"]) == {name for name, _ in module.named_parameters()}
    train(again, steps=3, first=4)
    torch.testing.assert_close(flat(again), flat(model), rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_are_compressed_too(dtype: str) -> None:
    module = Linears(getattr(torch, dtype))
    model, state = compressed(module, codec="int8")
    for step in range(3):
        module.zero_grad()
        model(make_inputs(dist.get_rank(), step, getattr(torch, dtype))).backward()
    assert_same_everywhere(flat_gradients(module))
    wanted = torch.cat(make_inputs(0, 2) + make_inputs(1, 2)).view(2, -1).mean(0)
    torch.testing.assert_close(flat_gradients(module).float(), wanted, rtol=0, atol=0.1)
    assert state.statistics().buckets_compressed > 0


@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_leaves_error_feedback_alone() -> None:
    module = Linears()
    model, state = compressed(module, codec="int8")
    model(make_inputs(dist.get_rank(), 0)).backward()
    before = state.state_dict()["residuals"]
    module.zero_grad()
    inputs = make_inputs(dist.get_rank(), 1)
    if dist.get_rank():
        inputs[2][5] = float("inf")
    model(inputs).backward()
    assert module.weights[2].grad is not None
    assert module.weights[2].grad.isnan().all()
    for name, values in state.state_dict()["residuals"].items():
        torch.testing.assert_close(values, before[name], rtol=0, atol=0)


@on_ranks(2)
def test_without_a_codec_there_is_no_hook_and_with_one_it_shows() -> None:
    assert DistributedDataParallel(make_mlp()).gradient_hook is None
    model = DistributedDataParallel(make_mlp(), codec="int8")
    assert model.gradient_hook is not None
    train(model, steps=2)
    assert model.gradient_hook.statistics().buckets == 2
    assert all(name.startswith(("0.", "2.", "4.")) for name in model.gradient_hook.state_dict()["residuals"])


@on_ranks(2)
def test_wrong_hooks_and_codecs_are_refused_on_all_ranks() -> None:
    with pytest.raises((UsageError, PeerCancelled), match="nonsense"):
        DistributedDataParallel(make_mlp(), codec=Name("nonsense" if dist.get_rank() else "int8"))
    with pytest.raises(SettingsDiffer, match=r"int8.*int4"):
        DistributedDataParallel(make_mlp(), codec="int4" if dist.get_rank() else "int8")
    model = DistributedDataParallel(make_mlp())
    with pytest.raises(UsageError, match="expected a GradientHook, got NoneType"):
        model.register_comm_hook(None, gradient_hook)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(UsageError, match="process group of the model"):
        model.register_comm_hook(GradientHook(group=group), gradient_hook)
    state = GradientHook()
    model.register_comm_hook(state, gradient_hook)
    with pytest.raises(UsageError, match="one GradientHook for a model"):
        model.register_comm_hook(GradientHook(), gradient_hook)
    with pytest.raises(UsageError, match="of its own for each model"):
        DistributedDataParallel(make_mlp()).register_comm_hook(state, gradient_hook)
    train(model, steps=1)
