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
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] = "all",
        late: Late = "drop",
        timeout: float | None = None,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
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
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until,
        late: Late = "drop",
        timeout: float | None = None,
    ) -> Array | Reduced: ...

    def __call__(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        until: Literal["all"] | Until = "all",
        late: Late = "drop",
        timeout: float | None = None,
    ) -> Array | Reduced:
        """Combine ``x`` of all ranks, in place (or into ``out``), and return it.

        ``op`` is sum, mean, prod, min, max, band, bor or bxor.  The result has the same bits on every rank, and again
        whenever the same values are reduced by the same algorithm.  A mean is the sum, divided at the end; in float16,
        which may not hold the sum, each rank's part is divided first (values below 6e-5 lose digits by that).  Needs
        8 MiB of memory besides at most.  ``all_reduce.parts(x)`` gives finished parts while the rest travels.
        ``algorithm`` may say how many bytes of a chunk go in one message, 4k to 2m: ``ring/256k``; 1m without it.

        ``until`` says when the operation is complete: "all" waits for all ranks; with a ``Quorum`` or a ``Deadline`` it
        goes on without those that are late, and returns a ``Reduced``, the same on all ranks, which says who has
        contributed.  A mean is then that of the contributors, a sum theirs.  The part of a rank that is late is
        dropped, or, with ``late="next"`` (sums and means), added to its next part with the same ``key``.  Such calls
        match among themselves, by ``key``, in their order.  ``PeerLost`` where so many ranks are lost that the policy
        cannot be met, or no majority is left to decide; ``x`` is as before then.

        Without ``algorithm``, one of ``comm.algorithms("all_reduce")``, the cost model chooses.  Calls with the same
        ``key`` meet by it, in any order.  ``stream`` is for arrays on CUDA devices.

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
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Items[Part]:
        """Combine ``x`` of all ranks, in place (or into ``out``), and give parts of the result as they are finished.

        Iterate over them: ``where, values`` are a slice of the flat result, and its elements, a view of it; see
        ``asyncpar.Part`` and ``asyncpar.PartStream``.  The result has the bits of ``all_reduce(x)``, other ranks may
        call either, and the call takes its place in the order of operations at once.  Parts have 1 MiB per rank or so;
        a small result is one part.  An array on a device has no parts: ``UsageError``.
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

    def all_reduce_many(
        self,
        arrays: Iterable[Array],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> list[Array]:
        """Combine each of ``arrays`` of all ranks, in place, and return them in a list.

        One operation for all of them, which is much faster than one for each where they are small.  They may differ in
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
        x: Array,
        op: ReduceOp = "sum",
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: ReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array | None:
        """Combine ``x`` of all ranks at ``root``, which gets the result (in ``out``); the others get None."""
        return self._handle.wait(
            "reduce",
            lambda: self.on_loop.reduce(x, op, root=root, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def reduce_scatter(
        self,
        x: Array,
        op: ReduceOp = "sum",
        *,
        out: Array | None = None,
        algorithm: ReduceScatterAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array:
        """Combine ``x`` of all ranks and return this rank's slice of the result along axis 0.

        Slices have ``ceil(len(x) / size)`` rows; those of the last ranks may be shorter or empty.  ``x`` has the same
        shape on all ranks, and ``op`` is sum, mean, prod, min, max, band, bor or bxor.
        ``out`` takes the result (None: a new array).  ``algorithm`` is one of ``comm.algorithms("reduce_scatter")``
        (None: the quickest by the cost model).  Calls with the same ``key`` meet by it, in any order.  ``stream`` is
        for arrays on CUDA devices.

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
        x: Array,
        *,
        out: Array | None = None,
        algorithm: AllGatherAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array:
        """Return ``x`` of all ranks as one array of shape ``(size, *x.shape)``.

        ``x`` has the same shape and dtype on all ranks; ``all_gather_v`` takes other lengths.
        ``out`` takes the result (None: a new array).  ``algorithm`` is one of ``comm.algorithms("all_gather")``
        (None: the quickest by the cost model).  Calls with the same ``key`` meet by it, in any order.  ``stream`` is
        for arrays on CUDA devices.

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
        x: Array,
        *,
        out: Array | None = None,
        algorithm: AllGatherAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array:
        """Return ``x`` of all ranks one after another along axis 0, in which they may differ."""
        return self._handle.wait(
            "all_gather_v",
            lambda: self.on_loop.all_gather_v(x, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def gather(
        self,
        x: Array,
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: RootedAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array | None:
        """Return ``x`` of all ranks at ``root``, as ``all_gather`` does; the others get None."""
        return self._handle.wait(
            "gather",
            lambda: self.on_loop.gather(x, root=root, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def scatter(
        self,
        x: Array | None = None,
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: RootedAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array:
        """Return ``x[rank]`` of the ``x`` that ``root`` passes, of shape ``(size, ...)``.

        The other ranks pass no ``x``, but ``out``, which says shape and dtype.
        """
        return self._handle.wait(
            "scatter",
            lambda: self.on_loop.scatter(x, root=root, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def broadcast(
        self,
        x: Array,
        *,
        root: int = 0,
        algorithm: BroadcastAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array:
        """Overwrite ``x`` with that of ``root``, and return it.

        ``x`` is an array of the same shape and dtype on all ranks.
        ``algorithm`` is one of ``comm.algorithms("broadcast")`` (None: the quickest by the cost model).
        Calls with the same ``key`` meet by it, in any order.  ``stream`` is for arrays on CUDA devices.

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
        """Wait until all ranks have come here.

        ``algorithm`` is one of ``comm.algorithms("barrier")`` (None: the quickest by the cost model).  Calls with the
        same ``key`` meet by it, in any order.

        Example::

            comm.barrier()
        """
        self._handle.wait("barrier", lambda: self.on_loop.barrier(algorithm=algorithm, key=key), timeout)

    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        algorithm: AllToAllAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> Array:
        """Send ``x[r]`` to each rank ``r`` and return what they sent, entry ``r`` from rank ``r``; shapes as ``x``."""
        return self._handle.wait(
            "all_to_all",
            lambda: self.on_loop.all_to_all(x, out=out, algorithm=algorithm, key=key, stream=stream),
            timeout,
        )

    def all_to_all_v(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        out: Array | None = None,
        key: str | None = None,
        stream: object = None,
        timeout: float | None = None,
    ) -> tuple[Array, list[int]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next ``counts[1]`` to rank 1, and so on.

        Returns the rows received, by rank of their sender, and how many came from each.
        """
        return self._handle.wait(
            "all_to_all_v", lambda: self.on_loop.all_to_all_v(x, counts, out=out, key=key, stream=stream), timeout
        )

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
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
        """Return what has become of this rank's parts of operations with a policy (``until``) and this ``key``."""
        return self._handle.read("late_counts", lambda: self.on_loop.late_counts(key))

    @property
    def may_share_memory(self) -> bool:
        """May ranks of one host share memory?  Equal on all ranks, also where a host turned out to have none."""
        return self.on_loop.may_share_memory

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this rank can send here, as measured: the most of ``calibrate`` and of operations so far.

        Through lanes or shared memory, whichever they took.  A built-in figure before anything was measured.
        """
        return self.on_loop.bandwidth

    def algorithms(self, operation: str) -> tuple[Name, ...]:
        """Return the names that ``operation`` takes as ``algorithm`` in this group."""
        return self.on_loop.algorithms(operation)

    def is_pinned(self, operation: str) -> bool:
        """Has the user pinned algorithms of ``operation``?"""
        return self.on_loop.is_pinned(operation)

    def algorithm_table(self) -> str:
        """Return which algorithm is used for which operation and size, with the estimates behind it.

        The line behind the table says what lanes are taken to cost, and whether that was measured: see ``calibrate``.
        Once device arrays were used, more lines say how operations on them last went, by size where a pin tells sizes
        apart, and why if not by NCCL, after a table like the first of what would be used and the estimates of all ways.
        """
        return self.on_loop.algorithm_table()

    def predict(
        self, operation: str, payload: int, *, algorithm: AnyAlgorithm | None = None, on_devices: bool = False
    ) -> float:
        """Return the seconds that the cost model expects of ``operation`` on a buffer of ``payload`` bytes.

        ``algorithm`` None is the one that would be used.  ``on_devices``: of device arrays, where all ranks have NCCL,
        and a route between their hosts; by published figures until ``calibrate`` or ``set_device_lanes``.
        """
        return self.on_loop.predict(operation, payload, algorithm=algorithm, on_devices=on_devices)

    @property
    def measured_lane(self) -> LaneCosts | None:
        """What ``calibrate`` of this group has found of the lanes between its hosts, or of all where it has one host.

        Equal on all ranks; None before that.
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
        """Measure latency and bandwidth from rank 0 and choose algorithms by its figures, on all ranks alike.

        It measures to another rank of its host, and to one rank of each other host, 8 of them at most, one after the
        other; of these the slowest counts.

        With ``from_operations`` nothing is sent to measure: the figures are those of the latest operations by messages
        of this group, of all ranks.  So a program that calls it every now and then chooses by what its links are like
        now.  Choices change in ``calibrate`` and nowhere else: the sum of floats by another algorithm may differ in its
        last bits (it is the same on all ranks as ever), and pinned algorithms stay.

        With ``cache``, the path of a file on the host of rank 0, or True for one in the user's cache directory, figures
        of the same hosts and kinds of lanes are used that an earlier job has measured in the last week; where one is
        not there, all are measured, and kept.  A file that is damaged counts as empty.

        With ``device``, that of this rank on all ranks, also those of NCCL inside the host and between hosts, and of
        copies to the host: then device arrays go the way that is quickest by these figures.  That takes 64 MiB of the
        device for a moment; a rank without NCCL is a ``UsageError`` on all.  Call no other operation of this group
        until it is over.
        """
        self._handle.wait(
            "calibrate",
            lambda: self.on_loop.calibrate(device=device, from_operations=from_operations, cache=cache),
            timeout,
        )

    @property
    def device_lanes(self) -> DeviceLanes:
        """The figures of the cost model of device arrays: published ones, before ``calibrate``."""
        return self.on_loop.device_lanes

    def set_device_lanes(self, lanes: DeviceLanes) -> None:
        """Choose how device arrays go by ``lanes``, in this group and those that are made of it from now on.

        To be called on all ranks, with the same figures: an operation of ranks with others is an ``OperationMismatch``.
        """
        self._handle.do("set_device_lanes", lambda: self.on_loop.set_device_lanes(lanes))

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return a new array of undefined content, in memory that the ranks of this host share if they do.

        Collectives read such an array where it is, instead of copying it first.  Its memory is given back when the
        array and all its views are gone.  Raises ``ArenaFull`` when the host has no memory left for it.
        """
        return self._handle.do("empty", lambda: self.on_loop.empty(shape, dtype))

    def subgroup(
        self, ranks: Iterable[int], *, name: str | None = None, key: str | None = None, has_own_timeout: bool = True
    ) -> Self | None:
        """Return the communicator over ``ranks`` of this group, in that order; None if this rank is not one of them.

        Nothing is sent.  Its members must ask for the same ranks in the same order, and as often: every call makes
        another group.  With ``key`` the ranks that pass equal keys are one group instead, in whatever order and however
        often they ask; who asks again gets the same communicator until it is closed, and then another one: members must
        close it equally often.  Groups last until they are closed; one without ``key`` also with its last reference.

        Ranks that ask for different ranks, or of which one uses another ``key``, wait for each other until the timeout:
        a rank that does not come cannot be told from one that comes late, from another task perhaps.  The error then
        says in which operation of which group the other is, and that it has made no such group.

        Its ``timeout`` begins with that of this group and is its own; without ``has_own_timeout`` it stays that of this
        group.
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

        Raises ``UsageError`` while another object has it: their operations could meet.  ``kind`` is what messages call
        the owner, by default the name of its class.
        """
        self._handle.do("claim", lambda: self.on_loop.claim(name, owner, kind=kind))

    def release(self, name: str, owner: object) -> None:
        """Give back a name that ``owner`` has claimed; does nothing if it has not."""
        self._handle.end("release", lambda: self.on_loop.release(name, owner))

    def give_up(self, rank: int, text: str) -> None:
        """End this group on this rank with ``PeerCancelled``: its operations that are not over, and all later calls.

        ``rank`` (of the world) has not done its part, and will not: ``text`` says why.  Other ranks learn of it when
        they have waited for something that this one will not call, which is after a second (a receive from any rank
        is not told).  What the group has of the arena is given back when all its ranks have given it up.
        """
        self._handle.end("give_up", lambda: self.on_loop.give_up(rank, text))

    def revoke(self, reason: str | BaseException = "") -> None:
        """End this group, and every group made from it, on all its ranks: for programs that go on after a loss.

        Any rank may call it, at any time; it does not wait, and does nothing where the group is revoked already.  All
        operations that are not over, and all later calls, raise ``WorldRevoked``, which has ``reason``, and the rank
        that ``reason`` names if it is the error of a rank.  The news reaches all ranks that live, also when some are
        dead or this one dies meanwhile.  ``shrink`` and ``agree`` work afterwards, other groups go on.  A rank that has
        left the world tells nobody: it says so that there is a newer world, and gets ``StaleGeneration`` from this one.
        """
        self._handle.end("revoke", lambda: self.on_loop.revoke(reason))

    @property
    def is_revoked(self) -> bool:
        """Has a rank revoked this group, or one that it was made from?"""
        return self.on_loop.is_revoked

    @property
    def is_over(self) -> bool:
        """Does this rank accept no more operations of the group: is it revoked, given up or closed?"""
        return self.on_loop.is_over

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks of this group that are known here to be lost, or to have left the world, in its numbering."""
        return self.on_loop.lost

    def agree(self, flag: int, *, timeout: float | None = None) -> Agreed:
        """Return the bitwise AND of ``flag`` (64 bits with sign) of all ranks that are left, and which are lost.

        All of them get the same, although ranks are lost before or meanwhile, and in a revoked group, too.  The n-th
        call of ``agree`` or ``shrink`` on one rank meets the n-th on the others.  A rank that lives and does not call
        it within ``timeout`` seconds is a ``PeerTimeout`` on all, one that does not answer for so long is held for
        lost.  A rank that others hold for lost, and lives, gets ``PeerLost``.  A rank whose call is cancelled has given
        its flag all the same.
        """
        return self._handle.wait("agree", lambda: self.on_loop.agree(flag), timeout)

    def shrink(self, *, timeout: float | None = None) -> Self:
        """Return the communicator over the ranks that are left, in their order; all of them get the same, or an error.

        It works in a revoked group, and while further ranks are lost; revoking this group later does not end the new
        one.  Errors are those of ``agree``.  No majority is needed: where a network has broken in two, each side gets
        a group of its own, and the program must know which of them goes on.

        If the group has a communicator of NCCL that the loss has ended, the new one is shrunk from it
        (``ncclCommShrink`` with the abort flag) at its first operation on device arrays.
        """
        return self._made(self._handle.wait("shrink", self.on_loop.shrink, timeout))

    def close(self) -> None:
        """End this group on this rank and give back its memory, also that in the arena; idempotent.

        Operations of it that are not over, and all later calls, raise ``UsageError``; on the other ranks operations
        that wait for this one are ``PeerCancelled``.  Groups made from it stay.  A group without ``key``
        closes by itself when no reference to it, or to a call of it, is left.  The world ends with its node, and cannot
        be closed.
        """
        self._handle.end("close", self.on_loop.close)

    def refuse(self, operation: str, error: BaseException, *, key: str | None = None) -> None:
        """Give a call of ``operation`` its place that is refused with ``error`` before it gets here.

        For layers on top that check arguments of their own: the operation ends on the other ranks with
        ``PeerCancelled``, which says why, and the next calls of all ranks meet.  Calls of this class that are refused
        do so by themselves.
        """
        self._handle.end("refuse", lambda: self.on_loop.refuse(operation, error, key=key))

    def refuse_send(self, error: BaseException, dest: int, *, tag: int = 0) -> None:
        """Give a send its place that is refused with ``error`` before it gets here; see ``refuse``.

        The receive that would have got it ends.  Nothing is told of wrong ``dest`` and ``tag``.
        """
        self._handle.end("refuse_send", lambda: self.on_loop.refuse_send(error, dest, tag=tag))

    def refuse_recv(self, error: BaseException, source: int | None = None, *, tag: int = 0) -> None:
        """Let a receive that is refused with ``error`` before it gets here take its message; see ``refuse``.

        The send of it ends, if it is not over.  A receive from any rank takes none.
        """
        self._handle.end("refuse_recv", lambda: self.on_loop.refuse_recv(error, source, tag=tag))

    def describe_waits(self) -> list[str]:
        """Say of each operation of this rank that runs how long it has waited, for whom, and what is known of that."""
        return self._handle.read("describe_waits", self.on_loop.describe_waits)

    def send(self, x: Array, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send ``x`` to ``dest``, which receives it with the same ``tag`` (0 to 65535).

        Messages of one rank with one tag arrive in the order of the calls.  Returns when ``x`` may be reused: for a
        small array at once, for a larger one when it has been received.  ``x`` and what receives it may be device
        arrays, both or one of them.

        Example::

            if comm.rank == 0:
                comm.send(np.arange(3), 1)
            elif comm.rank == 1:
                numbers = comm.recv(0)
        """
        self._handle.wait("send", lambda: self.on_loop.send(x, dest, tag=tag), timeout)

    def recv(
        self, source: int | None = None, *, out: Array | None = None, tag: int = 0, timeout: float | None = None
    ) -> Array:
        """Return the next array that ``source`` (None: any rank) sends with ``tag``, in ``out`` if given.

        ``out`` must have the shape and dtype that are sent: anything else is an ``OperationMismatch`` on both ranks.

        Example::

            if comm.rank == 0:
                comm.send(np.arange(3), 1, tag=5)
            elif comm.rank == 1:
                numbers = comm.recv(0, tag=5)
        """
        return self._handle.wait("recv", lambda: self.on_loop.recv(source, out=out, tag=tag), timeout)

    def recv_any(self, *, out: Array | None = None, tag: int = 0, timeout: float | None = None) -> tuple[int, Array]:
        """Return the rank that sends the next array with ``tag``, and the array."""
        return self._handle.wait("recv_any", lambda: self.on_loop.recv_any(out=out, tag=tag), timeout)

    def send_object(self, value: object, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send a value of plain data, dataclasses, msgspec structs and arrays to ``dest``; see ``send``.

        Arrays in it must not be changed before the operation has ended.
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

        Values are plain data, dataclasses, msgspec structs and numpy arrays, nested as you like; tuples, sets, dates,
        ``Decimal``, ``UUID``, numpy scalars and the like keep their types.  ``wanted`` is the type to check and make,
        and that of the result for type checkers; for ``Any``, dataclasses, structs, members of enumerations, named
        tuples and other types of your own are a ``UsageError`` that names them and their place.  Arrays in values must
        not be changed before the operation has ended.
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
        """Return the values of all ranks, in their order."""
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
        """Return the values of all ranks at ``root``; the others get None."""
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
        """Return ``values[rank]`` of the values that ``root`` passes, one per rank; the others pass None."""
        return self._handle.wait(
            "scatter_object", lambda: self.on_loop.scatter_object(values, root=root, key=key, wanted=wanted), timeout
        )
