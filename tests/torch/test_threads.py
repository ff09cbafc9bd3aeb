"""Ranks as threads of one process: what runs on them, and how they end."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from asyncpar.errors import PeerLost, PeerTimeout, UsageError
from asyncpar.torch.thread_ranks import ThreadRanks, run_threads

LIMIT = 20.0
STARTED = 5.0
"""Within so many seconds ranks have started, and wait, on a busy machine, too."""


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    """After each test torch, and the threads of the process, are as they were."""
    hook, count = sys.excepthook, torch.get_num_threads()
    yield
    sys.excepthook = hook
    assert torch.get_num_threads() == count
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def make_model() -> nn.Module:
    """Return the same model everywhere; ranks share torch's random numbers, so they draw none."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        for place, one in enumerate(model.parameters()):
            one.copy_(torch.sin(torch.arange(float(one.numel())) + place).reshape(one.shape) / 4)
    return model


def rows() -> torch.Tensor:
    return torch.cos(torch.arange(64, dtype=torch.float32)).reshape(8, 8)


def train(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def trained_by_one() -> list[torch.Tensor]:
    model = make_model()
    train(model, rows())
    return [one.detach() for one in model.parameters()]


# -- what runs on them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 8])
def test_results_come_in_the_order_of_ranks(size: int) -> None:
    def main(rank: int, factor: float, *, offset: float) -> tuple[int, int, float]:
        x = torch.full((3,), rank * factor + offset)
        dist.all_reduce(x)
        return dist.get_rank(), dist.get_world_size(), float(x[0])

    total = float(sum(range(size)))
    assert run_threads(size, main, 1.0, offset=0.0) == [(rank, size, total) for rank in range(size)]


def test_collectives_messages_and_objects_arrive() -> None:
    def main(rank: int) -> Any:
        size = dist.get_world_size()
        gathered = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(gathered, torch.full((2,), float(rank)))
        scattered = torch.zeros(1)
        dist.reduce_scatter_single(scattered, torch.arange(float(size)))
        large = torch.full((300_000,), float(rank))
        dist.broadcast(large, src=2)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        came = torch.zeros(3)
        sending = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
        dist.recv(came, (rank - 1) % size)
        sending.wait()
        dist.barrier()
        return torch.stack(gathered)[:, 0].tolist(), scattered.item(), large[-1].item(), objects, came[0].item()

    for rank, (gathered, scattered, large, objects, came) in enumerate(run_threads(4, main)):
        assert gathered == [0.0, 1.0, 2.0, 3.0]
        assert scattered == 4.0 * rank
        assert large == 2.0
        assert objects == [{"rank": one} for one in range(4)]
        assert came == (rank - 1) % 4


def test_groups_of_some_ranks_are_each_their_own() -> None:
    def main(rank: int) -> tuple[float, float]:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        odd, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        x, y = torch.tensor(float(rank)), torch.tensor(float(rank))
        dist.all_reduce(x, group=halves[rank // 2])
        dist.all_reduce(y, group=odd)
        return x.item(), y.item()

    assert run_threads(4, main) == [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]


def test_functional_collectives_find_the_groups_of_their_thread() -> None:
    def main(rank: int) -> tuple[list[float], list[float]]:
        x = torch.full((2,), float(rank))
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        own = halves[rank // 2]
        everyone = functional.all_reduce(x, "sum", dist.group.WORLD)
        half = functional.all_gather_single(x, 0, own)
        return (everyone + 0).tolist(), (half + 0).tolist()

    found = run_threads(4, main)
    assert [one for one, _ in found] == [[6.0, 6.0]] * 4
    assert [half for _, half in found] == [[0.0, 0.0, 1.0, 1.0]] * 2 + [[2.0, 2.0, 3.0, 3.0]] * 2


def with_ddp(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(make_model())
    train(model, rows().chunk(4)[rank])
    return [one.detach() for one in model.parameters()]


def with_fully_shard(rank: int) -> list[torch.Tensor]:
    model: Any = make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    train(model, rows().chunk(4)[rank])
    return [one.full_tensor().detach() for one in model.parameters()]


def with_tensor_parallel(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, rows())
    return [one.full_tensor().detach() if isinstance(one, DTensor) else one.detach() for one in model.parameters()]


def with_a_mesh_of_two_dimensions(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(make_model(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    train(model, rows().chunk(2)[mesh.get_local_rank("data")])
    return [one.full_tensor().detach() for one in model.parameters()]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("main", [with_ddp, with_fully_shard, with_tensor_parallel, with_a_mesh_of_two_dimensions])
def test_training_on_threads_gives_what_one_process_gives(main: Callable[[int], list[torch.Tensor]]) -> None:
    wanted = trained_by_one()
    for parameters in run_threads(4, main):
        for found, want in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_distributed_tensors_are_sharded_and_put_together() -> None:
    whole = rows()

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        torch.testing.assert_close(sharded.to_local(), whole.chunk(4)[rank])
        product = sharded @ distribute_tensor(whole, mesh, [Replicate()]).t()
        torch.testing.assert_close(product.redistribute(placements=[Shard(1)]).full_tensor(), whole @ whole.t())

    run_threads(4, main)


def test_the_groups_of_the_process_stay_what_they_are() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.group.WORLD
        assert run_threads(3, lambda rank: dist.get_world_size()) == [3, 3, 3]
        assert dist.group.WORLD is before
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_runs_may_be_inside_each_other_and_at_the_same_time() -> None:
    def inner(rank: int, outer: int) -> int:
        x = torch.tensor(outer)
        dist.all_reduce(x)
        return int(x)

    def main(rank: int) -> tuple[list[int], int]:
        found = run_threads(2, inner, rank)
        x = torch.tensor(1)
        dist.all_reduce(x)
        return found, int(x)

    assert run_threads(3, main) == [([0, 0], 3), ([2, 2], 3), ([4, 4], 3)]


# -- how they end ------------------------------------------------------------------------------------------------------


class Spoiled(Exception):
    pass


@pytest.mark.parametrize("size", [2, 8])
def test_what_one_rank_raises_ends_the_others_and_is_raised(size: int) -> None:
    def main(rank: int) -> None:
        x = torch.ones(3)
        dist.all_reduce(x)
        if rank == 1:
            raise Spoiled("here")
        for _ in range(100):
            dist.all_reduce(x)

    with pytest.raises(Spoiled, match="here") as caught:
        ThreadRanks(size, timeout=LIMIT).run(main)
    notes = caught.value.__notes__
    assert notes[0] == f"This was raised on rank 1 of {size} threads."
    assert len(notes) == size
    assert all("PeerLost" in note and "rank 1" in note for note in notes[1:])


def test_a_rank_that_returns_too_early_is_named() -> None:
    def main(rank: int) -> None:
        if rank != 2:
            dist.barrier()

    with pytest.raises(PeerLost, match="rank 2") as caught:
        ThreadRanks(3, timeout=LIMIT).run(main)
    assert caught.value.rank == 2


def test_ranks_that_wait_in_vain_end_in_time_and_say_where() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)

    with pytest.raises(PeerTimeout, match=f"ranks 0, 1 of 2 threads: not over within {STARTED} s") as caught:
        ThreadRanks(2, timeout=STARTED).run(main)
    assert "dist.recv(torch.zeros(1), 1)" in caught.value.__notes__[0]
    assert "dist.recv(torch.zeros(1), 0)" in caught.value.__notes__[1]


def test_a_rank_that_waits_for_something_else_does_not_hold_up_who_began_the_run() -> None:
    released = threading.Event()

    def main(rank: int) -> None:
        if rank == 1:
            released.wait()
        else:
            dist.barrier()

    ranks = ThreadRanks(2, timeout=STARTED)
    ranks.grace = 0.1
    with pytest.raises(PeerTimeout, match="ranks 0, 1 of 2") as caught:
        ranks.run(main)
    assert "released.wait()" in caught.value.__notes__[1]
    left = [thread for thread in threading.enumerate() if thread.name == "rank 1"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    released.set()
    for thread in left:
        thread.join()
    assert dist.is_initialized()  # what is left of a run is not to end the groups of others
    dist.destroy_process_group()
    assert run_threads(2, lambda rank: rank) == [0, 1]


def test_ranks_that_do_not_come_to_a_start_are_told() -> None:
    with pytest.raises(UsageError, match="size: expected at least 1 rank, got 0"):
        run_threads(0, lambda rank: rank)
    with pytest.raises(UsageError, match="timeout: expected a positive number of seconds, got 0"):
        ThreadRanks(2, timeout=0)


def test_a_test_that_is_skipped_in_a_rank_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_threads(2, lambda rank: pytest.skip("not here"))


def test_torch_is_afterwards_as_it_was() -> None:
    world, hook = dist.distributed_c10d._world, sys.excepthook  # noqa: SLF001  # torch: the state of all groups, which threads of ranks replace by their own
    assert run_threads(2, lambda rank: rank) == [0, 1]
    assert dist.distributed_c10d._world is world  # noqa: SLF001  # torch: the state of all groups, which threads of ranks replace by their own
    with pytest.raises(ZeroDivisionError):
        run_threads(2, lambda rank: 1 // rank)
    assert dist.distributed_c10d._world is world  # noqa: SLF001  # torch: the state of all groups, which threads of ranks replace by their own
    assert sys.excepthook is hook


def test_many_runs_leave_nothing_behind() -> None:
    def main(rank: int) -> float:
        x = copy.copy(torch.ones(2))
        dist.all_reduce(x)
        return float(x[0])

    ranks = ThreadRanks(4, timeout=LIMIT)
    ranks.run(main)
    before = threading.active_count()
    for _ in range(20):
        assert ranks.run(main) == [4.0] * 4
    assert threading.active_count() <= before
