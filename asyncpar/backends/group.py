"""A group of a runtime: ranks of one backend that run collective operations together."""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from asyncpar.backends.compressed import CompressedAllReduce
from asyncpar.backends.compression import CompressionAlgorithm, CompressionKind
from asyncpar.backends.operations import (
    CallTally,
    CollectiveOp,
    CollectiveResult,
    CommunicationMetrics,
    ReductionOp,
    metrics_of,
)
from asyncpar.codecs import Codec
from asyncpar.collectives.arrays import Array, check_array, check_key, check_out, check_writable
from asyncpar.collectives.call import WatchedCall
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.ledger import UseCounts
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import UsageError


class CommunicationGroup:
    """A group of ranks of one backend.  ``communicator`` has all operations, ``run`` those of ``CollectiveOp``.

    A group is equal to its name, which ``str`` returns, and to no other group.  ``compression`` applies to sums and
    averages all-reduced by ``run``, not to calls of ``communicator``.
    """

    def __init__(
        self, *, name: str, backend: str, communicator: Communicator, compression: CompressionAlgorithm
    ) -> None:
        self.name = name
        self.backend = backend
        self.communicator = communicator
        self.compression = compression
        self._compressed: Communicator | None = None
        self._tally = CallTally()
        self._uses = UseCounts()

    def __repr__(self) -> str:
        return f"CommunicationGroup({self.name!r}, rank {self.rank} of {self.size}, {self.backend})"

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self.name == other if isinstance(other, str) else self is other

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def group_id(self) -> str:
        """The name of the group."""
        return self.name

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self.communicator.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank, ``cpu:N`` where N is its number among the ranks of the group on its host."""
        places = {rank: number for host in self.communicator.hosts for number, rank in enumerate(host)}
        return tuple(f"cpu:{places[rank]}" for rank in range(self.size))

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks in the numbering of the backend's world."""
        return self.communicator.ranks

    def metrics(self) -> CommunicationMetrics:
        """Return the metrics of this group's operations so far, including those called on ``communicator``."""
        compressed = None if self._compressed is None else self._compressed.traffic
        return metrics_of(self.communicator.traffic, compressed, self._tally)

    def run(
        self,
        operation: CollectiveOp | str,
        x: Array | None = None,
        *,
        reduction: ReductionOp | str = ReductionOp.SUM,
        root: int = 0,
        peer: int | None = None,
        tag: int = 0,
        out: Array | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, CollectiveResult]:
        """Start ``operation``; it runs when the returned coroutine is awaited.

        ``x``, ``root``, ``tag``, ``out`` and ``key`` are those of the method of ``Communicator`` of the same name,
        ``reduction`` is its ``op``; ``peer`` is the ``dest`` of a send and the ``source`` of a receive (None: any
        rank).  An argument that the operation does not have raises ``UsageError``.  Errors are those of that method;
        wrong arguments raise at once, but the call still takes its place: it ends on the other ranks with the reason.
        """
        asked = operation
        given = {"x": x, "reduction": reduction, "root": root, "peer": peer, "tag": tag, "out": out, "key": key}
        try:
            operation, reduction = _parse(operation, reduction)
            _check_arguments(operation, given | {"reduction": reduction})
            may_compress = self._may_compress(operation, reduction)
            codec = self._codec(x, out, key) if may_compress else None
        except Exception as error:
            self._refuse(error, asked, given)
            raise
        if may_compress:
            return self._compress(codec, x, reduction, out, self._use(key))
        if operation in (CollectiveOp.SEND, CollectiveOp.RECV):
            running: Coroutine[Any, Any, Array | None] = self._begin_message(operation, x, peer, tag, out)
        else:
            running = self._begin(operation, x, reduction, root, out, key)
        return WatchedCall(self._finish(operation, lambda: running), running.close)

    def _begin(
        self, operation: CollectiveOp, x: Any, reduction: ReductionOp, root: int, out: Array | None, key: str | None
    ) -> Coroutine[Any, Any, Array | None]:
        communicator, op = self.communicator, reduction.numeric
        match operation:
            case CollectiveOp.ALL_REDUCE:
                return communicator.all_reduce(x, op, out=out, key=key)
            case CollectiveOp.REDUCE:
                return communicator.reduce(x, op, root=root, out=out, key=key)
            case CollectiveOp.REDUCE_SCATTER:
                return communicator.reduce_scatter(x, op, out=out, key=key)
            case CollectiveOp.ALL_GATHER:
                return communicator.all_gather(x, out=out, key=key)
            case CollectiveOp.GATHER:
                return communicator.gather(x, root=root, out=out, key=key)
            case CollectiveOp.SCATTER:
                return communicator.scatter(x, root=root, out=out, key=key)
            case CollectiveOp.BROADCAST:
                return communicator.broadcast(x, root=root, key=key)
            case CollectiveOp.ALL_TO_ALL:
                return communicator.all_to_all(x, out=out, key=key)
            case CollectiveOp.BARRIER:
                return communicator.barrier(key=key)
            case CollectiveOp.SEND | CollectiveOp.RECV:
                raise AssertionError("messages are no collectives")

    def _begin_message(
        self, operation: CollectiveOp, x: Any, peer: int | None, tag: int, out: Array | None
    ) -> Coroutine[Any, Any, Array | None]:
        if operation is CollectiveOp.RECV:
            return self.communicator.recv(peer, out=out, tag=tag)
        if peer is None:
            raise UsageError(f"peer: expected the rank of the group to send to, 0..{self.size - 1}, got None")
        return self.communicator.send(x, peer, tag=tag)

    def _refuse(self, error: Exception, operation: object, given: Mapping[str, Any]) -> None:
        """Give a refused call its place: it ends on the other ranks, wherever they have it."""
        key = given["key"]
        if operation == CollectiveOp.SEND:
            self.communicator.refuse_send(error, given["peer"], tag=given["tag"])
        elif operation == CollectiveOp.RECV:
            self.communicator.refuse_recv(error, given["peer"], tag=given["tag"])
        elif not self._may_compress(operation, given["reduction"]):
            self.communicator.refuse(str(operation), error, key=key)
        elif key is None or (isinstance(key, str) and key):
            use = self._use(key)
            for part in use.keys:
                self._apart().refuse("all_reduce", error, key=part)

    # -- calls that may be compressed ------------------------------------------------------------------------------

    def _may_compress(self, operation: object, reduction: object) -> bool:
        """Return whether this is a sum or average that uses a codec if its array allows it.

        All such calls are in ``_apart``, including those of arrays that are sent unencoded, and refused ones: the
        arrays may differ between ranks, but the place of a call must not.
        """
        others = (ReductionOp.MIN, ReductionOp.MAX, ReductionOp.PRODUCT)
        return (
            isinstance(operation, str)
            and operation == CollectiveOp.ALL_REDUCE
            and not (isinstance(reduction, str) and reduction in others)
            and self.compression.kind is not CompressionKind.NONE
            and self.size > 1
        )

    def _apart(self) -> Communicator:
        """Return the communicator of calls that may be compressed."""
        if self._compressed is None:
            self._compressed = self.communicator.subgroup(range(self.size), key="compressed")
            assert self._compressed is not None
        return self._compressed

    def _use(self, key: str | None) -> _Use:
        name = "" if key is None else f"key {key}"
        number = self._uses.add(name)
        return _Use(name, number)

    def _codec(self, x: Any, out: Array | None, key: str | None) -> Codec | None:
        """Return the codec of the values of ``x`` if they are real numbers, and check the arguments."""
        check_key(key)
        if is_device_array(x):
            raise UsageError(
                "x: expected a numpy array where the backend was opened with compression, got a device array; average "
                "gradients by GradientSynchronizer with a codec, or open the backend without compression"
            )
        if not _is_real(check_array(x).dtype):
            return None
        _ = check_writable(x, "x") if out is None else check_out(out, x.shape, x.dtype)
        return self.compression.codec_for(x.size)

    def _compress(
        self, codec: Codec | None, x: Any, reduction: ReductionOp, out: Array | None, use: _Use
    ) -> Coroutine[Any, Any, CollectiveResult]:
        operation = CollectiveOp.ALL_REDUCE
        if codec is None:
            running = self._apart().all_reduce(x, reduction.numeric, out=out, key=use.keys[0])
            return WatchedCall(self._finish(operation, lambda: running, is_apart=True), running.close)
        call = CompressedAllReduce(
            self._apart(),
            codec.at(zlib.crc32(use.name.encode()), use.number),
            x,
            x if out is None else out,
            is_mean=reduction is ReductionOp.AVERAGE,
            keys=use.keys,
        )
        return WatchedCall(self._finish(operation, call.run, codec.name, is_apart=True), call.close)

    async def _finish(
        self,
        operation: CollectiveOp,
        run: Callable[[], Awaitable[Array | None]],
        codec: str = "",
        *,
        is_apart: bool = False,
    ) -> CollectiveResult:
        started = time.perf_counter()
        try:
            value = await run()
        except BaseException:
            self._tally.failed(operation)
            raise
        seconds = time.perf_counter() - started
        if is_apart:
            self._tally.compressed_done(seconds)
        return CollectiveResult(operation=operation, group=self.name, value=value, seconds=seconds, codec=codec)


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a key, or of none, among the calls that may be compressed."""

    name: str
    number: int

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of the two exchanges of a compressed call; an uncompressed one has the first."""
        return f"{self.name} #{self.number}/shards", f"{self.name} #{self.number}/sums"


