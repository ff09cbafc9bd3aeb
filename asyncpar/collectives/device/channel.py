"""An NCCL communicator and its stream: used in one order on all ranks, and broken with all that runs on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.device.records import LaunchOrder
from asyncpar.collectives.device.route import NoRoute, RouteProof
from asyncpar.collectives.operation import Operation
from asyncpar.core.observe.reporting import text_of
from asyncpar.device.fabric import DeviceCommunicator, DeviceError, Fabric, NcclDtype, NcclOp, NcclResult
from asyncpar.errors import PeerCancelled, PeerError, PeerLost, WorldRevoked

GRACE: Final = 1.0
"""Seconds for the links to report which rank is lost, after NCCL has reported a failure."""

_QUIET_LOOKS: Final = 2000
_QUIET_LOOKS_EVERY: Final = 0.001

Enqueue = Callable[[DeviceCommunicator, int], NcclResult]
"""``enqueue(communicator, stream)`` enqueues the work of an operation with NCCL."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The channel that a communicator comes from: split off as ``made``, or shrunk by the ranks in ``exclude``.

    ``places`` are the devices of its ranks.
    """

    channel: DeviceChannel
    places: tuple[int, ...]
    exclude: tuple[int, ...] = ()
    made: DeviceCommunicator | None = None


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """Reason for the end of a channel, and the rank of the world that caused it: not the error, which holds arrays."""

    text: str
    rank: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> ChannelEnd:
        """Return the end that ``error`` causes."""
        return cls(text_of(error) or type(error).__name__, error.rank if isinstance(error, PeerError) else None)

    def error(self, label: str) -> PeerCancelled:
        """Return the error of the operation ``label``, which this end causes."""
        text = f"the device communicator was ended, because {self.text}"
        return PeerCancelled(f"{label}: {text}", rank=self.rank, operation=label, cause=text)


@dataclass(eq=False, slots=True)
class Launch:
    """One operation on the channel; ``lent`` is kept until the devices are done with it."""

    caller_stream: int
    is_ordered: bool
    """Whether the caller orders later work itself (``stream=``)."""
    operation: Operation | None = None
    lent: tuple[object, ...] = ()
    event: int | None = None
    is_enqueued: bool = False
    is_alone: bool = False
    """Whether everything before it must be over."""
    other_streams: frozenset[int] = frozenset()
    """Further streams whose work comes before it: those of other arrays."""
    proof: RouteProof | None = None
    """The test of whether NCCL has a route, if that is not known."""
    prepared_by: DeviceChannel | None = None
    """The channel whose stream already waits for the caller's."""


