"""The communicator: operations over an ordered set of ranks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from asyncpar.collectives import calibration, exchanges, objects, recovery, splitting, subgroups
from asyncpar.collectives.algorithms.catalog import ARENA, DEVICE_ALGORITHMS, is_of_devices, known_algorithms
from asyncpar.collectives.array_operations import ArrayOperations
from asyncpar.collectives.arrays import Array, check_array, check_key, check_rank, check_tag, check_writable
from asyncpar.collectives.call import CoroutineCall
from asyncpar.collectives.completion.policies import LateCounts
from asyncpar.collectives.cost import CostModel
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.lane_cache import LaneCache, default_path
from asyncpar.collectives.ledger import Traffic, world_number
from asyncpar.collectives.notice import GroupNotice
from asyncpar.collectives.operation import Limits
from asyncpar.collectives.point_to_point import PointToPoint, ReceivedMessage
from asyncpar.collectives.policy import Policy, parse_pin
from asyncpar.collectives.recovery import Agreed
from asyncpar.collectives.revocation import revocation_of
from asyncpar.collectives.shared_memory.group import ArenaHost
from asyncpar.collectives.table import CLOSED, OperationTable
from asyncpar.collectives.wait_report import describe_wait
from asyncpar.core.config.checks import DefaultFloat
from asyncpar.core.config.device_lanes import DeviceLanes
from asyncpar.core.config.names import AnyAlgorithm, Name
from asyncpar.core.config.transport import INPROC_COSTS, LaneCosts
from asyncpar.core.foreign_arrays import HostArray
from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind, bucket_name
from asyncpar.core.observe.spans import EventSpan
from asyncpar.core.observe.steps import StepMeter
from asyncpar.core.tables import html_table
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import PeerCancelled, PeerTimeout, UsageError
from asyncpar.net.transport.lane_kinds import TCP, lane_kind
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.payload import UnwrittenPayload

T = TypeVar("T")

DEFAULT_TIMEOUT = DefaultFloat(300.0)
"""Seconds that an operation may go without progress."""


class Communicator(ArrayOperations):
    """Operations over the ranks of a group.

    All ranks of the group call the same operations in the same order; an operation takes its place in that order when
    it is *called*, and runs when the returned call is awaited, so several may be in flight.  Operations with equal
    ``key`` are matched by that name instead, in any order; a key may be reused, and its n-th use on one rank matches
    its n-th use on the others.  Every call counts, even one that fails or is cancelled, but only on the rank that makes
    it: after a failure that made some ranks skip a key which others have used, later uses of that key no longer match
    (they pair different steps, or wait for each other until the timeout).  In that case use new keys, for example with
    the number of the attempt in them.

    On each rank an operation either returns its result or raises: ``OperationMismatch`` if a rank calls something else,
    ``PeerLost`` if a rank is gone, ``PeerCancelled`` if one cancels or fails, and ``PeerTimeout`` if one does not do
    its part for ``timeout`` seconds.  Wrong arguments raise ``UsageError`` immediately where they are passed; such a
    call takes its place like any other, and raises ``PeerCancelled`` with the reason on the other ranks.  An operation
    returns only once all ranks call it with the same arguments, even where data flows one way.  After any of these
    errors but ``PeerLost`` the group stays usable.  Cancelling an operation takes effect at once.

    ``x`` are numpy arrays of any shape and layout, of any numeric dtype or bool or ``ml_dtypes.bfloat16``, arrays of
    other libraries, or contiguous arrays on CUDA devices (see ``ArrayOperations``).  They must not be touched until the
    operation is over.  ``root``, ``dest`` and ``source`` are ranks of the group.

    Options mean the same in all operations.  ``op`` is sum, mean, prod, min, max, band, bor or bxor.  ``out`` is an
    array of the shape and dtype of the result, which is written to it (None: a new array, or ``x`` where an operation
    is in place).  ``algorithm`` is one of ``algorithms(operation)`` (None: the cost model chooses).  ``key`` is
    described above (None: match by order).  ``stream`` is for arrays on CUDA devices: the operation is enqueued on it.
    ``tag`` distinguishes messages between two ranks.  ``wanted`` is the type as which a value is decoded and checked
    (None: as received).  ``name`` names a new group in messages.  ``dtype`` is numpy's.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._messages = PointToPoint(engine)
        self._keyed: dict[tuple[tuple[int, ...], str], Communicator] = {}
        """Open groups that were made from this one with a key."""
        self._forget: Callable[[], object] | None = None
        """Removes this group from the keyed groups of the one it was made from."""
        self._is_world = False
        engine.group.on_ended = _on_ended(self._messages, engine)
        engine.group.on_left = _on_left(engine)

    @classmethod
    def world(
        cls,
        links: Links,
        *,
        pin: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        lane: str | LaneCosts | None = None,
        arena: ArenaHost | None = None,
        has_arenas: bool = False,
    ) -> Self:
        """Return the communicator over all ranks of the world of ``links``; make one per world, on the running loop.

        ``pin`` is described in ``collectives.pin``.  ``lane`` is the input of the cost model: a kind of lane or
        figures, equal on all ranks; by default in-process figures where no rank has an address, else those of TCP.
        ``arena`` belongs to this rank's host; ``has_arenas``, equal on all ranks, means that hosts should have one.
        """
        members = links.world.members
        if lane is None:
            lane = TCP.costs if any(member.address for member in members) else INPROC_COSTS
        costs = lane_kind(lane).costs if isinstance(lane, str) else lane
        model = CostModel(size=len(members), hosts=links.world.hosts, lane=costs, local=costs, has_arenas=has_arenas)
        policy = Policy(model=model, pin=parse_pin(pin or ""))
        limits = Limits(_checked_timeout(timeout))
        engine = Engine(
            table=OperationTable(links, arena),
            number=world_number(links.world.generation),
            name="world",
            ranks=tuple(range(len(members))),
            policy=policy,
            limits=limits,
        )
        world = cls(engine)
        world._is_world = True
        return world

    # -- identity --------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = ", revoked" if self.is_revoked else ", over" if self.is_over else ""
        return f"<communicator {self.name!r}: rank {self.rank} of {self.size}{state}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        state = "revoked" if self.is_revoked else "over" if self.is_over else "in use"
        rows = [("communicator", self.name), ("rank", f"{self.rank} of {self.size}"), ("state", state)]
        return html_table(rows)

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        return self._engine.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks in world numbering, in the order of the group."""
        return self._engine.ranks

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host, as its launcher set it."""
        links = self._engine.table.links
        return links.world.members[links.rank].local_rank

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of this group by host, in this group's numbering, hosts in order of their first rank."""
        return self._engine.hosts

    @property
    def group(self) -> int:
        """The group's number on the wire."""
        return self._engine.group.number

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return self._engine.group.name

    @property
    def timeout(self) -> float | None:
        """Seconds that an operation may go without progress before it raises ``PeerTimeout``; None: forever.

        It belongs to this group: a group made from it starts with the same value.
        """
        return self._engine.group.limits.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._engine.group.limits.timeout = _checked_timeout(seconds)

    @property
    def traffic(self) -> Traffic:
        """Statistics of the finished operations of this rank: a snapshot."""
        return self._engine.traffic()

    def late_counts(self, key: str | None = None) -> LateCounts:
        """Return counts of this rank's parts of operations with a policy (``until``) and this ``key``, by their use."""
        from asyncpar.collectives.policy_calls import series_of  # most programs need none

        return series_of(self._engine, key).counts

    @property
    def may_share_memory(self) -> bool:
        """Whether ranks of one host may share memory; equal on all ranks, even where a host has no arena."""
        return self._engine.policy.model.has_arenas

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this rank can send in this group: the maximum measured by ``calibrate`` and operations so far.

        Counts lanes or shared memory, whichever the operations used.  A built-in figure before anything was measured.
        """
        return self._engine.bandwidth

    def algorithms(self, operation: str) -> tuple[Name, ...]:
        """Return the names that ``operation`` takes as ``algorithm`` in this group."""
        arena = (ARENA,) if self._engine.arena is not None else ()
        return tuple(map(Name, (*known_algorithms(operation), *arena)))

    def is_pinned(self, operation: str) -> bool:
        """Return whether the user has pinned algorithms of ``operation``."""
        return operation in self._engine.policy.pin.ranges

    def algorithm_table(self) -> str:
        """Return a table of the algorithm used for each operation and size, with the estimates behind it.

        The line after the table states the assumed cost of lanes, and whether it was measured: see ``calibrate``.  Once
        device arrays have been used, more lines show how operations on them last ran, by size where a pin depends on
        size, with the reason if not by NCCL, after a table like the first with the algorithms that would be used and
        the estimates of all ways.
        """
        policy, ways = self._engine.policy, self._engine.device_ways
        tables = policy.table(), policy.model.describe_lanes(), policy.device_table(ways.possible)
        return "\n".join(filter(None, [*tables, *ways.lines()]))

    def predict(
        self, operation: str, payload: int, *, algorithm: AnyAlgorithm | None = None, on_devices: bool = False
    ) -> float:
        """Return the seconds that the cost model expects of ``operation`` on a buffer of ``payload`` bytes.

        ``algorithm`` None means the one that would be used.  With ``on_devices`` the buffer is a device array, and all
        ranks have NCCL and a route between their hosts; the figures are published ones until ``calibrate`` or
        ``set_device_lanes``.
        """
        policy = self._engine.policy
        if on_devices:
            possible = [name for name in DEVICE_ALGORITHMS if is_of_devices(operation, name)]
            chosen = algorithm or policy.choose_on_devices(operation, payload, possible)
            return policy.devices.estimate(operation, chosen, payload)
        chosen = algorithm or policy.choose(operation, payload, arena=policy.has_arena)
        return policy.model.estimate(operation, chosen, payload)

    @property
    def measured_lane(self) -> LaneCosts | None:
        """The lane costs that ``calibrate`` of this group measured: between hosts, or of all lanes if it has one host.

        Equal on all ranks; None before calibration.
        """
        return self._engine.measured_lane

    def calibrate(
        self, *, device: int | None = None, from_operations: bool = False, cache: str | Path | bool = False
    ) -> Coroutine[Any, Any, None]:
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
        try:
            if (device is not None) + from_operations + (cache is not False) > 1:
                raise UsageError(
                    "calibrate: expected one of device, from_operations and cache; leave it out, or others"
                )
            lanes = None if cache is False else LaneCache(default_path() if cache is True else cache)
        except UsageError as error:
            self._engine.refuse("calibrate", error)
            raise
        if from_operations:
            return calibration.calibrate_from_operations(self._engine)
        if lanes is not None:
            return calibration.calibrate_by_cache(self._engine, lanes, clock=time.perf_counter)
        measured = calibration.calibrate(self._engine, clock=time.perf_counter)
        if device is None:
            return measured
        from asyncpar.collectives.device.calibration import calibrate_devices  # with devices only

        return calibrate_devices(self._engine, measured, device, clock=time.perf_counter)

    @property
    def device_lanes(self) -> DeviceLanes:
        """The cost model's figures for device arrays: published ones, before ``calibrate``."""
        return self._engine.policy.device_lanes

    def set_device_lanes(self, lanes: DeviceLanes) -> None:
        """Choose the way of device arrays by ``lanes``, in this group and in groups made from it from now on.

        Call it on all ranks, with the same figures: otherwise operations raise ``OperationMismatch``.
        """
        self._engine.check_node("set_device_lanes")
        if not isinstance(lanes, DeviceLanes):
            raise UsageError(f"lanes: expected DeviceLanes, got {lanes!r}")
        self._engine.policy = replace(self._engine.policy, device_lanes=lanes)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return a new array of undefined content, in shared memory if the ranks of this host share memory.

        Collectives read such an array in place, instead of copying it first.  Its memory is freed when the array and
        all its views are gone.  Raises ``ArenaFull`` when the host has no memory left for it.
        """
        self._engine.check_node("empty")
        arena = self._engine.table.arena
        return np.empty(shape, dtype) if arena is None else arena.arena.empty(shape, dtype)

    # -- sub-groups ------------------------------------------------------------------------------------------------

    def subgroup(
        self,
        ranks: Iterable[int],
        *,
        name: str | None = None,
        key: str | None = None,
        has_own_timeout: bool = True,
    ) -> Communicator | None:
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
        self._engine.check_node("subgroup")
        check_key(key)
        if key is None:
            engine = subgroups.subgroup(self._engine, ranks, name, has_own_timeout=has_own_timeout)
            return None if engine is None else Communicator(engine)
        place = tuple(ranks), key
        made = self._keyed.get(place)
        if made is None:
            engine = subgroups.subgroup(self._engine, place[0], name, key, has_own_timeout=has_own_timeout)
            if engine is None:
                return None
            made = self._keyed[place] = Communicator(engine)
            made._forget = partial(self._keyed.pop, place, None)
        return made

    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None
    ) -> Coroutine[Any, Any, Communicator | None]:
        """Return the communicator over the ranks that pass the same ``color``, ordered by ``key``, then by rank.

        All ranks of this group call it; those that pass None get None.
        """
        return self._engine.checked(
            "split", None, lambda: splitting.split(self._engine, color, key, name, Communicator)
        )

    def claim(self, name: str, owner: object, *, kind: str | None = None) -> None:
        """Reserve ``name``, from which ``owner`` derives the keys of its operations, until it is released or collected.

        Raises ``UsageError`` while another object has it: their operations could be mixed up.  ``kind`` is the owner's
        name in messages, by default the name of its class.
        """
        self._engine.check_node("claim")
        kind = kind or type(owner).__name__
        self._engine.table.claims.claim(self.group, name, owner, kind=kind, group_name=self.name)

    def release(self, name: str, owner: object) -> None:
        """Release a name that ``owner`` has claimed; do nothing if it has not."""
        self._engine.table.claims.release(self.group, name, owner)

    def give_up(self, rank: int, text: str) -> None:
        """End this group on this rank: its pending operations and all later calls raise ``PeerCancelled``.

        ``rank`` (of the world) has not done its part, and will not; ``text`` is the reason.  Other ranks learn of it
        once they have waited a second for a call that this rank will not make (a receive from any rank is not
        notified).  The group's part of the arena is freed when all its ranks have given it up.
        """
        group = self._engine.group
        group.given_up = rank, text
        self._messages.give_up()
        for operation in [*group.pending(), *self._messages.pending()]:
            if operation.failure is None:
                message = f"rank {self._engine.table.links.rank}: {operation.label}: given up, because {text}"
                operation.report_failure("timeout", text, lost=rank)
                operation.fail(PeerCancelled(message, rank=rank, operation=operation.label, cause=text))
        self._engine.leave_arena()

    def revoke(self, reason: str | BaseException = "") -> None:
        """End this group, and every group made from it, on all its ranks: for programs that continue after a loss.

        Any rank may call it at any time; it does not wait, and does nothing where the group is revoked already.  All
        pending operations and all later calls raise ``WorldRevoked``, which carries ``reason``, and the rank that
        ``reason`` names if it is the error of a rank.  The revocation reaches all live ranks, even when some are dead
        or this one dies meanwhile.  ``shrink`` and ``agree`` work afterwards; other groups are not affected.  A rank
        that has left the world notifies no other: it records that there is a newer world, and its calls in this one
        raise ``StaleGeneration``.
        """
        self._engine.table.context.check_home_loop("revoke")
        engine = self._engine
        links = engine.table.links
        engine.table.revoke(
            revocation_of(
                reason,
                number=self.group,
                ranks=self.ranks,
                name=self.name,
                generation=links.world.generation,
                me=links.rank,
            )
        )

    @property
    def is_revoked(self) -> bool:
        """Whether a rank has revoked this group, or one that it was made from."""
        return self._engine.group.revocation is not None

    @property
    def is_over(self) -> bool:
        """Whether this rank accepts no more operations of the group, which is revoked, given up or closed."""
        return self._engine.group.given_up is not None

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks of this group, in its numbering, that this rank knows to be lost or to have left the world."""
        gone = self._engine.table.links.lost
        return tuple(place for place, rank in enumerate(self.ranks) if rank in gone) if gone else ()

    def agree(self, flag: int) -> Coroutine[Any, Any, Agreed]:
        """Return the bitwise AND of ``flag`` (signed 64-bit) over all survivors, and the ranks that are lost.

        All survivors get the same result, even if ranks are lost before or meanwhile, and even in a revoked group.  The
        n-th call of ``agree`` or ``shrink`` on one rank matches the n-th on the others.  A live rank that does not call
        it within ``timeout`` seconds raises ``PeerTimeout`` on all; one that does not answer for that long is declared
        lost.  A live rank that others declared lost gets ``PeerLost``.  A rank whose call is cancelled still
        contributes its flag.
        """
        return CoroutineCall("agree", recovery.agree(self._engine, flag))

    def shrink(self) -> Coroutine[Any, Any, Communicator]:
        """Return the communicator over the survivors, in their order; all of them get the same, or an error.

        It works in a revoked group, and while further ranks are lost; revoking this group later does not end the new
        one.  Errors are those of ``agree``.  No majority is needed: in a network partition each side gets a group of
        its own, and the program must decide which of them continues.

        If the group has an NCCL communicator that the loss has ended, the new one is shrunk from it (``ncclCommShrink``
        with the abort flag) at its first operation on device arrays.
        """
        return CoroutineCall("shrink", recovery.shrink(self._engine, Communicator))

    def close(self) -> None:
        """End this group on this rank and free its memory, including that in the arena.  Idempotent.

        Its pending operations and all later calls raise ``UsageError``; on the other ranks, operations that wait for
        this one raise ``PeerCancelled``.  Groups made from it stay open.  A group without ``key`` closes automatically
        when no reference to it, or to one of its calls, is left.  The world ends with its node, and cannot be closed.
        """
        if self._is_world:
            raise UsageError("close: the world is closed with its node")
        group = self._engine.group
        if group.is_closed:
            return
        group.is_closed = True
        group.given_up = self._engine.table.links.rank, "it was closed here"
        for operation in [*group.pending(), *self._messages.pending()]:
            if operation.failure is None:
                operation.report_failure("failed", CLOSED)
                operation.fail(UsageError(f"{operation.label}: group {group.name} was closed on this rank"))
        group.channels[:] = self._messages.close()
        self._engine.close()
        if self._forget is not None:
            self._forget()

    def refuse(self, operation: str, error: BaseException, *, key: str | None = None) -> None:
        """Take the place of a call of ``operation`` that a layer above has refused with ``error``.

        For layers that check arguments of their own: the operation ends on the other ranks with ``PeerCancelled``,
        which has the reason, and the next calls of all ranks match.  Refused calls of this class do so automatically.
        """
        self._engine.refuse(operation, error, key)

    def refuse_send(self, error: BaseException, dest: int, *, tag: int = 0) -> None:
        """Take the place of a send that a layer above has refused with ``error``; see ``refuse``.

        The receive that would have got it ends.  A wrong ``dest`` or ``tag`` is ignored.
        """
        with suppress(UsageError):
            self._messages.refuse_send(self._other(dest, "dest"), check_tag(tag), error)

    def refuse_recv(self, error: BaseException, source: int | None = None, *, tag: int = 0) -> None:
        """Take the place of a receive that a layer above has refused with ``error``, and its message; see ``refuse``.

        The pending send of that message ends.  A receive from any rank takes no message.
        """
        if source is not None:
            with suppress(UsageError):
                self._messages.refuse_receive(self._other(source, "source"), check_tag(tag), error)

    def describe_waits(self) -> list[str]:
        """Describe how long each running operation of this rank has waited, for which rank, and what is known of it."""
        now = self._engine.table.now()
        pending = [*self._engine.group.pending(), *self._messages.pending()]
        return [describe_wait(operation, now) for operation in pending if operation.is_waiting]

    # -- messages between two ranks --------------------------------------------------------------------------------

    def send(self, x: HostArray, dest: int, *, tag: int = 0) -> Coroutine[Any, Any, None]:
        """Send ``x`` to ``dest``, which receives it with the same ``tag`` (0 to 65535).

        Messages of one rank with one tag arrive in the order of the calls.  Returns when ``x`` may be reused: for a
        small array at once, for a larger one when it has been received.  ``x`` and the receiving array may be device
        arrays, both or one of them.

        Example::

            if comm.rank == 0:
                await comm.send(np.arange(3), 1)
            elif comm.rank == 1:
                numbers = await comm.recv(0)
        """
        if type(x) is not np.ndarray and is_device_array(x):
            from asyncpar.collectives.device import messages  # needed only with devices

            to, tag = self._other(dest, "dest"), check_tag(tag)
            try:
                return messages.send(self._engine, self._messages, x, to, tag)
            except Exception as error:
                self._messages.refuse_send(to, tag, error)
                raise
        return self._send(dest, tag, lambda: check_array(x))

    def recv(
        self, source: int | None = None, *, out: HostArray | None = None, tag: int = 0
    ) -> Coroutine[Any, Any, Array]:
        """Return the next array that ``source`` (None: any rank) sends with ``tag``, or ``out``, which receives it.

        ``out`` must have the shape and dtype of the sent array; otherwise both ranks raise ``OperationMismatch``.

        Example::

            if comm.rank == 0:
                await comm.send(np.arange(3), 1, tag=5)
            elif comm.rank == 1:
                numbers = await comm.recv(0, tag=5)
        """
        return self._receive(source, out, tag, lambda delivery: delivery.array)

    def recv_any(self, *, out: HostArray | None = None, tag: int = 0) -> Coroutine[Any, Any, tuple[int, Array]]:
        """Return the rank that sends the next array with ``tag``, and the array."""
        return self._receive(None, out, tag, lambda delivery: (delivery.source, delivery.array))

    def send_object(self, value: object, dest: int, *, tag: int = 0) -> Coroutine[Any, Any, None]:
        """Send a value of plain data, dataclasses, msgspec structs and arrays to ``dest``; see ``send``.

        Arrays in it must not be modified before the operation has ended.
        """
        return self._send(dest, tag, lambda: objects.encoded(value, "value"))

    @overload
    def recv_object(self, source: int | None = None, *, tag: int = 0, wanted: type[T]) -> Coroutine[Any, Any, T]: ...

    @overload
    def recv_object(
        self, source: int | None = None, *, tag: int = 0, wanted: Any = Any
    ) -> Coroutine[Any, Any, Any]: ...

    def recv_object(self, source: int | None = None, *, tag: int = 0, wanted: Any = Any) -> Coroutine[Any, Any, Any]:
        """Return the next value that ``source`` (None: any rank) sends with ``tag``; it must be of type ``wanted``."""

        def convert(delivery: ReceivedMessage) -> Any:
            return objects.decoded(delivery.array, wanted, "recv_object")

        return self._receive(source, None, tag, convert, is_object=True)

    # -- objects ---------------------------------------------------------------------------------------------------

    @overload
    def broadcast_object(
        self, value: object = None, *, root: int = 0, key: str | None = None, wanted: type[T]
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def broadcast_object(
        self, value: object = None, *, root: int = 0, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, Any]: ...

    def broadcast_object(
        self, value: object = None, *, root: int = 0, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, Any]:
        """Return the ``value`` that ``root`` passes.

        Values are plain data, dataclasses, msgspec structs and numpy arrays, nested arbitrarily; tuples, sets, dates,
        ``Decimal``, ``UUID``, numpy scalars and the like keep their types.  ``wanted`` is the type that is checked and
        built, and the result type for type checkers; with ``Any``, dataclasses, structs, enum members, named tuples and
        other types of your own raise a ``UsageError`` that names them and their place.  Arrays in values must not be
        modified before the operation has ended.
        """
        return self._engine.checked(
            "broadcast_object",
            key,
            lambda: objects.broadcast_object(self._engine, value, root=root, wanted=wanted, key=key),
        )

    @overload
    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: type[T]
    ) -> Coroutine[Any, Any, list[T]]: ...

    @overload
    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, list[Any]]: ...

    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, list[Any]]:
        """Return the values of all ranks, in rank order."""
        return self._engine.checked(
            "all_gather_object", key, lambda: objects.all_gather_object(self._engine, value, wanted=wanted, key=key)
        )

    @overload
    def gather_object(
        self, value: object, *, root: int = 0, key: str | None = None, wanted: type[T]
    ) -> Coroutine[Any, Any, list[T] | None]: ...

    @overload
    def gather_object(
        self, value: object, *, root: int = 0, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, list[Any] | None]: ...

    def gather_object(
        self, value: object, *, root: int = 0, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, list[Any] | None]:
        """Return the values of all ranks, in rank order, at ``root``, and None elsewhere."""
        return self._engine.checked(
            "gather_object", key, lambda: objects.gather_object(self._engine, value, root=root, wanted=wanted, key=key)
        )

    @overload
    def scatter_object(
        self, values: Sequence[object] | None = None, *, root: int = 0, key: str | None = None, wanted: type[T]
    ) -> Coroutine[Any, Any, T]: ...

    @overload
    def scatter_object(
        self, values: Sequence[object] | None = None, *, root: int = 0, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, Any]: ...

    def scatter_object(
        self, values: Sequence[object] | None = None, *, root: int = 0, key: str | None = None, wanted: Any = Any
    ) -> Coroutine[Any, Any, Any]:
        """Return ``values[rank]`` of the values that ``root`` passes, one per rank; other ranks pass None."""
        return self._engine.checked(
            "scatter_object",
            key,
            lambda: objects.scatter_object(self._engine, values, root=root, wanted=wanted, key=key),
        )

    # -- internals -------------------------------------------------------------------------------------------------

    def _other(self, rank: object, name: str) -> int:
        checked = check_rank(rank, self.size, name)
        if checked == self.rank:
            raise UsageError(f"{name}: expected another rank than this one, got {rank}")
        return checked

    def _send(self, dest: int, tag: int, content: Callable[[], Array | UnwrittenPayload]) -> Coroutine[Any, Any, None]:
        """Send the content; if ``content`` raises, the message still takes its place."""
        to, tag = self._other(dest, "dest"), check_tag(tag)
        try:
            return self._messages.send(content(), to, tag)
        except Exception as error:
            self._messages.refuse_send(to, tag, error)
            raise

    def _receive(
        self,
        source: int | None,
        out: Any,
        tag: int,
        convert: Callable[[ReceivedMessage], T],
        *,
        is_object: bool = False,
        is_standing: bool = False,
    ) -> Coroutine[Any, Any, T]:
        """Receive a message; if ``out`` is refused, the message is taken nevertheless.  See ``standing.py``."""
        if source is None and self.size == 1:
            raise UsageError("source: there is no other rank to receive from in a group of one")
        of, tag = None if source is None else self._other(source, "source"), check_tag(tag)
        try:
            if out is not None and type(out) is not np.ndarray and is_device_array(out):
                from asyncpar.collectives.device import messages  # needed only with devices

                return messages.receive(self._engine, self._messages, of, tag, out, convert)
            into = None if out is None else check_writable(check_array(out, "out"), "out")
            if into is not out:
                into_numpy, convert = convert, lambda delivery: into_numpy(delivery._replace(array=out))
            return self._messages.receive(of, tag, into, convert=convert, is_object=is_object, is_standing=is_standing)
        except Exception as error:
            self._messages.refuse_receive(of, tag, error)
            raise


