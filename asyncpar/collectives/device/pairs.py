"""Messages of device arrays by NCCL: ``ncclSend`` and ``ncclRecv`` in a communicator of two ranks for each direction.

Theory of operation.  NCCL matches sends and receives of two ranks by their order alone, and both hang if it differs.
The receiver therefore decides: it knows which message it takes, by source, tag and number.  The sender describes its
device with its envelope; the receiver compares shapes and dtypes, gives the message its place among all that it takes
from this rank, and answers with that.  Then both launch it in that place (``channel.py``).  A sender that fails before
that only notifies the receiver, which knows whether the message has a place, and breaks the communicator if so.  Each
direction has a communicator and a stream of its own: with one for both, two ranks that send to each other would wait
for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from asyncpar.collectives.algorithms.catalog import NCCL, STAGED
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.device.channel import Enqueue, Launch
from asyncpar.collectives.device.records import (
    ORDER_WORDS,
    RECORD_WORDS,
    LaunchOrder,
    RankRecord,
    Way,
    choose_way,
)
from asyncpar.collectives.device.route import NoRoute
from asyncpar.collectives.device.run import by_nccl
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.point_to_point import ANSWER, BODY, ENVELOPE, receive_frame, transmit
from asyncpar.collectives.protocol import ANSWER_BYTES, DECLINED
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM, DeviceCommunicator, NcclDtype, NcclResult
from asyncpar.errors import UsageError

_WORD: Final = np.dtype(np.int64)
_ANSWER_WORDS: Final = ORDER_WORDS + RECORD_WORDS
assert _ANSWER_WORDS * _WORD.itemsize == ANSWER_BYTES
_RECEIVER, _SENDER = 0, 1


def _bytes(words: Array) -> memoryview:
    return words.view(np.uint8).data


async def _answer(operation: Operation, peer: int, order: LaunchOrder, record: RankRecord) -> None:
    words = np.concatenate([order.encode(), record.encode()])
    await transmit(operation, peer, {ANSWER: _bytes(words)})


async def send_by_pair(operation: Operation, pair: DeviceGroup, peer: int, envelope: bytes, source: DeviceArray) -> Way:
    """Send ``envelope``, and ``source`` by NCCL if the receiver can take it that way; return the way.

    If the way is not NCCL, the content has not been sent.
    """
    row = pair.row(source.device)
    answer = np.zeros(_ANSWER_WORDS, _WORD)
    coming = operation.post(peer, ANSWER, _bytes(answer))
    await transmit(operation, peer, {ENVELOPE: memoryview(envelope), BODY: _bytes(row)})
    if coming is not None:
        await operation.received(peer, ANSWER, coming)
    if answer.tobytes() == DECLINED:
        return Way(algorithm=STAGED, reason=f"rank {peer} receives it there", is_by_choice=True)
    records = pair.records([answer[ORDER_WORDS:], row])
    order = LaunchOrder.decode(answer, records)
    way = _way(pair, records)
    if way.algorithm == NCCL:

        def send(comm: DeviceCommunicator, stream: int) -> NcclResult:
            return comm.send(source.pointer, source.nbytes, NcclDtype.UINT8, _RECEIVER, stream)

        return await _launch(operation, pair, order, source, send)
    return way


async def receive_by_pair(operation: Operation, pair: DeviceGroup, peer: int, target: DeviceArray) -> Way:
    """Answer the sender ``peer``, and receive into ``target`` by NCCL if both can; return the way.

    If the way is not NCCL, nothing was received.
    """
    row = np.zeros(RECORD_WORDS, _WORD)
    await receive_frame(operation, peer, BODY, row)
    own = pair.row(target.device)
    records = pair.records([own, row])
    way = _way(pair, records)
    order = pair.decide(records, way)
    try:
        await _answer(operation, peer, order, records[_RECEIVER])
    except BaseException as error:
        pair.miss(order, error)
        raise
    if way.algorithm == NCCL:

        def receive(comm: DeviceCommunicator, stream: int) -> NcclResult:
            return comm.recv(target.pointer, target.nbytes, NcclDtype.UINT8, _SENDER, stream)

        return await _launch(operation, pair, order, target, receive)
    return way


def _way(pair: DeviceGroup, records: Sequence[RankRecord]) -> Way:
    """Return the way of a message; one that NCCL would refuse goes through the host, with the reason."""
    try:
        return choose_way(records, pair.ranks, None, is_spread=pair.is_spread)
    except UsageError as error:
        return Way(algorithm=STAGED, reason=str(error))


async def _launch(
    operation: Operation, pair: DeviceGroup, order: LaunchOrder, array: DeviceArray, enqueue: Enqueue
) -> Way:
    launch = Launch(caller_stream=array.stream or LEGACY_DEFAULT_STREAM, is_ordered=False)
    try:
        await by_nccl(operation, pair, order, launch, enqueue, lent=(array,))
    except NoRoute as error:
        return Way(algorithm=STAGED, reason=str(error))
    return Way(algorithm=NCCL)
