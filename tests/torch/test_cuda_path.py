"""Operations of CUDA tensors over asyncpar's own communicator (``ASYNCPAR_TORCH_CUDA=asyncpar``), without a GPU.

CPU tensors pass for those of a device, and NCCL is the fake: what programs get must be what CPU tensors give them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncpar.collectives.device.host import use_fabric
from asyncpar.errors import UsageError
from asyncpar.torch import run_threads, signatures
from asyncpar.torch.cuda_path import CudaPath
from asyncpar.torch.signatures import cuda_path_name
from tests.device.fake_fabric import FakeFabric
from tests.device.pretended import EagerCluster, let_tensors_pass

SIZE = 3


@pytest.fixture(name="cluster")
def pretend(monkeypatch: pytest.MonkeyPatch) -> EagerCluster:
    """Let all tensors take the path of CUDA tensors, in the threads of ``run_ranks``."""
    let_tensors_pass(monkeypatch)
    real = signatures._device  # noqa: SLF001

    def device(tensors: Any) -> torch.device | None:
        first = tensors
        while isinstance(first, list | tuple) and first:
            first = first[0]
        is_dense = isinstance(first, torch.Tensor) and first.layout is torch.strided
        return torch.device("cuda", 0) if is_dense else real(tensors)

    monkeypatch.setattr(signatures, "_device", device)
    monkeypatch.setenv("ASYNCPAR_TORCH_CUDA", "asyncpar")
    return EagerCluster()


def run_ranks(cluster: EagerCluster, function: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Run ``function`` on ranks whose devices are those of ``cluster``."""

    def on_device(rank: int) -> Any:
        group: Any = dist.group.WORLD
        fabric = FakeFabric(cluster, visible=[0], allows_shared_devices=True)
        group.thread.do(lambda: use_fabric(group.communicator._engine.table, fabric))  # noqa: SLF001
        group.barrier().wait()
        found = function(rank)
        assert isinstance(group.paths.get("cuda"), CudaPath)
        return found

    found = run_threads(size, on_device)
    assert cluster.faults == []
    return found


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 9, shape, generator=generator).to(dtype)


def reduces(op: Any, dtype: torch.dtype = torch.float32) -> Callable[[int], torch.Tensor]:
    def run(rank: int) -> torch.Tensor:
        x = numbers(rank, 5, 3, dtype=dtype)
        dist.all_reduce(x, op=op)
        return x

    return run


def not_contiguous(rank: int) -> torch.Tensor:
    x = numbers(rank, 4, 6).t()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    dist.broadcast(x[::2], src=1)
    return x


def premultiplied(rank: int) -> torch.Tensor:
    x = numbers(rank, 6)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))  # noqa: SLF001
    return x


def coalesced(rank: int) -> list[torch.Tensor]:
    tensors = [numbers(rank, 3), numbers(rank + 9, 2, 2)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    return tensors


def reduced(rank: int) -> list[torch.Tensor]:
    x, y = numbers(rank, 4), numbers(rank, 4, dtype=torch.int64)
    dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
    dist.reduce(y, dst=2, op=dist.ReduceOp.AVG)
    return [x, y]


def scattered_sums(rank: int) -> list[torch.Tensor]:
    out, uneven = torch.zeros(2, 2), torch.zeros(rank + 1)
    dist.reduce_scatter(out, [numbers(rank * 10 + i, 2, 2) for i in range(SIZE)])
    dist.reduce_scatter(uneven, [numbers(rank * 10 + i, i + 1) for i in range(SIZE)], op=dist.ReduceOp.AVG)
    whole, part = numbers(rank, 6, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    dist.reduce_scatter_single(part, whole, op=dist.ReduceOp.AVG)
    own = whole[2 * rank : 2 * rank + 2]
    dist.reduce_scatter_single(own, whole)
    several = [torch.zeros(2), torch.zeros(1)]
    dist.group.WORLD.reduce_scatter_single_coalesced(
        several, [numbers(rank, 6), numbers(rank, 3)], dist.distributed_c10d.ReduceScatterOptions()
    ).wait()
    return [out, uneven, part, own, *several]


def broadcasts(rank: int) -> list[torch.Tensor]:
    x, y = numbers(rank, 3, 2), numbers(rank, 4).to(torch.float8_e4m3fn)
    dist.broadcast(x, src=2)
    dist.broadcast(y, src=0)
    return [x, y.float()]


def gathers(rank: int) -> list[torch.Tensor]:
    equal = [torch.zeros(2, 2, dtype=torch.bfloat16) for _ in range(SIZE)]
    dist.all_gather(equal, numbers(rank, 2, 2, dtype=torch.bfloat16))
    uneven = [torch.zeros(i + 1) for i in range(SIZE)]
    dist.all_gather(uneven, numbers(rank, rank + 1))
    whole = torch.zeros(SIZE, 4)
    dist.all_gather_single(whole, numbers(rank, 4))
    place = torch.zeros(SIZE * 2)
    place[2 * rank : 2 * rank + 2] = rank + 1.0
    dist.all_gather_single(place, place[2 * rank : 2 * rank + 2])
    turned = torch.zeros(4, SIZE).t()
    dist.all_gather_single(turned, numbers(rank, 4))
    several = [torch.zeros(SIZE * 3, dtype=torch.float16), torch.zeros(SIZE, 2, dtype=torch.int64)]
    dist.group.WORLD.all_gather_single_coalesced(
        several,
        [numbers(rank, 3, dtype=torch.float16), numbers(rank, 2, dtype=torch.int64)],
        dist.distributed_c10d.AllgatherOptions(),
    ).wait()
    lists = [[torch.zeros(3), torch.zeros(1, dtype=torch.int8)] for _ in range(SIZE)]
    mine = [numbers(rank, 3), numbers(rank, 1, dtype=torch.int8)]
    dist.group.WORLD.allgather_coalesced(lists, mine).wait()
    return [*equal, *uneven, whole, place, turned, *several, *(tensor for row in lists for tensor in row)]


def rooted(rank: int) -> list[torch.Tensor]:
    rows = [torch.zeros(3) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(numbers(rank, 3), rows, dst=1)
    out = torch.zeros(2, 2)
    dist.scatter(out, [numbers(i, 2, 2) for i in range(SIZE)] if rank == 2 else None, src=2)
    return [*(rows or []), out]


def exchanges(rank: int) -> list[torch.Tensor]:
    equal = torch.zeros(SIZE * 2, 2)
    dist.all_to_all_single(equal, numbers(rank, SIZE * 2, 2))
    sizes, coming = [rank + i for i in range(SIZE)], [i + rank for i in range(SIZE)]
    uneven = torch.zeros(sum(coming), 3)
    dist.all_to_all_single(uneven, numbers(rank, sum(sizes), 3), coming, sizes)
    parts = [torch.zeros(i + rank + 1) for i in range(SIZE)]
    dist.all_to_all(parts, [numbers(rank * 10 + i, i + rank + 1) for i in range(SIZE)])
    return [equal, uneven, *parts]


def messages(rank: int) -> list[torch.Tensor]:
    small, large = torch.zeros(3), torch.zeros(200, 200).t()
    if rank == 0:
        dist.send(numbers(1, 3), dst=1)
        dist.send(numbers(2, 200, 200), dst=2, tag=5)
    elif rank == 1:
        dist.recv(small, src=0)
        dist.send(numbers(3, 200, 200), dst=2, tag=6)
    else:
        assert dist.recv(large, src=None, tag=5) == 0
        dist.recv(large, src=1, tag=6)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, numbers(rank, 20_000), (rank + 1) % SIZE),
            dist.P2POp(dist.irecv, ring := torch.zeros(20_000), (rank - 1) % SIZE),
        ]
    )
    for work in works:
        work.wait()
    return [small, large, ring]


