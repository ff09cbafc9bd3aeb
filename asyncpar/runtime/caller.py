"""The caller's half of an actor system: calls and tells on their way out, answers on their way in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncpar.errors import (
    ActorDown,
    AsyncparError,
    MailboxFull,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    RemoteError,
    UsageError,
)
from asyncpar.runtime import message
from asyncpar.runtime.delivery import time_left
from asyncpar.runtime.post import Post
from asyncpar.runtime.ref import ActorRef, Told
from asyncpar.runtime.window import Parcel, SendWindow
from asyncpar.transport.links import MAX_MESSAGE_BYTES
from asyncpar.wire.payload import Extension, PayloadDecoder, PayloadEncoder


class _Told(Told):
    """A told message: sent, queued, or lost."""

    __slots__ = ("error", "parcel", "waiter")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.error: PeerLost | None = None
        self.waiter: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
        while not self.parcel.is_sent:
            if self.error is not None:
                raise self.error
            if self.waiter is None or self.waiter.done():
                self.waiter = asyncio.get_running_loop().create_future()
            yield from asyncio.shield(self.waiter).__await__()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask, or a request to the system of a rank, that waits for its answer."""

    ref: ActorRef[Any]
    endpoint: str
    result: PayloadDecoder[Any]
    future: asyncio.Future[Any]

    def __str__(self) -> str:
        return f"{self.endpoint} of {self.ref!r}"