def _on_left(engine: Engine) -> Callable[[], None]:
    """Return a callback that drops the engine's plans, and does not keep the group alive.

    Offers stay as they are: a rank that comes later may still read what this one has written.
    """
    held = weakref.ref(engine)

    def leave() -> None:
        engine = held()
        if engine is not None:
            engine.forget_prepared()

    return leave


def _on_ended(messages: PointToPoint, engine: Engine) -> Callable[[], list[tuple[int, int]]]:
    """Return a callback that frees the memory of a group whose operations have failed, and holds it weakly."""
    held = weakref.ref(messages), weakref.ref(engine)

    def end() -> list[tuple[int, int]]:
        messages, engine = held[0](), held[1]()
        if engine is not None:
            engine.leave_arena()
        return [] if messages is None else messages.end()

    return end


def _checked_timeout(seconds: float | None) -> float | None:
    if seconds is not None and not seconds > 0:
        raise UsageError(f"timeout: expected a positive number of seconds or None, got {seconds!r}")
    return seconds


def engine_of(communicator: Communicator) -> Engine:
    """Return the operations of a group, for modules that add others, such as those on device arrays."""
    return communicator._engine


def cost_model_of(communicator: Communicator) -> CostModel:
    """Return the cost model by which ``communicator`` chooses; equal on all its ranks."""
    return communicator._engine.policy.model


