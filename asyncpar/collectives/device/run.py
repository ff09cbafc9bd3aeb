"""Execution of an operation on devices: agreed on, launched in its turn, and awaited by its event."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import Any, Final, TypeVar

from asyncpar.collectives.algorithms.catalog import DEVICE_ALGORITHMS, HIERARCHICAL, NCCL, STAGED, is_of_devices
from asyncpar.collectives.call import MessageCall
from asyncpar.collectives.device.agree import MOST_COUNTS_IN_ARENA, Meeting
from asyncpar.collectives.device.channel import DeviceChannel, Enqueue, Launch
from asyncpar.collectives.device.records import LaunchOrder, Way, choose_way, first_of, way_without_route
from asyncpar.collectives.device.route import NoRoute
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.protocol import Description, Reason, describe
from asyncpar.collectives.shared_memory.call import ArenaOperation
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.core.config.device_lanes import DeviceLanes
from asyncpar.device.arrays import DeviceArray, stream_handle
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM
from asyncpar.errors import OperationMismatch, PeerError, PeerLost, UsageError
from asyncpar.net.arena.channel import Turn
from asyncpar.net.arena.run_queue import Program

T = TypeVar("T")

_ENDING_SECONDS: Final = 10.0
"""Seconds that a failed call waits for the devices to leave its arrays alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """An operation on devices as its arguments define it.

    ``arrays`` are all that it touches.  ``enqueue`` enqueues it with NCCL, if it ``has_nccl``; ``through_host`` does it
    with numpy arrays instead, under a key of its own.  ``result`` makes the caller's result from the order, which has
    the counts of all ranks.
    """

    name: str
    arguments: tuple[str, ...]
    arrays: tuple[DeviceArray, ...]
    result: Callable[[LaunchOrder], Any]
    enqueue: Callable[[LaunchOrder], Enqueue]
    through_host: Callable[[Operation, LaunchOrder], Coroutine[Any, Any, None]]
    by_host: Callable[[Operation], Coroutine[Any, Any, None]] | None = None
    has_nccl: bool = True
    counts: Sequence[int] = ()
    size: int | None = None
    """Bytes by which a pin is looked up; by default those of the first array."""
    is_alone: bool = False
    """Whether nothing else may run on the communicator."""
    device: int = 0
    """The device of an operation without arrays."""


class _Launched(Operation):
    """An operation on devices; ``channel`` is set when it is launched."""

    __slots__ = ()

    channel: DeviceChannel | None
    parts: asyncio.Task[None] | None
    """The task that carries it out by other operations."""

    def fail(self, error: BaseException) -> None:
        self._pass_on(error)
        super().fail(_apart(error))  # others may fail with it, and its traceback has their frames: see ``DeviceCall``
        if self.parts is not None:
            _cancel_once(self.parts)  # other ranks may never call theirs

    def _pass_on(self, error: BaseException) -> None:
        """Notify the other ranks of the ``error`` of a peer, if this is the first rank of the group.

        They wait only for this rank, as it decides the order, and may never learn of a peer that has left.
        """
        if self.failure is not None or self.is_over or not isinstance(error, PeerError) or len(self.audience) < 2:
            return
        if self.home.ranks[0] == self.context.links.rank:
            reason: Reason = "lost" if isinstance(error, PeerLost) else "failed"
            self.report_failure(reason, error.cause or str(error), lost=error.rank)

    def waits_for(self) -> list[int]:
        """Return the ranks that this one waits for: once it is launched, all others."""
        if self.channel is None:
            return self.waits_to_meet()
        is_waiting = self.waiter is not None and not self.waiter.done()
        return Operation.waits_for(self) or (list(self.audience) if is_waiting else [])

    def waits_to_meet(self) -> list[int]:
        """Return the ranks that this one waits for before it is launched."""
        return super().waits_for()


