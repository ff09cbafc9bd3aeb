"""Steps and buckets of replicas are in the event ring, and name the rank that holds up the others."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchReplicas

from asyncpar.collectives.ledger import world_number
from asyncpar.core.config.names import Name
from asyncpar.core.observe.recorder import current_recorder
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.observe.image import Event, read_image
from asyncpar.observe.rounds import Cause, Round, rounds_of
from asyncpar.observe.stragglers import REPORTED_ROUNDS, find_straggler
from asyncpar.torch import DistributedDataParallel, GradientHook, gradient_hook
from tests.torch.models import WIDTH, Block
from tests.torch.worlds import on_ranks

SMALL_BUCKETS_MB = 0.0005
CULPRIT = 1
SLEEP = 0.05


class Slow(Block):
    """Takes longer on one rank."""

    seconds = SLEEP

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * (dist.get_rank() == CULPRIT))
        return super().forward(x)


def replicas(kind: str, module: nn.Module) -> nn.Module:
    if kind == "hook":
        model = TorchReplicas(module, bucket_cap_mb=SMALL_BUCKETS_MB)
        model.register_comm_hook(GradientHook(codec="int8", minimum_bytes=0), gradient_hook)
        return model
    return DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB, codec=Name(kind))


def events(since: int) -> list[Event]:
    recorder = current_recorder()
    assert recorder is not None
    return [event for event in read_image(recorder.snapshot()).events if event.ticket > since]


def last_ticket() -> int:
    return max((event.ticket for event in events(-1)), default=-1)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["none", "int8", "hook"])
def test_each_backward_pass_is_a_step_with_its_buckets(kind: str) -> None:
    torch.manual_seed(0)
    model, before = replicas(kind, Block()), last_ticket()
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
    found = events(before)
    steps = [event for event in found if event.kind is EventKind.STEP]
    assert [step.sequence for step in steps] == [1, 2, 3]
    assert {step.state for step in steps} == {EventState.COMPLETED}
    buckets = [event for event in found if event.kind is EventKind.BUCKET]
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    for step in steps:
        assert step.ended is not None
        inside = [bucket for bucket in buckets if step.created <= bucket.created < step.ended]
        assert len(inside) > 1 or step.sequence == 1  # torch knows the buckets from the second pass on
        assert {bucket.name for bucket in inside} == {f"bucket {index}" for index in range(len(inside))}
        assert sum(bucket.nbytes for bucket in inside) == nbytes
        codec = "int8" if kind == "hook" else "none"  # DistributedDataParallel leaves small buckets as they are
        assert {bucket.algorithm for bucket in inside} == {codec}
        assert all(bucket.ended is not None and bucket.state is EventState.COMPLETED for bucket in inside)


@on_ranks(3)
@pytest.mark.parametrize("kind", ["none", "hook"])
def test_a_rank_whose_forward_pass_takes_longer_is_named(kind: str) -> None:
    torch.manual_seed(0)
    model, before = replicas(kind, Slow()), last_ticket()
    for _ in range(REPORTED_ROUNDS + 1):
        model(torch.ones(2, WIDTH)).sum().backward()
    steps = [event for event in events(before) if event.kind is EventKind.STEP]
    everyone: list[list[Round]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, rounds_of(steps, steps[-1].group, REPORTED_ROUNDS))
    straggler = find_straggler(dict(enumerate(everyone)))
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (CULPRIT, Cause.COMPUTE)
    assert steps[-1].group in {world_number(generation) for generation in range(4)}


@on_ranks(2)
def test_a_backward_pass_that_fails_is_a_step_that_failed() -> None:
    torch.manual_seed(0)
    block = Block()
    model, before = replicas("none", block), last_ticket()

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("a hook fails")

    handle = block.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="a hook fails"):
        model(torch.ones(2, WIDTH)).sum().backward()
    handle.remove()
    dist.barrier()
    model.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    steps = [(event.sequence, event.state) for event in events(before) if event.kind is EventKind.STEP]
    assert steps == [(1, EventState.FAILED), (2, EventState.COMPLETED)]


def sharded(module: nn.Module, kind: str) -> nn.Module:
    if kind == "fully_shard":
        fully_shard(module)
        return module
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_each_step_of_an_optimizer_of_a_sharded_model_is_a_step_but_the_first(kind: str) -> None:
    torch.manual_seed(0)
    slow = Slow()
    slow.seconds = 0.2
    model, before = sharded(slow, kind), last_ticket()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    passes = 6
    for _ in range(passes):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = [event for event in events(before) if event.kind is EventKind.STEP]
    assert len(steps) in (passes - 1, passes)  # nothing records when the first one began, in a new process
    assert {step.name for step in steps} == {"optimizer"}
    for one, two in itertools.pairwise(steps):
        assert two.sequence == one.sequence + 1
        assert one.ended is not None
        assert one.ended <= two.created
    assert steps[-1].group in {world_number(generation) for generation in range(4)}
    rounds = rounds_of(steps, steps[-1].group, REPORTED_ROUNDS)
    assert len(rounds) == len(steps) - 1
    own = min(one.own for one in rounds)  # what a rank waits for the other is not its own
    assert (own >= 2 * slow.seconds) is (dist.get_rank() == CULPRIT)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["none", "hook"])
def test_an_optimizer_that_moves_replicas_ends_no_step(kind: str) -> None:
    torch.manual_seed(0)
    model, before = replicas(kind, Block()), last_ticket()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    steps = [event for event in events(before) if event.kind is EventKind.STEP]
    assert len(steps) == 4
    assert "optimizer" not in {step.name for step in steps}


@on_ranks(2)
def test_an_optimizer_may_be_compiled() -> None:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        dist.all_reduce(torch.ones(1))
        step()
