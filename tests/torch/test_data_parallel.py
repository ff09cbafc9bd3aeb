"""``asyncpar.torch.DistributedDataParallel`` trains as torch's class of that name does."""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchReplicas
from torch.utils.checkpoint import checkpoint

from asyncpar.gradsync import TuningConfig
from asyncpar.torch import DistributedDataParallel
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.worlds import on_ranks

SMALL_BUCKETS_MB = 0.0005
BATCH = 4


class Shared(nn.Module):
    """The first matrix is the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Frozen(nn.Module):
    """A part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.body(x))


class Backwards(nn.Module):
    """Parameters registered in the order in which their gradients become final, and images in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.first(x).view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.last(self.middle(image).reshape(x.shape))


class Chosen(nn.Module):
    """A part that is used in some steps, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        x = self.parts[0](x)
        if self.step % 2:
            x = x + self.parts[1](x)
        return x + self.parts[2](x) if dist.get_rank() else x


class Checkpointed(nn.Module):
    """Activations that backward computes again, with a part that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in [*self.blocks, self.blocks[0]]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (Block, {}),
    "shared": (Shared, {}),
    "frozen": (Frozen, {}),
    "batch norm": (_norms, {}),
    "batch norm, buffers of each rank": (_norms, {"broadcast_buffers": False}),
    "other order": (Backwards, {}),
    "unused": (Chosen, {"find_unused_parameters": True}),
    "static": (Checkpointed, {"static_graph": True}),
}


def train(
    model: nn.Module, *, steps: int = 4, dtype: torch.dtype = torch.float32, to_none: bool = True, accumulated: int = 0
) -> list[torch.Tensor]:
    """Train on this rank's rows; return all gradients, after each step, that there are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        for turn in range(accumulated + 1):
            x = torch.randn(BATCH, WIDTH, generator=generator).to(dtype)
            if turn < accumulated:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
    return found


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]()


def assert_equal(got: nn.Module, expected: nn.Module) -> None:
    """Assert that states have the same names and bits."""
    ours, theirs = got.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [25, SMALL_BUCKETS_MB])
@pytest.mark.parametrize("name", list(MODELS))
def test_all_bits_are_those_of_torch(name: str, bucket_mb: float) -> None:
    settings = MODELS[name][1]
    ours = DistributedDataParallel(make(name), bucket_cap_mb=bucket_mb, **settings)
    theirs = TorchReplicas(make(name), bucket_cap_mb=bucket_mb, **settings)
    for one, other in zip(train(ours), train(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert_equal(ours, theirs)
    assert_same_everywhere(list(ours.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", ["plain", "unused", "shared"])
def test_accumulated_gradients_are_those_of_torch(name: str, to_none: bool) -> None:
    settings = MODELS[name][1]
    ours = DistributedDataParallel(make(name), bucket_cap_mb=SMALL_BUCKETS_MB, **settings)
    theirs = TorchReplicas(make(name), bucket_cap_mb=SMALL_BUCKETS_MB, gradient_as_bucket_view=True, **settings)
    got, expected = (train(each, to_none=to_none, accumulated=2) for each in (ours, theirs))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert_same_everywhere(list(ours.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_have_buckets_of_their_own(dtype: str) -> None:
    kind = getattr(torch, dtype)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH).to(kind), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x.to(kind))).float())

    models = []
    for wrapper in (DistributedDataParallel, TorchReplicas):
        torch.manual_seed(5)
        models.append(wrapper(Mixed()))
        train(models[-1])
    assert len(models[0].bucket_sizes) == 2
    assert_equal(*models)


@on_ranks(2)
@pytest.mark.parametrize("name", ["plain", "static"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_by_autocast_gives_the_bits_of_torch(name: str, dtype: str) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=getattr(torch, dtype)):
                return self.body(x).float()

    models = [kind(Cast(), **MODELS[name][1]) for kind in (DistributedDataParallel, TorchReplicas)]
    ours, theirs = map(train, models)
    assert {gradient.dtype for gradient in ours} == {torch.float32}
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert_equal(*models)


@on_ranks(4, joins=False)
def test_two_hosts_without_a_codec_give_the_means_of_torch() -> None:
    from asyncpar.torch.rendezvous import attach
    from tests.torch.ranks import initialize, place

    os.environ["ASYNCPAR_BIND"] = "127.0.0.1"
    names: Any = attach  # all ranks are on this host, which is to pass for two
    names.host_id = lambda name: f"{name}-{place().rank // 2}"
    initialize()
    ours, theirs = DistributedDataParallel(make("plain")), TorchReplicas(make("plain"))
    assert ours.process_group.communicator.hosts == ((0, 1), (2, 3))
    for one, other in zip(train(ours), train(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert_same_everywhere(list(ours.parameters()))


@on_ranks(4)
def test_four_ranks_and_a_part_of_them_agree() -> None:
    group = dist.new_group([0, 1, 2])
    for each in (None, group):
        if each is group and dist.get_rank() == 3:
            continue
        ours = DistributedDataParallel(make("plain"), process_group=each)
        theirs = TorchReplicas(make("plain"), process_group=each)
        for one, other in zip(train(ours), train(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize(
    ("cores", "bucket_mb", "is_tuned", "buckets"),
    [
        (2, None, False, [1, 5]),
        (4, None, False, [1, 2, 2, 1]),
        (2, 25, False, [1, 2, 2, 1]),
        (2, None, True, [1, 2, 2, 1]),
    ],
)
def test_ranks_that_leave_no_core_idle_reduce_in_large_buckets(
    cores: int, bucket_mb: int | None, is_tuned: bool, buckets: list[int]
) -> None:
    large = 10 << 18
    module = nn.ParameterList(nn.Parameter(torch.zeros(large)) for _ in range(6))
    with mock.patch("os.cpu_count", return_value=cores):
        tuning = TuningConfig() if is_tuned else None
        model = DistributedDataParallel(module, bucket_cap_mb=bucket_mb, tuning=tuning)
    assert model.bucket_sizes == [count * large * 4 for count in buckets]


@on_ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_views_of_buckets_after_each_backward(to_none: bool) -> None:
    model = DistributedDataParallel(make("other order"), bucket_cap_mb=SMALL_BUCKETS_MB)
    places = []
    for _ in range(3):
        train(model, steps=1, to_none=to_none)
        places.append([each.grad.untyped_storage().data_ptr() for each in model.parameters()])
    assert places[1] == places[2] != places[0]


@on_ranks(2)
def test_replicas_start_from_the_first_rank_and_load_states_of_torch() -> None:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(_norms())
    assert_same_everywhere([tensor.float() for tensor in model.state_dict().values()])
    other = TorchReplicas(_norms())
    train(other)
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert_equal(model, other)


@on_ranks(2)
def test_nothing_is_kept_when_a_model_is_gone() -> None:
    import weakref

    model = DistributedDataParallel(make("plain"))
    train(model)
    module, reducer = model.module, weakref.ref(model._reducer)  # noqa: SLF001  # whether it is freed shows nowhere else
    found: Any = reducer()
    bucket = weakref.ref(found._buckets[0].array)  # noqa: SLF001
    del found
    del model
    gc.collect()
    assert reducer() is None
    module.zero_grad()
    gc.collect()
    assert bucket() is None
    module(torch.ones(1, WIDTH)).sum().backward()
