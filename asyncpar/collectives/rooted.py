"""Operations between one rank and all others, with a chunk for each: gather, scatter."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.arrays import (
    Array,
    check_array,
    check_leading,
    check_only_root,
    check_out,
    check_rank,
    check_writable,
    contiguous,
)
from asyncpar.collectives.engine import Engine, OperationPlan, describe_array
from asyncpar.collectives.execute import InPlace, Scratch, execute
from asyncpar.collectives.gathers import equal_chunks
from asyncpar.collectives.one_way import Way, confirmed, from_root, to_root
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import NOWHERE, SEGMENT_BYTES, AlongChunks, PackedChunks, Slice, packed_segment
from asyncpar.collectives.shared_memory import operations
from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RootedPlan(OperationPlan):
    """Where this rank's own chunk lies, and the scratch of a rank that passes on the chunks of others (None: none)."""

    packed: PackedChunks | None
    own: AlongChunks


def gather(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array | None]:
    root = check_rank(root, engine.size)
    source = check_array(x)
    check_only_root(out, "out", engine.rank, root)
    target = check_out(out, (engine.size, *source.shape), source.dtype) if engine.rank == root else None
    plan = engine.prepared(
        ("gather", source.dtype, source.shape, root, algorithm),
        lambda: _prepare_rooted("gather", engine, source, root, algorithm),
    )
    messages, packed, own = plan.messages, plan.packed, plan.own

    async def body(operation: Operation) -> Array | None:
        if target is None:
            flat = contiguous(source).reshape(-1)
            workspace = InPlace(flat) if packed is None else _scratch(operation, flat, None, packed, own, engine.rank)
            await to_root(engine, operation, root, messages, lambda: execute(operation, messages, workspace))
            return None
        work = contiguous(target)
        work[root] = source
        await to_root(engine, operation, root, messages, lambda: execute(operation, messages, InPlace(work)))
        if work is not target:
            target[...] = work
        return target

    if plan.is_in_arena:
        make = operations.gather(source, target, root)
        sends = source.nbytes if target is None else 0
        return engine.start_in_arena("gather", plan, make, body, key=key, result=target, shows=source, sends=sends)
    return engine.start("gather", plan.description, key, body)


def scatter(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Array]:
    root = check_rank(root, engine.size)
    check_only_root(x, "x", engine.rank, root)
    source = check_leading(check_array(x), engine.size) if engine.rank == root else None
    if source is None and out is None:
        raise UsageError(f"out: expected an array on every rank but root {root}, to tell shape and dtype; got None")
    target = (
        check_out(out, source.shape[1:], source.dtype)
        if source is not None
        else check_writable(check_array(out, "out"), "out")
    )
    plan = engine.prepared(
        ("scatter", target.dtype, target.shape, root, algorithm),
        lambda: _prepare_rooted("scatter", engine, target, root, algorithm),
    )
    messages, packed, own = plan.messages, plan.packed, plan.own

    async def body(operation: Operation) -> Array:
        if source is not None:
            whole = InPlace(contiguous(source))
            await from_root(engine, operation, root, messages, lambda: execute(operation, messages, whole))
            target[...] = source[root]
            return target
        work = contiguous(target)
        flat = work.reshape(-1)
        workspace = InPlace(flat) if packed is None else _scratch(operation, None, flat, packed, own, engine.rank)
        await from_root(engine, operation, root, messages, lambda: execute(operation, messages, workspace))
        if work is not target:
            target[...] = work
        return target

    if plan.is_in_arena:
        make = operations.scatter(source, target, root)
        sends = 0 if source is None else source.nbytes - target.nbytes
        return engine.start_in_arena("scatter", plan, make, body, key=key, result=target, shows=source, sends=sends)
    return engine.start("scatter", plan.description, key, body)


def _prepare_rooted(name: str, engine: Engine, x: Array, root: int, wanted: str | None) -> RootedPlan:
    """Prepare gather or scatter of one array like ``x`` per rank.

    The root works in its own memory; others, in a tree, in scratch that holds the chunks they pass on.
    """
    count, dtype = x.size, x.dtype
    algorithm = engine.algorithm(name, x.nbytes * engine.size, wanted, arena=True)
    carrier = engine.carrier(name, x.nbytes * engine.size, algorithm)
    is_direct = carrier == "linear"
    segment = SEGMENT_BYTES if is_direct else packed_segment(engine.size)

    def along(slices: list[Slice]) -> AlongChunks:
        return AlongChunks(slices, longest=count, itemsize=dtype.itemsize, segment=segment)

    own = along([Slice(0, 0, count)])
    packed: PackedChunks | None = None
    layout: AlongChunks | PackedChunks
    if engine.rank == root:
        layout = along(equal_chunks(engine.size, count))
    elif is_direct:
        layout = along([Slice(0, 0, count) if rank == engine.rank else NOWHERE for rank in range(engine.size)])
    else:
        layout = packed = PackedChunks(along(equal_chunks(engine.size, count)))
    way: Way = "to root" if name == "gather" else "from root"
    schedule = confirmed(engine, engine.schedule(name, carrier, root), layout, root, way)
    return RootedPlan(
        description=describe_array(name, dtype, x.shape, (f"root={root}",), algorithm),
        messages=engine.bind(schedule, layout),
        packed=packed,
        own=own,
        is_in_arena=algorithm == ARENA,
    )


def _scratch(
    operation: Operation, source: Array | None, target: Array | None, packed: PackedChunks, own: AlongChunks, rank: int
) -> Scratch:
    """Return scratch for the chunks that a rank of a tree passes on.

    Its own comes from ``source`` or goes to ``target``.
    """
    mine = source if source is not None else target
    assert mine is not None

    def pair(piece: int) -> list[tuple[Slice, Slice]]:
        return [(packed.place(piece)[rank], own.place(piece)[0])]

    return Scratch(
        pool=operation.context.pool,
        dtype=mine.dtype,
        length=lambda piece: packed.place(piece)[-1].stop,
        source=mine,
        fill=pair if source is not None else lambda piece: [],  # noqa: ARG005
        target=target,
        drain=pair if target is not None else None,
    )
