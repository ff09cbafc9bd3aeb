"""A collective algorithm from outside the package: a schedule of rounds, and what the cost model reckons with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from asyncpar.collectives.algorithms.catalog import (
    ALGORITHMS,
    Algorithm,
    known_algorithms,
    register_algorithm,
    schedule_of,
    unregister_algorithm,
)
from asyncpar.collectives.algorithms.steps import Recv, Round, Send, one
from asyncpar.collectives.algorithms.work import AlgorithmWork
from asyncpar.core.config.names import Name
from asyncpar.errors import UsageError
from asyncpar.testing import local_world


def star(rank: int, size: int) -> Iterator[Round]:
    """Rank 0 sums what every rank sends, and sends the sum to all."""
    if rank == 0:
        for peer in range(1, size):
            yield (Recv(peer, one(0), reduce=True),)
        yield tuple(Send(peer, one(0)) for peer in range(1, size))
    else:
        yield (Send(0, one(0)),)
        yield (Recv(0, one(0)),)


def work(size: int, payload: float) -> AlgorithmWork:
    return AlgorithmWork(size, 2 * (size - 1) * payload, (size - 1) * payload)


STAR = Algorithm(operation="all_reduce", name="star", rounds=star, work=work)


@pytest.fixture
def registered() -> Iterator[None]:
    register_algorithm(STAR)
    yield
    unregister_algorithm("all_reduce", "star")


async def sums(size: int, *, algorithm: str | None = None, pin: str | None = None) -> tuple[list[np.ndarray], int]:
    """Return the sum on each rank, and how many messages rank 0 received."""
    async with local_world(size, pin=pin) as nodes:
        arrays = [np.full(1000, node.rank + 1.0) for node in nodes]
        wanted = None if algorithm is None else Name(algorithm)
        operations = (node.world.all_reduce(x, algorithm=wanted) for node, x in zip(nodes, arrays, strict=True))
        await asyncio.gather(*operations)
        assert "star" in nodes[0].world.algorithms("all_reduce")
        assert "star" in nodes[0].world.algorithm_table()
        return arrays, nodes[0].world.traffic.of("all_reduce").payload_bytes


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("size", [1, 2, 5])
async def test_it_carries_an_all_reduce(size: int) -> None:
    arrays, sent = await sums(size, algorithm="star")
    assert all((x == size * (size + 1) / 2).all() for x in arrays)
    assert sent == 8000 * (size - 1)


@pytest.mark.usefixtures("registered")
async def test_a_pin_takes_it() -> None:
    _, sent = await sums(4, pin="all_reduce:0-inf@star")
    assert sent == 3 * 8000, "rank 0 sends the whole array to each of the others"


async def test_the_cost_model_chooses_it_where_it_is_the_cheapest() -> None:
    with ALGORITHMS["all_reduce"].registered(replace(STAR, work=lambda size, payload: AlgorithmWork(0.1, 0))):
        _, sent = await sums(4)
    assert sent == 3 * 8000


async def test_its_name_is_known_as_long_as_it_is_registered() -> None:
    assert "star" not in known_algorithms("all_reduce")
    async with local_world(1) as (node,):
        with pytest.raises(UsageError, match=r"all_reduce has ring, halving, doubling, tree, .*; got 'star'"):
            await node.world.all_reduce(np.zeros(3), algorithm=Name("star"))
    with pytest.raises(UsageError, match=r"expected one of ring, .*, got 'star'"):
        unregister_algorithm("all_reduce", "star")


def test_a_name_that_is_registered_anew_is_the_new_algorithm() -> None:
    def one_chunk(size: int) -> int:
        return 1

    def two_chunks(size: int) -> int:
        return 2

    found = []
    for chunks in (one_chunk, two_chunks):
        with ALGORITHMS["all_reduce"].registered(replace(STAR, chunks=chunks)):
            found.append(schedule_of("all_reduce", "star", rank=0, size=3).chunks)
    assert found == [1, 2]


def deaf(rank: int, size: int) -> Iterator[Round]:
    """The other ranks do not take the sum."""
    yield from star(rank, size) if rank == 0 else [(Send(0, one(0)),)]


def forgetful(rank: int, size: int) -> Iterator[Round]:
    """Rank 0 forgets the last rank's part."""
    for steps in star(rank, size):
        yield tuple(Recv(step.peer, step.chunks) if isinstance(step, Recv) else step for step in steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "ring"}, "algorithm of all_reduce: the name 'ring' is taken; choose another name"),
        ({"name": "arena"}, "the name 'arena' has a meaning of its own; choose another name"),
        ({"name": "hierarchical"}, "the name 'hierarchical' has a meaning of its own"),
        ({"name": "a@b"}, "got 'a@b'; change the name"),
        ({"operation": "sort"}, "operation: expected one of all_reduce, .*, got 'sort'"),
        ({"rounds": deaf}, "algorithm 'star' of all_reduce: rounds: wrong on 2 ranks: .*; correct the schedule"),
        ({"rounds": forgetful}, "rounds: wrong on 2 ranks: .*; correct the schedule"),
        (
            {"work": lambda size, payload: AlgorithmWork(-1, 0)},
            r"work: expected an AlgorithmWork .*steps=-1",
        ),
        (
            {"work": lambda size, payload: AlgorithmWork(1, math.inf)},
            r"work: expected an AlgorithmWork .*moved=inf",
        ),
        (
            {"work": lambda size, payload: 3.0},
            r"expected an AlgorithmWork of finite figures from 0, got 3.0 for 2 ranks",
        ),
    ],
)
def test_a_wrong_registration_is_refused_and_says_what_to_change(changes: dict[str, object], message: str) -> None:
    before = known_algorithms("all_reduce")
    with pytest.raises(UsageError, match=message):
        register_algorithm(replace(STAR, **changes))  # type: ignore[arg-type]
    assert known_algorithms("all_reduce") == before