def _apart(error: BaseException) -> BaseException:
    """Return an error like ``error`` with a traceback of its own."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    return made


class DeviceOperation(_Launched):
    """An operation on devices whose ranks agree on it by messages."""

    __slots__ = ("channel", "parts")

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.channel = None
        self.parts = None


class ArenaDeviceOperation(_Launched, ArenaOperation):
    """An operation on devices whose ranks agree on it in shared memory."""

    __slots__ = ("channel", "parts")

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.channel = None
        self.parts = None

    def waits_to_meet(self) -> list[int]:
        if self.is_over:  # it has no task any more
            return []
        return Operation.waits_for(self) if self.task.is_done else super().waits_to_meet()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Result of an operation that fails with the same ``error`` on all ranks; none needs to notify the others."""

    error: UsageError


class DeviceCall(MessageCall[T]):
    """A call that ends when the devices no longer touch its arrays, even if it fails.

    A call that is not awaited runs in a task once a later one is agreed on, which would otherwise wait for its launch.
    """

    __slots__ = ("__weakref__", "_early")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._early: asyncio.Task[T] | None = None

    def begin_early(self) -> None:
        """Run, if it has not begun."""
        if self._steps is None and self._early is None and not self._operation.is_over:
            body = self._body
            del self._body
            self._early = self._operation.context.loop.create_task(self._run(body))

    def _begin(self) -> Generator[Any, Any, T]:
        return super()._begin() if self._early is None else self._early.__await__()

    def _give_up(self, error: BaseException | None = None) -> None:
        if self._early is None:
            super()._give_up(error)
        elif not self._operation.is_over and not self._operation.context.loop.is_closed():
            self._operation.context.loop.call_soon_threadsafe(self._early.cancel)

    @property
    def runs_anywhere(self) -> bool:
        return False  # the loop ends it

    async def _run(self, body: Callable[[Operation], Awaitable[T]]) -> T:
        try:
            result = await super()._run(body)
        except (Exception, asyncio.CancelledError) as error:
            operation = self._operation
            channel = operation.channel if isinstance(operation, DeviceOperation | ArenaDeviceOperation) else None
            if channel is not None and channel.ended is not None:
                await asyncio.wait([channel.ended], timeout=_ENDING_SECONDS)
            del body
            clear_frames(error.__traceback__)  # they hold the arrays, as long as the operation holds the error
            raise
        if isinstance(result, _Refusal):
            raise result.error
        return result


def start(
    engine: Engine, work: DeviceWork, *, algorithm: str | None, key: str | None, stream: object
) -> Coroutine[Any, Any, Any]:
    """Give the call its place in the order of operations now; ranks agree on it when it is awaited."""
    device = _one_device(work)
    wanted = _wanted(engine, work, algorithm)
    group = DeviceGroup.of(engine)
    if not work.has_nccl:
        what = f"{work.name}({', '.join(work.arguments)})"
        if algorithm in (NCCL, HIERARCHICAL):
            raise UsageError(f"algorithm: NCCL has no {what}; leave the algorithm to asyncpar")
        if wanted != STAGED:
            group.host.warn_once(f"NCCL has no {work.name} like this: it goes through the host", f": {what}")
            wanted = STAGED
    handle = None if stream is None else _checked_stream(group, stream, device)
    for array in work.arrays:
        _check_own_stream(group, array)
    description = describe(work.name, work.arguments, _described(wanted, engine.policy.device_lanes))
    caller_stream = _caller_stream(work) if handle is None else handle
    launch = Launch(caller_stream=caller_stream, is_ordered=handle is not None, is_alone=work.is_alone)
    launch.other_streams = frozenset(array.stream for array in work.arrays if array.stream) - {caller_stream}

    def prepare() -> None:
        channel = group.usable(device) if work.has_nccl and wanted != STAGED else None
        if channel is not None:
            channel.prepare(launch)

    best = partial(engine.policy.devices.choose, work.name, _payload(work)) if not work.counts else first_of
    choose = partial(
        choose_way,
        best=best,
        ranks=group.ranks,
        wanted=wanted,
        is_spread=group.is_spread,
        can_go_by_host=work.by_host is not None,
    )
    meeting = Meeting(group, device, work.counts, choose, prepare)

    async def body(operation: Operation) -> Any:
        try:
            order = await _met(operation, group, meeting)
        except BaseException as error:
            if meeting.has_announced and not isinstance(error, OperationMismatch):  # a mismatch launches nowhere
                if meeting.order is None:
                    group.skip(error)
                else:
                    group.miss(meeting.order, error)
            raise
        return await _run(operation, engine, group, work, choose, order, launch, wanted)

    arena = engine.arena
    if key is not None or not _has_room(arena, work):
        return engine.start(work.name, description, key, body, kind=DeviceOperation, call=DeviceCall)

    return _in_arena(engine, work.name, description, body, meeting)