_NOWHERE: dict[str, object] = {"reduction": ReductionOp.SUM, "root": 0, "tag": 0}
"""The values of arguments that an operation does not take, if not None."""

_ROOTED = ("x", "root", "out", "key")

_ARGUMENTS: dict[CollectiveOp, tuple[str, ...]] = {
    CollectiveOp.ALL_REDUCE: ("x", "reduction", "out", "key"),
    CollectiveOp.REDUCE: (*_ROOTED, "reduction"),
    CollectiveOp.REDUCE_SCATTER: ("x", "reduction", "out", "key"),
    CollectiveOp.ALL_GATHER: ("x", "out", "key"),
    CollectiveOp.GATHER: _ROOTED,
    CollectiveOp.SCATTER: _ROOTED,
    CollectiveOp.BROADCAST: ("x", "root", "key"),
    CollectiveOp.ALL_TO_ALL: ("x", "out", "key"),
    CollectiveOp.SEND: ("x", "peer", "tag"),
    CollectiveOp.RECV: ("peer", "tag", "out"),
    CollectiveOp.BARRIER: ("key",),
}


def _parse(operation: str, reduction: str) -> tuple[CollectiveOp, ReductionOp]:
    try:
        return CollectiveOp(operation), ReductionOp(reduction)
    except ValueError as error:
        raise UsageError(f"operation, reduction: {error}") from None


def _check_arguments(operation: CollectiveOp, given: Mapping[str, object]) -> None:
    """Raise ``UsageError`` for an argument that ``operation`` does not have, and for a missing array."""
    for name, value in given.items():
        nothing = _NOWHERE.get(name)
        if name not in _ARGUMENTS[operation] and (value is not None if nothing is None else value != nothing):
            raise UsageError(f"{name}: {operation} has no use for it, got {_shown(value)}")
    if given["x"] is None and "x" in _ARGUMENTS[operation] and operation is not CollectiveOp.SCATTER:
        raise UsageError(f"x: {operation} expects an array, got None")


def _shown(value: object) -> str:
    """Return the form of ``value`` in errors: an array is not shown whole."""
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def _is_real(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == np.dtype(ml_dtypes.bfloat16)
