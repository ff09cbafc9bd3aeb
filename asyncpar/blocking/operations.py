"""Generated from asyncpar/collectives by scripts/generate-blocking; do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from asyncpar.blocking.items import Items
from asyncpar.blocking.node_handle import NodeHandle
from asyncpar.collectives import communicator
from asyncpar.collectives.all_reduce import MethodWithParts
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.completion.policies import Late, LateCounts, Reduced, Until
from asyncpar.collectives.ledger import Traffic
from asyncpar.collectives.parts import Part
from asyncpar.collectives.recovery import Agreed
from asyncpar.core.config.device_lanes import DeviceLanes
from asyncpar.core.config.names import (
    AllGatherAlgorithm,
    AllReduceAlgorithm,
    AllToAllAlgorithm,
    AnyAlgorithm,
    BarrierAlgorithm,
    BroadcastAlgorithm,
    Name,
    ReduceAlgorithm,
    ReduceOp,
    ReduceScatterAlgorithm,
    RootedAlgorithm,
)
from asyncpar.core.config.transport import LaneCosts
from asyncpar.core.foreign_arrays import ArrayT, HostArray

T = TypeVar("T")


class AllReduce:
    """The operation ``all_reduce`` of a communicator: call it, or iterate over its result in ``parts``."""

    def __init__(self, handle: NodeHandle, on_loop: communicator.Communicator) -> None:
        self._handle = handle
        self.on_loop = on_loop
        """The group for coroutines that run on the loop."""

    @overload
    def __call__(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] = "all",
        late: Late = "drop",
        timeout: float | None = None,
    ) -> ArrayT: ...

    @overload
    def __call__(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Until,
        late: Late = "drop",
        timeout: float | None = None,
    ) -> Reduced: ...

    @overload
    def __call__(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until,
        late: Late = "drop",
        timeout: float | None = None,
    ) -> ArrayT | Reduced: ...

    def __call__(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until = "all",
        late: Late = "drop",
        timeout: float | None = None,
    ) -> ArrayT | Reduced:
        """Combine ``x`` of all ranks, in place (or into ``out``), and return it.

        ``op`` is sum, mean, prod, min, max, band, bor or bxor.  The result has the same bits on every rank, and again
        whenever the same values are reduced by the same algorithm.  A mean is the sum, divided at the end; in float16,
        which may not hold the sum, each rank's part is divided first (values below 6e-5 lose digits by that).  It needs
        at most 8 MiB of additional memory.  ``all_reduce.parts(x)`` yields finished parts while the rest is in flight.
        ``algorithm`` may set the number of bytes of a chunk in one message, 4k to 2m: ``ring/256k``; the default is 1m.

        ``until`` defines when the operation is complete: "all" waits for all ranks; with a ``Quorum`` or a ``Deadline``
        it continues without late ranks, and returns a ``Reduced``, the same on all ranks, which lists the
        contributors.  Means and sums are then those of the contributors.  The part of a late rank is dropped, or, with
        ``late="next"`` (sums and means), added to its next part with the same ``key``.  Such calls match among
        themselves, by ``key``, in their order.  It raises ``PeerLost`` if so many ranks are lost that the policy cannot
        be met, or no majority is left to decide; ``x`` is then unchanged.

        Without ``algorithm``, one of ``comm.algorithms("all_reduce")``, the cost model chooses.  Calls with equal
        ``key`` match each other, in any order.  ``stream`` is for arrays on CUDA devices.

        Example::

            mean = comm.all_reduce(np.full(3, comm.rank, "float32"), "mean")
            total = comm.all_reduce(np.ones(3), out=np.empty(3))  # leaves x as it is
        """
        return self._handle.wait(
            "all_reduce",
            lambda: self.on_loop.all_reduce(
                x, op, out=out, algorithm=algorithm, key=key, stream=stream, until=until, late=late
            ),
            timeout,
        )

    def parts(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Items[Part]:
        """Combine ``x`` of all ranks, in place (or into ``out``), and yield parts of the result as they are finished.

        Each part is a pair ``where, values``: a slice of the flat result, and a view of its elements; see
        ``asyncpar.Part`` and ``asyncpar.PartStream``.  The result has the bits of ``all_reduce(x)``, other ranks may
        call either, and the call takes its place in the order of operations at once.  Parts have about 1 MiB per rank;
        a small result is one part.  Device arrays have no parts: ``UsageError``.
        """
        return Items(
            self._handle,
            "all_reduce",
            lambda: self.on_loop.all_reduce.parts(x, op, out=out, algorithm=algorithm, key=key),
            timeout=timeout,
        )


def _all_reduce_of(operations: Operations) -> AllReduce:
    return AllReduce(operations._handle, operations.on_loop)


class Operations:
    """The operations of ``asyncpar.Communicator``, which block until they are over; ``timeout`` is in seconds."""

    def __init__(self, handle: NodeHandle, on_loop: communicator.Communicator) -> None:
        self._handle = handle
        self.on_loop = on_loop
        """The same group for coroutines that run on the loop."""

    def _made(self, made: communicator.Communicator) -> Self:
        return type(self)(self._handle, made)

    def _wrapped(self, made: communicator.Communicator | None) -> Self | None:
        return None if made is None else self._made(made)

    all_reduce = MethodWithParts(AllReduce.__call__, _all_reduce_of)

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[Array],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> list[Array]: ...

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[HostArray],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> list[Any]: ...

    def all_reduce_many(
        self,
        arrays: Iterable[HostArray],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Combine each of ``arrays`` of all ranks, in place, and return them in a list.

        All of them are one operation, which is much faster than one per array where they are small.  They may differ in
        shape, layout and dtype, but must not overlap; all ranks pass the same shapes and dtypes in the same order.
        Results are as those of ``all_reduce``, with the same bits on every rank.
        """
        return self._handle.wait(
            "all_reduce_many",
            lambda: self.on_loop.all_reduce_many(arrays, op, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def reduce(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        root: int = 0,
        out: HostArray | None = None,
        algorithm: ReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT | None:
        """Combine ``x`` of all ranks at ``root``, which gets the result (in ``out``); other ranks get None."""
        return self._handle.wait(
            "reduce",
            lambda: self.on_loop.reduce(x, op, root=root, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def reduce_scatter(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: ReduceScatterAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Combine ``x`` of all ranks and return this rank's slice of the result along axis 0.

        Slices have ``ceil(len(x) / size)`` rows; those of the last ranks may be shorter or empty.  ``x`` has the same
        shape on all ranks, and ``op`` is sum, mean, prod, min, max, band, bor or bxor.  ``out`` receives the result
        (None: a new array).  ``algorithm`` is one of ``comm.algorithms("reduce_scatter")`` (None: the fastest by the
        cost model).  Calls with equal ``key`` match each other, in any order.  ``stream`` is for arrays on CUDA
        devices.

        Example::

            mine = comm.reduce_scatter(np.ones(2 * comm.size))  # [size, size]
        """
        return self._handle.wait(
            "reduce_scatter",
            lambda: self.on_loop.reduce_scatter(x, op, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def all_gather(
        self,
        x: ArrayT,
        *,
        out: HostArray | None = None,
        algorithm: AllGatherAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Return ``x`` of all ranks as one array of shape ``(size, *x.shape)``.

        ``x`` has the same shape and dtype on all ranks; ``all_gather_v`` accepts different lengths.  ``out`` receives
        the result (None: a new array).  ``algorithm`` is one of ``comm.algorithms("all_gather")`` (None: the fastest by
        the cost model).  Calls with equal ``key`` match each other, in any order.  ``stream`` is for arrays on CUDA
        devices.

        Example::

            ranks = comm.all_gather(np.array([comm.rank]))  # [[0], [1], ...]
        """
        return self._handle.wait(
            "all_gather",
            lambda: self.on_loop.all_gather(x, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def all_gather_v(
        self,
        x: ArrayT,
        *,
        out: HostArray | None = None,
        algorithm: AllGatherAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Return ``x`` of all ranks, concatenated along axis 0, in which they may differ."""
        return self._handle.wait(
            "all_gather_v",
            lambda: self.on_loop.all_gather_v(x, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def gather(
        self,
        x: ArrayT,
        *,
        root: int = 0,
        out: HostArray | None = None,
        algorithm: RootedAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT | None:
        """Return ``x`` of all ranks at ``root``, as ``all_gather`` does; other ranks get None."""
        return self._handle.wait(
            "gather",
            lambda: self.on_loop.gather(x, root=root, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def scatter(
        self,
        x: ArrayT | None = None,
        *,
        root: int = 0,
        out: ArrayT | None = None,
        algorithm: RootedAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Return ``x[rank]`` of the ``x`` that ``root`` passes, of shape ``(size, ...)``.

        The other ranks pass no ``x`` but ``out``, which gives shape and dtype.
        """
        return self._handle.wait(
            "scatter",
            lambda: self.on_loop.scatter(x, root=root, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def broadcast(
        self,
        x: ArrayT,
        *,
        root: int = 0,
        algorithm: BroadcastAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Overwrite ``x`` with that of ``root``, and return it.

        ``x`` is an array of the same shape and dtype on all ranks.  ``algorithm`` is one of
        ``comm.algorithms("broadcast")`` (None: the fastest by the cost model).  Calls with equal ``key`` match each
        other, in any order.  ``stream`` is for arrays on CUDA devices.

        Example::

            weights = comm.broadcast(np.full(3, comm.rank), root=1)  # [1, 1, 1]
        """
        return self._handle.wait(
            "broadcast",
            lambda: self.on_loop.broadcast(x, root=root, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def barrier(
        self, *, algorithm: BarrierAlgorithm | None = None, key: str | None = None, timeout: float | None = None
    ) -> None:
        """Wait until all ranks have called it.

        ``algorithm`` is one of ``comm.algorithms("barrier")`` (None: the fastest by the cost model).  Calls with equal
        ``key`` match each other, in any order.

        Example::

            comm.barrier()
        """
        self._handle.wait("barrier", lambda: self.on_loop.barrier(algorithm=algorithm, key=key), timeout)

    def all_to_all(
        self,
        x: ArrayT,
        *,
        out: HostArray | None = None,
        algorithm: AllToAllAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> ArrayT:
        """Send ``x[r]`` to each rank ``r`` and return an array like ``x``, whose entry ``r`` came from rank ``r``."""
        return self._handle.wait(
            "all_to_all",
            lambda: self.on_loop.all_to_all(x, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def all_to_all_v(
        self,
        x: ArrayT,
        counts: Sequence[int],
        *,
        out: HostArray | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> tuple[ArrayT, list[int]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next ``counts[1]`` to rank 1, and so on.

        Returns the received rows, in the order of their senders' ranks, and the number of rows from each.
        """
        return self._handle.wait(
            "all_to_all_v", lambda: self.on_loop.all_to_all_v(x, counts, out=out, key=key, stream=stream), timeout
        )

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self.on_loop.rank

    @property
    def size(self) -> int:
        return self.on_loop.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks in world numbering, in the order of the group."""
        return self.on_loop.ranks

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host, as its launcher set it."""
        return self.on_loop.local_rank

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of this group by host, in this group's numbering, hosts in order of their first rank."""
        return self.on_loop.hosts

    @property
    def group(self) -> int:
        """The group's number on the wire."""
        return self.on_loop.group

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return self.on_loop.name

    @property
    def traffic(self) -> Traffic:
        """Statistics of the finished operations of this rank: a snapshot."""
        return self._handle.read("traffic", lambda: self.on_loop.traffic)

    def late_counts(self, key: str | None = None) -> LateCounts:
        """Return counts of this rank's parts of operations with a policy (``until``) and this ``key``, by their use."""
        return self._handle.read("late_counts", lambda: self.on_loop.late_counts(key))

    @property
    def may_share_memory(self) -> bool:
        """Whether ranks of one host may share memory; equal on all ranks, even where a host has no arena."""
        return self.on_loop.may_share_memory

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this rank can send in this group: the maximum measured by ``calibrate`` and operations so far.

        Counts lanes or shared memory, whichever the operations used.  A built-in figure before anything was measured.
        """
        return self.on_loop.bandwidth

    def algorithms(self, operation: str) -> tuple[Name, ...]:
        """Return the names that ``operation`` takes as ``algorithm`` in this group."""
        return self.on_loop.algorithms(operation)

    def is_pinned(self, operation: str) -> bool:
        """Return whether the user has pinned algorithms of ``operation``."""
        return self.on_loop.is_pinned(operation)

    def algorithm_table(self) -> str:
        """Return a table of the algorithm used for each operation and size, with the estimates behind it.

        The line after the table states the assumed cost of lanes, and whether it was measured: see ``calibrate``.  Once
        device arrays have been used, more lines show how operations on them last ran, by size where a pin depends on
        size, with the reason if not by NCCL, after a table like the first with the algorithms that would be used and
        the estimates of all ways.
        """
        return self.on_loop.algorithm_table()

    def predict(
        self, operation: str, payload: int, *, algorithm: AnyAlgorithm | None = None, on_devices: bool = False
    ) -> float:
        """Return the seconds that the cost model expects of ``operation`` on a buffer of ``payload`` bytes.

        ``algorithm`` None means the one that would be used.  With ``on_devices`` the buffer is a device array, and all
        ranks have NCCL and a route between their hosts; the figures are published ones until ``calibrate`` or
        ``set_device_lanes``.
        """
        return self.on_loop.predict(operation, payload, algorithm=algorithm, on_devices=on_devices)

    @property
    def measured_lane(self) -> LaneCosts | None:
        """The lane costs that ``calibrate`` of this group measured: between hosts, or of all lanes if it has one host.

        Equal on all ranks; None before calibration.
        """
        return self.on_loop.measured_lane

    def calibrate(
        self,
        *,
        device: int | None = None,
        from_operations: bool = False,
        cache: str | Path | bool = False,
        timeout: float | None = None,
    ) -> None:
        """Measure latency and bandwidth from rank 0, and choose algorithms by its figures on all ranks.

        Rank 0 measures to another rank of its host, and to one rank of each other host, 8 of them at most, one after
        the other; the slowest of these counts.

        With ``from_operations`` nothing is sent to measure: the figures are those of the latest operations by messages
        of this group, of all ranks.  A program that calls it from time to time thus adapts its choices to the current
        state of its links.  Choices change only in ``calibrate``: a sum of floats by another algorithm may differ in
        its last bits (it is still the same on all ranks), and pinned algorithms stay.

        With ``cache``, the path of a file on the host of rank 0, or True for one in the user's cache directory, figures
        that an earlier job measured in the last week for the same hosts and kinds of lanes are reused; if one is
        missing, all are measured and stored.  A damaged file counts as empty.

        With ``device``, the number of this rank's device, which all ranks must pass, the figures of NCCL inside the
        host and between hosts, and of copies to the host, are measured too, and device arrays then go the way that is
        fastest by these figures.  This takes 64 MiB of device memory for a moment; a rank without NCCL raises
        ``UsageError`` on all.  Call no other operation of this group until it is over.
        """
        self._handle.wait(
            "calibrate",
            lambda: self.on_loop.calibrate(device=device, from_operations=from_operations, cache=cache),
            timeout,
        )

    @property
    def device_lanes(self) -> DeviceLanes:
        """The cost model's figures for device arrays: published ones, before ``calibrate``."""
        return self.on_loop.device_lanes

    def set_device_lanes(self, lanes: DeviceLanes) -> None:
        """Choose the way of device arrays by ``lanes``, in this group and in groups made from it from now on.

        Call it on all ranks, with the same figures: otherwise operations raise ``OperationMismatch``.
        """
        self._handle.do("set_device_lanes", lambda: self.on_loop.set_device_lanes(lanes))

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return a new array of undefined content, in shared memory if the ranks of this host share memory.

        Collectives read such an array in place, instead of copying it first.  Its memory is freed when the array and
        all its views are gone.  Raises ``ArenaFull`` when the host has no memory left for it.
        """
        return self._handle.do("empty", lambda: self.on_loop.empty(shape, dtype))

    def subgroup(
        self, ranks: Iterable[int], *, name: str | None = None, key: str | None = None, has_own_timeout: bool = True
    ) -> Self | None:
        """Return the communicator over ``ranks`` of this group, in that order; None if this rank is not one of them.

        Nothing is sent.  Members must request the same ranks in the same order, and equally often: every call makes
        another group.  With ``key``, ranks that pass equal keys form one group instead, in any order and however often
        they ask; a repeated call returns the same communicator until it is closed, and then a new one, so members must
        close it equally often.  Groups last until they are closed; one without ``key`` also ends with its last
        reference.

        Ranks that request different ranks, or use different keys, wait for each other until the timeout: a rank that
        never joins cannot be distinguished from one that joins late, perhaps from another task.  The error then names
        the operation and the group in which the other rank is, and states that it has made no such group.

        Its ``timeout`` starts with the value of this group and is its own; without ``has_own_timeout`` the two share
        one.
        """
        return self._wrapped(
            self._handle.do(
                "subgroup", lambda: self.on_loop.subgroup(ranks, name=name, key=key, has_own_timeout=has_own_timeout)
            )
        )

    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None, timeout: float | None = None
    ) -> Self | None:
        """Return the communicator over the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks of this group call it; those that pass None get None.
        """
        return self._wrapped(self._handle.wait("split", lambda: self.on_loop.split(color, key, name=name), timeout))

    def claim(self, name: str, owner: object, *, kind: str | None = None) -> None:
        """Reserve ``name``, from which ``owner`` derives the keys of its operations, until it is released or collected.

        Raises ``UsageError`` while another object has it: their operations could be mixed up.  ``kind`` is the owner's
        name in messages, by default the name of its class.
        """
        self._handle.do("claim", lambda: self.on_loop.claim(name, owner, kind=kind))

    def release(self, name: str, owner: object) -> None:
        """Release a name that ``owner`` has claimed; do nothing if it has not."""
        self._handle.end("release", lambda: self.on_loop.release(name, owner))

    def give_up(self, rank: int, text: str) -> None:
        """End this group on this rank: its pending operations and all later calls raise ``PeerCancelled``.

        ``rank`` (of the world) has not done its part, and will not; ``text`` is the reason.  Other ranks learn of it
        once they have waited a second for a call that this rank will not make (a receive from any rank is not
        notified).  The group's part of the arena is freed when all its ranks have given it up.
        """
        self._handle.end("give_up", lambda: self.on_loop.give_up(rank, text))

    def revoke(self, reason: str | BaseException = "") -> None:
        """End this group, and every group made from it, on all its ranks: for programs that continue after a loss.

        Any rank may call it at any time; it does not wait, and does nothing where the group is revoked already.  All
        pending operations and all later calls raise ``WorldRevoked``, which carries ``reason``, and the rank that
        ``reason`` names if it is the error of a rank.  The revocation reaches all live ranks, even when some are dead
        or this one dies meanwhile.  ``shrink`` and ``agree`` work afterwards; other groups are not affected.  A rank
        that has left the world notifies no other: it records that there is a newer world, and its calls in this one
        raise ``StaleGeneration``.
        """
        self._handle.end("revoke", lambda: self.on_loop.revoke(reason))

    @property
    def is_revoked(self) -> bool:
        """Whether a rank has revoked this group, or one that it was made from."""
        return self.on_loop.is_revoked

    @property
    def is_over(self) -> bool:
        """Whether this rank accepts no more operations of the group, which is revoked, given up or closed."""
        return self.on_loop.is_over

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks of this group, in its numbering, that this rank knows to be lost or to have left the world."""
        return self.on_loop.lost

    def agree(self, flag: int, *, timeout: float | None = None) -> Agreed:
        """Return the bitwise AND of ``flag`` (signed 64-bit) over all survivors, and the ranks that are lost.

        All survivors get the same result, even if ranks are lost before or meanwhile, and even in a revoked group.  The
        n-th call of ``agree`` or ``shrink`` on one rank matches the n-th on the others.  A live rank that does not call
        it within ``timeout`` seconds raises ``PeerTimeout`` on all; one that does not answer for that long is declared
        lost.  A live rank that others declared lost gets ``PeerLost``.  A rank whose call is cancelled still
        contributes its flag.
        """
        return self._handle.wait("agree", lambda: self.on_loop.agree(flag), timeout)

    def shrink(self, *, timeout: float | None = None) -> Self:
        """Return the communicator over the survivors, in their order; all of them get the same, or an error.

        It works in a revoked group, and while further ranks are lost; revoking this group later does not end the new
        one.  Errors are those of ``agree``.  No majority is needed: in a network partition each side gets a group of
        its own, and the program must decide which of them continues.

        If the group has an NCCL communicator that the loss has ended, the new one is shrunk from it (``ncclCommShrink``
        with the abort flag) at its first operation on device arrays.
        """
        return self._made(self._handle.wait("shrink", self.on_loop.shrink, timeout))

    def close(self) -> None:
        """End this group on this rank and free its memory, including that in the arena.  Idempotent.

        Its pending operations and all later calls raise ``UsageError``; on the other ranks, operations that wait for
        this one raise ``PeerCancelled``.  Groups made from it stay open.  A group without ``key`` closes automatically
        when no reference to it, or to one of its calls, is left.  The world ends with its node, and cannot be closed.
        """
        self._handle.end("close", self.on_loop.close)

    def refuse(self, operation: str, error: BaseException, *, key: str | None = None) -> None:
        """Take the place of a call of ``operation`` that a layer above has refused with ``error``.

        For layers that check arguments of their own: the operation ends on the other ranks with ``PeerCancelled``,
        which has the reason, and the next calls of all ranks match.  Refused calls of this class do so automatically.
        """
        self._handle.end("refuse", lambda: self.on_loop.refuse(operation, error, key=key))

    def refuse_send(self, error: BaseException, dest: int, *, tag: int = 0) -> None:
        """Take the place of a send that a layer above has refused with ``error``; see ``refuse``.

        The receive that would have got it ends.  A wrong ``dest`` or ``tag`` is ignored.
        """
        self._handle.end("refuse_send", lambda: self.on_loop.refuse_send(error, dest, tag=tag))

    def refuse_recv(self, error: BaseException, source: int | None = None, *, tag: int = 0) -> None:
        """Take the place of a receive that a layer above has refused with ``error``, and its message; see ``refuse``.

        The pending send of that message ends.  A receive from any rank takes no message.
        """
        self._handle.end("refuse_recv", lambda: self.on_loop.refuse_recv(error, source, tag=tag))

    def describe_waits(self) -> list[str]:
        """Describe how long each running operation of this rank has waited, for which rank, and what is known of it."""
        return self._handle.read("describe_waits", self.on_loop.describe_waits)

    def send(self, x: HostArray, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send ``x`` to ``dest``, which receives it with the same ``tag`` (0 to 65535).

        Messages of one rank with one tag arrive in the order of the calls.  Returns when ``x`` may be reused: for a
        small array at once, for a larger one when it has been received.  ``x`` and the receiving array may be device
        arrays, both or one of them.

        Example::

            if comm.rank == 0:
                comm.send(np.arange(3), 1)
            elif comm.rank == 1:
                numbers = comm.recv(0)
        """
        self._handle.wait("send", lambda: self.on_loop.send(x, dest, tag=tag), timeout)

    def recv(
        self, source: int | None = None, *, out: HostArray | None = None, tag: int = 0, timeout: float | None = None
    ) -> Array:
        """Return the next array that ``source`` (None: any rank) sends with ``tag``, or ``out``, which receives it.

        ``out`` must have the shape and dtype of the sent array; otherwise both ranks raise ``OperationMismatch``.

        Example::

            if comm.rank == 0:
                comm.send(np.arange(3), 1, tag=5)
            elif comm.rank == 1:
                numbers = comm.recv(0, tag=5)
        """
        return self._handle.wait("recv", lambda: self.on_loop.recv(source, out=out, tag=tag), timeout)

    def recv_any(
        self, *, out: HostArray | None = None, tag: int = 0, timeout: float | None = None
    ) -> tuple[int, Array]:
        """Return the rank that sends the next array with ``tag``, and the array."""
        return self._handle.wait("recv_any", lambda: self.on_loop.recv_any(out=out, tag=tag), timeout)

    def send_object(self, value: object, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send a value of plain data, dataclasses, msgspec structs and arrays to ``dest``; see ``send``.

        Arrays in it must not be modified before the operation has ended.
        """
        self._handle.wait("send_object", lambda: self.on_loop.send_object(value, dest, tag=tag), timeout)

    @overload
    def recv_object(
        self, source: int | None = None, *, tag: int = 0, wanted: type[T], timeout: float | None = None
    ) -> T: ...

    @overload
    def recv_object(
        self, source: int | None = None, *, tag: int = 0, wanted: Any = Any, timeout: float | None = None
    ) -> Any: ...

    def recv_object(
        self, source: int | None = None, *, tag: int = 0, wanted: Any = Any, timeout: float | None = None
    ) -> Any:
        """Return the next value that ``source`` (None: any rank) sends with ``tag``; it must be of type ``wanted``."""
        return self._handle.wait(
            "recv_object", lambda: self.on_loop.recv_object(source, tag=tag, wanted=wanted), timeout
        )

    @overload
    def broadcast_object(
        self,
        value: object = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: type[T],
        timeout: float | None = None,
    ) -> T: ...

    @overload
    def broadcast_object(
        self,
        value: object = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> Any: ...

    def broadcast_object(
        self,
        value: object = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> Any:
        """Return the ``value`` that ``root`` passes.

        Values are plain data, dataclasses, msgspec structs and numpy arrays, nested arbitrarily; tuples, sets, dates,
        ``Decimal``, ``UUID``, numpy scalars and the like keep their types.  ``wanted`` is the type that is checked and
        built, and the result type for type checkers; with ``Any``, dataclasses, structs, enum members, named tuples and
        other types of your own raise a ``UsageError`` that names them and their place.  Arrays in values must not be
        modified before the operation has ended.
        """
        return self._handle.wait(
            "broadcast_object", lambda: self.on_loop.broadcast_object(value, root=root, key=key, wanted=wanted), timeout
        )

    @overload
    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: type[T], timeout: float | None = None
    ) -> list[T]: ...

    @overload
    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: Any = Any, timeout: float | None = None
    ) -> list[Any]: ...

    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: Any = Any, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        return self._handle.wait(
            "all_gather_object", lambda: self.on_loop.all_gather_object(value, key=key, wanted=wanted), timeout
        )

    @overload
    def gather_object(
        self, value: object, *, root: int = 0, key: str | None = None, wanted: type[T], timeout: float | None = None
    ) -> list[T] | None: ...

    @overload
    def gather_object(
        self, value: object, *, root: int = 0, key: str | None = None, wanted: Any = Any, timeout: float | None = None
    ) -> list[Any] | None: ...

    def gather_object(
        self, value: object, *, root: int = 0, key: str | None = None, wanted: Any = Any, timeout: float | None = None
    ) -> list[Any] | None:
        """Return the values of all ranks, in rank order, at ``root``, and None elsewhere."""
        return self._handle.wait(
            "gather_object", lambda: self.on_loop.gather_object(value, root=root, key=key, wanted=wanted), timeout
        )

    @overload
    def scatter_object(
        self,
        values: Sequence[object] | None = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: type[T],
        timeout: float | None = None,
    ) -> T: ...

    @overload
    def scatter_object(
        self,
        values: Sequence[object] | None = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> Any: ...

    def scatter_object(
        self,
        values: Sequence[object] | None = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> Any:
        """Return ``values[rank]`` of the values that ``root`` passes, one per rank; other ranks pass None."""
        return self._handle.wait(
            "scatter_object", lambda: self.on_loop.scatter_object(values, root=root, key=key, wanted=wanted), timeout
        )
