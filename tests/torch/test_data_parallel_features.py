"""Features of torch's DistributedDataParallel beside training, which asyncpar's has, to the same bits.

Each feature is a function of the class of replicas; what it returns is compared between the two classes.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchReplicas
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asyncpar.core.config.names import CodecChoice
from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from asyncpar.torch import DistributedDataParallel
from tests.torch.models import WIDTH, Block, assert_same_everywhere
from tests.torch.worlds import on_ranks

Wrap = Callable[..., Any]


class Parts(nn.Module):
    """Two blocks, a parameter of its own, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = Block(), nn.BatchNorm1d(WIDTH), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.scale


def make(*, seed: int = 3) -> Parts:
    torch.manual_seed(seed)
    return Parts()


def step(model: nn.Module, number: int = 0, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Make a step of plain SGD, or of ``optimizer``, on rows of this rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        return
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each -= 0.1 * each.grad


def values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def state(model: nn.Module) -> list[torch.Tensor]:
    return values(model.state_dict().values())


def _ignored(wrap: Wrap, names: list[str]) -> list[torch.Tensor]:
    module = make(seed=dist.get_rank())
    TorchReplicas._set_params_and_buffers_to_ignore_for_model(module, names)  # noqa: SLF001  # torch: trainers call it
    model = wrap(module)
    for number in range(3):
        step(model, number)
    return state(model)


def ignored(wrap: Wrap) -> list[torch.Tensor]:
    """Names as ``named_parameters`` has them; torch's reducer has a dot before those of the module itself."""
    return _ignored(wrap, ["first.first.weight", "norm.running_mean", "scale", ".scale"])


def buffers_of_each_rank(wrap: Wrap) -> list[torch.Tensor]:
    module = make(seed=dist.get_rank())
    module.norm.running_mean.fill_(dist.get_rank())
    model = wrap(module, broadcast_buffers=False)
    step(model)
    return state(model)


def copied(wrap: Wrap) -> list[torch.Tensor]:
    model = wrap(make())
    step(model)
    other = copy.deepcopy(model)
    before = state(model)
    for number in range(1, 3):
        step(other, number)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    step(model, 5)
    return [*state(model), *state(other)]


def pickled(wrap: Wrap) -> list[torch.Tensor]:
    model = wrap(make(), find_unused_parameters=True)
    step(model)
    other = pickle.loads(pickle.dumps(model))
    step(other, 1)
    return state(other)


def saved(wrap: Wrap) -> list[torch.Tensor]:
    model = wrap(make())
    step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    step(other, 1)
    return state(other)


def averaged(wrap: Wrap) -> list[torch.Tensor]:
    model = wrap(make())
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)]
    for number in range(3):
        step(model, number)
        for each in averages:
            each.update_parameters(model)
    with torch.no_grad():
        outputs = [each.eval()(torch.ones(2, WIDTH)) for each in averages]
    return [*outputs, *state(averages[0]), *state(averages[1])]


FEATURES = [ignored, buffers_of_each_rank, copied, pickled, saved, averaged]


@on_ranks(2)
@pytest.mark.parametrize("name", [feature.__name__ for feature in FEATURES])
def test_a_feature_of_torch_gives_the_same_bits(name: str) -> None:
    feature: Callable[[Wrap], list[torch.Tensor]] = globals()[name]
    ours, theirs = feature(DistributedDataParallel), feature(TorchReplicas)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


LOGGED: dict[str, dict[str, Any]] = {
    "usual": {},
    "unused": {"find_unused_parameters": True, "broadcast_buffers": False},
    "static": {"static_graph": True, "bucket_cap_mb": 0.0005},
    "hook": {},
}

NUMBERS_OF_ITS_OWN = {
    "bucket_cap_bytes",
    "gradient_as_bucket_view",
    "has_rebuilt_buckets",
    "iteration",
    "num_buckets_reduced",
}
"""Torch's class counts one pass less, and has another size of buckets where ranks are crowded."""

