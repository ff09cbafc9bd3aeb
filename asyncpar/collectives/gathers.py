"""Operations without a root that leave the same result on all ranks: ``all_gather``, ``all_gather_v``, ``barrier``."""

from __future__ import annotations

from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import numpy as np

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.arrays import (
    LARGEST_LENGTH,
    Array,
    check_array,
    check_out,
    check_rows,
    contiguous,
)
from asyncpar.collectives.engine import Engine, OperationPlan, describe_array
from asyncpar.collectives.execute import InPlace, execute
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import AlongChunks, Slice
from asyncpar.collectives.protocol import describe
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import MakeProgram
from asyncpar.errors import ProtocolError
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program


def all_gather(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    source = check_array(x)
    target = check_out(out, (engine.size, *source.shape), source.dtype, make=engine.table.links.memory.empty)
    plan = engine.prepared(
        ("all_gather", source.dtype, source.shape, algorithm),
        lambda: _prepare_all_gather(engine, source, algorithm),
    )

    async def body(operation: Operation) -> Array:
        work = contiguous(target)
        work[engine.rank] = source
        await execute(operation, plan.messages, InPlace(work))
        if work is not target:
            target[...] = work
        return target

    if plan.is_in_arena:
        make = _all_gather_program(source, target)
        return engine.start_in_arena(
            "all_gather", plan, make, body, key=key, result=target, shows=source, sends=source.nbytes
        )
    return engine.start("all_gather", plan.description, key, body)


def _all_gather_program(source: Array, target: Array) -> MakeProgram:
    def make(turn: Turn) -> Program:
        flat = contiguous(source).reshape(-1)
        work = contiguous(target)
        rows = work.reshape(turn.channel.size, -1)
        flow = programs.flow(turn, [(0, flat.size)] * turn.channel.size, flat.dtype, is_shared=True)
        yield from programs.exchange(turn, flow, flat, lambda start, pieces: programs.lay_down(rows, start, pieces))
        if work is not target:
            target[...] = work

    return make


def _prepare_all_gather(engine: Engine, x: Array, wanted: str | None) -> OperationPlan:
    payload = x.nbytes * engine.size
    algorithm = engine.algorithm("all_gather", payload, wanted, arena=True)
    schedule = engine.schedule("all_gather", engine.message_algorithm("all_gather", payload, algorithm))
    layout = AlongChunks(equal_chunks(engine.size, x.size), longest=x.size, itemsize=x.itemsize)
    return OperationPlan(
        description=describe_array("all_gather", x.dtype, x.shape, (), algorithm),
        messages=engine.bind(schedule, layout),
        is_in_arena=algorithm == ARENA,
    )


def equal_chunks(chunks: int, count: int) -> list[Slice]:
    """Return the slices of ``chunks`` chunks of ``count`` elements each, one after another in region 0."""
    return [Slice(0, chunk * count, (chunk + 1) * count) for chunk in range(chunks)]


def all_gather_v(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    source = check_rows(check_array(x))
    if out is not None:
        check_array(out, "out")
    if algorithm is not None:
        engine.algorithm("all_gather", 0, algorithm)
    rest = source.shape[1:]
    description = describe_array("all_gather_v", source.dtype, (None, *rest), (), algorithm or "auto")

    async def body(operation: Operation) -> Array:
        rows = await exchange_numbers(engine, operation, [source.shape[0]])
        counts = tuple(check_lengths(rows[:, 0]))
        plan = engine.prepared(
            ("all_gather_v", source.dtype, rest, counts, algorithm),
            lambda: _prepare_all_gather_v(engine, source, counts, algorithm),
        ).messages
        target = check_out(out, (sum(counts), *rest), source.dtype, make=engine.table.links.memory.empty)
        work = contiguous(target)
        first = sum(counts[: engine.rank])
        work[first : first + source.shape[0]] = source
        await execute(operation, plan, InPlace(work))
        if work is not target:
            target[...] = work
        return target

    return engine.start("all_gather_v", description, key, body)


def _prepare_all_gather_v(engine: Engine, x: Array, counts: tuple[int, ...], wanted: str | None) -> OperationPlan:
    row = int(np.prod(x.shape[1:], dtype=np.int64))
    algorithm = engine.algorithm("all_gather", sum(counts) * row * x.itemsize, wanted)
    ends = np.cumsum((0, *counts)) * row
    slices = [Slice(0, int(low), int(high)) for low, high in pairwise(ends)]
    layout = AlongChunks(slices, longest=max(counts) * row, itemsize=x.itemsize)
    return OperationPlan(
        description=describe_array("all_gather_v", x.dtype, (None, *x.shape[1:]), (), wanted or "auto"),
        messages=engine.bind(engine.schedule("all_gather", algorithm), layout, phase=1),
    )


async def exchange_numbers(engine: Engine, operation: Operation, numbers: list[int]) -> Array:
    """Return the matrix of the numbers of all ranks, one row per rank, as the first phase of an operation."""
    plan = engine.prepared(("numbers", len(numbers)), lambda: _prepare_numbers(engine, len(numbers))).messages
    matrix = np.empty((engine.size, len(numbers)), np.int64)
    matrix[engine.rank] = numbers
    await execute(operation, plan, InPlace(matrix))
    return matrix


def check_lengths(numbers: Array) -> list[int]:
    """Return lengths received from other ranks.  Raises ``ProtocolError`` for invalid ones."""
    lengths: list[int] = [int(number) for number in numbers]
    if min(lengths) < 0 or max(lengths) > LARGEST_LENGTH:
        raise ProtocolError(f"lengths from other ranks: expected 0..{LARGEST_LENGTH}, got {lengths}")
    return lengths


def _prepare_numbers(engine: Engine, count: int) -> OperationPlan:
    layout = AlongChunks(equal_chunks(engine.size, count), longest=count, itemsize=8)
    return OperationPlan(
        description=describe("numbers", (), "bruck"),
        messages=engine.bind(engine.schedule("all_gather", "bruck"), layout),
    )


def barrier(engine: Engine, *, algorithm: str | None, key: str | None) -> Coroutine[Any, Any, None]:
    plan = engine.prepared(("barrier", algorithm), lambda: _prepare_barrier(engine, algorithm))

    async def body(operation: Operation) -> None:
        await execute(operation, plan.messages, InPlace())

    if plan.is_in_arena:
        return engine.start_in_arena("barrier", plan, programs.barrier, body, key=key, result=None)
    return engine.start("barrier", plan.description, key, body)


def _prepare_barrier(engine: Engine, wanted: str | None) -> OperationPlan:
    algorithm = engine.algorithm("barrier", 0, wanted, arena=True)
    return OperationPlan(
        description=describe("barrier", (), algorithm),
        messages=engine.bind(
            engine.schedule("barrier", engine.message_algorithm("barrier", 0, algorithm)),
            AlongChunks((), longest=0, itemsize=1),
        ),
        is_in_arena=algorithm == ARENA,
    )
