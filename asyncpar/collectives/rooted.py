"""Operations between one rank and all others: broadcast, gather, scatter.

Theory of operation.  Where data goes one way, a rank that only sends would finish before the others have arrived, and
would never learn that one of them calls another operation: with two roots, each would take its own data for the result.
So messages without payload, which carry the fingerprint of the operation as all messages do, go the other way: *up* a
binomial tree to the root before data comes down, or *down* again after data has come up.  A rank sends its message only
when all ranks behind it have arrived, so the receiver knows of all of them; and a rank that calls another operation is
detected by a neighbour, which notifies all others.  With two ranks, each has only the other to know of: no rank waits
before data moves.

For data of one piece, as all small data is, these messages are part of its plan (``confirmed``).  Otherwise they are a
plan of their own, run before or after that of the data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.algorithms.steps import RankSchedule, emptied
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
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import (
    NOWHERE,
    SEGMENT_BYTES,
    AlongBuffer,
    AlongChunks,
    ChunkLayout,
    PackedChunks,
    Plan,
    Slice,
    packed_segment,
)
from asyncpar.collectives.protocol import describe
from asyncpar.collectives.quick_call import QuickCall
from asyncpar.collectives.shared_memory import programs
from asyncpar.collectives.shared_memory.call import MakeProgram
from asyncpar.collectives.shared_memory.fast_path import QUICK_BROADCAST_BYTES, QuickBroadcast, is_quick_broadcast
from asyncpar.errors import UsageError
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program


class RootedPlan(OperationPlan, frozen=True, kw_only=True):
    """Layouts of this rank's own chunk, and of the scratch of a rank that passes on other chunks (None: no scratch)."""

    packed: PackedChunks | None
    own: AlongChunks