REBUILT = {"rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}
"""Torch's class makes no other buckets after the first pass where parameters may be unused, and with a static graph."""


@on_ranks(2)
@pytest.mark.parametrize("name", list(LOGGED))
def test_logging_data_have_the_names_and_settings_of_torch(name: str) -> None:
    def log(wrap: Wrap) -> list[dict[str, Any]]:
        model = wrap(make(), **LOGGED[name])
        if name == "hook":
            model.register_comm_hook(None, allreduce_hook)
        model._set_ddp_runtime_logging_sample_rate(1)  # noqa: SLF001
        before = model._get_ddp_logging_data()  # noqa: SLF001
        with model.join() if name == "usual" else nullcontext():
            for number in range(3):
                step(model, number)
        return [before, model._get_ddp_logging_data()]  # noqa: SLF001

    for ours, theirs in zip(log(DistributedDataParallel), log(TorchReplicas), strict=True):
        assert ours.keys() ^ theirs.keys() <= REBUILT, ours.keys() ^ theirs.keys()
        measured = {each for each in ours if "time" in each and "runtime" not in each}
        buckets = {each for each in ours if "bucket_sizes" in each or "indices" in each}
        for each in ours.keys() - measured - buckets - NUMBERS_OF_ITS_OWN:
            assert ours[each] == theirs[each], each
        assert all(ours[each] >= 0 for each in measured)
    assert ours["iteration"] == 3
    assert 0 < ours["backward_comm_time"] <= 3 * ours["avg_backward_comm_time"]
    assert ours["backward_compute_time_start"] <= ours["backward_compute_time_end"] <= ours["backward_comm_time_end"]
    sizes = [int(size) for size in ours["rebuilt_bucket_sizes"].split(", ")]
    assert sum(sizes) == ours["total_parameter_size_bytes"]
    assert len(sizes) == len(ours["rebuilt_per_bucket_param_indices"].split(", "))


@on_ranks(2)
def test_logging_data_say_what_was_not_used() -> None:
    module = make()
    module.more = nn.Linear(3, 5)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    step(model)
    assert model._get_ddp_logging_data()["unused_parameter_size"] == 4 * (3 * 5 + 5)  # noqa: SLF001
    other = copy.deepcopy(model)
    assert other._get_ddp_logging_data()["module_name"] == "Parts"  # noqa: SLF001
    with pytest.raises(UsageError, match="expected 1 or more, got 0"):
        model._set_ddp_runtime_logging_sample_rate(0)  # noqa: SLF001


@on_ranks(2)
def test_what_is_ignored_may_differ_between_ranks_and_lie_elsewhere() -> None:
    module = make()
    module.register_buffer("own", torch.zeros(dist.get_rank() + 1))
    module.far = nn.Parameter(torch.zeros(3, device="meta"))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own", "far"])  # noqa: SLF001
    model = DistributedDataParallel(module)
    step(model)
    assert_same_everywhere([each.grad for each in model.parameters() if each.grad is not None])


@on_ranks(3)
def test_a_copy_keeps_its_group_and_only_models_of_the_default_group_are_saved() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    model = DistributedDataParallel(make(), process_group=group, codec="int8")
    other = copy.deepcopy(model)
    step(other)
    assert other.process_group is group
    assert other.gradient_hook is not None
    assert other.gradient_hook is not model.gradient_hook
    assert_same = [torch.empty_like(other.module.scale) for _ in range(2)]
    dist.all_gather(assert_same, other.module.scale.detach(), group=group)
    assert torch.equal(*assert_same)
    with pytest.raises(UsageError, match="default process group"):
        pickle.dumps(model)


@on_ranks(2)
def test_a_copy_that_does_not_train_makes_no_buckets() -> None:
    model = DistributedDataParallel(make())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other(torch.ones(2, WIDTH))
    assert model.bucket_sizes
    assert not other.bucket_sizes


PHASES: dict[str, list[tuple[str, ...]]] = {
    "thaw": [("second",), ("second", "first"), ("second", "first", "scale", "norm")],
    "freeze": [("second", "first", "scale", "norm"), ("second",)],
    "alternate": [("first",), ("second",), ("first",), ("second",)],
    "nothing between": [("first", "second"), (), ("first", "second")],
}
"""The parts that are trained, one phase after the other."""


def _require(module: nn.Module, parts: tuple[str, ...]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in parts)


@on_ranks(2)
@pytest.mark.parametrize("name", list(PHASES))
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_what_requires_gradients_may_change_between_steps(name: str, settings: dict[str, Any]) -> None:
    """The reference is wrapped anew in each phase."""
    ours, reference = make(), make()
    _require(ours, PHASES[name][0])
    model = DistributedDataParallel(ours, bucket_cap_mb=0.0005, **settings)
    for phase, parts in enumerate(PHASES[name]):
        _require(ours, parts)
        _require(reference, parts)
        wrapped = TorchReplicas(reference, bucket_cap_mb=0.0005, **settings) if parts else reference
        for number in range(2):
            for each in (model, wrapped):
                if parts:
                    step(each, 2 * phase + number)
                else:
                    each(torch.ones(4, WIDTH))
        if parts:  # else ours has the buffers of rank 0, and the reference none of another rank
            torch.testing.assert_close(state(ours), state(reference), rtol=0, atol=0)
    assert_same_everywhere(state(ours)[:1])


@on_ranks(2)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_rank_that_alone_changes_what_requires_gradients_is_named_and_taken_back_all_go_on(
    codec: CodecChoice,
) -> None:
    module = make()
    model = DistributedDataParallel(module, bucket_cap_mb=0.0005, codec=codec)
    step(model)
    if dist.get_rank() == 1:
        module.first.requires_grad_(False)
    with pytest.raises(OperationMismatch, match="other parameters require gradients now"):
        step(model, 1)
    module.first.requires_grad_(True)
    for number in range(2, 4):
        step(model, number)
        assert_same_everywhere([each.grad for each in model.parameters() if each.grad is not None])


@on_ranks(2)
def test_a_discriminator_that_is_frozen_every_second_step_trains_as_in_torch() -> None:
    def train(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(5)
        generator, critic = (wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())) for _ in range(2))
        rows = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            for loses, wins in ((generator, critic), (critic, generator)):
                wins.requires_grad_(False)
                loses.requires_grad_(True)
                made = generator(torch.randn(4, WIDTH, generator=rows))
                loses.zero_grad()
                critic(made).square().mean().backward()
                with torch.no_grad():
                    for each in loses.parameters():
                        each -= 0.1 * each.grad
        return [*state(generator), *state(critic)]

    torch.testing.assert_close(train(DistributedDataParallel), train(TorchReplicas), rtol=0, atol=0)


