"""Operations that combine: ``all_reduce``, ``reduce``, ``reduce_scatter``."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.algorithms.steps import RankSchedule, Recv
from asyncpar.collectives.arrays import (
    Array,
    Reduction,
    check_apart,
    check_array,
    check_only_root,
    check_out,
    check_rank,
    check_rows,
    check_writable,
    collective_reduction,
    contiguous,
)
from asyncpar.collectives.engine import Engine, OperationPlan, describe_array
from asyncpar.collectives.execute import InPlace, Scratch, Workspace, execute
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.parts import FinishedParts, PartStream, TakePart
from asyncpar.collectives.plan import (
    SEGMENT_BYTES,
    AlongBuffer,
    AlongChunks,
    PackedChunks,
    Slice,
    packed_segment,
    split_segment,
)
from asyncpar.collectives.quick_call import QuickCall
from asyncpar.collectives.rooted import confirmed, to_root
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.all_reduce import all_reduce_program
from asyncpar.collectives.shared_memory.call import HostedOperation, MakeProgram
from asyncpar.collectives.shared_memory.fast_path import quick_all_reduce
from asyncpar.collectives.shared_memory.hierarchical import Route, all_reduce_layout, run_all_reduce
from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.errors import UsageError
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program


class AllReducePlan(OperationPlan, frozen=True, kw_only=True):
    """Plan of an ``all_reduce``; ``route`` leads through the arenas of several hosts."""

    reduction: Reduction
    layout: AlongBuffer
    route: Route | None


class ReducePlan(OperationPlan, frozen=True, kw_only=True):
    """Plan of a ``reduce``; ``receives`` means that this rank, not the root, combines data from other ranks."""

    reduction: Reduction
    layout: AlongBuffer
    receives: bool


class ReduceScatterPlan(OperationPlan, frozen=True, kw_only=True):
    """Layouts of the input, of this rank's slice of the result, and of the scratch, for algorithms that need one."""

    reduction: Reduction
    spread: AlongChunks
    packed: PackedChunks | None
    own: AlongChunks


