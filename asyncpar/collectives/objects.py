"""The object forms: values of plain data and arrays, encoded without pickle, moved as bytes."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from asyncpar.collectives.arrays import Array, check_rank
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.execute import InPlace, execute
from asyncpar.collectives.gathers import check_lengths, exchange_numbers
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import NOWHERE, AlongChunks, Plan, Slice
from asyncpar.collectives.protocol import describe
from asyncpar.collectives.rooted import from_root, prepare_broadcast
from asyncpar.core.concurrency.tasks import INLINE_COPY_BYTES, off_loop
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.payload import UnwrittenPayload, decode_payload, prepare_payload

MAX_BYTES = 1 << 30
"""Maximum number of bytes of objects that a rank receives in one operation."""


def encoded(value: object, what: str, wanted: Any = None) -> UnwrittenPayload:
    """Encode ``value`` as bytes, to be written.  Raises ``UsageError`` naming a type that cannot be sent.

    ``wanted`` is the type that receivers decode: for ``Any``, values that need a declared type are refused here.
    """
    return prepare_payload(value, what=what, declares=wanted is not Any)


async def _written(content: UnwrittenPayload) -> Array:
    return np.frombuffer(await off_loop(content.write, nbytes=content.nbytes, inline=INLINE_COPY_BYTES), np.uint8)


async def _decode_all(
    everything: Array, chunks: Sequence[Slice], wanted: Any, what: str, *, own: tuple[int, object]
) -> list[Any]:
    """Decode the value in each of ``chunks`` into memory of its own; at index ``own[0]`` it is ``own[1]``."""
    place, values = own[0], []
    for rank, (_, start, stop) in enumerate(chunks):
        if rank == place:
            values.append(own[1])
            continue
        content = np.empty(stop - start, np.uint8)
        await off_loop(partial(np.copyto, content, everything[start:stop]), nbytes=content.size)
        values.append(decoded(content, wanted, what))
    return values


def decoded(content: Array, wanted: Any, what: str) -> Any:
    """Decode the value in ``content``, which has no other user: arrays in it are views."""
    return decode_payload(content.data, wanted, what=what)


def broadcast_object(
    engine: Engine, value: object, *, root: int, wanted: Any, key: str | None
) -> Coroutine[Any, Any, Any]:
    root = check_rank(root, engine.size)
    content = encoded(value, "value", wanted) if engine.rank == root else None

    async def body(operation: Operation) -> Any:
        length = np.array([0 if content is None else content.nbytes], np.int64)
        lengths = engine.prepared(("length", root), lambda: prepare_broadcast(engine, length, root, "tree")).messages
        await from_root(engine, operation, root, lengths, lambda: execute(operation, lengths, InPlace(length)))
        _checked(length)
        moving = np.empty(int(length[0]), np.uint8) if content is None else await _written(content)
        plan = prepare_broadcast(engine, moving, root, None, phase=1, confirms=False).messages
        await execute(operation, plan, InPlace(moving))
        return value if engine.rank == root else decoded(moving, wanted, operation.label)

    return engine.start("broadcast_object", describe("broadcast_object", (f"root={root}",), "auto"), key, body)


def all_gather_object(engine: Engine, value: object, *, wanted: Any, key: str | None) -> Coroutine[Any, Any, list[Any]]:
    content = encoded(value, "value", wanted)

    async def body(operation: Operation) -> list[Any]:
        lengths = _checked((await exchange_numbers(engine, operation, [content.nbytes]))[:, 0])
        chunks = _chunks(lengths)
        everything = np.empty(sum(lengths), np.uint8)
        own = everything[chunks[engine.rank].start : chunks[engine.rank].stop]
        await off_loop(partial(content.write_into, own.data), nbytes=own.size)
        algorithm = engine.algorithm("all_gather", everything.size, None)
        await execute(operation, _plan(engine, "all_gather", algorithm, 0, chunks, max(lengths)), InPlace(everything))
        return await _decode_all(everything, chunks, wanted, operation.label, own=(engine.rank, value))

    return engine.start("all_gather_object", describe("all_gather_object", (), "auto"), key, body)


def gather_object(
    engine: Engine, value: object, *, root: int, wanted: Any, key: str | None
) -> Coroutine[Any, Any, list[Any] | None]:
    root = check_rank(root, engine.size)
    content = encoded(value, "value", wanted)

    async def body(operation: Operation) -> list[Any] | None:
        lengths = _checked((await exchange_numbers(engine, operation, [content.nbytes]))[:, 0])
        if engine.rank != root:
            chunks = [Slice(0, 0, content.nbytes) if rank == engine.rank else NOWHERE for rank in range(engine.size)]
            plan = _plan(engine, "gather", "linear", root, chunks, max(lengths))
            await execute(operation, plan, InPlace(await _written(content)))
            return None
        chunks = _chunks(lengths)
        everything = np.empty(sum(lengths), np.uint8)
        await execute(operation, _plan(engine, "gather", "linear", root, chunks, max(lengths)), InPlace(everything))
        return await _decode_all(everything, chunks, wanted, operation.label, own=(root, value))

    return engine.start("gather_object", describe("gather_object", (f"root={root}",), "linear"), key, body)


def scatter_object(
    engine: Engine, values: Sequence[object] | None, *, root: int, wanted: Any, key: str | None
) -> Coroutine[Any, Any, Any]:
    root = check_rank(root, engine.size)
    contents = _encoded_values(engine, values, root, wanted)

    async def body(operation: Operation) -> Any:
        lengths = np.array([content.nbytes for content in contents] or [0] * engine.size, np.int64)
        known = engine.prepared(("lengths", root), lambda: prepare_broadcast(engine, lengths, root, "tree")).messages
        await from_root(engine, operation, root, known, lambda: execute(operation, known, InPlace(lengths)))
        longest, length = max(_checked(lengths)), int(lengths[engine.rank])
        if contents:
            chunks = _chunks([content.nbytes for content in contents])
            moving = np.empty(chunks[-1].stop, np.uint8)
            for content, (_, start, stop) in zip(contents, chunks, strict=True):
                await off_loop(partial(content.write_into, moving[start:stop].data), nbytes=content.nbytes)
        else:
            moving = np.empty(length, np.uint8)
            chunks = [Slice(0, 0, length) if rank == engine.rank else NOWHERE for rank in range(engine.size)]
        await execute(operation, _plan(engine, "scatter", "linear", root, chunks, longest), InPlace(moving))
        return decoded(moving, wanted, operation.label) if values is None else values[root]

    return engine.start("scatter_object", describe("scatter_object", (f"root={root}",), "linear"), key, body)


def _encoded_values(engine: Engine, values: Sequence[object] | None, root: int, wanted: Any) -> list[UnwrittenPayload]:
    if engine.rank != root:
        if values is not None:
            raise UsageError(f"values: expected None on rank {engine.rank} of the group, as only root {root} has them")
        return []
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != engine.size:
        raise UsageError(
            f"values: expected a sequence of {engine.size} values, one per rank, got {type(values).__name__}"
        )
    return [encoded(value, f"values[{rank}]", wanted) for rank, value in enumerate(values)]


def _checked(lengths: Array) -> list[int]:
    """Return the announced lengths.  Raises ``ProtocolError`` for invalid ones, and for too many bytes in all."""
    numbers = check_lengths(lengths)
    if sum(numbers) > MAX_BYTES:
        raise ProtocolError(f"objects: at most {MAX_BYTES} bytes are received in one operation, got {sum(numbers)}")
    return numbers


def _chunks(lengths: Sequence[int]) -> list[Slice]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return [Slice(0, start, stop) for start, stop in pairwise(ends)]


def _plan(engine: Engine, operation: str, algorithm: str, root: int, chunks: list[Slice], longest: int) -> Plan:
    return engine.bind(
        engine.schedule(operation, algorithm, root), AlongChunks(chunks, longest=longest, itemsize=1), phase=1
    )