@on_ranks(2)
def test_lazy_modules_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"run module\(example\) once"):
        DistributedDataParallel(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))
    lazy = nn.LazyLinear(3)
    torch.manual_seed(1)
    lazy(torch.ones(2, WIDTH))
    step(DistributedDataParallel(lazy))


@on_ranks(2)
def test_norms_over_ranks_are_refused_as_torch_has_none_on_cpus() -> None:
    with pytest.raises(ValueError, match=r"module norm: expected no SyncBatchNorm"):
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(make()))


class Words(nn.Module):
    """Embeddings with sparse gradients, one of which is used in some steps only, and a dense part."""

    def __init__(self, *, is_dense: bool = True, uses_all: bool = True, is_sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH, sparse=is_sparse)
        self.more = nn.EmbeddingBag(6, WIDTH, sparse=is_sparse)
        self.block = Block() if is_dense else nn.Identity()
        self.uses_all, self.number = uses_all, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        places = torch.arange(3) * (dist.get_rank() + 1) + self.number
        y = self.words(places % 10).sum(0) + x
        if self.uses_all or (self.number + dist.get_rank()) % 2:
            y = y + self.more((places % 6).reshape(1, 3))
        return self.block(y)


class Waves(nn.Module):
    """Complex parameters, one of them in another layout, among real ones of an odd number of values."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(3))
        self.wave = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).t())
        self.more = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.complex64) @ self.wave.conj() * self.more
        return torch.view_as_real(y).float() * self.odd.sum()


class Halves(nn.Module):
    """All of it in float16, with gradients that have few bits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block().half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.half()).float() * 4


REFERENCES: dict[str, Callable[[], nn.Module]] = {
    "sparse": lambda: Words(is_sparse=False),
    "only sparse": lambda: Words(is_dense=False, is_sparse=False),
    "sparse, some unused": lambda: Words(uses_all=False, is_sparse=False),
}
"""Models with the same gradients, dense ones: torch's Gloo crashes now and then when it reduces two sparse gradients at
once (torch 2.13, a program of torch alone), and its class does not take sparse gradients that are unused."""

KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "sparse": (Words, {}),
    "only sparse": (lambda: Words(is_dense=False), {}),
    "sparse, some unused": (lambda: Words(uses_all=False), {"find_unused_parameters": True}),
    "complex": (Waves, {}),
    "float16": (Halves, {}),
    "scripted": (lambda: torch.jit.script(Block()), {}),
}


@on_ranks(2)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", list(KINDS))
def test_gradients_of_other_kinds_are_those_of_torch_over_gloo(name: str, accumulates: bool) -> None:
    make_module, settings = KINDS[name]
    gloo = dist.new_group(backend="gloo")

    def train(make_module: Callable[[], nn.Module], wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = wrap(make_module(), bucket_cap_mb=0.0005, **settings)
        generator, found = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(3):
            model.zero_grad()
            if accumulates:
                with model.no_sync():
                    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            for each in model.parameters():
                if each.grad is not None:
                    found.append(each.grad.to_dense().clone())
                    with torch.no_grad():
                        each -= 0.01 * found[-1]
        return found

    ours = train(make_module, DistributedDataParallel)
    theirs = train(REFERENCES.get(name, make_module), partial(TorchReplicas, process_group=gloo))
    torch.testing.assert_close(ours, theirs, rtol=1e-3 if name == "float16" else 1e-6, atol=1e-6)
    assert_same_everywhere([torch.view_as_real(each).double() if each.is_complex() else each.double() for each in ours])


@on_ranks(2)
def test_a_step_with_sparse_gradients_that_one_rank_cannot_end_ends_on_all_and_the_next_one_works() -> None:
    module = Words()
    model = DistributedDataParallel(module)
    step(model)
    outputs = model(torch.ones(4, WIDTH))
    if dist.get_rank() == 1:
        outputs.register_hook(_refuse)
    with pytest.raises(UsageError if dist.get_rank() else PeerCancelled):
        outputs.sum().backward()
    step(model, 1)
    assert_same_everywhere([each.grad.to_dense() for each in model.parameters() if each.grad is not None])


def _refuse(_: object) -> None:
    raise UsageError("it breaks")


@on_ranks(2)
def test_sparse_gradients_join_and_complex_ones_are_refused_with_a_codec() -> None:
    module = Words()
    model = DistributedDataParallel(module, codec="int8")
    with model.join():
        for number in range(1 + dist.get_rank()):
            step(model, number)
    assert_same_everywhere(list(model.parameters()))
    with pytest.raises(UsageError, match="none for complex gradients, such as wave"):
        DistributedDataParallel(Waves(), codec="int8")