def lane_figures_of(communicator: Communicator) -> Array:
    """Return this rank's measurements of lanes: the negative latency and the bandwidth, -inf where unknown."""
    return communicator._engine.lanes.figures()


def notice_of(communicator: Communicator, key: str) -> GroupNotice:
    """Return the next notice of ``key`` in the group of ``communicator``."""
    return GroupNotice(communicator._engine, key)


def skip_use(communicator: Communicator, key: str) -> None:
    """Skip a use of ``key``: count it without an operation, as all ranks do.  Never raises."""
    engine = communicator._engine
    engine.table.take_abort(engine.group, engine.skip(key))


def agreeing(communicator: Communicator, detail: str, make: Callable[[], T]) -> T:
    """Return ``make()``; the operations that it calls raise ``OperationMismatch`` unless all ranks pass ``detail``.

    For layers above whose callers must agree on more than the arguments of the operation: ``detail`` is part of the
    fingerprint, and errors show it.
    """
    return communicator._engine.agreeing(detail, make)


async def overdue(
    communicator: Communicator, text: str, seconds: float, *, is_message: bool, peer: int | None
) -> PeerTimeout:
    """Return the error for a pending call, whose message begins with ``text`` and names the missing rank.

    The call is the oldest that waits: among messages (with rank ``peer`` of the group, if given), or among other
    operations.  All ranks call the latter in one order, so a rank that misses a later call has not reached the oldest
    either.  The search asks other ranks for ``seconds`` at most.
    """
    engine = communicator._engine
    wanted = None if peer is None else communicator.ranks[peer]
    pending = communicator._messages.pending() if is_message else engine.group.pending()
    for operation in pending:
        if operation.is_waiting and (wanted is None or wanted in operation.waits_for()):
            return await engine.table.waits.overdue(operation, text, seconds)
    return PeerTimeout(f"{text}: nothing is under way any more")


