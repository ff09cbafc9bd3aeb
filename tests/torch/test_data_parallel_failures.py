"""Failures under ``asyncpar.torch.DistributedDataParallel``: each rank is notified of them, and the next step works."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.errors import AsyncparError, PeerCancelled, UsageError
from asyncpar.torch import DistributedDataParallel
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.worlds import on_ranks

SMALL_BUCKETS_MB = 0.0005


class Breaking(nn.Module):
    """A network in which something goes wrong on rank 1 while it is ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.broken = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if dist.get_rank() == 1 and self.broken:
            if self.broken == "forward":
                raise ArithmeticError("it breaks")
            if self.broken == "backward":
                x.register_hook(_raise)
            if self.broken == "beginning":
                y = self.head(x)
                y.register_hook(_raise)
                return y * 1.0
            if self.broken == "unused":
                return x
        return self.head(x)


def _raise(_: object) -> None:
    raise ArithmeticError("it breaks")


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def assert_equal(tensors: Iterable[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Assert that values have the same bits."""
    for one, other in zip(tensors, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize("how", ["forward", "backward", "beginning", "unused", "parameter hook", "last hook"])
def test_a_step_that_one_rank_cannot_end_ends_on_all_and_the_next_one_works(how: str, when: int) -> None:
    torch.manual_seed(1)
    module = Breaking()
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
    for _ in range(when):
        step(model)
    module.broken = how
    before = copies(model.parameters())
    handle: Any = None
    if how == "parameter hook" and dist.get_rank() == 1:
        handle = module.body.first.weight.register_hook(_raise)
    if how == "last hook" and dist.get_rank() == 1:
        handle = module.body.first.weight.register_post_accumulate_grad_hook(_raise)
    if dist.get_rank() == 0:
        with pytest.raises(PeerCancelled, match="unused" if how == "unused" else "breaks|exception") as caught:
            step(model)
        assert caught.value.rank == 1
    else:
        with pytest.raises(UsageError if how == "unused" else ArithmeticError) as failed:
            step(model)
        if how == "unused":
            assert "head.weight" in str(failed.value)
            assert "find_unused_parameters=True" in str(failed.value)
    assert_equal(model.parameters(), before)
    module.broken = ""
    if handle is not None:
        handle.remove()
    for _ in range(3):
        step(model)
        assert_same_everywhere([each.grad for each in model.parameters()])


def _replace(model: nn.Module) -> None:
    model.module.head = nn.Linear(WIDTH, WIDTH)


def _assign(model: nn.Module) -> None:
    model.module.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def _add(model: nn.Module) -> None:
    model.module.more = nn.Linear(2, 2)


def _reshape(model: nn.Module) -> None:
    model.module.head.weight.data = torch.zeros(WIDTH, 2 * WIDTH)


def _cast(model: nn.Module) -> None:
    model.double()


@on_ranks(2)
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_refused_change_leaves_parameters_and_taken_back_the_next_step_works(ranks: list[int]) -> None:
    model = DistributedDataParallel(Breaking())
    step(model)
    before, weight = copies(model.parameters()), model.module.head.weight
    if dist.get_rank() in ranks:
        _assign(model)
    with pytest.raises((UsageError, PeerCancelled), match="before DistributedDataParallel"):
        step(model)
    model.module.head.weight = weight
    assert_equal(model.parameters(), before)
    for _ in range(2):
        step(model)
        assert_same_everywhere([each.grad for each in model.parameters()])


class _Misplaced(torch.autograd.Function):
    """Gives a gradient on another device."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to("meta")


@on_ranks(2)
@pytest.mark.parametrize("when", [0, 2])
def test_a_gradient_on_another_device_ends_the_step_on_all_ranks_and_the_next_one_works(when: int) -> None:
    class Part(Breaking):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_odd = self.broken and dist.get_rank() == 1
            return self.head(_Misplaced.apply(self.body(x)) if is_odd else self.body(x))

    torch.manual_seed(1)
    module = Part()
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
    for _ in range(when):
        step(model)
    before, module.broken = copies(model.parameters()), "device"
    with pytest.raises((RuntimeError, PeerCancelled), match=r"device|exception has ended") as caught:
        step(model)
    assert isinstance(caught.value, PeerCancelled) == (dist.get_rank() == 0)
    assert_equal(model.parameters(), before)
    module.broken = ""
    for _ in range(2):
        step(model)
        assert_same_everywhere([each.grad for each in model.parameters()])


CHANGES = {"replace": _replace, "assign": _assign, "add": _add, "reshape": _reshape, "cast": _cast}


@on_ranks(2)
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("change", list(CHANGES))
def test_parameters_that_change_after_wrapping_are_refused(change: str, ranks: list[int]) -> None:
    module = Breaking()
    module.register_buffer("steps", torch.zeros(3))
    model = DistributedDataParallel(module)
    step(model)
    is_changed = dist.get_rank() in ranks
    if is_changed:
        CHANGES[change](model)
    kind: type[AsyncparError] = UsageError if is_changed else PeerCancelled
    with pytest.raises(kind, match="before DistributedDataParallel"):
        step(model)


@on_ranks(2)
def test_modules_on_other_devices_are_refused_on_all_ranks() -> None:
    module = Block().to("meta" if dist.get_rank() else "cpu")
    with pytest.raises((UsageError, PeerCancelled), match="CPU's memory"):
        DistributedDataParallel(module)
    model = DistributedDataParallel(Block())
    if dist.get_rank():
        model.to("meta")
    with pytest.raises((UsageError, PeerCancelled), match="expected the one that was wrapped"):
        step(model)


def _wider() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH + dist.get_rank())


def _of_other_dtype() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=[torch.float32, torch.float64][dist.get_rank()])


