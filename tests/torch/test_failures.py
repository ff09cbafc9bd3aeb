"""Ranks that die, fail, leave and stop: the others learn soon which ones, and can go on without them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncpar.errors import PeerCancelled, PeerLost, PeerTimeout
from tests.torch.ranks import await_others, initialize, place
from tests.torch.worlds import Outcome, World, on_ranks, open_world


@contextmanager
def raises_naming(*words: str, kind: type[Exception] = PeerLost) -> Iterator[None]:
    """Assert that the block raises ``kind`` with all of ``words``."""
    with pytest.raises(kind) as raised:
        yield
    text = str(raised.value)
    assert all(word in text for word in words), text


def meet_again(name: str, *ranks: int) -> None:
    """Form a new default group of the ``ranks`` of the world that are left."""
    dist.destroy_process_group()
    here = place()
    initialize(init_method=f"{here.meeting}-{name}", rank=ranks.index(here.rank), world_size=len(ranks))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [len(ranks)] * 2


def end_without(world: World, function: Callable[..., Any], *gone: int) -> list[Outcome]:
    """Run ``function`` on all ranks, of which those ``gone`` do not return; the others must do so well."""
    world.is_broken = True  # ranks will end badly, which is as it should be
    world.start(function, limit=60)
    outcomes = world.finish(limit=60, grace=20)
    assert [outcome.rank for outcome in outcomes if not outcome.is_good] == list(gone), "\n".join(map(str, outcomes))
    return [outcomes[rank] for rank in gone]


def parallel_model() -> torch.nn.Module:
    """Return layers with a bucket each; rank 3 kills itself in the middle of the backward pass."""
    layers = [torch.nn.Linear(128, 128) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
    await_others(3)  # the model is made by broadcasts
    if dist.get_rank() == 3:
        layers[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return model


def die_in_a_backward_pass() -> None:
    model = parallel_model()
    loss = model(torch.ones(4, 128)).sum()
    with raises_naming("rank 3 on "):
        loss.backward()
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(3)), lambda: dist.recv(torch.ones(3), 3)):
        with raises_naming("rank 3 on "):
            call()
    meet_again("second", 0, 1, 2)


def end_at_once_while_others_wait() -> None:
    if dist.get_rank() == 2:
        dist.recv(torch.ones(1), 0)
        os._exit(3)
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(3), 2)
        dist.isend(torch.ones(1), 2)  # rank 2 ends when it has this: the send may end well or by that loss
        with raises_naming("rank 2 on "):
            work.wait()
        assert isinstance(work.exception(), PeerLost)
        with pytest.raises(RuntimeError, match=r"PeerLost: .*rank 2 on "):
            work.get_future().wait()
    else:
        with raises_naming("rank 2 on "):
            dist.barrier()
    meet_again("third", 0, 1)


def exit_without_destroying_the_group() -> None:
    if dist.get_rank() == 1:
        sys.exit(4)
    with raises_naming("rank 1 on ", "it left the world"):
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_others_are_told_of_every_death_and_go_on() -> None:
    with open_world(4) as world:
        [killed] = end_without(world, die_in_a_backward_pass, 3)
        assert killed.status == -signal.SIGKILL
        ended, _ = end_without(world, end_at_once_while_others_wait, 2, 3)
        assert ended.status == 3
        left, *_ = end_without(world, exit_without_destroying_the_group, 1, 2, 3)
        assert left.status == 4


def die_with_sharded_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    layers = [torch.nn.Linear(32, 32) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    if dist.get_rank() == 1:
        layers[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    x = model(torch.ones(4, 32))
    with raises_naming("rank 1 on ", kind=RuntimeError):
        x.sum().backward()
    dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.timeout(200)
def test_a_death_in_sharded_data_parallel_is_told_by_name() -> None:
    with open_world(2) as world:
        [killed] = end_without(world, die_with_sharded_parameters, 1)
        assert killed.status == -signal.SIGKILL


@on_ranks(2)
def test_a_rank_that_stands_still_is_named_and_may_go_on() -> None:
    slow = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier(slow)
    large = torch.ones(1 << 20)  # its second round takes rank 0, which has given up: a barrier's message is there
    if dist.get_rank() == 1:
        dist.send(torch.tensor([os.getpid()]), 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerCancelled, match=r"rank 0 failed in it: .*waited \d+\.\d s for rank 1"):
            dist.all_reduce(large, group=slow)
    else:
        pid = torch.zeros(1, dtype=torch.int64)
        dist.recv(pid, 1)
        with raises_naming("rank 0: all_reduce", " s for rank 1", "timeout", kind=PeerTimeout):
            dist.all_reduce(large, group=slow)
        os.kill(int(pid), signal.SIGCONT)
    for group in (slow, None):
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0] * 3


@on_ranks(2)
def test_an_operation_may_have_a_timeout_of_its_own() -> None:
    group, options = dist.new_group(), dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.3)
    if dist.get_rank() == 0:
        with raises_naming("all_reduce: not over within its timeout of 0.3 s", "for rank 1", kind=PeerTimeout):
            group.allreduce([torch.ones(3)], options).wait()
        with pytest.raises(PeerTimeout, match=r"barrier: not over within its timeout of 0\.2 s.* for rank 1"):
            group.barrier(timeout=timedelta(seconds=0.2)).wait()
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        with pytest.raises(PeerCancelled, match="rank 0 cancelled it"):
            group.allreduce([torch.ones(3)]).wait()
        with pytest.raises(PeerCancelled, match="rank 0 cancelled it"):
            group.barrier().wait()
    dist.barrier(group)


@on_ranks(2)
def test_ctrl_c_ends_a_wait_at_once() -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(3), 1, group=group)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come as soon as it is asked for
            dist.send(torch.tensor([os.getpid()]), 1)
            work.wait()
        dist.destroy_process_group(group)
    else:
        pid = torch.zeros(1, dtype=torch.int64)
        dist.recv(pid, 0)
        os.kill(int(pid), signal.SIGINT)
    dist.barrier()