def _in_arena(
    engine: Engine, name: str, description: Description, body: Callable[[Operation], Awaitable[Any]], meeting: Meeting
) -> DeviceCall[Any]:
    """Return the call of ``body``, whose ranks agree in the arena of their group."""
    made: list[weakref.ref[DeviceCall[Any]]] = []

    def begin(turn: Turn) -> Program:
        call = made[0]()
        if call is not None:
            call.begin_early()
        return meeting.in_arena(turn)

    task = engine.enter_arena(name, description, begin, ArenaDeviceOperation)
    call: DeviceCall[Any] = DeviceCall(task.operation, body, engine.count)
    made.append(weakref.ref(call))
    return call


def _has_room(arena: ArenaGroup | None, work: DeviceWork) -> bool:
    return arena is not None and not arena.is_refused and len(work.counts) <= MOST_COUNTS_IN_ARENA


async def _met(operation: Operation, group: DeviceGroup, meeting: Meeting) -> LaunchOrder:
    """Return the order of ``operation`` once all ranks have come to it."""
    if group.size == 1:
        return meeting.alone()
    if isinstance(operation, ArenaDeviceOperation) and await operation.task.run():
        assert meeting.order is not None
        return meeting.order
    return await meeting.by_messages(operation)


def _caller_stream(work: DeviceWork) -> int:
    return (work.arrays[0].stream if work.arrays else None) or LEGACY_DEFAULT_STREAM


async def _run(
    operation: Operation,
    engine: Engine,
    group: DeviceGroup,
    work: DeviceWork,
    choose: partial[Way],
    order: LaunchOrder,
    launch: Launch,
    wanted: str | None,
) -> Any:
    try:
        way = choose(order.records)
    except UsageError as error:
        return _Refusal(error)
    result = work.result(order)
    if way.algorithm == NCCL:
        try:
            await by_nccl(operation, group, order, launch, work.enqueue(order), lent=(work, result))
        except NoRoute as error:
            try:
                way = way_without_route(
                    str(error), wanted, can_go_by_host=work.by_host is not None, best=choose.keywords["best"]
                )
            except UsageError as refused:
                return _Refusal(refused)
    reason = way.reason or ("" if work.has_nccl else f"NCCL has no {work.name}({', '.join(work.arguments)})")
    text = f"{way.algorithm}: {reason}" if reason else way.algorithm
    engine.device_ways.note(work.name, text, _payload(work), possible=way.possible if work.has_nccl else (STAGED,))
    if way.reason:
        how = "through the host" if way.algorithm == STAGED else "by NCCL on each host, and the network of this world"
        group.host.warn_once(f"group {engine.group.name}: device arrays go {how}: {way.reason}")
    if way.algorithm == HIERARCHICAL:
        assert work.by_host is not None
        await _by_parts(operation, work.by_host(operation))
    elif way.algorithm == STAGED:
        await _by_parts(operation, work.through_host(operation, order))
    return result


async def _by_parts(operation: Operation, work: Coroutine[Any, Any, None]) -> None:
    """Carry out ``operation`` by other operations, which end with it."""
    assert isinstance(operation, DeviceOperation | ArenaDeviceOperation)
    operation.parts = parts = operation.context.loop.create_task(work)
    try:
        await asyncio.wait([parts])
    except asyncio.CancelledError:
        _cancel_once(parts)
        await asyncio.wait([parts])  # until its copies are over
        _forget_frames(parts)
        raise
    finally:
        operation.parts = None
    if parts.cancelled() and operation.failure is not None:
        _forget_frames(parts)
        raise operation.failure
    parts.result()