def _of_other_name() -> nn.Module:
    return nn.ModuleDict({f"part{dist.get_rank()}": nn.Linear(WIDTH, WIDTH)})


def _of_other_buffers() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_buffer("more", torch.zeros(dist.get_rank() + 1))
    return module


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("_wider", r"weight torch.float32\[9, 8\]"),
        ("_of_other_dtype", "torch.float64"),
        ("_of_other_name", "part1"),
        ("_of_other_buffers", "buffer more"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks(make: str, text: str) -> None:
    module: Callable[[], nn.Module] = globals()[make]
    with pytest.raises(SettingsDiffer, match=text):
        DistributedDataParallel(module())


@on_ranks(2)
def test_settings_that_differ_are_refused_on_all_ranks() -> None:
    with pytest.raises(SettingsDiffer, match="finds_unused"):
        DistributedDataParallel(Block(), find_unused_parameters=bool(dist.get_rank()))


@on_ranks(2)
def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="require gradients"):
        DistributedDataParallel(nn.Tanh())
    with pytest.raises(UsageError, match="bucket_cap_mb"):
        DistributedDataParallel(Block(), bucket_cap_mb=0)
    with pytest.raises(UsageError, match="backend asyncpar"):
        DistributedDataParallel(Block(), process_group=dist.new_group(backend="gloo"))
    with pytest.raises(UsageError, match="Module"):
        DistributedDataParallel(3)


@on_ranks(2)
def test_an_argument_that_one_rank_cannot_take_is_refused_on_all_ranks() -> None:
    settings: dict[str, Any] = {"bucket_cap_mb": -1} if dist.get_rank() else {}
    with pytest.raises(PeerCancelled if dist.get_rank() == 0 else UsageError, match="bucket_cap_mb"):
        DistributedDataParallel(Block(), **settings)
    step(DistributedDataParallel(Block()))


REFUSED: dict[str, tuple[Any, str]] = {
    "device_ids": ([0], "CPU's memory"),
    "output_device": (0, "CPU's memory"),
    "dim": (1, "leave it out"),
    "check_reduction": (True, "leave it out"),
    "gradient_as_bucket_view": (False, "views"),
    "delay_all_reduce_named_params": ([("a", 1)], "torch's class"),
    "param_to_hook_all_reduce": (1, "torch's class"),
    "mixed_precision": (1, "torch.autocast"),
    "device_mesh": (1, "get_group"),
    "skip_all_reduce_unused_params": (True, "torch's class"),
    "batched_grad_copy": (True, "leave it out"),
    "bucket_cap_mb_list": ([1, 2], "bucket_cap_mb"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(REFUSED))
def test_arguments_of_torch_that_have_no_meaning_are_refused_with_what_to_do(name: str) -> None:
    value, advice = REFUSED[name]
    with pytest.raises(UsageError, match=f"{name}: expected .*{advice}"):
        DistributedDataParallel(Block(), **{name: value})


@on_ranks(2)
def test_all_arguments_of_torch_are_taken_in_its_order() -> None:
    ours, theirs = (
        list(inspect.signature(kind.__init__).parameters)
        for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel)
    )
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == ["codec", "tuning"]
    model = DistributedDataParallel(Block(), [], None, 0, gradient_as_bucket_view=True, forward_sync_buffers=False)
    step(model)
    assert_same_everywhere([each.grad for each in model.parameters()])


@on_ranks(2)
def test_sparse_gradients_of_one_rank_are_refused_on_all_ranks() -> None:
    torch.manual_seed(2)
    with pytest.raises(SettingsDiffer, match="sparse gradients"):
        DistributedDataParallel(nn.Embedding(4, 2, sparse=dist.get_rank() == 1))
    embedding = nn.Embedding(4, 2)
    model = DistributedDataParallel(embedding)
    embedding.sparse = dist.get_rank() == 1
    with pytest.raises((UsageError, PeerCancelled), match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@on_ranks(2)
def test_a_gradient_that_comes_twice_is_refused_on_all_ranks() -> None:
    from torch.utils.checkpoint import checkpoint

    block = Block()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
            return checkpoint(self.block, x, use_reentrant=True) if dist.get_rank() else x

    model = DistributedDataParallel(Twice(), bucket_cap_mb=SMALL_BUCKETS_MB)
    with pytest.raises((UsageError, PeerCancelled), match="static_graph=True"):
        step(model)


@on_ranks(2)
def test_a_static_graph_that_differs_is_refused_on_all_ranks() -> None:
    module = Breaking()
    model = DistributedDataParallel(module, static_graph=True)
    module.broken = "unused"
    with pytest.raises(UsageError, match="as many gradients on all ranks"):
        step(model)
    module.broken = ""
    step(model)
    module.broken = "unused"
    with pytest.raises((UsageError, PeerCancelled), match="static_graph=False"):
        step(model)
