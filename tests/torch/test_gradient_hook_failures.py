"""Wrong use of the gradient hook, and failures of ranks, are typed errors of ``backward``."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncpar.errors import OperationMismatch, PeerLost, UsageError
from asyncpar.torch import GradientHook, gradient_hook
from tests.torch.hooked import Linears, flat, hooked, make_inputs, make_mlp, train
from tests.torch.ranks import await_others
from tests.torch.worlds import on_ranks, open_world


@on_ranks(2)
def test_ranks_with_different_codecs_are_told_both() -> None:
    model, _ = hooked(make_mlp(), codec="int8" if dist.get_rank() == 0 else "int4")
    with pytest.raises(UsageError, match=r"rank 0 has codec int8.*, rank 1 has codec int4"):
        train(model, steps=1)


@on_ranks(2)
def test_a_hook_on_some_ranks_only_is_a_mismatch_on_all() -> None:
    model = DistributedDataParallel(make_mlp())
    if dist.get_rank() == 0:
        model.register_comm_hook(GradientHook(), gradient_hook)
    with pytest.raises((OperationMismatch, RuntimeError), match=r"(?s)all_gather_object.*all_reduce"):
        train(model, steps=1)


@on_ranks(2)
def test_sparse_gradients_are_refused() -> None:
    module = nn.Embedding(10, 4, sparse=True)
    model, _ = hooked(module)
    with pytest.raises(UsageError, match="dense gradients, got sparse ones; use Embedding"):
        model(torch.tensor([1, 2])).sum().backward()


@on_ranks(2)
def test_groups_of_other_backends_are_refused() -> None:
    group = dist.new_group(backend="gloo")
    with pytest.raises(UsageError, match=r"backend asyncpar, got gloo; make it by dist.init_process_group"):
        GradientHook(group=group)


@on_ranks(2)
def test_what_is_no_bucket_or_no_state_is_refused() -> None:
    state = GradientHook()
    with pytest.raises(UsageError, match="expected a bucket of DistributedDataParallel, got Tensor; FSDP and others"):
        gradient_hook(state, torch.zeros(3))
    model = DistributedDataParallel(make_mlp())
    model.register_comm_hook(None, gradient_hook)
    with pytest.raises(
        UsageError, match=r"state: expected a GradientHook, got NoneType; call model.register_comm_hook"
    ):
        train(model, steps=1)


@on_ranks(2)
def test_a_hook_for_two_models_in_one_backward_pass_is_refused() -> None:
    models = [DistributedDataParallel(make_mlp(seed)) for seed in range(2)]
    state = GradientHook(minimum_bytes=0)
    for model in models:
        model.register_comm_hook(state, gradient_hook)
    x = torch.ones(3, 20)
    with pytest.raises(UsageError, match="each model needs a GradientHook of its own"):
        (models[0](x).square().sum() + models[1](x).square().sum()).backward()


@on_ranks(2)
def test_residuals_of_another_model_are_refused_on_all_ranks() -> None:
    model, state = hooked(Linears(), codec="topk:0.1")
    model(make_inputs(dist.get_rank(), 0)).backward()
    saved = state.state_dict()
    with pytest.raises(UsageError, match="error feedback, which is off here"):
        GradientHook(error_feedback=False).load_state_dict(saved)
    other, fresh = hooked(make_mlp(), codec="topk:0.1")
    fresh.load_state_dict(saved)
    with pytest.raises(UsageError, match=r"expected a residual of .* values for parameter 0"):
        train(other, steps=1)


def test_without_a_process_group_there_is_no_hook() -> None:
    with pytest.raises(UsageError, match=r"there is no process group yet; call dist.init_process_group"):
        GradientHook()


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_rank_that_dies_in_backward_is_named_at_once() -> None:
    with open_world(2) as world:
        world.is_broken = True
        raised, ended = world.outcomes(die_in_backward)
        assert ended.status == -signal.SIGKILL
        assert raised.error is None, raised
        assert raised.value < 5.0


def die_in_backward() -> float:
    """Return how long rank 0 waited for its error."""
    model, _ = hooked(make_mlp(), codec="int8")
    train(model, steps=3)
    first = next(model.parameters())
    await_others(1)
    if dist.get_rank() == 1:
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1") as caught:
        train(model, steps=1)
    assert caught.value.rank == 1
    assert isinstance(caught.value, dist.DistBackendError)
    waited = time.monotonic() - begun
    assert flat(model).isfinite().all()
    dist.destroy_process_group()
    return waited