def gather(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    root = check_rank(root, engine.size)
    source = check_array(x)
    check_only_root(out, "out", engine.rank, root)
    target = (
        check_out(out, (engine.size, *source.shape), source.dtype, make=engine.table.links.memory.empty)
        if engine.rank == root
        else None
    )
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
        make = _gather_program(source, target, root)
        sends = source.nbytes if target is None else 0
        return engine.start_in_arena("gather", plan, make, body, key=key, result=target, shows=source, sends=sends)
    return engine.start("gather", plan.description, key, body)


def _gather_program(source: Array, target: Array | None, root: int) -> MakeProgram:
    """Return the program; ``target`` is the root's."""

    def make(turn: Turn) -> Program:
        flat = contiguous(source).reshape(-1)
        flow = programs.flow(turn, [(0, flat.size)] * turn.channel.size, flat.dtype, is_shared=True, is_piped=True)
        if target is None:
            yield from programs.hand_out(turn, flow, flat, (root,))
            return
        work = contiguous(target)
        rows = work.reshape(turn.channel.size, -1)
        rows[root] = flat
        others = [rows[place] for place in turn.channel.others]
        yield from programs.take_in(
            turn, flow, turn.channel.others, lambda start, pieces: programs.lay_down(others, start, pieces)
        )
        if work is not target:
            target[...] = work

    return make


def scatter(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    root = check_rank(root, engine.size)
    check_only_root(x, "x", engine.rank, root)
    source = check_leading(check_array(x), engine.size) if engine.rank == root else None
    if source is None and out is None:
        raise UsageError(f"out: expected an array on every rank but root {root}, to give shape and dtype; got None")
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
        make = _scatter_program(source, target, root)
        sends = 0 if source is None else source.nbytes - target.nbytes
        return engine.start_in_arena("scatter", plan, make, body, key=key, result=target, shows=source, sends=sends)
    return engine.start("scatter", plan.description, key, body)


def _scatter_program(source: Array | None, target: Array, root: int) -> MakeProgram:
    """Return the program; ``source`` is the root's."""

    def make(turn: Turn) -> Program:
        channel = turn.channel
        width = target.size
        slices = [(place * width, (place + 1) * width) for place in range(channel.size)]
        flow = programs.flow(turn, slices, target.dtype, is_shared=False, is_piped=True)
        if source is not None:
            yield from programs.hand_out(turn, flow, contiguous(source).reshape(-1), channel.others)
            target[...] = source[root]
            return
        work = contiguous(target)
        flat = work.reshape(-1)
        yield from programs.take_in(
            turn, flow, (root,), lambda start, pieces: programs.lay_down((flat,), start, pieces)
        )
        if work is not target:
            target[...] = work

    return make


def _prepare_rooted(name: str, engine: Engine, x: Array, root: int, wanted: str | None) -> RootedPlan:
    """Prepare gather or scatter of one array like ``x`` per rank.

    The root works in its own memory; in a tree, other ranks work in scratch that holds the chunks they pass on.
    """
    count, dtype = x.size, x.dtype
    algorithm = engine.algorithm(name, x.nbytes * engine.size, wanted, arena=True)
    by_messages = engine.message_algorithm(name, x.nbytes * engine.size, algorithm)
    is_direct = by_messages == "linear"
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
    schedule = confirmed(engine, engine.schedule(name, by_messages, root), layout, root, way)
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


def broadcast(
    engine: Engine, x: object, *, root: int, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    if key is None and algorithm is None and type(x) is np.ndarray and type(root) is int:
        quick = engine.quick.get(("broadcast", root, x.dtype, x.shape))
        if quick is not None and (engine.rank == root or x.flags.writeable):
            return QuickCall(engine, quick, x)
    root = check_rank(root, engine.size)
    array = check_array(x)
    if engine.rank != root:
        check_writable(array, "x")
    plan = engine.prepared(
        ("broadcast", array.dtype, array.shape, root, algorithm),
        lambda: prepare_broadcast(engine, array, root, algorithm, arena=True),
    )

    async def body(operation: Operation) -> Array:
        work = contiguous(array)
        messages = plan.messages
        await from_root(engine, operation, root, messages, lambda: execute(operation, messages, InPlace(work)))
        if work is not array and engine.rank != root:
            array[...] = work
        return array

    if plan.is_in_arena:
        make = programs.broadcast(array, root)
        sends = array.nbytes if engine.rank == root else 0
        shows = array if array.nbytes > QUICK_BROADCAST_BYTES else None
        if key is None and algorithm is None and array is x:
            engine.plan_quickly(
                ("broadcast", root, array.dtype, array.shape),
                lambda group, channel: (
                    QuickBroadcast(group, channel, plan.description, array, root=root)
                    if is_quick_broadcast(array.nbytes, channel)
                    else None
                ),
            )
        return engine.start_in_arena("broadcast", plan, make, body, key=key, result=array, shows=shows, sends=sends)
    return engine.start("broadcast", plan.description, key, body)


def prepare_broadcast(
    engine: Engine,
    x: Array,
    root: int,
    wanted: str | None,
    *,
    phase: int = 0,
    arena: bool = False,
    confirms: bool = True,
) -> OperationPlan:
    """Prepare a broadcast of arrays like ``x``; ``confirms`` adds the messages that make all ranks known."""
    algorithm = engine.algorithm("broadcast", x.nbytes, wanted, arena=arena)
    layout = AlongBuffer(count=x.size, chunks=1, itemsize=x.itemsize)
    schedule = engine.schedule("broadcast", engine.message_algorithm("broadcast", x.nbytes, algorithm), root)
    if confirms:
        schedule = confirmed(engine, schedule, layout, root, "from root")
    return OperationPlan(
        description=describe_array("broadcast", x.dtype, x.shape, (f"root={root}",), algorithm),
        messages=engine.bind(schedule, layout, phase=phase),
        is_in_arena=algorithm == ARENA,
    )


_PHASE: Final = 7
"""Follows the phases of the data, of which calibration has most."""

Transfer = Callable[[], Awaitable[None]]
Way = Literal["from root", "to root"]

_AGAINST: Final[dict[Way, str]] = {"from root": "reduce", "to root": "broadcast"}
"""The operation that sends in the opposite direction."""


def confirmed(engine: Engine, schedule: RankSchedule, layout: ChunkLayout, root: int, way: Way) -> RankSchedule:
    """Return ``schedule``, in which data goes ``way``, with the messages without payload if it is one piece.

    ``from_root`` and ``to_root`` run a plan of the result, whose number of pieces is the same on all ranks.
    """
    if layout.pieces > 1 or engine.size == 1:
        return schedule
    data, nothing = schedule.rounds, emptied(engine.schedule(_AGAINST[way], "tree", root).rounds)
    if engine.size == 2:
        rounds = tuple(here + there for here, there in zip(nothing, data, strict=True))
    else:
        rounds = (*nothing, *data) if way == "from root" else (*data, *nothing)
    return replace(schedule, rounds=rounds)


async def from_root(engine: Engine, operation: Operation, root: int, plan: Plan, transfer: Transfer) -> None:
    """Run ``transfer``, in which data goes from ``root`` to the others; all ranks are then in ``operation``.

    ``plan`` is the first plan that it runs, of a schedule from ``confirmed``.
    """
    if plan.pieces == 1:
        await transfer()
        return
    if engine.size == 2 and engine.rank == root:
        await transfer()
        await _pass_nothing(engine, operation, root, "reduce")
        return
    await _pass_nothing(engine, operation, root, "reduce")
    await transfer()


async def to_root(engine: Engine, operation: Operation, root: int, plan: Plan, transfer: Transfer) -> None:
    """Run ``transfer``, in which data goes from the others to ``root``; all ranks are then in ``operation``.

    ``plan`` is the one that it runs, of a schedule from ``confirmed``.
    """
    if plan.pieces == 1:
        await transfer()
        return
    if engine.size == 2 and engine.rank == root:
        await _pass_nothing(engine, operation, root, "broadcast")
        await transfer()
        return
    await transfer()
    await _pass_nothing(engine, operation, root, "broadcast")


async def _pass_nothing(engine: Engine, operation: Operation, root: int, way: str) -> None:
    """Run the messages of ``way`` in a tree, without payload."""
    if engine.size > 1:
        prepared = engine.prepared(("nothing", way, root), lambda: _prepare(engine, root, way))
        await execute(operation, prepared.messages, InPlace())


def _prepare(engine: Engine, root: int, way: str) -> OperationPlan:
    nothing = AlongBuffer(count=0, chunks=1, itemsize=1)
    schedule = engine.schedule(way, "tree", root)
    return OperationPlan(
        description=describe("nothing", (), "tree"),
        messages=engine.bind(schedule, nothing, phase=_PHASE),
    )
