"""Operations in which every rank sends different data to every rank: ``all_to_all``, ``all_to_all_v``."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.arrays import (
    Array,
    check_apart,
    check_array,
    check_counts,
    check_leading,
    check_out,
    check_rows,
    contiguous,
)
from asyncpar.collectives.engine import Engine, OperationPlan, describe_array
from asyncpar.collectives.execute import InPlace, execute
from asyncpar.collectives.gathers import check_lengths, exchange_numbers
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import AlongChunks, Plan, Slice
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import MakeProgram
from asyncpar.errors import OperationMismatch
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

_SHOWN = 4
"""Number of differing counts that an error names; of further ones it has the number."""


class AllToAllPlan(OperationPlan, frozen=True, kw_only=True):
    """Plan of an all_to_all; ``scratch`` is the number of elements for chunks that this rank passes on."""

    scratch: int


def all_to_all(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    source = check_leading(check_array(x), engine.size)
    target = check_out(out, source.shape, source.dtype, make=engine.table.links.memory.empty)
    if out is not None:
        check_apart(source, target)
    plan = engine.prepared(
        ("all_to_all", source.dtype, source.shape, algorithm),
        lambda: _prepare_all_to_all(engine, source, algorithm),
    )

    async def body(operation: Operation) -> Array:
        work = contiguous(target)
        scratch = np.empty(plan.scratch, source.dtype)
        await execute(operation, plan.messages, InPlace(contiguous(source), work, scratch))
        if work is not target:
            target[...] = work
        return target

    if plan.is_in_arena:
        make = _all_to_all_program(source, target)
        sends = source.nbytes - source[0].nbytes
        return engine.start_in_arena("all_to_all", plan, make, body, key=key, result=target, shows=source, sends=sends)
    return engine.start("all_to_all", plan.description, key, body)


def _all_to_all_program(source: Array, target: Array) -> MakeProgram:
    def make(turn: Turn) -> Program:
        size = turn.channel.size
        work = contiguous(target)
        rows = work.reshape(size, -1)
        width = rows.shape[1]
        slices = [(place * width, (place + 1) * width) for place in range(size)]
        flow = programs.flow(turn, slices, source.dtype, is_shared=False)
        flat = contiguous(source).reshape(-1)
        yield from programs.exchange(turn, flow, flat, lambda start, pieces: programs.lay_down(rows, start, pieces))
        if work is not target:
            target[...] = work

    return make


def _prepare_all_to_all(engine: Engine, x: Array, wanted: str | None) -> AllToAllPlan:
    size = engine.size
    algorithm = engine.algorithm("all_to_all", x.nbytes, wanted, arena=True)
    schedule = engine.schedule("all_to_all", engine.message_algorithm("all_to_all", x.nbytes, algorithm))
    count = x.size // size
    slices: list[Slice] = []
    for chunk in range(schedule.chunks):
        region = min(chunk // size, 2)  # input, output, and all the rest is scratch
        start = (chunk - region * size) * count
        slices.append(Slice(region, start, start + count))
    layout = AlongChunks(slices, longest=count, itemsize=x.itemsize)
    return AllToAllPlan(
        description=describe_array("all_to_all", x.dtype, x.shape, (), algorithm),
        messages=engine.bind(schedule, layout),
        scratch=max(schedule.chunks - 2 * size, 0) * count,
        is_in_arena=algorithm == ARENA,
    )


def all_to_all_v(
    engine: Engine,
    x: object,
    counts: object,
    *,
    out: object = None,
    key: str | None = None,
    expected: Sequence[int] = (),
    what: str = "rows",
) -> Coroutine[Any, Any, Any]:
    source = check_rows(check_array(x))
    if out is not None:
        check_array(out, "out")
    sent = check_counts(counts, engine.size, source.shape[0])
    rest = source.shape[1:]
    details = ("expected",) if expected else ()
    description = describe_array("all_to_all_v", source.dtype, (None, *rest), details, "pairwise")

    async def body(operation: Operation) -> tuple[Array, list[int]]:
        numbers = await exchange_numbers(engine, operation, [*sent, *expected])
        check_lengths(numbers.reshape(-1))
        matrix = numbers[:, : engine.size]
        if expected:
            _check_expected(engine, matrix, numbers[:, engine.size :], what)
        received = [int(count) for count in matrix[:, engine.rank]]
        target = check_out(out, (sum(received), *rest), source.dtype, make=engine.table.links.memory.empty)
        if out is not None:
            check_apart(source, target)
        work = contiguous(target)
        plan = _plan_all_to_all_v(engine, source, sent, received, longest=int(matrix.max()))
        await execute(operation, plan, InPlace(contiguous(source), work))
        if work is not target:
            target[...] = work
        return target, received

    return engine.start("all_to_all_v", description, key, body)


def _check_expected(engine: Engine, sent: Array, expected: Array, what: str) -> None:
    """Raise the same on all ranks unless each gets what it expects; ``sent`` is by sender, ``expected`` by receiver."""
    different = np.argwhere(expected != sent.T).tolist()
    if different:
        differences = [
            f"rank {engine.ranks[sender]} sends {sent[sender, receiver]} {what} where rank {engine.ranks[receiver]} "
            f"expects {expected[receiver, sender]}"
            for receiver, sender in different[:_SHOWN]
        ]
        more = f", and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise OperationMismatch(f"{', '.join(differences)}{more} (group {engine.group.name})")


def _plan_all_to_all_v(engine: Engine, x: Array, sent: list[int], received: list[int], *, longest: int) -> Plan:
    row = int(np.prod(x.shape[1:], dtype=np.int64))
    slices: list[Slice] = []
    for region, counts in enumerate((sent, received)):
        ends = np.cumsum((0, *counts)) * row
        slices += [Slice(region, int(low), int(high)) for low, high in pairwise(ends)]
    layout = AlongChunks(slices, longest=longest * row, itemsize=x.itemsize)
    schedule = engine.schedule("all_to_all", "pairwise")
    return engine.bind(schedule, layout, phase=1)
