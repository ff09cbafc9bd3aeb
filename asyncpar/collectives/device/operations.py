"""The collectives of ``Communicator`` over device arrays: arguments, NCCL calls, and the way through the host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from asyncpar.collectives import coalesced, exchanges, gathers, reductions, rooted
from asyncpar.collectives.arrays import Array, check_counts, check_only_root, check_rank, collective_reduction
from asyncpar.collectives.device import by_host
from asyncpar.collectives.device.arguments import (
    allocated,
    check_apart,
    check_leading,
    check_lengths,
    check_rows,
    in_place,
    reduced,
    shown,
    slices,
)
from asyncpar.collectives.device.dtypes import nccl_reduction
from asyncpar.collectives.device.enqueue import DevicePiece, exchange, grouped, reduce_slices
from asyncpar.collectives.device.records import LaunchOrder
from asyncpar.collectives.device.run import DeviceWork, start
from asyncpar.collectives.device.staging import copies_for
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.operation import Operation
from asyncpar.device.arrays import DeviceArray, device_array
from asyncpar.device.fabric import NcclDtype

Result: TypeAlias = Coroutine[Any, Any, Any]
_Host: TypeAlias = Callable[[Sequence[Array], str], Awaitable[Any]]


def all_reduce(
    engine: Engine, x: object, *, op: str, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.all_reduce``."""
    source = device_array(x)
    target = in_place(source, out)
    collective_reduction(op, source.dtype)
    how = nccl_reduction(op, source.dtype)

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await reductions.all_reduce(engine, arrays[0], op=op, out=None, algorithm=None, key=host_key)

    work = DeviceWork(
        name="all_reduce",
        arguments=(shown(source), op),
        arrays=(source, target),
        result=lambda _: target.owner,
        has_nccl=how.is_known,
        enqueue=lambda _: (
            lambda comm, on: comm.all_reduce(
                source.pointer, target.pointer, source.size * how.factor, how.dtype, how.op, on
            )
        ),
        through_host=_staged(engine, (source,), lambda _: (target,), host),
        by_host=lambda operation: by_host.all_reduce(engine, operation, source, target, op, how),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def all_reduce_many(
    engine: Engine, arrays: Iterable[object], *, op: str, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.all_reduce_many``, in one launch."""
    sources = [device_array(array, f"arrays[{place}]") for place, array in enumerate(arrays)]
    targets = [in_place(source, None, f"arrays[{place}]") for place, source in enumerate(sources)]
    for source in sources:
        collective_reduction(op, source.dtype)
    hows = [nccl_reduction(op, source.dtype) for source in sources]

    async def host(copies: Sequence[Array], host_key: str) -> Any:
        return await coalesced.all_reduce_many(engine, copies, op=op, algorithm=None, key=host_key)

    def calls(_: LaunchOrder) -> Any:
        return lambda comm, on: grouped(
            _fabric(engine),
            [
                partial(
                    comm.all_reduce, source.pointer, target.pointer, source.size * how.factor, how.dtype, how.op, on
                )
                for source, target, how in zip(sources, targets, hows, strict=True)
                if source.size
            ],
        )

    work = DeviceWork(
        name="all_reduce_many",
        arguments=(*(shown(source) for source in sources), op),
        arrays=(*sources, *targets),
        result=lambda _: [target.owner for target in targets],
        has_nccl=all(how.is_known for how in hows),
        enqueue=calls,
        through_host=_staged(engine, sources, lambda _: targets, host, is_many=True),
        size=sum(source.nbytes for source in sources),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def reduce(
    engine: Engine,
    x: object,
    *,
    op: str,
    root: int,
    out: object,
    algorithm: str | None,
    key: str | None,
    stream: object,
) -> Result:
    """Implement ``ArrayOperations.reduce``."""
    source = device_array(x)
    root = check_rank(root, engine.size)
    check_only_root(out, "out", engine.rank, root)
    collective_reduction(op, source.dtype)
    target = reduced(source, out, source.shape) if engine.rank == root else None
    how = nccl_reduction(op, source.dtype)
    recv = 0 if target is None else target.pointer

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await reductions.reduce(engine, arrays[0], op=op, root=root, out=None, algorithm=None, key=host_key)

    work = DeviceWork(
        name="reduce",
        arguments=(shown(source), op, f"root={root}"),
        arrays=_present(source, target),
        result=lambda _: None if target is None else target.owner,
        has_nccl=how.is_known,
        enqueue=lambda _: (
            lambda comm, on: comm.reduce(source.pointer, recv, source.size * how.factor, how.dtype, how.op, root, on)
        ),
        through_host=_staged(engine, (source,), lambda _: _present(target), host),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def reduce_scatter(
    engine: Engine, x: object, *, op: str, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.reduce_scatter``."""
    source = check_rows(device_array(x))
    parts = slices(source, engine.size)
    low, high = parts[engine.rank]
    target = reduced(source, out, (high - low, *source.shape[1:]), of="this rank's slice")
    if out is not None:
        check_apart(source, target)
    collective_reduction(op, source.dtype)
    how = nccl_reduction(op, source.dtype)

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await reductions.reduce_scatter(engine, arrays[0], op=op, out=None, algorithm=None, key=host_key)

    work = DeviceWork(
        name="reduce_scatter",
        arguments=(shown(source), op),
        arrays=(source, target),
        result=lambda _: target.owner,
        has_nccl=how.is_known,
        enqueue=lambda _: lambda comm, on: reduce_slices(_fabric(engine), comm, source, target, parts, how, on),
        through_host=_staged(engine, (source,), lambda _: (target,), host),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def all_gather(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.all_gather``."""
    source = device_array(x)
    target = reduced(source, out, (engine.size, *source.shape))

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await gathers.all_gather(engine, arrays[0], out=None, algorithm=None, key=host_key)

    work = DeviceWork(
        name="all_gather",
        arguments=(shown(source),),
        arrays=(source, target),
        result=lambda _: target.owner,
        enqueue=lambda _: (
            lambda comm, on: comm.all_gather(source.pointer, target.pointer, source.nbytes, NcclDtype.UINT8, on)
        ),
        through_host=_staged(engine, (source,), lambda _: (target,), host),
        size=target.nbytes,
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def all_gather_v(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.all_gather_v``."""
    source = check_rows(device_array(x))
    made: list[DeviceArray] = []

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await gathers.all_gather_v(engine, arrays[0], out=None, algorithm=None, key=host_key)

    def result(order: LaunchOrder) -> Any:
        rows = sum(check_lengths([record.counts[0] for record in order.records]))
        made.append(reduced(source, out, (rows, *source.shape[1:])))
        return made[0].owner

    def calls(order: LaunchOrder) -> Any:
        row = _row_bytes(source)
        counts = [record.counts[0] * row for record in order.records]
        starts = np.cumsum((0, *counts))
        return lambda comm, on: grouped(
            _fabric(engine),
            [
                partial(
                    comm.broadcast,
                    source.pointer if place == engine.rank else made[0].pointer + int(starts[place]),
                    made[0].pointer + int(starts[place]),
                    count,
                    NcclDtype.UINT8,
                    place,
                    on,
                )
                for place, count in enumerate(counts)
                if count
            ],
        )

    work = DeviceWork(
        name="all_gather_v",
        arguments=(shown(source, rows_differ=True),),
        arrays=(source,),
        result=result,
        enqueue=calls,
        through_host=_staged(engine, (source,), lambda _: made, host),
        counts=(source.shape[0],),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def gather(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.gather``."""
    root = check_rank(root, engine.size)
    source = device_array(x)
    check_only_root(out, "out", engine.rank, root)
    target = reduced(source, out, (engine.size, *source.shape)) if engine.rank == root else None
    each = source.nbytes
    sends = [DevicePiece(root, source.pointer, each)]
    recvs = (
        []
        if target is None
        else [DevicePiece(place, target.pointer + place * each, each) for place in range(engine.size)]
    )

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await rooted.gather(engine, arrays[0], root=root, out=None, algorithm=None, key=host_key)

    work = DeviceWork(
        name="gather",
        arguments=(shown(source), f"root={root}"),
        arrays=_present(source, target),
        result=lambda _: None if target is None else target.owner,
        enqueue=lambda _: lambda comm, on: exchange(_fabric(engine), comm, sends, recvs, on),
        through_host=_staged(engine, (source,), lambda _: _present(target), host),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def scatter(
    engine: Engine, x: object, *, root: int, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.scatter``."""
    root = check_rank(root, engine.size)
    check_only_root(x, "x", engine.rank, root)
    source = check_leading(device_array(x), engine.size) if engine.rank == root else None
    target = allocated(source, out, root)
    each = target.nbytes
    sends = (
        []
        if source is None
        else [DevicePiece(place, source.pointer + place * each, each) for place in range(engine.size)]
    )
    recvs = [DevicePiece(root, target.pointer, each)]

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        given = arrays[0] if source is not None else None
        empty = None if source is not None else np.empty(target.shape, target.dtype)
        return await rooted.scatter(engine, given, root=root, out=empty, algorithm=None, key=host_key)

    work = DeviceWork(
        name="scatter",
        arguments=(shown(target), f"root={root}"),
        arrays=_present(source, target),
        result=lambda _: target.owner,
        enqueue=lambda _: lambda comm, on: exchange(_fabric(engine), comm, sends, recvs, on),
        through_host=_staged(engine, _present(source), lambda _: (target,), host),
        size=target.nbytes * engine.size,
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def broadcast(
    engine: Engine, x: object, *, root: int, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.broadcast``."""
    root = check_rank(root, engine.size)
    source = device_array(x)
    target = source if engine.rank == root else in_place(source, None)

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await rooted.broadcast(engine, arrays[0], root=root, algorithm=None, key=host_key)

    work = DeviceWork(
        name="broadcast",
        arguments=(shown(source), f"root={root}"),
        arrays=(source, target),
        result=lambda _: target.owner,
        enqueue=lambda _: (
            lambda comm, on: comm.broadcast(source.pointer, target.pointer, source.nbytes, NcclDtype.UINT8, root, on)
        ),
        through_host=_staged(engine, (source,), lambda _: (target,) if engine.rank != root else (), host),
        by_host=lambda operation: by_host.broadcast(engine, operation, target, root),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def all_to_all(
    engine: Engine, x: object, *, out: object, algorithm: str | None, key: str | None, stream: object
) -> Result:
    """Implement ``ArrayOperations.all_to_all``."""
    source = check_leading(device_array(x), engine.size)
    target = reduced(source, out, source.shape)
    if out is not None:
        check_apart(source, target)
    each = source.nbytes // engine.size
    sends = [DevicePiece(place, source.pointer + place * each, each) for place in range(engine.size)]
    recvs = [DevicePiece(place, target.pointer + place * each, each) for place in range(engine.size)]

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        return await exchanges.all_to_all(engine, arrays[0], out=None, algorithm=None, key=host_key)

    work = DeviceWork(
        name="all_to_all",
        arguments=(shown(source),),
        arrays=(source, target),
        result=lambda _: target.owner,
        enqueue=lambda _: lambda comm, on: exchange(_fabric(engine), comm, sends, recvs, on),
        through_host=_staged(engine, (source,), lambda _: (target,), host),
    )
    return start(engine, work, algorithm=algorithm, key=key, stream=stream)


def all_to_all_v(engine: Engine, x: object, counts: object, *, out: object, key: str | None, stream: object) -> Result:
    """Implement ``ArrayOperations.all_to_all_v``."""
    source = check_rows(device_array(x))
    sent = check_counts(counts, engine.size, source.shape[0])
    row = _row_bytes(source)
    made: list[DeviceArray] = []

    def received(order: LaunchOrder) -> list[int]:
        return check_lengths([record.counts[engine.rank] for record in order.records])

    def result(order: LaunchOrder) -> Any:
        target = reduced(source, out, (sum(received(order)), *source.shape[1:]))
        if out is not None:
            check_apart(source, target)
        made.append(target)
        return target.owner, received(order)

    async def host(arrays: Sequence[Array], host_key: str) -> Any:
        found, _ = await exchanges.all_to_all_v(engine, arrays[0], sent, out=None, key=host_key)
        return found

    def calls(order: LaunchOrder) -> Any:
        sends = _pieces(source.pointer, [count * row for count in sent])
        recvs = _pieces(made[0].pointer, [count * row for count in received(order)])
        return lambda comm, on: exchange(_fabric(engine), comm, sends, recvs, on)

    work = DeviceWork(
        name="all_to_all_v",
        arguments=(shown(source, rows_differ=True),),
        arrays=(source,),
        result=result,
        enqueue=calls,
        through_host=_staged(engine, (source,), lambda _: made, host),
        counts=sent,
    )
    return start(engine, work, algorithm=None, key=key, stream=stream)


def _pieces(start: int, lengths: Sequence[int]) -> list[DevicePiece]:
    ends = np.cumsum((0, *lengths))
    return [DevicePiece(place, start + int(ends[place]), length) for place, length in enumerate(lengths)]


def _row_bytes(array: DeviceArray) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize


def _present(*arrays: DeviceArray | None) -> tuple[DeviceArray, ...]:
    return tuple(array for array in arrays if array is not None)


def _fabric(engine: Engine) -> Any:
    return DeviceGroup.of(engine).host.fabric


def _staged(
    engine: Engine,
    sources: Sequence[DeviceArray],
    targets: Callable[[LaunchOrder], Sequence[DeviceArray]],
    host: _Host,
    *,
    is_many: bool = False,
) -> Callable[[Operation, LaunchOrder], Coroutine[Any, Any, None]]:
    """Return a function that does an operation through the host: copy, ``host`` under a key of its own, copy back."""

    async def through_host(operation: Operation, order: LaunchOrder) -> None:
        into = targets(order)
        some = (*sources, *into)
        device = some[0].device if some else 0
        copies = copies_for(DeviceGroup.of(engine).host, operation, device)
        try:
            staged = await copies.to_host(sources, (some[0].stream or 1) if some else 1)
            found = await host(staged, f"{operation.name} of device arrays, {operation.sequence}")
            if into:
                await copies.to_device(found if is_many else [found], into)
        finally:
            await copies.close()

    return through_host