class DeviceChannel:
    """The communicator of one epoch of a group, on the device of this rank."""

    def __init__(
        self,
        host: DeviceHost,
        order: LaunchOrder,
        place: int,
        origin: Origin | None,
        broken: Callable[[DeviceChannel, ChannelEnd], None],
    ) -> None:
        assert host.fabric is not None
        self._broken = broken
        self.host = host
        self.fabric: Fabric = host.fabric
        self.epoch = order.epoch
        self.device = order.records[place].index
        self.places = tuple(record.place for record in order.records)
        self.communicator: DeviceCommunicator | None = None
        self.failure: ChannelEnd | None = None
        self.ended: asyncio.Future[None] | None = None
        """Done when nothing of a broken or closed channel touches memory any more."""
        self.no_route = ""
        """The reason why NCCL does not connect the group, once its ranks have found it out."""
        self._scratch: int | None = None
        self._order, self._place, self._origin = order, place, origin
        self._stream: int | None = None
        self._is_retired = False
        self._is_connected = False
        self._next = 0
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._launches: set[Launch] = set()
        self._events: list[int] = []
        host.keep(self)

    # -- launching -------------------------------------------------------------------------------------------------

    async def launch(self, number: int, operation: Operation, launch: Launch, enqueue: Enqueue) -> None:
        """Enqueue an operation as the ``number``-th, in its turn; one that must be alone waits for all others."""
        launch.operation = operation
        self._launches.add(launch)
        while self._next != number:
            self._check(operation)
            turn = self._turns[number] = self.host.loop.create_future()
            await operation.wait(None, turn)
        self._check(operation)
        if self.communicator is None and launch.proof is not None:
            await self._prove(operation, launch.proof)
        elif self.communicator is None:
            await self._connect(operation)
        assert self.communicator is not None
        self._is_connected = True
        if launch.is_alone:
            await self._until(operation, lambda: not any(one.is_enqueued for one in self._launches))
            self._check(operation)
        if launch.prepared_by is not self:
            self.prepare(launch)
        stream = self._stream_of(launch)
        result = enqueue(self.communicator, stream)
        launch.is_enqueued = True
        if result is NcclResult.IN_PROGRESS:
            await self._until_ready(operation)
        elif result is not NcclResult.SUCCESS:
            raise DeviceError(f"{operation.label}: NCCL: {result}", result=result)
        launch.event = self._event()
        self.fabric.record_event(launch.event, stream)
        self._next += 1
        turn_of_next = self._turns.pop(self._next, None)
        if turn_of_next is not None and not turn_of_next.done():
            turn_of_next.set_result(None)

    async def completed(self, operation: Operation, launch: Launch) -> None:
        """Wait until the devices are done with ``launch``.  Raises the failure that NCCL reports."""
        try:
            await self._until(operation, partial(self._is_over, launch))
        except DeviceError:
            await self._await_losses(operation)
            raise
        self._retire(launch)

    def leave_to_stream(self, launch: Launch, lost: Callable[[], PeerError | None]) -> None:
        """Let ``launch`` run on, as its caller waits on the stream.  The channel is broken when a rank is ``lost``."""
        assert launch.operation is not None
        label = launch.operation.label
        due = self.host.loop.time() + (launch.operation.home.limits.timeout or float("inf"))

        def is_over() -> bool:
            error: BaseException | None = lost()
            if error is None and self.host.loop.time() > due:
                error = DeviceError(f"{label}: it did not run in time in the stream of its caller")
            if error is not None:
                self.break_off(error)
            return self.failure is not None or self._is_over(launch)

        def over(future: asyncio.Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self.break_off(error)
            if self.failure is None:
                self._retire(launch)

        self.host.poller.wait(is_over).add_done_callback(over)

    def _is_over(self, launch: Launch) -> bool:
        assert launch.event is not None
        if self.fabric.query_event(launch.event):
            return True
        self._is_ready()
        return False

    def _is_ready(self) -> bool:
        """Return whether the communicator is ready for calls.  Raises ``DeviceError`` if it has failed."""
        assert self.communicator is not None
        state = self.communicator.get_async_error()
        if state in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            return state is NcclResult.SUCCESS
        last_error = self.communicator.get_last_error()
        raise DeviceError(f"NCCL on cuda:{self.device}: {state}{': ' + last_error if last_error else ''}", result=state)

    async def _prove(self, operation: Operation, proof: RouteProof) -> None:
        """Connect, and send one byte around.  Raises ``NoRoute`` if that fails on any rank."""
        proof.begin()
        trouble = ""
        try:
            async with asyncio.timeout(proof.seconds):
                await self._connect(operation, proof)
                if not proof.has_failed:
                    await self._try_out(operation, proof)
        except (DeviceError, TimeoutError) as error:
            if operation.failure is not None:
                raise
            trouble = text_of(error) or f"NCCL is not connected after {proof.seconds:.3g} s"
        self.no_route = await proof.settle(trouble)
        if self.no_route:
            self._end_without_route()
            raise NoRoute(self.no_route)

    async def _try_out(self, operation: Operation, proof: RouteProof) -> None:
        assert self.communicator is not None
        self._scratch = self.fabric.allocate(1, self.device)
        stream, event = self._own_stream(), self._event()
        self._events.append(event)
        one, add = NcclDtype.UINT8, NcclOp.MAX
        if self.communicator.all_reduce(self._scratch, self._scratch, 1, one, add, stream) is not NcclResult.SUCCESS:
            await self._until(operation, self._is_ready, proof)
        self.fabric.record_event(event, stream)

        def is_through() -> bool:
            if self.fabric.query_event(event):
                return True
            self._is_ready()
            return False

        await self._until(operation, is_through, proof)
        scratch, self._scratch = self._scratch, None
        self.fabric.free(scratch, self.device)

    async def _connect(self, operation: Operation, proof: RouteProof | None = None) -> None:
        order, fabric = self._order, self.fabric
        origin, self._origin = self._origin, None
        if origin is not None and origin.made is not None:
            self.communicator = origin.made
            await self._until_ready(operation, proof)
            return
        if origin is not None and origin.channel.ended is not None:
            await self._until(operation, origin.channel.ended.done)
        if origin is not None and origin.channel.communicator is not None:
            self.communicator = origin.channel.communicator.shrink(origin.exclude, abort=True)
        else:
            self.communicator = fabric.init_rank(len(order.records), order.unique_id, self._place, self.device)
        await self._until_ready(operation, proof)

    async def _until_ready(self, operation: Operation, proof: RouteProof | None = None) -> None:
        try:
            await self._until(operation, self._is_ready, proof)
        except DeviceError:
            if proof is None:
                await self._await_losses(operation)
            raise

    async def _until(self, operation: Operation, is_done: Callable[[], bool], proof: RouteProof | None = None) -> None:
        """Wait until ``is_done()``.  A rank that has left may have done its part before; otherwise that never happens.

        Also returns when ``proof`` has failed on another rank.
        """
        due: float | None = None

        def look() -> bool:
            nonlocal due
            if is_done() or (proof is not None and proof.has_failed):
                return True
            error = operation.context.lost_member(operation.route or operation.home)
            if error is not None:
                due = due or self.host.loop.time() + GRACE
                if self.host.loop.time() > due:
                    operation.report_failure("lost", error.cause or str(error), lost=error.rank)
                    operation.fail(operation.lost(error))
            return False

        coming = self.host.poller.wait(look)
        try:
            await operation.wait(None, coming)
        finally:
            coming.cancel()

    async def _await_losses(self, operation: Operation) -> None:
        """Wait a moment for the links, which detect a lost rank; NCCL does not."""
        until = self.host.loop.time() + GRACE
        await self._until(operation, lambda: self.host.loop.time() >= until)

    def prepare(self, launch: Launch) -> None:
        """Make the stream of ``launch`` wait for those of its arrays, possibly before it is certain to be launched."""
        launch.prepared_by = self
        if launch.is_ordered:
            return
        event = self._event()
        self._events.append(event)  # it may be recorded again while it is waited for
        for stream in (launch.caller_stream, *launch.other_streams):
            self.fabric.record_event(event, stream)
            self.fabric.wait_event(self._stream_of(launch), event)

    def _stream_of(self, launch: Launch) -> int:
        """Return the stream of ``launch``: the caller's if that orders later work, otherwise this channel's."""
        if launch.is_ordered:
            return launch.caller_stream
        return self._own_stream()

    def _own_stream(self) -> int:
        if self._stream is None:
            self._stream = self.fabric.create_stream(self.device)
        return self._stream

    def _event(self) -> int:
        return self._events.pop() if self._events else self.fabric.create_event(self.device)

    def _retire(self, launch: Launch) -> None:
        self._launches.discard(launch)
        if launch.event is not None and self.failure is None:
            self._events.append(launch.event)
            launch.event = None
        self._close_if_idle()

    def _check(self, operation: Operation) -> None:
        if self.no_route:
            raise NoRoute(self.no_route)
        if self.failure is not None:
            raise self.failure.error(operation.label)

    # -- ends ------------------------------------------------------------------------------------------------------

    def break_off(self, error: BaseException, own: Operation | None = None) -> None:
        """End all that runs on the channel, because ``own`` failed with ``error``; the others are ``PeerCancelled``."""
        if self.failure is not None:
            return
        self.failure = ChannelEnd.of(error)
        self._broken(self, self.failure)
        for launch in list(self._launches):
            operation = launch.operation
            if operation is not None and operation is not own and operation.failure is None and not operation.is_over:
                ended = self.failure.error(operation.label)
                operation.report_failure("failed", ended.cause or "")
                operation.fail(ended)
        self._end(keeps=self._is_connected and isinstance(error, PeerLost | WorldRevoked))

    def _end_without_route(self) -> None:
        """End the channel; the operations that wait for their turn on it fail for lack of a route."""
        self.failure = ChannelEnd(self.no_route)
        self._broken(self, self.failure)
        turns = list(self._turns.values())
        self._end(keeps=False)
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

    def retire(self) -> None:
        """Free everything as soon as nothing runs any more: later operations use another channel."""
        self._is_retired = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_retired and not self._launches:
            self.close()

    def close(self) -> None:
        """Free everything; idempotent."""
        if self.failure is None:
            self.failure = ChannelEnd("it was closed")
            self._end(keeps=False)
        elif self.communicator is not None and self.ended is not None:
            communicator, self.communicator = self.communicator, None
            self.ended.add_done_callback(lambda _: self.host.in_thread(communicator.abort))

    def _end(self, *, keeps: bool) -> None:
        """Stop and free in a thread; lent arrays are kept until then.  With ``keeps`` the communicator may shrink."""
        communicator, stream, is_idle = self.communicator, self._stream, not self._launches
        events = [*self._events, *(launch.event for launch in self._launches if launch.event is not None)]
        self._events, self._turns, self._stream = [], {}, None
        scratch, self._scratch = self._scratch, None
        if not keeps:
            self.communicator = None

        def stop() -> None:
            try:
                if communicator is not None:
                    _stop(communicator, keeps=keeps, is_idle=is_idle)
            finally:
                for event in events:
                    self.fabric.destroy_event(event)
                if stream is not None:
                    self.fabric.destroy_stream(stream)
                if scratch is not None:
                    self.fabric.free(scratch, self.device)

        self.ended = self.host.in_thread(stop)
        self.ended.add_done_callback(lambda _: self._launches.clear())


def _stop(communicator: DeviceCommunicator, *, keeps: bool, is_idle: bool) -> None:
    """Wait, in a thread, until nothing runs on ``communicator`` any more."""
    if keeps:
        try:
            communicator.revoke()
            for _ in range(_QUIET_LOOKS):
                if communicator.get_async_error() is not NcclResult.IN_PROGRESS:
                    return
                time.sleep(_QUIET_LOOKS_EVERY)
        except DeviceError:
            pass  # a library without it; communicators that ended this way cannot shrink, which is an error there
        communicator.abort()
    elif is_idle:
        communicator.destroy()
    else:
        communicator.abort()
