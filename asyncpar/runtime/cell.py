"""A cell: the task, the mailbox and the life of one actor.

Theory of operation.  One task constructs the actor, runs ``on_start``, handles one message after the other and runs
``on_stop``.  Endpoints run inside this task, not in tasks of their own, which makes a message cheap.  To end an
endpoint whose caller has gone, the task itself is cancelled, and this is told apart from a real cancellation by
counting (the way ``asyncio.timeout`` does it): when the endpoint has ended, however it ended, the count is taken back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import msgspec

from asyncpar.errors import AsyncparError, PeerCancelled, PeerError, PeerLost, ProtocolError, UsageError
from asyncpar.runtime.actor import Actor
from asyncpar.runtime.endpoint import EndpointSpec
from asyncpar.runtime.message import CLOSED, STOPPED, USAGE
from asyncpar.runtime.thread import ActorThread
from asyncpar.runtime.window import message_cost

T = TypeVar("T")

BURST: Final = 32
"""Messages handled in a row before the event loop gets a turn, if no endpoint gave it one."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A call (or tell: ``call`` is None) that arrived at its actor."""

    sender: int
    call: int | None
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]
    payload: memoryview
    is_cancelled: bool = field(default=False, init=False)
    """The caller has gone; nobody waits for the answer."""

    @property
    def cost(self) -> int:
        return message_cost(self.payload)


class CellEvents(Protocol):
    """What a cell tells its owner.  Never blocks, never raises."""

    def taken(self, cell: Cell, delivery: Delivery) -> None:
        """The delivery left the mailbox."""
        ...

    def answered(self, cell: Cell, delivery: Delivery, value: object) -> None:
        """The endpoint returned ``value``."""
        ...

    def raised(self, cell: Cell, delivery: Delivery, error: BaseException) -> None:
        """The endpoint raised ``error``."""
        ...

    def refused(self, cell: Cell, delivery: Delivery, reason: str, text: str) -> None:
        """The endpoint was not called, or not to its end, for a reason of ``message``."""
        ...

    def ended(self, cell: Cell) -> None:
        """The cell handles nothing more."""
        ...


