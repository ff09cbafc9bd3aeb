"""Communication hooks of torch, and of programs, under ``asyncpar.torch.DistributedDataParallel``, to torch's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, _apply_optimizer_in_backward
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchReplicas

from asyncpar.errors import UsageError
from asyncpar.torch import DistributedDataParallel, GradientHook, gradient_hook
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.test_data_parallel_features import Parts, Words, make, state, step, values
from tests.torch.worlds import on_ranks

Wrap = Callable[..., Any]

SMALL_BUCKETS_MB = 0.0005


def _plain(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``hook`` without annotations, which torch's class compares with types, not with their names."""
    hook.__annotations__.clear()
    return hook


@_plain
def bf16(group: object, bucket: Any) -> Future[torch.Tensor]:
    """Do what ``bf16_compress_hook`` does, which torch's class refuses by its name on CPUs."""
    return default_hooks._compress_hook(torch.bfloat16, group, bucket)  # noqa: SLF001


def rank_one(**settings: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, **settings)


def local(*, reduces: bool) -> Callable[[], post_localSGD_hook.PostLocalSGDState]:
    return lambda: post_localSGD_hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=reduces)


@_plain
def norms(_: object, bucket: Any) -> Future[torch.Tensor]:
    """Clip the gradient of each parameter, then average; in a new tensor of another dtype."""
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape
        gradient.mul_(0.5 + bucket.index() + 2 * bucket.is_last())
    work = dist.all_reduce(bucket.buffer().double(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


HOOKS: dict[str, tuple[Callable[[], object], Callable[..., Any]]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "bf16": (lambda: None, bf16),
    "fp16 around allreduce": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "noop": (lambda: None, debugging_hooks.noop_hook),
    "powerSGD": (rank_one, powerSGD_hook.powerSGD_hook),
    "powerSGD, stacked": (partial(rank_one, batch_tensors_with_same_shape=True), powerSGD_hook.powerSGD_hook),
    "powerSGD, cold": (partial(rank_one, warm_start=False), powerSGD_hook.powerSGD_hook),
    "powerSGD in fp16": (rank_one, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "local SGD without reduction": (local(reduces=False), post_localSGD_hook.post_localSGD_hook),
    "of a program": (lambda: None, norms),
}


def _train(wrap: Wrap, name: str, *, steps: int = 5, **settings: Any) -> list[torch.Tensor]:
    """Return the gradients of all steps and the parameters, in one bucket, so that nothing is out of order."""
    make_state, hook = HOOKS[name]
    model = wrap(make(), **settings)
    model.register_comm_hook(make_state(), hook)
    found = []
    for number in range(steps):
        step(model, number)
        found += values(each.grad for each in model.parameters())
    return [*found, *state(model)]


@on_ranks(2)
@pytest.mark.parametrize("name", list(HOOKS))
def test_gradients_are_those_of_torch_with_the_same_hook_bit_for_bit(name: str) -> None:
    ours, theirs = (_train(wrap, name) for wrap in (DistributedDataParallel, TorchReplicas))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@on_ranks(4)
@pytest.mark.parametrize("name", ["allreduce", "powerSGD", "of a program"])
def test_many_buckets_take_their_turns_on_all_ranks(name: str) -> None:
    """Hooks begin operations in callbacks, at times of their own."""
    settings: dict[str, Any] = {"bucket_cap_mb": SMALL_BUCKETS_MB}
    ours = _train(DistributedDataParallel, name, **settings)
    assert_same_everywhere([each.double() for each in ours[: 5 * 13]])
    if name == "of a program":  # which does something else for each bucket, and buckets differ
        return
    torch.testing.assert_close(ours, _train(DistributedDataParallel, name, **settings), rtol=0, atol=0)


@on_ranks(4)
def test_local_sgd_averages_in_groups_and_then_parameters() -> None:
    def train(wrap: Wrap) -> list[torch.Tensor]:
        model = wrap(make())
        group = dist.new_subgroups(2)[0]
        state_of_hook = post_localSGD_hook.PostLocalSGDState(None, group, 2)
        model.register_comm_hook(state_of_hook, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=3, warmup_steps=2)
        )
        found = []
        for number in range(6):
            step(model, number, optimizer)
            found += state(model)
        return found

    torch.testing.assert_close(train(DistributedDataParallel), train(TorchReplicas), rtol=0, atol=0)


@on_ranks(2)
def test_the_types_of_hooks_that_torch_knows_are_taken() -> None:
    def train(wrap: Wrap, register: Callable[[Any], object]) -> list[torch.Tensor]:
        model = wrap(make())
        register(model)
        for number in range(3):
            step(model, number)
        return state(model)

    kinds = ddp_comm_hooks.DDPCommHookType
    registers: list[Callable[[Any], object]] = [
        *(
            lambda model, kind=kind: model._register_builtin_comm_hook(kind)  # noqa: SLF001
            for kind in (
                dist.BuiltinCommHookType.ALLREDUCE,
                dist.BuiltinCommHookType.FP16_COMPRESS,
            )
        ),
        *(
            lambda model, kind=kind: ddp_comm_hooks.register_ddp_comm_hook(kind, model, dist.group.WORLD)
            for kind in kinds
            if kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS, kinds.POWER_SGD, kinds.POWER_SGD_RANK2, kinds.NOOP)
        ),
        lambda model: model._register_fused_optim(torch.optim.SGD, 0.05),  # noqa: SLF001
        lambda model: model._register_fused_optim(  # noqa: SLF001
            torch.optim.Adam, 0.05, optim_params=[*model.module.first.parameters()]
        ),
    ]
    for register in registers:
        ours, theirs = (train(wrap, register) for wrap in (DistributedDataParallel, TorchReplicas))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ddp_comm_hooks.register_ddp_comm_hook(kinds.BF16_COMPRESS, model := DistributedDataParallel(make()))
    step(model)


@on_ranks(2)
@pytest.mark.parametrize("settings", [{"find_unused_parameters": True}, {"static_graph": True}, {"no_sync": True}])
def test_hooks_go_with_what_else_there_is(settings: dict[str, Any]) -> None:
    """torch's class begins the exchange of what is unused beside the operations of the hook, in any order."""
    accumulates = settings.pop("no_sync", False)

    def train(wrap: Wrap) -> list[torch.Tensor]:
        model = wrap(make(), **(settings if wrap is DistributedDataParallel else {}))
        model.register_comm_hook(rank_one(), powerSGD_hook.powerSGD_hook)
        found = []
        for number in range(5):
            if accumulates:
                with model.no_sync():
                    step(model, 10 + number)
            step(model, number)
            found += values(each.grad for each in model.parameters())
        return found

    torch.testing.assert_close(train(DistributedDataParallel), train(TorchReplicas), rtol=0, atol=0)


@on_ranks(2)
def test_ranks_that_are_through_pass_zeros_to_hooks() -> None:
    def train(wrap: Wrap) -> list[torch.Tensor]:
        model = wrap(make())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        with model.join():
            for number in range(2 + 2 * dist.get_rank()):
                step(model, number)
        return state(model)

    torch.testing.assert_close(train(DistributedDataParallel), train(TorchReplicas), rtol=0, atol=0)


class Breaking(nn.Module):
    """A network that breaks on rank 1 in one of its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.number = Block(), Block(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        y = self.first(x)
        if self.number == 3 and dist.get_rank() == 1:
            y.register_hook(_break)
        return self.second(y)


def _break(_: object) -> None:
    raise ArithmeticError("it breaks")


@on_ranks(2)
@pytest.mark.parametrize("name", ["allreduce", "powerSGD", "noop"])
@pytest.mark.parametrize("cap", [SMALL_BUCKETS_MB, 25])
def test_a_step_that_breaks_on_one_rank_ends_on_all_and_the_next_one_works(name: str, cap: float) -> None:
    make_state, hook = HOOKS[name]
    torch.manual_seed(3)
    model = DistributedDataParallel(Breaking(), bucket_cap_mb=cap)
    model.register_comm_hook(make_state(), hook)
    for number in range(2):
        step(model, number)
    if name != "noop" or dist.get_rank() == 1:  # a hook that exchanges nothing has nothing that could end
        with pytest.raises(ArithmeticError if dist.get_rank() == 1 else RuntimeError, match=r"breaks|exception"):
            step(model, 2)
    else:
        step(model, 2)
    for number in range(3, 6):
        step(model, number)
        if name != "noop":
            assert_same_everywhere([each.grad for each in model.parameters() if each.grad is not None])


def _on_one_rank(_: object, bucket: Any) -> Future[torch.Tensor]:
    if dist.get_rank() == 1:
        raise ArithmeticError("the hook breaks")
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def _in_a_callback(_: object, bucket: Any) -> Future[torch.Tensor]:
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(_divide)


def _divide(done: Future[torch.Tensor]) -> torch.Tensor:
    raise ArithmeticError("the callback breaks")


@on_ranks(2)
def test_what_a_hook_raises_is_raised_by_backward() -> None:
    model = DistributedDataParallel(make())
    model.register_comm_hook(None, _on_one_rank)
    with pytest.raises((ArithmeticError, RuntimeError), match="the hook breaks"):
        step(model)
    model = DistributedDataParallel(make())
    model.register_comm_hook(None, _in_a_callback)
    with pytest.raises(Exception, match="the callback breaks"):
        step(model)


@on_ranks(2)
def test_a_hook_of_a_program_may_call_that_of_asyncpar() -> None:
    def train(model: DistributedDataParallel) -> list[torch.Tensor]:
        for number in range(3):
            step(model, number)
        return state(model)

    hook = GradientHook(codec="int8")
    model = DistributedDataParallel(make())
    model.register_comm_hook(hook, lambda state, bucket: gradient_hook(state, bucket).then(lambda done: done.value()))
    ours = train(model)
    torch.testing.assert_close(ours, train(DistributedDataParallel(make(), codec="int8")), rtol=0, atol=0)


@on_ranks(2)
def test_copies_have_no_hook_and_other_parameters_keep_it() -> None:
    model = DistributedDataParallel(make())
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    other = copy.deepcopy(model)
    step(other)
    assert_same_everywhere([each.grad for each in other.parameters() if each.grad is not None])
    step(model)
    model.module.first.requires_grad_(False)
    step(model, 1)
    gathered = [torch.empty(WIDTH) for _ in range(2)]
    dist.all_gather(gathered, model.module.scale.grad)
    assert not torch.equal(*gathered)


@on_ranks(2)
def test_what_is_no_hook_is_refused() -> None:
    model = DistributedDataParallel(make())
    torch_only = (quantization_hooks.quantization_pertensor_hook, powerSGD_hook.batched_powerSGD_hook)
    for wrong, words in zip(torch_only, ('use codec="int8"', "use powerSGD_hook"), strict=True):
        with pytest.raises(UsageError, match=words):
            model.register_comm_hook(None, wrong)
    for wrong, words in ((3, "got int"), (make, "does not take these two"), (lambda bucket: bucket, "these two")):
        with pytest.raises(UsageError, match=words):
            model.register_comm_hook(None, wrong)
    with pytest.raises(UsageError, match="BuiltinCommHookType, got 'allreduce'"):
        model._register_builtin_comm_hook("allreduce")  # noqa: SLF001
    model.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    with pytest.raises(UsageError, match="expected one for a model, got another"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UsageError, match=r"expected a torch.futures.Future, got Tensor"):
        step(model)
    with pytest.raises(UsageError, match="leave out codec="):
        DistributedDataParallel(make(), codec="int8").register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UsageError, match=r"sparse ones of words.weight"):
        DistributedDataParallel(Words()).register_comm_hook(None, default_hooks.allreduce_hook)


@on_ranks(2)
def test_an_optimizer_that_would_step_before_gradients_are_reduced_is_refused() -> None:
    module = make()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(UsageError, match=r"_register_fused_optim\(torch.optim.SGD, lr\)"):
        DistributedDataParallel(module)


def _of_another_size(_: object, bucket: Any) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer()[:3])
    return future


@on_ranks(2)
def test_a_result_of_another_size_is_refused() -> None:
    model = DistributedDataParallel(Parts())
    model.register_comm_hook(None, _of_another_size)
    with pytest.raises(UsageError, match=r"_of_another_size: expected a future of a tensor of \d+ values"):
        step(model)