def exchange_expected(
    communicator: Communicator, x: Array, counts: Sequence[int], expected: Sequence[int], what: str
) -> Coroutine[Any, Any, tuple[Array, list[int]]]:
    """Call ``all_to_all_v``, where ``expected[r]`` is the number of rows expected from rank ``r``.

    Raises ``OperationMismatch`` on all ranks, before anything moves, unless every rank is sent the rows it expects; the
    message calls rows ``what``.
    """
    engine = communicator._engine
    return engine.checked(
        "all_to_all_v", None, lambda: exchanges.all_to_all_v(engine, x, counts, expected=expected, what=what)
    )


def recorder_of(communicator: Communicator) -> Recorder:
    """Return the recorder of the rank that owns ``communicator``."""
    return communicator._engine.table.links.recorder


def bucket_span(communicator: Communicator, index: int, nbytes: int, codec: str) -> EventSpan:
    """Return the span that records bucket ``index`` of gradients, of ``nbytes``, while ``communicator`` reduces it.

    ``codec`` is the name of the codec that encodes it, ``"none"`` if none does.
    """
    name, recorder = bucket_name(index, codec), recorder_of(communicator)
    return EventSpan(name, kind=EventKind.BUCKET, recorder=recorder, nbytes=nbytes)


def step_meter(communicator: Communicator, name: str) -> StepMeter:
    """Return the meter of the training steps called ``name`` on the ranks of ``communicator``."""
    links = communicator._engine.table.links
    is_whole = communicator.size == links.world.size
    return StepMeter(links.recorder, name, group=world_number(links.world.generation) if is_whole else 0)


def announce_leaving(communicator: Communicator) -> None:
    """Announce to the other ranks of the world that this one makes no more calls, in any group, and leaves soon.

    Operations that wait on them for such a call end with ``PeerLost``, as when this rank has left; its earlier calls go
    on.
    """
    communicator._engine.table.announce_leaving()


FixedRanksUse: TypeAlias = Literal["averaging", "replicas", "sharding"]
"""Uses of fixed ranks for which an elastic job has other ways: to average gradients, to average those of a process's
replicas, and to shard the state of an optimizer."""


def refuse_elastic(communicator: Communicator, what: str, use: FixedRanksUse = "averaging") -> None:
    """Raise ``UsageError`` for ``what``, which requires fixed ranks, if the world belongs to an elastic job.

    The job makes the error, with advice for this ``use``.
    """
    refuse = communicator._engine.table.links.refuse_fixed_ranks
    if refuse is not None:
        raise refuse(what, use)