class Cell:
    """One actor and its mailbox.  ``run`` is its task; everything else is called on the same loop."""

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        create: Callable[[], Actor],
        endpoints: Mapping[str, EndpointSpec],
        events: CellEvents,
    ) -> None:
        self.name = name
        self._rank = rank
        self.task: asyncio.Task[None] | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends when the actor is ready, with what its constructor or ``on_start`` raised if it is not."""
        self.stop_error: BaseException | None = None
        """What ``on_stop`` raised."""
        self._create = create
        self._endpoints = endpoints
        self._events = events
        self._mailbox: deque[Delivery] = deque()
        self._waker: asyncio.Future[None] | None = None
        self._current: Delivery | None = None
        self._interrupts = 0
        self._is_busy = False
        self._end: str | None = None
        self._thread = ActorThread(f"actor {name}")

    @property
    def is_stopping(self) -> bool:
        return self._end is not None

    def put(self, delivery: Delivery) -> None:
        """Add to the mailbox."""
        self._mailbox.append(delivery)
        self._wake()

    def cancel(self, delivery: Delivery) -> None:
        """Nobody waits for ``delivery`` any more: end its endpoint, or never begin it."""
        delivery.is_cancelled = True
        if self._current is delivery:
            self._interrupt(delivery)

    def stop(self) -> None:
        """Let the current message finish, then end."""
        self._end = self._end or STOPPED
        self._wake()

    def close(self) -> None:
        """End; the current message is cancelled."""
        self._end = CLOSED
        self._interrupt(self._current)
        self._wake()

    def is_current_task(self) -> bool:
        """Is the caller running inside this actor's own task?"""
        return asyncio.current_task() is self.task

    async def wait_ended(self) -> None:
        """Return when the task is over, however it ended."""
        if self.task is not None:
            await asyncio.wait({self.task})

    async def run(self) -> None:
        """Live: start, handle messages until told to stop, stop."""
        try:
            actor = await self._start()
            if actor is not None:
                try:
                    await self._serve(actor)
                finally:
                    self._end = self._end or CLOSED
                    self._refuse_rest()
                    await self._stop(actor)
        finally:
            self._end = self._end or STOPPED
            self._refuse_rest()
            self._thread.close()
            if not self.started.done():
                self.started.set_exception(self._never_started())
            self._events.ended(self)

    # -- the task --------------------------------------------------------------------------------------------------

    async def _start(self) -> Actor | None:
        if self._end is not None or self.started.done():
            return None
        try:
            actor = self._create()
            await self._interruptible(actor.on_start())
        except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; spawn raises it
            if not self.started.done():
                self.started.set_exception(error)
            return None
        except asyncio.CancelledError:
            if self._is_task_cancelled():
                raise
            if not self.is_stopping and not self.started.done():
                self.started.set_exception(AsyncparError(f"actor {self.name!r}: on_start cancelled itself"))
            return None
        if not self.started.done():
            self.started.set_result(None)
        return actor

    async def _stop(self, actor: Actor) -> None:
        try:
            await actor.on_stop()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; whoever stops the actor decides
            self.stop_error = error

    async def _serve(self, actor: Actor) -> None:
        handled = 0
        while (delivery := await self._next()) is not None:
            self._events.taken(self, delivery)
            if not delivery.is_cancelled:
                await self._handle(actor, delivery)
            del delivery  # an idle actor keeps no message alive
            handled += 1
            if handled % BURST == 0:
                await asyncio.sleep(0)

    async def _next(self) -> Delivery | None:
        while not self._mailbox and not self.is_stopping:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        return None if self.is_stopping else self._mailbox.popleft()

    async def _handle(self, actor: Actor, delivery: Delivery) -> None:
        spec = self._endpoints.get(delivery.endpoint)
        if spec is None:
            text = (
                f"{delivery.endpoint!r} is no endpoint of {type(actor).__qualname__}; it has {sorted(self._endpoints)}"
            )
            self._events.refused(self, delivery, USAGE, text)
            return
        try:
            args, kwargs = spec.bind(delivery.arguments, delivery.keywords, delivery.payload)
        except (UsageError, ProtocolError) as error:
            self._events.refused(self, delivery, USAGE, str(error))
            return
        self._current = delivery
        try:
            method = getattr(actor, spec.name)
            if spec.is_async:
                value = await self._interruptible(method(*args, **kwargs))
            else:
                value = await self._interruptible(self._thread.run(lambda: method(*args, **kwargs)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; its caller is told
            self._events.raised(self, delivery, error)
        except asyncio.CancelledError as error:
            self._cancelled(delivery, error)
        else:
            self._events.answered(self, delivery, value)
        finally:
            self._current = None

    def _cancelled(self, delivery: Delivery, error: asyncio.CancelledError) -> None:
        """An endpoint ended with a cancellation: ours, its own, or that of the whole task."""
        if self._is_task_cancelled():
            self._events.refused(self, delivery, CLOSED, "the node was closed")
            raise error
        if self._end == CLOSED:
            self._events.refused(self, delivery, CLOSED, "the node was closed")
        else:
            self._events.raised(self, delivery, error)

    async def _interruptible(self, work: Awaitable[T]) -> T:
        """Await user code; what ``_interrupt`` did to this task meanwhile is undone in the end."""
        self._is_busy = True
        try:
            return await work
        finally:
            self._is_busy = False
            task = asyncio.current_task()
            assert task is not None
            while self._interrupts:
                self._interrupts -= 1
                task.uncancel()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _interrupt(self, work: Delivery | None) -> None:
        """Cancel the user code that handles ``work`` (None: ``on_start``), if it still does."""
        if not self._is_busy or self._current is not work or self.task is None:
            return
        if self.is_current_task():  # the endpoint itself caused this: it must be suspended to be cancelled
            asyncio.get_running_loop().call_soon(self._interrupt, work)
            return
        self._interrupts += 1
        self.task.cancel()

    def _never_started(self) -> PeerError:
        if self._end == STOPPED:
            return PeerCancelled(f"actor {self.name!r} was stopped before it had started", rank=self._rank)
        return PeerLost("this node is closed", rank=self._rank, cause="closed")

    def _is_task_cancelled(self) -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _refuse_rest(self) -> None:
        reason = self._end or CLOSED
        text = "the node was closed" if reason == CLOSED else "the actor was stopped"
        while self._mailbox:
            delivery = self._mailbox.popleft()
            self._events.taken(self, delivery)
            self._events.refused(self, delivery, reason, text)