def in_groups(rank: int) -> torch.Tensor:
    group = dist.new_group([0, 2])
    x = numbers(rank, 4)
    if rank != 1:
        dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    return x


CASES: dict[str, Callable[[int], Any]] = {
    "sum": reduces(dist.ReduceOp.SUM),
    "product": reduces(dist.ReduceOp.PRODUCT, torch.float64),
    "integer mean": reduces(dist.ReduceOp.AVG, torch.int32),
    "or": reduces(dist.ReduceOp.BOR, torch.uint8),
    "bfloat16": reduces(dist.ReduceOp.SUM, torch.bfloat16),
    "complex": reduces(dist.ReduceOp.SUM, torch.complex64),
    **{
        each.__name__: each
        for each in (
            not_contiguous,
            premultiplied,
            coalesced,
            reduced,
            scattered_sums,
            broadcasts,
            gathers,
            rooted,
            exchanges,
            messages,
            in_groups,
        )
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operations_give_what_those_of_the_host_give(
    case: Callable[[int], Any], cluster: EagerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(signatures, "_device", lambda _: None)
        expected = run_threads(SIZE, case)
    torch.testing.assert_close(run_ranks(cluster, case), expected, rtol=0, atol=0)


def test_ddp_trains_as_on_the_host(cluster: EagerCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(rank: int) -> list[torch.Tensor]:
        torch_model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        for place, one in enumerate(torch_model.parameters()):
            one.data = numbers(rank + place, *one.shape) / 100
        model = torch.nn.parallel.DistributedDataParallel(torch_model, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(numbers(10 * rank + step, 4, 64)).square().mean().backward()
            optimizer.step()
        return [one.detach() for one in model.parameters()]

    with monkeypatch.context() as patch:
        patch.setattr(signatures, "_device", lambda _: None)
        expected = run_threads(2, train)
    found = run_ranks(cluster, train, 2)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_what_differs_and_what_is_refused_is_raised_on_all_ranks(cluster: EagerCluster) -> None:
    def run(rank: int) -> None:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 calls all_reduce\(float32\[2\], sum\)"):
            dist.all_reduce(torch.ones(2 + rank))
        with pytest.raises(dist.DistBackendError, match=r"input_list: expected|refused on rank 0"):
            dist.group.WORLD.reduce_scatter(torch.ones(1), [torch.ones(1)] * (1 if rank == 0 else 2)).wait()
        with pytest.raises(dist.DistBackendError, match="it can only be moved"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2.0, 2.0]

    run_ranks(cluster, run, 2)


def test_the_variable_is_checked() -> None:
    assert cuda_path_name({}) == "torch"
    assert cuda_path_name({"ASYNCPAR_TORCH_CUDA": "asyncpar"}) == "asyncpar"
    with pytest.raises(UsageError, match=re.escape("ASYNCPAR_TORCH_CUDA: expected torch or asyncpar, got 'gpu'")):
        cuda_path_name({"ASYNCPAR_TORCH_CUDA": "gpu"})
