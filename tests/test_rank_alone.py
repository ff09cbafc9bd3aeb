"""A rank alone has no other to wait for, so it must give its event loop a turn of its own accord."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.nn import Initializer, Linear, Parameter
from asyncpar.nn.optimizers import AdamW, Optimizer
from asyncpar.node import Node
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage
from tests.multinode.worlds import members
from tests.parallel.replicas import make_batch, make_model, open_replica, train_step

Once = Callable[[], Awaitable[object]]
Prepare = Callable[[Node, AsyncExitStack], Awaitable[Once]]

MOST_CALLS = 200_000
"""Seconds of calls: the loop is due after some milliseconds of them."""

_X = np.ones(4, np.float32)


async def _exhaust(communicator: Communicator) -> None:
    async for _ in communicator.all_reduce.parts(_X):
        pass


async def _shrink(communicator: Communicator) -> None:
    (await communicator.shrink()).close()


async def _split(communicator: Communicator) -> None:
    group = await communicator.split(0)
    assert group is not None
    group.close()


OPERATIONS: dict[str, Callable[[Communicator], Awaitable[object]]] = {
    "all_reduce": lambda c: c.all_reduce(_X),
    "all_reduce of a megabyte": lambda c: c.all_reduce(np.ones(1 << 18, np.float32)),
    "all_reduce with a key": lambda c: c.all_reduce(_X, key="key"),
    "all_reduce_many": lambda c: c.all_reduce_many([_X, _X]),
    "all_reduce of a quorum": lambda c: c.all_reduce(_X, until=ap.Quorum(1)),
    "all_reduce.parts": _exhaust,
    "reduce": lambda c: c.reduce(_X, root=0),
    "reduce_scatter": lambda c: c.reduce_scatter(_X),
    "all_gather": lambda c: c.all_gather(_X),
    "all_gather_v": lambda c: c.all_gather_v(_X),
    "gather": lambda c: c.gather(_X, root=0),
    "scatter": lambda c: c.scatter(_X.reshape(1, 4), root=0),
    "broadcast": lambda c: c.broadcast(_X, root=0),
    "all_to_all": lambda c: c.all_to_all(_X.reshape(1, 4)),
    "all_to_all_v": lambda c: c.all_to_all_v(_X, [4]),
    "barrier": lambda c: c.barrier(),
    "all_gather_object": lambda c: c.all_gather_object({"a": 1}),
    "gather_object": lambda c: c.gather_object({"a": 1}, root=0),
    "scatter_object": lambda c: c.scatter_object([1], root=0),
    "broadcast_object": lambda c: c.broadcast_object({"a": 1}, root=0),
    "agree": lambda c: c.agree(1),
    "shrink": _shrink,
    "split": _split,
    "calibrate": lambda c: c.calibrate(),
}


class Counter(ap.Actor):
    def __init__(self) -> None:
        self.total = 0

    @ap.endpoint
    async def add(self, number: int) -> int:
        self.total += number
        return self.total


async def ask_oneself(node: Node, _stack: AsyncExitStack) -> Once:
    counter = await node.spawn(Counter)
    return lambda: counter.add(1)


async def synchronize_gradients(node: Node, _stack: AsyncExitStack) -> Once:
    synchronizer = GradientSynchronizer.data_parallel(node.world)
    parameters = [Parameter(f"weight{i}", np.zeros((8, 8), np.float32)) for i in range(2)]

    async def step() -> None:
        async with synchronizer.step(parameters) as begun:
            for parameter in reversed(parameters):
                begun.ready(parameter.name)

    return step


async def train_a_replica(node: Node, stack: AsyncExitStack) -> Once:
    replica = await stack.enter_async_context(open_replica(node, make_model()))
    batch = make_batch(2)
    return lambda: train_step(replica, *batch)


def shard(stage: ZeROStage) -> Prepare:
    async def prepare(node: Node, stack: AsyncExitStack) -> Once:
        layer = Linear("layer", 4, 4, initializer=Initializer.from_seed(1))
        optimizer = ZeROOptimizer(AdamW(), ZeROConfig(stage=stage), node.world, learning_rate=1e-3)
        stack.callback(optimizer.close)
        await optimizer.register_parameters(layer.parameters())

        async def step() -> None:
            layer.parameters()[0].accumulate(np.ones((4, 4), np.float32))
            await optimizer.optimizer_step()

        return step

    return prepare


async def train_over_nodes(_node: Node, stack: AsyncExitStack) -> Once:
    (member,) = await stack.enter_async_context(members(1, 1))
    return lambda: member.step(0)


async def take_elastic_steps(_node: Node, stack: AsyncExitStack) -> Once:
    job = await stack.enter_async_context(ap.elastic(portions=2, seed=7))
    parameters = [Parameter("weight", np.zeros(4, np.float32))]
    optimizer = Optimizer(parameters, AdamW())
    steps = job.steps(job.state(parameters, optimizer), until=MOST_CALLS)

    async def step() -> None:
        async with await anext(steps) as begun:
            for portion in begun.portions:
                begun.add(portion, {"weight": np.ones(4, np.float32)})
            gradients = await begun.reduce("mean")
            await begun.update(optimizer, gradients, learning_rate=1e-3)

    return step


WAYS: dict[str, Prepare] = {
    "an actor's ask": ask_oneself,
    "gradient synchronizer": synchronize_gradients,
    "data parallelism": train_a_replica,
    "ZeRO 1": shard(ZeROStage.STAGE1),
    "ZeRO 2": shard(ZeROStage.STAGE2),
    "multi-node trainer": train_over_nodes,
    "elastic steps": take_elastic_steps,
}


async def assert_gives_turns(once: Once) -> None:
    """Do it again and again until the loop has run something else."""
    await once()  # what only the first one does may wait
    for _ in range(3):
        turns: list[None] = []
        asyncio.get_running_loop().call_soon(turns.append, None)
        for _ in range(MOST_CALLS):
            await once()
            if turns:
                break
        assert turns


@pytest.mark.parametrize("name", OPERATIONS)
async def test_operations_of_a_rank_alone_give_the_loop_its_turn(name: str) -> None:
    async with ap.testing.local_world(1, transport="inproc") as (node,):
        await assert_gives_turns(lambda: OPERATIONS[name](node.world))


@pytest.mark.parametrize("name", OPERATIONS)
async def test_operations_of_a_group_of_one_give_the_loop_its_turn(name: str) -> None:
    async with ap.testing.local_world(2, transport="inproc") as nodes:
        alone = nodes[0].world.subgroup([0], key="alone")
        assert alone is not None
        await assert_gives_turns(lambda: OPERATIONS[name](alone))


@pytest.mark.parametrize("name", WAYS)
async def test_training_alone_gives_the_loop_its_turn(name: str) -> None:
    async with ap.testing.local_world(1, transport="inproc") as (node,), AsyncExitStack() as stack:
        await assert_gives_turns(await WAYS[name](node, stack))


async def test_an_operation_alone_can_be_cancelled_between_others() -> None:
    async with ap.testing.local_world(1, transport="inproc") as (node,):

        async def reduce_for_ever() -> None:
            while True:
                await node.world.all_reduce(_X)

        task = asyncio.create_task(reduce_for_ever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await node.world.all_gather_object(1) == [1]