def _forget_frames(ended: asyncio.Task[None]) -> None:
    """Clear the frames that the error of a task holds, and with them the arrays."""
    try:
        error: BaseException | None = ended.exception()
    except asyncio.CancelledError as cancelled:
        error = cancelled
    if error is not None:
        clear_frames(error.__traceback__)
        del error  # it holds this frame


def _cancel_once(parts: asyncio.Task[None]) -> None:
    """Cancel ``parts``; a clean-up in progress goes on."""
    if not parts.cancelling():
        parts.cancel()


async def by_nccl(
    operation: Operation,
    group: DeviceGroup,
    order: LaunchOrder,
    launch: Launch,
    enqueue: Enqueue,
    *,
    lent: tuple[object, ...],
) -> None:
    """Launch ``operation`` in its place in ``order``; ``lent`` is kept until the devices are done.

    Raises ``NoRoute``, on all ranks, if NCCL turns out not to connect them; nothing has then been done.
    """
    assert isinstance(operation, DeviceOperation | ArenaDeviceOperation)
    channel = group.channel(order, operation.label)
    operation.channel = channel
    launch.lent = lent
    launch.proof = group.proof(order, operation)
    context, home = operation.context, operation.home

    def lost() -> PeerLost | None:
        return context.lost_member(home)

    try:
        await channel.launch(order.number, operation, launch, enqueue)
        if launch.is_ordered:
            channel.leave_to_stream(launch, lost)
        else:
            await channel.completed(operation, launch)
    except NoRoute as error:
        group.note_route(order, str(error))
        raise
    except BaseException as error:
        channel.break_off(error, operation)
        raise
    if launch.proof is not None:
        group.note_route(order, "")


def _wanted(engine: Engine, work: DeviceWork, algorithm: object) -> str | None:
    """Return the algorithm that the caller or a pin names."""
    if algorithm is not None:
        if not isinstance(algorithm, str) or not is_of_devices(work.name, algorithm):
            known = ", ".join(one for one in DEVICE_ALGORITHMS if is_of_devices(work.name, one))
            raise UsageError(f"algorithm: {work.name} of device arrays has {known}; got {algorithm!r}")
        return algorithm
    return engine.policy.pin.find_device(work.name, _payload(work))


def _payload(work: DeviceWork) -> int:
    """Return the bytes by which a pin is looked up."""
    return work.size if work.size is not None else (work.arrays[0].nbytes if work.arrays else 0)


def _described(wanted: str | None, lanes: DeviceLanes) -> str:
    figures = "" if wanted or lanes.is_built_in else f" by {lanes}"
    return f"{wanted or 'auto'}{figures} on devices (pass device arrays on all ranks, or on none)"


def _one_device(work: DeviceWork) -> int:
    devices = sorted({array.device for array in work.arrays})
    if len(devices) > 1:
        texts = ", ".join(f"cuda:{device}" for device in devices)
        raise UsageError(f"expected arrays on one device, got arrays on {texts}; copy them to one")
    return devices[0] if devices else work.device


def _checked_stream(group: DeviceGroup, stream: object, device: int) -> int:
    handle = stream_handle(stream)
    fabric = group.host.fabric
    if fabric is None:
        raise UsageError(f"stream: this rank has no NCCL to order by a stream: {group.host.reason}; leave it out")
    of = fabric.stream_device(handle)
    if of is not None and of != device:
        raise UsageError(
            f"stream: expected one of cuda:{device}, where the array is, got one of cuda:{of}; "
            f"pass a stream of cuda:{device}"
        )
    return handle


def _check_own_stream(group: DeviceGroup, array: DeviceArray) -> None:
    """Raise ``UsageError`` unless the stream that ``array`` names belongs to its device."""
    fabric, stream = group.host.fabric, array.stream
    if fabric is None or stream is None or stream in (LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM):
        return
    of = fabric.stream_device(stream)
    if of is not None and of != array.device:
        raise UsageError(
            f"{array}: expected its stream on that device, got one of cuda:{of}; "
            f"make a stream of cuda:{array.device} the current one of its library"
        )
