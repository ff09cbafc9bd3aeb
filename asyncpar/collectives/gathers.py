"""Operations that move whole payloads between one rank and all: all_gather, gather, scatter, broadcast, barrier."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np

from asyncpar.collectives.arguments import (
    check_array,
    check_leading,
    check_only_root,
    check_out,
    check_rank,
    check_rows,
    check_writable,
    contiguous,
)
from asyncpar.collectives.description import describe
from asyncpar.collectives.engine import Engine, Prepared, describe_array
from asyncpar.collectives.execute import execute
from asyncpar.collectives.layout import (
    NOWHERE,
    SEGMENT_BYTES,
    AlongBuffer,
    AlongChunks,
    PackedChunks,
    Slice,
    packed_segment,
)
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import Plan
from asyncpar.collectives.reduction import Array
from asyncpar.collectives.workspace import InPlace, Scratch
from asyncpar.errors import UsageError


def all_gather(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array]:
    source = check_array(x)
    target = check_out(out, (engine.size, *source.shape), source.dtype)
    prepared = engine.prepared(
        ("all_gather", source.dtype, source.shape, algorithm),
        lambda: _prepare_all_gather(engine, source, algorithm),
    )

    async def body(operation: Operation) -> Array:
        work = contiguous(target)
        work[engine.rank] = source
        await execute(operation, prepared.plan, InPlace(work))
        if work is not target:
            target[...] = work
        return target

    return engine.start("all_gather", prepared.description, key, body)


def _prepare_all_gather(engine: Engine, x: Array, wanted: str | None) -> Prepared:
    algorithm = engine.algorithm("all_gather", x.nbytes * engine.size, wanted)
    layout = AlongChunks(_equal_chunks(engine.size, x.size), longest=x.size, itemsize=x.itemsize)
    return Prepared(
        description=describe_array("all_gather", x.dtype, x.shape, (), algorithm),
        plan=Plan(engine.schedule("all_gather", algorithm), layout, rank=engine.rank, ranks=engine.ranks),
    )


def _equal_chunks(chunks: int, count: int) -> list[Slice]:
    return [Slice(0, chunk * count, (chunk + 1) * count) for chunk in range(chunks)]


def all_gather_v(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array]:
    source = check_rows(check_array(x))
    if algorithm is not None:
        engine.algorithm("all_gather", 0, algorithm)
    rest = source.shape[1:]
    description = describe_array("all_gather_v", source.dtype, (None, *rest), (), algorithm or "auto")

    async def body(operation: Operation) -> Array:
        rows = await exchange_numbers(engine, operation, [source.shape[0]])
        counts = tuple(int(count) for count in rows[:, 0])
        plan = engine.prepared(
            ("all_gather_v", source.dtype, rest, counts, algorithm),
            lambda: _prepare_all_gather_v(engine, source, counts, algorithm),
        ).plan
        target = check_out(out, (sum(counts), *rest), source.dtype)
        work = contiguous(target)
        first = sum(counts[: engine.rank])
        work[first : first + source.shape[0]] = source
        await execute(operation, plan, InPlace(work))
        if work is not target:
            target[...] = work
        return target

    return engine.start("all_gather_v", description, key, body)


def _prepare_all_gather_v(engine: Engine, x: Array, counts: tuple[int, ...], wanted: str | None) -> Prepared:
    row = int(np.prod(x.shape[1:], dtype=np.int64))
    algorithm = engine.algorithm("all_gather", sum(counts) * row * x.itemsize, wanted)
    ends = np.cumsum((0, *counts)) * row
    slices = [Slice(0, int(low), int(high)) for low, high in zip(ends, ends[1:], strict=False)]
    layout = AlongChunks(slices, longest=max(counts) * row, itemsize=x.itemsize)
    return Prepared(
        description=describe_array("all_gather_v", x.dtype, (None, *x.shape[1:]), (), wanted or "auto"),
        plan=Plan(engine.schedule("all_gather", algorithm), layout, rank=engine.rank, ranks=engine.ranks, phase=1),
    )


async def exchange_numbers(engine: Engine, operation: Operation, numbers: list[int]) -> Array:
    """Return the matrix of what each rank passes, one row per rank, as the first phase of an operation."""
    plan = engine.prepared(("numbers", len(numbers)), lambda: _prepare_numbers(engine, len(numbers))).plan
    matrix = np.empty((engine.size, len(numbers)), np.int64)
    matrix[engine.rank] = numbers
    await execute(operation, plan, InPlace(matrix))
    return matrix


def _prepare_numbers(engine: Engine, count: int) -> Prepared:
    layout = AlongChunks(_equal_chunks(engine.size, count), longest=count, itemsize=8)
    return Prepared(
        description=describe("numbers", (), "bruck"),
        plan=Plan(engine.schedule("all_gather", "bruck"), layout, rank=engine.rank, ranks=engine.ranks),
    )


def broadcast(
    engine: Engine, x: object, *, root: int, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array]:
    root = check_rank(root, engine.size)
    array = check_array(x)
    if engine.rank != root:
        check_writable(array, "x")
    prepared = engine.prepared(
        ("broadcast", array.dtype, array.shape, root, algorithm),
        lambda: prepare_broadcast(engine, array, root, algorithm),
    )

    async def body(operation: Operation) -> Array:
        work = contiguous(array)
        await execute(operation, prepared.plan, InPlace(work))
        if work is not array and engine.rank != root:
            array[...] = work
        return array

    return engine.start("broadcast", prepared.description, key, body)


def prepare_broadcast(engine: Engine, x: Array, root: int, wanted: str | None, *, phase: int = 0) -> Prepared:
    algorithm = engine.algorithm("broadcast", x.nbytes, wanted)
    layout = AlongBuffer(count=x.size, chunks=1, itemsize=x.itemsize)
    schedule = engine.schedule("broadcast", algorithm, root)
    return Prepared(
        description=describe_array("broadcast", x.dtype, x.shape, (f"root={root}",), algorithm),
        plan=Plan(schedule, layout, rank=engine.rank, ranks=engine.ranks, phase=phase),
    )


def gather(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array | None]:
    root = check_rank(root, engine.size)
    source = check_array(x)
    check_only_root(out, "out", engine.rank, root)
    target = check_out(out, (engine.size, *source.shape), source.dtype) if engine.rank == root else None
    prepared = engine.prepared(
        ("gather", source.dtype, source.shape, root, algorithm),
        lambda: _prepare_rooted("gather", engine, source.dtype, source.shape, root, algorithm),
    )
    packed, own = prepared.extra

    async def body(operation: Operation) -> Array | None:
        if target is None:
            flat = contiguous(source).reshape(-1)
            workspace = InPlace(flat) if packed is None else _scratch(operation, flat, None, packed, own, engine.rank)
            await execute(operation, prepared.plan, workspace)
            return None
        work = contiguous(target)
        work[root] = source
        await execute(operation, prepared.plan, InPlace(work))
        if work is not target:
            target[...] = work
        return target

    return engine.start("gather", prepared.description, key, body)


def scatter(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array]:
    root = check_rank(root, engine.size)
    check_only_root(x, "x", engine.rank, root)
    source = check_leading(check_array(x), engine.size) if engine.rank == root else None
    if source is None and out is None:
        raise UsageError(f"out: expected an array on every rank but root {root}, to tell shape and dtype; got None")
    target = check_out(out, source.shape[1:], source.dtype) if source is not None else check_writable(
        check_array(out, "out"), "out"
    )
    prepared = engine.prepared(
        ("scatter", target.dtype, target.shape, root, algorithm),
        lambda: _prepare_rooted("scatter", engine, target.dtype, target.shape, root, algorithm),
    )
    packed, own = prepared.extra

    async def body(operation: Operation) -> Array:
        if source is not None:
            await execute(operation, prepared.plan, InPlace(contiguous(source)))
            target[...] = source[root]
            return target
        work = contiguous(target)
        flat = work.reshape(-1)
        workspace = InPlace(flat) if packed is None else _scratch(operation, None, flat, packed, own, engine.rank)
        await execute(operation, prepared.plan, workspace)
        if work is not target:
            target[...] = work
        return target

    return engine.start("scatter", prepared.description, key, body)


def _prepare_rooted(
    name: str, engine: Engine, dtype: np.dtype[Any], shape: tuple[int, ...], root: int, wanted: str | None
) -> Prepared:
    """Prepare gather or scatter of one array of ``shape`` per rank.

    The root works in its own memory; others, in a tree, in scratch that holds the chunks they pass on.
    """
    count = int(np.prod(shape, dtype=np.int64))
    algorithm = engine.algorithm(name, count * dtype.itemsize * engine.size, wanted)
    is_direct = algorithm == "linear"
    segment = SEGMENT_BYTES if is_direct else packed_segment(engine.size)

    def along(slices: list[Slice]) -> AlongChunks:
        return AlongChunks(slices, longest=count, itemsize=dtype.itemsize, segment=segment)

    own = along([Slice(0, 0, count)])
    packed: PackedChunks | None = None
    layout: AlongChunks | PackedChunks
    if engine.rank == root:
        layout = along(_equal_chunks(engine.size, count))
    elif is_direct:
        layout = along([Slice(0, 0, count) if rank == engine.rank else NOWHERE for rank in range(engine.size)])
    else:
        layout = packed = PackedChunks(along(_equal_chunks(engine.size, count)))
    return Prepared(
        description=describe_array(name, dtype, shape, (f"root={root}",), algorithm),
        plan=Plan(engine.schedule(name, algorithm, root), layout, rank=engine.rank, ranks=engine.ranks),
        extra=(packed, own),
    )


def _scratch(
    operation: Operation, source: Array | None, target: Array | None, packed: PackedChunks, own: AlongChunks, rank: int
) -> Scratch:
    """Return scratch for the chunks that a rank of a tree passes on; its own comes from ``source`` or goes to ``target``."""
    mine = source if source is not None else target
    assert mine is not None

    def pair(piece: int) -> list[tuple[Slice, Slice]]:
        return [(packed.place(piece)[rank], own.place(piece)[0])]

    return Scratch(
        pool=operation.table.pool,
        dtype=mine.dtype,
        length=lambda piece: packed.place(piece)[-1].stop,
        source=mine,
        fill=pair if source is not None else lambda piece: [],  # noqa: ARG005
        target=target,
        drain=pair if target is not None else None,
    )


def barrier(engine: Engine, *, algorithm: str | None, key: str | None) -> Coroutine[Any, Any, None]:
    prepared = engine.prepared(("barrier", algorithm), lambda: _prepare_barrier(engine, algorithm))

    async def body(operation: Operation) -> None:
        await execute(operation, prepared.plan, InPlace())

    return engine.start("barrier", prepared.description, key, body)


def _prepare_barrier(engine: Engine, wanted: str | None) -> Prepared:
    algorithm = engine.algorithm("barrier", 0, wanted)
    return Prepared(
        description=describe("barrier", (), algorithm),
        plan=Plan(
            engine.schedule("barrier", algorithm),
            AlongChunks((), longest=0, itemsize=1),
            rank=engine.rank,
            ranks=engine.ranks,
        ),
    )
