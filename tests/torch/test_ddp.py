"""DistributedDataParallel gives what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from asyncpar.errors import PeerCancelled
from tests.torch.models import WIDTH, assert_close, assert_parameters, assert_same_everywhere, make_model, rows, train
from tests.torch.worlds import on_ranks

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "static view": {"gradient_as_bucket_view": True, "static_graph": True},
    "delayed": {},
}


@on_ranks(2)
@pytest.mark.parametrize("kind", list(KINDS))
def test_training_equals_that_of_one_process(kind: str) -> None:
    settings = dict(KINDS[kind])
    model, expected = make_model(), make_model()
    if kind == "delayed":
        settings["delay_all_reduce_named_params"] = [("2.weight", model[2].weight), ("2.bias", model[2].bias)]
        settings["param_to_hook_all_reduce"] = model[0].first.weight
    train(DistributedDataParallel(model, **settings), rank=dist.get_rank())
    train(expected)
    assert_parameters(model, expected)
    assert_same_everywhere(list(model.parameters()))


@on_ranks(4)
def test_four_ranks_train_as_one() -> None:
    model, expected = make_model(), make_model()
    train(DistributedDataParallel(model, bucket_cap_mb=0.0005), rank=dist.get_rank())
    train(expected)
    assert_parameters(model, expected)


@on_ranks(2)
def test_models_start_from_the_first_rank() -> None:
    model = make_model()
    with torch.no_grad():
        model[2].weight.add_(dist.get_rank())
    DistributedDataParallel(model)
    assert_parameters(model, make_model(), rtol=0, atol=0)


@on_ranks(2)
def test_unused_parameters_are_found_and_left_alone() -> None:
    model = make_model(has_unused=True)
    replicated = DistributedDataParallel(model, find_unused_parameters=True)
    train(replicated, rank=dist.get_rank())
    assert model[0].unused.weight.grad is None
    expected = make_model(has_unused=True)
    train(expected)
    assert_parameters(model, expected)


@on_ranks(2)
def test_parameters_used_on_one_rank_get_its_gradient_halved() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[dist.get_rank()](x)

    replicated = DistributedDataParallel(Choice(), find_unused_parameters=True)
    replicated(torch.ones(1, 2)).sum().backward()
    for part in model:
        torch.testing.assert_close(part.weight.grad, torch.full((2, 2), 0.5))


@on_ranks(2)
def test_no_sync_adds_gradients_up() -> None:
    model, expected = make_model(), make_model()
    replicated = DistributedDataParallel(model)
    with replicated.no_sync():
        x, _ = rows(0, dist.get_rank())
        replicated(x).sum().backward()
    x, _ = rows(1, dist.get_rank())
    replicated(x).sum().backward()
    for step in range(2):
        (expected(rows(step)[0]).sum() / 2).backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@on_ranks(2)
def test_join_lets_ranks_have_more_batches_than_others() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    replicated = DistributedDataParallel(model)
    counts = (2, 5)
    with Join([replicated]):
        for _ in range(counts[dist.get_rank()]):
            model.weight.grad = None
            replicated(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
            with torch.no_grad():
                model.weight -= model.weight.grad
    assert_same_everywhere([model.weight])
    both, alone = (1 + 2) / 2, 2 / 2
    torch.testing.assert_close(model.weight, torch.full((1, 2), -(2 * both + 3 * alone)))


@on_ranks(2)
def test_buffers_follow_the_first_rank() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
    replicated = DistributedDataParallel(model)
    with torch.no_grad():
        model[1].running_mean.fill_(5.0 + dist.get_rank())
    replicated(rows(0, dist.get_rank())[0])
    replicated(rows(1, dist.get_rank())[0])
    first = model[1].running_mean.clone()
    dist.broadcast(first, 0)
    replicated.eval()
    replicated._sync_buffers()  # noqa: SLF001  # torch: what DDP calls in a forward in training; called by hand, as a forward would change the running mean
    torch.testing.assert_close(model[1].running_mean, first)


@on_ranks(2)
def test_the_compress_hook_reduces_in_half_precision() -> None:
    model, expected = make_model(), make_model()
    replicated = DistributedDataParallel(model)
    replicated.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(replicated, rank=dist.get_rank())
    train(expected)
    assert_parameters(model, expected, rtol=0.05, atol=0.01)
    assert_same_everywhere(list(model.parameters()))


@on_ranks(2)
def test_the_all_reduce_hook_is_plain_training() -> None:
    model, expected = make_model(), make_model()
    replicated = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    replicated.register_comm_hook(None, default_hooks.allreduce_hook)
    train(replicated, rank=dist.get_rank())
    train(expected)
    assert_parameters(model, expected)


@on_ranks(2)
def test_the_power_sgd_hook_trains_in_step() -> None:
    model = make_model()
    replicated = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    replicated.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(replicated, 8, rank=dist.get_rank())
    assert_same_everywhere(list(model.parameters()))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert state.error_dict


@on_ranks(2)
def test_hooks_of_users_get_futures() -> None:
    seen: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        state.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model, expected = make_model(), make_model()
    replicated = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    replicated.register_comm_hook(seen, hook)
    train(replicated, rank=dist.get_rank())
    train(expected)
    assert_parameters(model, expected)
    assert len(set(seen)) > 1


@on_ranks(2)
def test_models_in_mixed_precision_train() -> None:
    model, expected = make_model(), make_model()
    replicated = DistributedDataParallel(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        replicated(rows(0, dist.get_rank())[0]).float().sum().backward()
        (expected(rows(0)[0]).float().sum() / 2).backward()
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0.1, atol=0.1)


@on_ranks(2)
def test_data_loaders_fork_workers() -> None:
    data = TensorDataset(torch.arange(16.0).reshape(16, 1).repeat(1, WIDTH))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    model = DistributedDataParallel(make_model())
    for _ in range(2):
        total = torch.zeros(())
        for (x,) in loader:
            model(x).sum().backward()
            total += x[:, 0].sum()
        dist.all_reduce(total)
        assert total.item() == sum(range(16))


@on_ranks(2)
def test_two_models_train_in_one_process() -> None:
    models = [make_model(), make_model(has_unused=True)]
    groups = [None, dist.new_group()]
    replicated = [
        DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        for model, group in zip(models, groups, strict=True)
    ]
    x, _ = rows(0, dist.get_rank())
    (replicated[0](x).sum() + replicated[1](x).sum()).backward()
    expected = make_model()
    (expected(rows(0)[0]).sum() / 2).backward()
    assert_close([p.grad for p in models[0].parameters()], [p.grad for p in expected.parameters()])


@on_ranks(2)
def test_local_models_average_their_parameters() -> None:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
        model.bias.fill_(2.0 * dist.get_rank())
    model(torch.ones(3)).sum().backward()
    averager = PeriodicModelAverager(period=2)
    for _ in range(2):
        averager.average_parameters(list(model.parameters()))
    torch.testing.assert_close(model.weight, torch.full((3, 3), 0.5))
    torch.testing.assert_close(model.bias, torch.full((3,), 1.0))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "static graph", "find unused", "delayed", "fp16"])
def test_backward_raises_typed_errors_and_the_model_can_go_on(kind: str) -> None:
    group: Any = dist.group.WORLD
    settings = dict(KINDS.get(kind, {}))
    model, expected = make_model(), make_model()
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.0005, **settings)
    if kind == "fp16":
        parallel._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # noqa: SLF001  # torch: how DDP takes the hooks of C++ that BuiltinCommHookType lists; there is no public call
    x, _ = rows(dist.get_rank())
    start = group.start

    async def fail() -> None:
        raise PeerCancelled("rank 7 had enough", rank=7)

    for step in range(3):
        loss = parallel(x).square().sum()
        if step != 1:
            group.start = lambda _, tensors, **settings: start(fail, tensors, **settings)
            try:
                with pytest.raises(PeerCancelled, match="rank 7 had enough") as raised:
                    loss.backward()
            finally:
                del group.start
            assert raised.value.rank == 7
            assert isinstance(raised.value, dist.DistBackendError)
            parallel.zero_grad()
        else:
            loss.backward()
    parallel.zero_grad()
    if kind != "fp16":
        train(parallel, rank=dist.get_rank())
        train(expected)
        assert_parameters(model, expected)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["FP16_COMPRESS", "ALLREDUCE"])
def test_hooks_that_torch_has_built_in_give_means(kind: str) -> None:
    model = nn.Linear(3, 2, bias=False)
    parallel = DistributedDataParallel(model)
    parallel._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))  # noqa: SLF001  # torch: how DDP takes the hooks of C++ that BuiltinCommHookType lists; there is no public call
    for _ in range(3):
        parallel.zero_grad()
        parallel(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 1.5))


class Words(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(places).sum(1))


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_embeddings_with_sparse_gradients_train_as_in_one_process(settings: dict[str, bool]) -> None:
    model, expected = Words(), Words()
    parallel = DistributedDataParallel(model, **settings)
    places = torch.tensor([[[1, 2, 2], [3, 4, 5]], [[2, 7, 9], [1, 1, 0]]])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        parallel(places[dist.get_rank()]).square().mean().backward()
        expected(places.flatten(0, 1)).square().mean().backward()
        assert model.words.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
    assert_parameters(model, expected)
    assert_same_everywhere(list(model.parameters()))
