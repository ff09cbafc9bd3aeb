"""A call at its two ends: ``PendingCall`` at its caller, ``Delivery`` and its ``Execution`` at its actor.

An endpoint runs inside a task that outlives it.  To interrupt the endpoint, that task is cancelled; ``Execution``
distinguishes this from a cancellation of the task itself by counting, as ``asyncio.timeout`` does: when the endpoint
has ended, however it ended, its interrupts are subtracted from the count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Self, TypeVar

import msgspec

from asyncpar.actors.runtime.call_streams import Feeds, ServedStreams
from asyncpar.actors.runtime.endpoint import EndpointSpec
from asyncpar.actors.runtime.ref import ActorRef, Told
from asyncpar.actors.runtime.stream_ends import Inlet
from asyncpar.actors.runtime.window import OutboundMessage, ReceiveWindow
from asyncpar.core.observe.recorder import NO_TICKET
from asyncpar.errors import AsyncparError, PeerLost
from asyncpar.net.wire.payload import PayloadDecoder, PayloadEncoder

T = TypeVar("T")


class Execution:
    """One run of user code in the task that creates this object."""

    __slots__ = ("_interrupts", "_is_over", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] = task
        self._interrupts = 0
        self._is_over = False

    @property
    def task(self) -> asyncio.Task[object]:
        """The task in which it runs."""
        return self._task

    @property
    def is_interrupted(self) -> bool:
        """Whether ``interrupt`` was called."""
        return self._interrupts > 0

    def interrupt(self) -> None:
        """Cancel the user code, if it still runs."""
        if self._is_over:
            return
        if asyncio.current_task() is self._task:  # the code interrupts itself: only a suspended task can be cancelled
            asyncio.get_running_loop().call_soon(self.interrupt)
            return
        self._interrupts += 1
        self._task.cancel()

    async def run(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``, and uncancel the task for each ``interrupt``.

        Cancellations of the task that ``work`` has caught and not raised again are uncancelled, too.
        """
        before = self._task.cancelling()
        is_cancelled = False
        try:
            return await work
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            self._is_over = True
            for _ in range(self._interrupts if is_cancelled else self._task.cancelling() - before):
                self._task.uncancel()


class Delivery(msgspec.Struct, eq=False):
    """A call, or a tell (``call`` is None), that arrived at its actor.

    ``window`` is that of its sender and actor, of which it uses ``cost``.  ``deadline`` is the time of this loop at
    which the caller stops waiting.
    """

    sender: int
    call: int | None
    actor: str
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]
    payload: memoryview
    window: ReceiveWindow
    cost: int
    deadline: float | None = None
    wants_stream: bool = False
    spec: EndpointSpec | None = None
    """The endpoint that it calls; set when the message is put into the mailbox."""
    execution: Execution | None = None
    """The run of its endpoint, while there is one."""
    streams: ServedStreams | None = None
    """Streams of the call; set just before its endpoint runs."""
    asks: set[int] | None = None
    """Numbers of the asks that its endpoint waits for."""
    is_cancelled: bool = False
    """Whether the call was cancelled, so that no answer is sent."""

    @property
    def title(self) -> str:
        """The endpoint, for error texts."""
        return f"{self.endpoint if self.spec is None else self.spec.title}()"

    def cancel(self, reason: AsyncparError) -> None:
        """Send no answer; interrupt the endpoint if it runs, otherwise do not start it."""
        self.is_cancelled = True
        if self.streams is not None:
            self.streams.abort(reason)
        if self.execution is not None:
            self.execution.interrupt()

    def forget(self) -> None:
        """Drop deadline and arguments after the endpoint ended; tasks that it started may keep this object alive."""
        self.execution = None
        self.deadline = None
        self.arguments, self.keywords, self.payload = [], {}, memoryview(b"")


CURRENT: Final[ContextVar[Delivery | None]] = ContextVar("asyncpar delivery", default=None)
"""The message whose endpoint is running in this context."""


def time_left() -> float | None:
    """Return the seconds until the caller of the running endpoint stops waiting, at least 0.0.

    None if the caller has no deadline, and outside of an endpoint.
    """
    current = CURRENT.get()
    if current is None or current.deadline is None:
        return None
    return max(0.0, current.deadline - asyncio.get_running_loop().time())


class PendingCall(msgspec.Struct, eq=False):
    """A call, or a request to the actor system of a rank, that waits for its answer.

    ``outgoing`` is the message of a call; None for a request.  ``origin`` is the message whose endpoint made the call.
    """

    call: int
    ref: ActorRef[Any]
    endpoint: str
    result: PayloadDecoder[Any]
    future: asyncio.Future[Any]
    outgoing: OutboundMessage | None = None
    origin: Delivery | None = None
    inlet: Inlet[Any] | None = None
    """Receives the items of an endpoint that was called for a stream."""
    feeds: Feeds | None = None
    """Streams among the arguments of the call."""
    ticket: int = NO_TICKET
    """The ticket of its record: see ``Recorder``."""

    @property
    def title(self) -> str:
        """Endpoint and actor, for error texts."""
        return f"{self.endpoint} of {self.ref!r}"

    def __str__(self) -> str:
        return f"the result of {self.title}"


class QueuedTell(Told):
    """A told message: sent, queued or lost."""

    __slots__ = ("error", "outgoing", "waiter")

    def __init__(self, outgoing: OutboundMessage) -> None:
        self.outgoing = outgoing
        self.error: PeerLost | None = None
        self.waiter: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
        while not self.outgoing.is_sent:
            if self.error is not None:
                raise self.error.with_traceback(None)
            if self.waiter is None or self.waiter.done():
                self.waiter = asyncio.get_running_loop().create_future()
            yield from asyncio.shield(self.waiter).__await__()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class EncodedArguments(tuple[Any, ...]):
    """Encoded positional and named arguments, for use in many calls."""

    encoder: PayloadEncoder
    positional: list[msgspec.Raw]
    named: dict[str, msgspec.Raw]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Any],
        encoder: PayloadEncoder,
        positional: list[msgspec.Raw],
        named: dict[str, msgspec.Raw],
    ) -> Self:
        """Return ``arguments`` together with their encoded parts, which belong to ``encoder``."""
        encoded = cls(arguments)
        encoded.encoder, encoded.positional, encoded.named = encoder, positional, named
        return encoded
