"""NCCL in the memory of this process, with its semantics, for tests without a GPU.

Communicators are nonblocking: they are complete when all ranks have called, and report so when they are queried; the
first operation of each takes a while to begin.  An operation runs when the work of all ranks has reached the head of
their streams, and hangs until then, forever if a rank does not call it.  Errors surface later, when a communicator's
state is queried.  An aborted communicator stays aborted, and only its own rank learns of it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.device.fabric import (
    UNIQUE_ID_BYTES,
    DeviceDescription,
    DeviceError,
    FabricVersions,
    NcclDtype,
    NcclOp,
    NcclResult,
)
from tests.device.fake_devices import FakeCluster

_COMBINE: dict[NcclOp, Any] = {
    NcclOp.SUM: np.add,
    NcclOp.AVG: np.add,
    NcclOp.PROD: np.multiply,
    NcclOp.MIN: np.minimum,
    NcclOp.MAX: np.maximum,
}


def _numpy(dtype: NcclDtype) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if dtype is NcclDtype.BFLOAT16 else np.dtype(str(dtype))


@dataclass
class _GivenPart:
    """The arguments of one rank to an operation."""

    kind: tuple[Any, ...]
    send: int
    recv: int
    count: int
    has_arrived: bool = False
    is_done: bool = False
    comm: FakeCommunicator | None = None


@dataclass
class _Clique:
    """State that the ranks of one communicator share."""

    size: int
    comms: dict[int, FakeCommunicator] = field(default_factory=dict)
    parts: dict[int, dict[int, _GivenPart]] = field(default_factory=lambda: defaultdict(dict))
    sends: dict[tuple[int, int], deque[_GivenPart]] = field(default_factory=lambda: defaultdict(deque))
    recvs: dict[tuple[int, int], deque[_GivenPart]] = field(default_factory=lambda: defaultdict(deque))
    error: NcclResult | None = None
    text: str = ""
    pending: dict[Any, Any] = field(default_factory=dict)
    """By name: splits and shrinks that not all ranks have called."""


class _Launch:
    """The work of one group of calls in a stream: all of them progress together."""

    def __init__(self, cluster: FakeCluster, parts: Sequence[tuple[_GivenPart, Callable[[], bool]]]) -> None:
        self._cluster = cluster
        self._parts = parts

    def step(self) -> bool:
        for part, progress in self._parts:
            comm = part.comm
            assert comm is not None
            part.has_arrived = True
            if not part.is_done and not comm.is_aborted:
                progress()
        return all(part.is_done or (part.comm is not None and part.comm.is_aborted) for part, _ in self._parts)


class FakeCommunicator:
    """One rank of a communicator."""

    def __init__(self, fabric: FakeFabric, clique: _Clique, rank: int, device: int) -> None:
        self._fabric, self._clique = fabric, clique
        self._cluster = fabric.cluster
        self.number = fabric.cluster.handle()
        """Its number among all communicators of the cluster, in the order in which they were made."""
        self.rank, self.size, self.device = rank, clique.size, device
        self.is_aborted = False
        self.is_destroyed = False
        self._operations = itertools.count()
        self._calls = itertools.count()
        self._error: NcclResult | None = None
        self._busy_until = 0
        self._is_connected = False
        self.cut_off = ""
        self._split: tuple[str, int] | None = None
        self._late: list[tuple[int, list[tuple[_GivenPart, Callable[[], bool]]]]] = []
        clique.comms[rank] = self
        fabric.cluster_communicators.add(self)

    # -- state -----------------------------------------------------------------------------------------------------

    def get_async_error(self) -> NcclResult:
        with self._cluster.lock:
            self._cluster.tick()
            if self.is_aborted or self.is_destroyed:
                return NcclResult.INVALID_USAGE
            if self._error is not None:
                return self._error
            if self._clique.error is not None:
                return self._clique.error
            if self.cut_off and (self._is_connected or "first" not in self.cut_off):
                return NcclResult.SYSTEM_ERROR if "fail" in self.cut_off else NcclResult.IN_PROGRESS
            if self.size < 0 or len(self._clique.comms) < self.size or self._cluster.ticks < self._busy_until:
                return NcclResult.IN_PROGRESS
            if self._is_splitting():
                return NcclResult.IN_PROGRESS
            self._enqueue_late()
            return NcclResult.SUCCESS

    def _is_splitting(self) -> bool:
        """Return whether this rank has called a split that others have not."""
        return self._split is not None and len(self._clique.pending[self._split]["called"]) < self.size

    def get_last_error(self) -> str:
        return self._clique.text

    def fail_later(self, result: NcclResult) -> None:
        """Make ``get_async_error`` return ``result`` from now on; operations hang."""
        self._error = result

    def _check(self, what: str) -> None:
        if self.is_aborted or self.is_destroyed:
            raise DeviceError(f"{what}: the communicator is aborted", result=NcclResult.INVALID_USAGE)
        if self.size < 0 or len(self._clique.comms) < self.size or self._late or self._is_splitting():
            raise DeviceError(f"{what}: the communicator is in progress", result=NcclResult.INVALID_USAGE)

    def abort(self) -> None:
        with self._cluster.lock:
            self.is_aborted = True
            self._late.clear()
            self._fabric.cluster_communicators.discard(self)

    def revoke(self) -> NcclResult:
        with self._cluster.lock:
            for parts in self._clique.parts.values():
                if self.rank in parts:
                    parts[self.rank].is_done = True
            for queue in (*self._clique.sends.values(), *self._clique.recvs.values()):
                for part in queue:
                    part.is_done |= part.comm is self
            self._late.clear()
            return NcclResult.SUCCESS

    def destroy(self) -> None:
        with self._cluster.lock:
            self.is_destroyed = True
            self._fabric.cluster_communicators.discard(self)

    # -- communicators from this one -------------------------------------------------------------------------------

    def split(self, color: int | None, key: int) -> FakeCommunicator | None:
        self._check("split")
        with self._cluster.lock:
            self._fabric.splits += 1
            self._split = ("split", next(self._calls))
            waiting = self._clique.pending.setdefault(self._split, {})
            clique = None if color is None else waiting.setdefault(color, _Clique(size=-1))
            waiting.setdefault("called", {})[self.rank] = (color, key)
            made = None if clique is None else FakeCommunicator(self._fabric, clique, ~self.rank, self.device)
            called: dict[int, tuple[int | None, int]] = waiting["called"]
            if len(called) == self.size:
                for other_color in {value[0] for value in called.values()} - {None}:
                    members = sorted((value[1], rank) for rank, value in called.items() if value[0] == other_color)
                    _complete(waiting[other_color], [rank for _, rank in members])
            return made

    def shrink(self, exclude: Sequence[int], *, abort: bool) -> FakeCommunicator:
        with self._cluster.lock:
            left = [rank for rank in range(self.size) if rank not in set(exclude)]
            if self.rank not in left or self.is_destroyed or (self.is_aborted and not abort):
                raise DeviceError("shrink: this rank is excluded", result=NcclResult.INVALID_ARGUMENT)
            if abort:
                self.revoke()
            place = ("shrink", next(self._calls), tuple(left))
            self._fabric.shrinks += 1
            clique = self._clique.pending.setdefault(place, _Clique(size=len(left)))
            return FakeCommunicator(self._fabric, clique, left.index(self.rank), self.device)

    # -- operations ------------------------------------------------------------------------------------------------

    def all_reduce(self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, stream: int) -> NcclResult:
        return self._collective(("all_reduce", count, dtype, op), send, recv, count, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: NcclDtype, root: int, stream: int) -> NcclResult:
        return self._collective(("broadcast", count, dtype, root), send, recv, count, stream)

    def reduce(
        self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, root: int, stream: int
    ) -> NcclResult:
        return self._collective(("reduce", count, dtype, op, root), send, recv, count, stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: NcclDtype, stream: int) -> NcclResult:
        return self._collective(("all_gather", count, dtype), send, recv, count, stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, stream: int) -> NcclResult:
        return self._collective(("reduce_scatter", count, dtype, op), send, recv, count, stream)

    def send(self, send: int, count: int, dtype: NcclDtype, peer: int, stream: int) -> NcclResult:
        part = _GivenPart(("p2p", count, dtype), send, 0, count, comm=self)
        return self._point_to_point(part, self._clique.sends[self.rank, peer], (self.rank, peer), stream)

    def recv(self, recv: int, count: int, dtype: NcclDtype, peer: int, stream: int) -> NcclResult:
        part = _GivenPart(("p2p", count, dtype), 0, recv, count, comm=self)
        return self._point_to_point(part, self._clique.recvs[peer, self.rank], (peer, self.rank), stream)

    def _collective(self, kind: tuple[Any, ...], send: int, recv: int, count: int, stream: int) -> NcclResult:
        self._check(kind[0])
        with self._cluster.lock:
            number = next(self._operations)
            part = self._clique.parts[number][self.rank] = _GivenPart(kind, send, recv, count, comm=self)
            return self._launch(part, lambda: self._progress(number), stream)

    def _point_to_point(
        self, part: _GivenPart, queue: deque[_GivenPart], pair: tuple[int, int], stream: int
    ) -> NcclResult:
        self._check("send or recv")
        with self._cluster.lock:
            queue.append(part)
            return self._launch(part, lambda: self._exchange(pair), stream)

    def _launch(self, part: _GivenPart, progress: Callable[[], bool], stream: int) -> NcclResult:
        if self._cluster.stream_device(stream) not in (None, self.device):
            raise DeviceError("the stream is one of another device", result=NcclResult.INVALID_USAGE)
        if self._fabric.group_depth:
            self._fabric.grouped.append((self, stream, part, progress))
            return NcclResult.SUCCESS
        return self._start(stream, [(part, progress)])

    def _start(self, stream: int, parts: list[tuple[_GivenPart, Callable[[], bool]]]) -> NcclResult:
        if not self._is_connected:
            self._is_connected = True
            self._busy_until = self._cluster.ticks + self._cluster.random.randint(1, 6)
            self._late.append((stream, parts))
            return NcclResult.IN_PROGRESS
        self._cluster.enqueue(stream, _Launch(self._cluster, parts))
        return NcclResult.SUCCESS

    def _enqueue_late(self) -> None:
        late, self._late = self._late, []
        for stream, parts in late:
            self._cluster.enqueue(stream, _Launch(self._cluster, parts))

    # -- running ---------------------------------------------------------------------------------------------------

    def _progress(self, number: int) -> bool:
        """Run collective ``number`` if all ranks are there and make the same call; it hangs otherwise."""
        parts = self._clique.parts[number]
        if len(parts) < self.size or not all(part.has_arrived for part in parts.values()):
            return False
        if not all(map(_is_alive, parts.values())) or len({part.kind for part in parts.values()}) != 1:
            return False
        _run(self._cluster, [parts[rank] for rank in range(self.size)])
        for part in parts.values():
            part.is_done = True
        del self._clique.parts[number]
        return True

    def _exchange(self, pair: tuple[int, int]) -> bool:
        sends, recvs = self._clique.sends[pair], self._clique.recvs[pair]
        while sends and recvs and sends[0].has_arrived and recvs[0].has_arrived:
            both = sends[0], recvs[0]
            if sends[0].kind != recvs[0].kind or any(part.is_done or not _is_alive(part) for part in both):
                return False
            sent, received = sends.popleft(), recvs.popleft()
            sent.is_done = received.is_done = True
            nbytes = sent.count * _numpy(sent.kind[2]).itemsize
            self._cluster.memory(received.recv, nbytes)[...] = self._cluster.memory(sent.send, nbytes)
        return True


def _is_alive(part: _GivenPart) -> bool:
    """Return whether the communicator of the rank that gave ``part`` works."""
    return part.comm is not None and not part.comm.is_aborted and part.comm._error is None


def _complete(clique: _Clique, members: Sequence[int]) -> None:
    """Number the members of one of the groups of a split, which all ranks have called."""
    made = {rank: clique.comms.pop(~rank) for rank in members}
    clique.size = len(members)
    for place, rank in enumerate(members):
        made[rank].rank, made[rank].size = place, len(members)
        clique.comms[place] = made[rank]


def _run(cluster: FakeCluster, parts: Sequence[_GivenPart]) -> None:
    """Move and combine the data of all ranks for one collective."""
    name, count, dtype, *more = parts[0].kind
    of = _numpy(dtype)

    def read(address: int, elements: int) -> Array:
        values: Array = cluster.memory(address, elements * of.itemsize).copy().view(of)
        return values

    def write(address: int, values: Array) -> None:
        cluster.memory(address, values.nbytes)[...] = np.ascontiguousarray(values).view(np.uint8)

    if name in ("all_reduce", "reduce", "reduce_scatter"):
        length = count * len(parts) if name == "reduce_scatter" else count
        total = _combined(more[0], [read(part.send, length) for part in parts])
        for rank, part in enumerate(parts):
            if name == "all_reduce" or (name == "reduce" and rank == more[1]):
                write(part.recv, total)
            elif name == "reduce_scatter":
                write(part.recv, total[rank * count : (rank + 1) * count])
    elif name == "broadcast":
        values = read(parts[more[0]].send, count)
        for part in parts:
            write(part.recv, values)
    else:
        joined = np.concatenate([read(part.send, count) for part in parts])
        for part in parts:
            write(part.recv, joined)


def _combined(op: NcclOp, values: Sequence[Array]) -> Array:
    total = values[0].copy()
    with np.errstate(all="ignore"):
        for other in values[1:]:
            _COMBINE[op](total, other, out=total)
        if op is NcclOp.AVG:
            total = (total / len(values)).astype(total.dtype)
    return total


class FakeFabric:
    """One rank's view of ``cluster``: devices ``visible``, by index there, on ``host``.

    ``cut_off``: communicators over several hosts ``fail`` or ``hang`` on this rank, or ``fail at first`` or ``hang at
    first`` use, although nothing indicates that there is no route.
    """

    name = "nccl"

    def __init__(
        self,
        cluster: FakeCluster,
        *,
        visible: Sequence[int] | None = None,
        host: str = "localhost",
        allows_shared_devices: bool = False,
        reaches_other_hosts: bool = True,
        cut_off: str = "",
        version: int = 23004,
    ) -> None:
        self.cluster = cluster
        self.host = host
        self.visible = tuple(range(cluster.devices)) if visible is None else tuple(visible)
        self.allows_shared_devices = allows_shared_devices
        self.reaches_other_hosts = reaches_other_hosts
        self.cut_off = cut_off
        self.versions = FabricVersions(nccl=version, cuda_driver=13000)
        self.group_depth = 0
        self.shrinks = 0
        """How often a communicator of this rank was shrunk."""
        self.splits = 0
        """How often a communicator of this rank was split."""
        self.inits = 0
        """How often a communicator was made from a unique id."""
        self.grouped: list[tuple[FakeCommunicator, int, _GivenPart, Callable[[], bool]]] = []
        self.cluster_communicators: set[FakeCommunicator] = set()
        """Communicators of this rank that were neither aborted nor destroyed."""

    def devices(self) -> tuple[DeviceDescription, ...]:
        return tuple(
            DeviceDescription(index=index, uuid=f"GPU-{place}", name="Fake", total_bytes=80 << 30)
            for index, place in enumerate(self.visible)
        )

    def get_unique_id(self) -> bytes:
        with self.cluster.lock:
            return self.cluster.handle().to_bytes(UNIQUE_ID_BYTES, "little")

    def init_rank(self, size: int, unique_id: bytes, rank: int, device: int) -> FakeCommunicator:
        with self.cluster.lock:
            self.inits += 1
            cliques = self.cluster.cliques
            clique = cliques.setdefault(unique_id, _Clique(size=size))
            others = list(clique.comms.values())
            made = FakeCommunicator(self, clique, rank, device)
            for other in others:
                if self.host != other._fabric.host and not self.reaches_other_hosts:
                    clique.error = NcclResult.SYSTEM_ERROR
                    clique.text = f"no route from {self.host} to {other._fabric.host}"
                for one in (made, other):
                    if self.host != other._fabric.host and one._fabric.cut_off:
                        one.cut_off = one._fabric.cut_off
                if self._place(made) == self._place(other) and not self.allows_shared_devices:
                    clique.error = NcclResult.INVALID_USAGE
                    clique.text = f"Duplicate GPU detected : rank {rank} and rank {other.rank} both on one device"
            return made

    @staticmethod
    def _place(comm: FakeCommunicator) -> tuple[str, int]:
        return comm._fabric.host, comm._fabric.visible[comm.device]

    def group_start(self) -> None:
        self.group_depth += 1

    def group_end(self) -> NcclResult:
        self.group_depth -= 1
        if self.group_depth:
            return NcclResult.SUCCESS
        grouped, self.grouped = self.grouped, []
        launches: dict[tuple[FakeCommunicator, int], list[tuple[_GivenPart, Callable[[], bool]]]] = {}
        for comm, stream, part, progress in grouped:
            launches.setdefault((comm, stream), []).append((part, progress))
        results = [comm._start(stream, parts) for (comm, stream), parts in launches.items()]
        return NcclResult.IN_PROGRESS if NcclResult.IN_PROGRESS in results else NcclResult.SUCCESS

    def create_stream(self, device: int) -> int:
        return self.cluster.create_stream(device)

    def destroy_stream(self, stream: int) -> None:
        self.cluster.destroy_stream(stream)

    def stream_device(self, stream: int) -> int | None:
        return self.cluster.stream_device(stream)

    def create_event(self, device: int) -> int:
        return self.cluster.create_event(device)

    def record_event(self, event: int, stream: int) -> None:
        self.cluster.record_event(event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self.cluster.wait_event(stream, event)

    def query_event(self, event: int) -> bool:
        return self.cluster.query_event(event)

    def destroy_event(self, event: int) -> None:
        self.cluster.destroy_event(event)

    def allocate(self, nbytes: int, device: int) -> int:
        return self.cluster.allocate(nbytes, device)

    def free(self, address: int, device: int) -> None:
        self.cluster.free(address)

    def allocate_pinned(self, nbytes: int) -> int:
        return self.cluster.allocate(nbytes, -1)

    def free_pinned(self, address: int) -> None:
        self.cluster.free(address)

    def pinned_view(self, address: int, nbytes: int) -> memoryview:
        return self.cluster.memory(address, nbytes).data

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.cluster.copy(target, source, nbytes, stream)