class Caller:
    """Sends calls to actors and ends each with its result or an error."""

    def __init__(self, rank: int, *, extension: Extension, post: Post) -> None:
        self._rank = rank
        self._extension = extension
        self._post = post
        self._pending: dict[int, _Pending] = {}
        self._windows: dict[tuple[int, str], SendWindow] = {}
        self._told: dict[Parcel, _Told] = {}
        self._next_call = 0
        self._is_closed = False

    @property
    def pending(self) -> int:
        """Asks that wait for an answer."""
        return len(self._pending)

    # -- out -------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        result: PayloadDecoder[Any],
    ) -> Any:
        """Send a call and return its result, decoded by ``result``.  See ``ref.Endpoint`` for the errors."""
        self._check_open(ref, endpoint)
        call = self._new_call()
        encoder, encoded, named = self.encode(endpoint, arguments, keywords)
        envelope = message.Call(call, ref.name, endpoint, encoded, named, time_left())
        parcel = Parcel(encoder.finish(envelope, what=f"the call of {endpoint}"))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = _Pending(ref, endpoint, result, future)
        try:
            self._put(ref, endpoint, parcel)
            return await future
        except asyncio.CancelledError:
            self._withdraw(ref, call, parcel)
            raise
        finally:
            del self._pending[call]
            if not future.cancelled() and future.done():
                future.exception()  # seen: a cancellation may have come at the same time

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        """Send a call that nobody answers."""
        self._check_open(ref, endpoint)
        window = self._windows.get((ref.rank, ref.name))
        if window is not None:
            window.check_room(f"tell {endpoint} of {ref!r}")
        encoder, encoded, named = self.encode(endpoint, arguments, keywords)
        envelope = message.Tell(ref.name, endpoint, encoded, named)
        parcel = Parcel(encoder.finish(envelope, what=f"the call of {endpoint}"))
        told = _Told(parcel)
        if not self._put(ref, endpoint, parcel):
            self._told[parcel] = told
        return told

    async def request(
        self,
        ref: ActorRef[Any],
        verb: str,
        envelope: Callable[[int], message.Message],
        encoder: PayloadEncoder,
        result: PayloadDecoder[Any],
    ) -> Any:
        """Ask something about ``ref`` of the system it belongs to: what ``envelope`` makes of the call's number."""
        self._check_open(ref, verb)
        call = self._new_call()
        payload = encoder.finish(envelope(call), what=verb)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = _Pending(ref, verb, result, future)
        try:
            self._send(ref, verb, payload)
            return await future
        except asyncio.CancelledError:
            if not self._is_closed:
                self._post.say(ref.rank, message.Cancel(call))
            raise
        finally:
            del self._pending[call]
            if not future.cancelled() and future.done():
                future.exception()  # seen: a cancellation may have come at the same time

    def encode(
        self, endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[PayloadEncoder, list[msgspec.Raw], dict[str, msgspec.Raw]]:
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        encoded = [
            encoder.part(argument, what=f"argument {place} of {endpoint}()")
            for place, argument in enumerate(arguments, start=1)
        ]
        named = {
            name: encoder.part(argument, what=f"argument {name!r} of {endpoint}()")
            for name, argument in keywords.items()
        }
        return encoder, encoded, named

    def _put(self, ref: ActorRef[Any], endpoint: str, parcel: Parcel) -> bool:
        """Send ``parcel`` or queue it; True if it was sent."""
        place = (ref.rank, ref.name)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = SendWindow()
        if not window.put(parcel):
            return False
        try:
            self._send(ref, endpoint, parcel.payload)
        except PeerLost:
            self._windows.pop(place, None)
            raise
        return True

    def _send(self, ref: ActorRef[Any], verb: str, payload: memoryview) -> None:
        try:
            self._post.send(ref.rank, payload)
        except PeerLost as error:
            raise _lost_during(error, f"{verb} of {ref!r}") from None

    def _new_call(self) -> int:
        call = self._next_call
        self._next_call += 1
        return call

    def _withdraw(self, ref: ActorRef[Any], call: int, parcel: Parcel) -> None:
        """The ask was cancelled: nothing must come of it any more."""
        window = self._windows.get((ref.rank, ref.name))
        if window is not None and window.drop(parcel):
            return
        if parcel.is_sent and not self._is_closed:
            self._post.say(ref.rank, message.Cancel(call))

    # -- in --------------------------------------------------------------------------------------------------------

    def reply(self, rank: int, reply: message.Reply, payload: memoryview) -> None:
        """An answer arrived; ignored if nobody waits for it any more."""
        pending = self._find(rank, reply.call)
        if pending is None:
            return
        try:
            value = pending.result.decode_part(reply.value, payload, what=f"the result of {pending}")
        except (UsageError, ProtocolError) as error:
            pending.future.set_exception(error)
        else:
            pending.future.set_result(value)

    def failure(self, rank: int, failure: message.Failure) -> None:
        """There is no result; ignored if nobody waits for it any more."""
        pending = self._find(rank, failure.call)
        if pending is not None:
            pending.future.set_exception(_error_of(failure, rank, str(pending)))

    def credit(self, rank: int, credit: message.Credit) -> None:
        """An actor took messages of ours."""
        if self._is_closed:
            return
        place = (rank, credit.actor)
        window = self._windows.get(place)
        if window is None:
            raise ProtocolError(
                f"actor credit: rank {rank} returned {credit.amount} for an actor that was sent nothing"
            )
        released = window.credit(credit.amount)
        if window.is_idle:
            del self._windows[place]
        for parcel in released:
            self._post.send_quietly(rank, parcel.payload)
            told = self._told.pop(parcel, None)
            if told is not None:
                told.wake()

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        """End everything that waits for ``rank``."""
        for pending in list(self._pending.values()):
            if pending.ref.rank == rank and not pending.future.done():
                pending.future.set_exception(_lost_during(error, str(pending)))
        for place in [place for place in self._windows if place[0] == rank]:
            for parcel in self._windows.pop(place).clear():
                told = self._told.pop(parcel, None)
                if told is not None:
                    told.error = error
                    told.wake()

    def close(self) -> None:
        """End everything that waits, whatever it waits for, and refuse everything new."""
        self._is_closed = True
        for rank in {pending.ref.rank for pending in self._pending.values()} | {rank for rank, _ in self._windows}:
            self.peer_lost(rank, self._closed())

    def _find(self, rank: int, call: int) -> _Pending | None:
        pending = self._pending.get(call)
        if pending is None or pending.future.done():
            return None
        if pending.ref.rank != rank:
            raise ProtocolError(f"actor message: rank {rank} answers call {call}, which rank {pending.ref.rank} got")
        return pending

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_open(self, ref: ActorRef[Any], endpoint: str) -> None:
        if self._is_closed:
            raise _lost_during(self._closed(), f"{endpoint} of {ref!r}")

    def _closed(self) -> PeerLost:
        return PeerLost("this node is closed", rank=self._rank, cause="closed")


def _lost_during(error: PeerLost, operation: str) -> PeerLost:
    """Return ``error`` for one operation that it ended."""
    text = f"{operation}: {error}"
    return PeerLost(text, rank=error.rank, host=error.host, operation=operation, cause=error.cause)


def _error_of(failure: message.Failure, rank: int, operation: str) -> AsyncparError:
    """Return what a caller must raise for ``failure``."""
    match failure.reason:
        case message.USAGE:
            return UsageError(f"{operation}: {failure.text}")
        case message.STOPPED:
            return ActorDown(f"rank {rank}: {operation}: {failure.text}", rank=rank, operation=operation)
        case message.FULL:
            return MailboxFull(f"rank {rank}: {operation}: {failure.text}", rank=rank, operation=operation)
        case message.DEADLINE:
            return PeerTimeout(f"rank {rank}: {operation}: {failure.text}", rank=rank, operation=operation)
        case message.CLOSED:
            return PeerLost(
                f"rank {rank}: {operation}: {failure.text}", rank=rank, operation=operation, cause=failure.text
            )
        case _:
            return RemoteError(failure.text, rank=rank, type_name=failure.type_name, remote_traceback=failure.traceback)