def all_reduce(
    engine: Engine, x: object, *, op: str, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    if out is None and key is None and algorithm is None and type(x) is np.ndarray:
        quick = engine.quick.get(("all_reduce", op, x.dtype, x.shape))
        if quick is not None and x.flags.writeable:
            return QuickCall(engine, quick, x)
    source = check_array(x)
    return start_all_reduce(engine, source, target_of(source, x, out), op=op, algorithm=algorithm, key=key)


def all_reduce_parts(
    engine: Engine, x: object, *, op: str, out: object, algorithm: str | None, key: str | None
) -> PartStream:
    source = check_array(x)
    target, parts = target_of(source, x, out), FinishedParts()
    call = start_all_reduce(engine, source, target, op=op, algorithm=algorithm, key=key, take=parts.take)
    return PartStream(call, parts)


def target_of(source: Array, x: object, out: object) -> Array:
    """Return the array that receives the result: ``x`` itself without ``out``."""
    return check_writable(source, "x") if out is None or out is x else check_out(out, source.shape, source.dtype)


def start_all_reduce(
    engine: Engine,
    source: Array,
    target: Array,
    *,
    op: str,
    algorithm: str | None,
    key: str | None,
    take: TakePart | None = None,
) -> Coroutine[Any, Any, Any]:
    """Give a call its place; ``take`` receives the parts of the result as they are finished."""
    plan = engine.prepared(
        ("all_reduce", source.dtype, source.shape, op, algorithm),
        lambda: _prepare_all_reduce(engine, source, op, algorithm),
    )
    reduction, layout, route = plan.reduction, plan.layout, plan.route
    take = None if take is None else _taken_into(target, take)

    async def body(operation: Operation) -> Array:
        reduction.load(source, target, engine.size)
        work = contiguous(target)
        flat = work.reshape(-1)

        def finish(piece: int, divides: bool) -> None:
            start, stop = layout.bounds(piece)
            if divides:
                reduction.finish(flat[start:stop], engine.size)
            if take is not None:
                take(flat, start, stop)

        def workspace(finishes: bool) -> Workspace:
            divides = finishes and reduction.divides
            return InPlace(flat, finish=partial(finish, divides=divides) if divides or take is not None else None)

        if route is None:
            await execute(operation, plan.messages, workspace(True), reduction.combine)
        else:
            await run_all_reduce(operation, route, plan.messages, workspace, reduction, engine.size)
        if work is not target and take is None:
            target[...] = work
        return target

    if plan.is_in_arena:
        if key is None and algorithm is None and source is target and take is None:
            engine.plan_quickly(
                ("all_reduce", op, source.dtype, source.shape),
                lambda group, channel: quick_all_reduce(group, channel, plan.description, source, reduction),
            )
        make = all_reduce_program(source, target, reduction, take)
        return engine.start_in_arena(
            "all_reduce", plan, make, body, key=key, result=target, shows=target, sends=source.nbytes
        )
    kind = Operation if route is None else HostedOperation
    return engine.start("all_reduce", plan.description, key, body, kind=kind)


def _taken_into(target: Array, take: TakePart) -> TakePart:
    """Return ``take`` for a result in ``target``: a target that is not contiguous receives its parts one by one."""
    if target.flags.c_contiguous:
        return take

    def write(flat: Array, start: int, stop: int) -> None:
        target.flat[start:stop] = flat[start:stop]
        take(flat, start, stop)

    return write


def _prepare_all_reduce(engine: Engine, x: Array, op: str, wanted: str | None) -> AllReducePlan:
    reduction = collective_reduction(op, x.dtype)
    name, segment = split_segment(wanted) if isinstance(wanted, str) else (wanted, None)
    algorithm = engine.algorithm("all_reduce", x.nbytes, name, arena=True)
    if segment is not None and algorithm == ARENA:
        raise UsageError(f"algorithm: the arena has no messages, so that they have no size; got {wanted!r}")
    by_messages = engine.message_algorithm("all_reduce", x.nbytes, algorithm)
    schedule = engine.schedule("all_reduce", by_messages)
    layout = all_reduce_layout(
        by_messages, count=x.size, chunks=schedule.chunks, itemsize=x.itemsize, segment=segment or SEGMENT_BYTES
    )
    named = algorithm if segment is None or wanted is None else wanted
    return AllReducePlan(
        description=describe_array("all_reduce", x.dtype, x.shape, (op,), named),
        messages=engine.bind(schedule, layout),
        reduction=reduction,
        layout=layout,
        route=engine.route(algorithm, layout),
        is_in_arena=algorithm == ARENA,
    )


def reduce(
    engine: Engine, x: object, *, op: str, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    source = check_array(x)
    root = check_rank(root, engine.size)
    check_only_root(out, "out", engine.rank, root)
    target = (
        check_out(out, source.shape, source.dtype, make=engine.table.links.memory.empty)
        if engine.rank == root
        else None
    )
    plan = engine.prepared(
        ("reduce", source.dtype, source.shape, op, root, algorithm),
        lambda: _prepare_reduce(engine, source, op, root, algorithm),
    )
    messages, reduction = plan.messages, plan.reduction
    source = reduction.loaded(source, engine.size)

    async def body(operation: Operation) -> Array | None:
        if target is None:
            flat = contiguous(source).reshape(-1)
            partial = _partial(operation, flat, plan.layout) if plan.receives else InPlace(flat)
            await to_root(
                engine, operation, root, messages, lambda: execute(operation, messages, partial, reduction.combine)
            )
            return None
        target[...] = source
        work = contiguous(target)
        await to_root(
            engine, operation, root, messages, lambda: execute(operation, messages, InPlace(work), reduction.combine)
        )
        reduction.finish(work, engine.size)
        if work is not target:
            target[...] = work
        return target

    if plan.is_in_arena:
        make = _reduce_program(source, target, reduction, root)
        sends = source.nbytes if target is None else 0
        return engine.start_in_arena("reduce", plan, make, body, key=key, result=target, shows=source, sends=sends)
    return engine.start("reduce", plan.description, key, body)


def _reduce_program(source: Array, target: Array | None, reduction: Reduction, root: int) -> MakeProgram:
    """Return the program; ``target`` is the root's."""

    def make(turn: Turn) -> Program:
        flat = contiguous(source).reshape(-1)
        flow = programs.flow(turn, [(0, flat.size)] * turn.channel.size, flat.dtype, is_shared=True, is_piped=True)
        if target is None:
            yield from programs.hand_out(turn, flow, flat, (root,))
            return
        work = contiguous(target)
        result = work.reshape(-1)

        def take(start: int, pieces: Sequence[Array]) -> None:
            own = flat[start : start + len(pieces[0])]
            ordered = [*pieces[:root], own, *pieces[root:]]
            programs.combine_pieces(result[start : start + len(own)], ordered, reduction)

        yield from programs.take_in(turn, flow, turn.channel.others, take)
        reduction.finish(result, turn.channel.size)
        if work is not target:
            target[...] = work

    return make


def _partial(operation: Operation, flat: Array, layout: AlongBuffer) -> Workspace:
    """Return scratch for the partial sums of a rank other than the root."""

    def fill(piece: int) -> list[tuple[Slice, Slice]]:
        start, stop = layout.bounds(piece)
        return [(Slice(0, 0, stop - start), Slice(0, start, stop))]

    def length(piece: int) -> int:
        start, stop = layout.bounds(piece)
        return stop - start

    return Scratch(pool=operation.context.pool, dtype=flat.dtype, length=length, source=flat, fill=fill)


def _prepare_reduce(engine: Engine, x: Array, op: str, root: int, wanted: str | None) -> ReducePlan:
    reduction = collective_reduction(op, x.dtype)
    algorithm = engine.algorithm("reduce", x.nbytes, wanted, arena=True)
    schedule = engine.schedule("reduce", engine.message_algorithm("reduce", x.nbytes, algorithm), root)
    receives = engine.rank != root and _receives(schedule)
    layout = AlongBuffer(count=x.size, chunks=1, itemsize=x.itemsize, is_packed=receives)
    return ReducePlan(
        description=describe_array("reduce", x.dtype, x.shape, (op, f"root={root}"), algorithm),
        messages=engine.bind(confirmed(engine, schedule, layout, root, "to root"), layout),
        reduction=reduction,
        layout=layout,
        receives=receives,
        is_in_arena=algorithm == ARENA,
    )


def _receives(schedule: RankSchedule) -> bool:
    return any(isinstance(step, Recv) for steps in schedule.rounds for step in steps)


def reduce_scatter(
    engine: Engine, x: object, *, op: str, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    source = check_rows(check_array(x))
    start, stop = ceil_chunks(source.shape[0], engine.size)[engine.rank]
    target = check_out(
        out,
        (stop - start, *source.shape[1:]),
        source.dtype,
        of="this rank's slice",
        make=engine.table.links.memory.empty,
    )
    if out is not None:
        check_apart(source, target)
    plan = engine.prepared(
        ("reduce_scatter", source.dtype, source.shape, op, algorithm),
        lambda: _prepare_reduce_scatter(engine, source, op, algorithm),
    )
    reduction, packed = plan.reduction, plan.packed
    source = reduction.loaded(source, engine.size)

    async def body(operation: Operation) -> Array:
        work = contiguous(target)
        flat, result = contiguous(source).reshape(-1), work.reshape(-1)
        workspace: Workspace
        if packed is None:
            work[...] = source[start:stop]
            workspace = InPlace(flat, result)
        else:
            workspace = _copied(operation, flat, result, plan.spread, packed, plan.own, engine.rank)
        await execute(operation, plan.messages, workspace, reduction.combine)
        reduction.finish(result, engine.size)
        if work is not target:
            target[...] = work
        return target

    if plan.is_in_arena:
        make = _reduce_scatter_program(source, target, reduction)
        sends = source.nbytes - target.nbytes
        return engine.start_in_arena(
            "reduce_scatter", plan, make, body, key=key, result=target, shows=source, sends=sends
        )
    return engine.start("reduce_scatter", plan.description, key, body)


def _reduce_scatter_program(source: Array, target: Array, reduction: Reduction) -> MakeProgram:
    def make(turn: Turn) -> Program:
        size = turn.channel.size
        row = source[0].size if source.shape[0] else 0
        slices = [(low * row, high * row) for low, high in ceil_chunks(source.shape[0], size)]
        work = contiguous(target)
        result = work.reshape(-1)

        def take(start: int, pieces: Sequence[Array]) -> None:
            programs.combine_pieces(result[start : start + len(pieces[0])], pieces, reduction)

        flow = programs.flow(turn, slices, source.dtype, is_shared=False)
        yield from programs.exchange(turn, flow, contiguous(source).reshape(-1), take)
        reduction.finish(result, size)
        if work is not target:
            target[...] = work

    return make


def _copied(
    operation: Operation,
    flat: Array,
    result: Array,
    spread: AlongChunks,
    packed: PackedChunks,
    own: AlongChunks,
    rank: int,
) -> Workspace:
    """Return scratch that holds a copy of the input, for algorithms that write to all of it."""
    return Scratch(
        pool=operation.context.pool,
        dtype=flat.dtype,
        length=lambda piece: packed.place(piece)[-1].stop,
        source=flat,
        fill=lambda piece: list(zip(packed.place(piece), spread.place(piece), strict=True)),
        target=result,
        drain=lambda piece: [(packed.place(piece)[rank], own.place(piece)[0])],
    )


def _prepare_reduce_scatter(engine: Engine, x: Array, op: str, wanted: str | None) -> ReduceScatterPlan:
    reduction: Reduction = collective_reduction(op, x.dtype)
    algorithm = engine.algorithm("reduce_scatter", x.nbytes, wanted, arena=True)
    by_messages = engine.message_algorithm("reduce_scatter", x.nbytes, algorithm)
    row = x[0].size if x.shape[0] else 0
    bounds = [(low * row, high * row) for low, high in ceil_chunks(x.shape[0], engine.size)]
    longest = bounds[0][1]
    mine = Slice(1, 0, bounds[engine.rank][1] - bounds[engine.rank][0])
    slices = [Slice(0, low, high) for low, high in bounds]
    packed: PackedChunks | None = None
    if by_messages == "pairwise":
        slices[engine.rank] = mine
        spread = own = AlongChunks(slices, longest=longest, itemsize=x.itemsize)
    else:
        segment = packed_segment(engine.size)
        spread = AlongChunks(slices, longest=longest, itemsize=x.itemsize, segment=segment)
        own = AlongChunks([mine], longest=longest, itemsize=x.itemsize, segment=segment)
        packed = PackedChunks(spread)
    return ReduceScatterPlan(
        description=describe_array("reduce_scatter", x.dtype, x.shape, (op,), algorithm),
        messages=engine.bind(engine.schedule("reduce_scatter", by_messages), packed or spread),
        reduction=reduction,
        spread=spread,
        packed=packed,
        own=own,
        is_in_arena=algorithm == ARENA,
    )
