"""Messages of device arrays between two ranks: by NCCL, or through the host like those of numpy arrays.

Either end may be a numpy array.  Order, tags and receives from any source work as for numpy arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from asyncpar.collectives.algorithms.catalog import NCCL
from asyncpar.collectives.call import Call, WatchedCall
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.device.pairs import receive_by_pair, send_by_pair
from asyncpar.collectives.device.records import Way
from asyncpar.collectives.device.run import DeviceCall, DeviceOperation
from asyncpar.collectives.device.staging import copies_for
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.point_to_point import BODY, ENVELOPE, STAGED, PointToPoint, ReceivedMessage, transmit
from asyncpar.collectives.protocol import encode_envelope
from asyncpar.device.arrays import DeviceArray, check_writable, device_array
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM, DeviceError
from asyncpar.net.transport.flow_control import EAGER_LIMIT

T = TypeVar("T")


def send(engine: Engine, messages: PointToPoint, x: object, dest: int, tag: int) -> Call[None]:
    """Implement ``Communicator.send``."""
    source = device_array(x)
    host = DeviceHost.of(engine.table)
    if host.fabric is None:
        host.warn_once(f"messages of device arrays go through the host: this rank has no NCCL: {host.reason}")
    waits = host.fabric is not None and source.nbytes > EAGER_LIMIT
    template = np.broadcast_to(np.zeros((), source.dtype), source.shape)
    envelope = encode_envelope(template, is_object=False, is_on_device=waits)

    async def send_body(operation: Operation, peer: int, envelope: bytes) -> None:
        if not waits:
            await _send_staged(operation, host, peer, source, envelope)
            return
        pair = DeviceGroup.of(engine).pair(dest, engine.rank)
        way = await send_by_pair(operation, pair, peer, envelope, source)
        _note(engine, "send", way)
        if way.algorithm != NCCL:
            await _send_staged(operation, host, peer, source, None)

    return messages.send_from_device(envelope, dest, tag, send_body, kind=DeviceOperation, call=DeviceCall)


async def _send_staged(
    operation: Operation, host: DeviceHost, peer: int, source: DeviceArray, envelope: bytes | None
) -> None:
    """Send ``source`` from host memory, with its ``envelope`` unless the receiver has that."""
    copies = copies_for(host, operation, source.device)
    try:
        content = (await copies.to_host((source,), source.stream or LEGACY_DEFAULT_STREAM))[0]
        payload = content.reshape(-1).view(np.uint8).data
        frames = {STAGED: payload} if envelope is None else {ENVELOPE: memoryview(envelope), BODY: payload}
        await transmit(operation, peer, frames)
    finally:
        await copies.close()


def receive(
    engine: Engine,
    messages: PointToPoint,
    source: int | None,
    tag: int,
    out: object,
    convert: Callable[[ReceivedMessage], T],
) -> Coroutine[Any, Any, T]:
    """Implement ``Communicator.recv`` with an ``out`` on a device."""
    target = check_writable(device_array(out, "out"), "out")
    host = DeviceHost.of(engine.table)

    async def take_body(operation: Operation, peer: int) -> bool:
        pair = DeviceGroup.of(engine).pair(engine.rank, engine.ranks.index(peer))
        way = await receive_by_pair(operation, pair, peer, target)
        _note(engine, "recv", way)
        return way.algorithm == NCCL

    call = messages.receive(
        source,
        tag,
        np.empty(target.shape, target.dtype),
        convert=lambda delivery: delivery,
        take_body=take_body,
        kind=DeviceOperation,
        call=DeviceCall,
    )
    timeout = engine.group.limits.timeout
    return WatchedCall(_received(host, call, target, convert, timeout), call.close)


def _note(engine: Engine, name: str, way: Way) -> None:
    """Record the way of a message for ``algorithm_table``; warn once if NCCL does not move it where it could."""
    text = f"{way.algorithm}: {way.reason}" if way.reason else way.algorithm
    engine.device_ways.note(name, f"{text} (up to {EAGER_LIMIT >> 10} KiB at once, through the host)")
    if way.reason and not way.is_by_choice:
        text = f"group {engine.group.name}: messages of device arrays go through the host: {way.reason}"
        DeviceHost.of(engine.table).warn_once(text)


async def _received(
    host: DeviceHost,
    call: Call[ReceivedMessage],
    target: DeviceArray,
    convert: Callable[[ReceivedMessage], T],
    timeout: float | None,
) -> T:
    delivery = await call
    if delivery.has_been_taken:
        return convert(delivery._replace(array=target.owner))
    copies = copies_for(host, None, target.device)
    try:
        async with asyncio.timeout(timeout) as deadline:
            await copies.to_device([delivery.array], [target])
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeviceError(
            f"recv: out, {target}, was not written within {timeout} s; does the stream that used it hang?"
        ) from error
    finally:
        await copies.close()
    return convert(ReceivedMessage(delivery.source, target.owner, delivery.is_object))
