"""Watching actors: each watch ends with exactly one ``Down``, whatever happens to the actor, its node or this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import AsyncparError, NodeClosed, PeerLost, ProtocolError, RemoteError
from asyncpar.net.transport.links import Links


class Watch:
    """A watch in progress: ``down = await watch``.  Awaiting it is optional if a hook receives the ``Down``."""

    __slots__ = ("_cancel", "_down", "_is_cancelled", "_waiter")

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._down: Down | None = None
        self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def down(self) -> Down | None:
        """The ``Down`` of the actor; None while it lives."""
        return self._down

    def cancel(self) -> None:
        """End the watch without a ``Down``.  A task that awaits it gets ``CancelledError``."""
        self._cancel()
        self._is_cancelled = True
        if self._waiter is not None:
            self._waiter.cancel()

    def __await__(self) -> Generator[Any, None, Down]:
        while self._down is None:
            if self._is_cancelled:
                raise asyncio.CancelledError("the watch was cancelled")
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            yield from asyncio.shield(self._waiter).__await__()
        return self._down

    def end(self, down: Down) -> None:
        """End the watch with ``down``."""
        self._down = down
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Watching(msgspec.Struct):
    ref: ActorRef[Any]
    watch: Watch
    on_down: Callable[[Down], None] | None
    among: dict[Watch, None] | None


class Watches:
    """The watches of this rank's actors and programs."""

    def __init__(self, links: Links, outbound: Outbound) -> None:
        self._rank = links.rank
        self._lost = links.lost
        self._outbound = outbound
        self._watching: dict[int, _Watching] = {}
        self._next = 0
        self._closed: PeerLost | None = None

    def __len__(self) -> int:
        return len(self._watching)

    def begin(
        self, ref: ActorRef[Any], on_down: Callable[[Down], None] | None = None, among: dict[Watch, None] | None = None
    ) -> Watch:
        """Watch ``ref``; ``on_down`` is called with the ``Down``.  Until it ends, the watch is in ``among``."""
        number = self._next
        self._next += 1
        watch = Watch(lambda: self._cancel(number))
        watching = _Watching(ref, watch, on_down, among)
        if self._closed is not None:
            _end(watching, Down(ref, DownReason.CLOSED, self._closed))
            return watch
        lost = self._lost.get(ref.rank)
        if lost is not None:
            _end(watching, Down(ref, DownReason.LOST, lost))
            return watch
        self._watching[number] = watching
        if among is not None:
            among[watch] = None
        self._outbound.send_message(ref.rank, message.WatchMessage(number, ref.name))
        return watch

    def downed(self, rank: int, downed: message.Downed) -> None:
        """Handle a message that a watched actor has ended."""
        watching = self._watching.get(downed.watch)
        if watching is None:
            return  # cancelled in the meantime
        if watching.ref.rank != rank:
            raise ProtocolError(f"actor message: rank {rank} ends watch {downed.watch}, which is not on it")
        down = decode_down(watching.ref, downed)
        del self._watching[downed.watch]
        _end(watching, down)

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        """End all watches of actors on ``rank``."""
        self._end_all(DownReason.LOST, error, lambda ref: ref.rank == rank)

    def close(self) -> None:
        """End all watches, because this node closes."""
        self._closed = NodeClosed.of(self._rank)
        self._end_all(DownReason.CLOSED, self._closed)

    def _end_all(
        self, reason: DownReason, error: PeerLost, which: Callable[[ActorRef[Any]], bool] = lambda _: True
    ) -> None:
        for number in [number for number, watching in self._watching.items() if which(watching.ref)]:
            watching = self._watching.pop(number)
            _end(watching, Down(watching.ref, reason, error))

    def _cancel(self, number: int) -> None:
        watching = self._watching.pop(number, None)
        if watching is not None:
            _leave(watching)
            self._outbound.send_message(watching.ref.rank, message.Unwatch(number))


def _leave(watching: _Watching) -> None:
    if watching.among is not None:
        watching.among.pop(watching.watch, None)


def _end(watching: _Watching, down: Down) -> None:
    _leave(watching)
    watching.watch.end(down)
    if watching.on_down is not None:
        watching.on_down(down)


def decode_down(ref: ActorRef[Any], downed: message.Downed) -> Down:
    """Decode the end of ``ref`` from ``downed``.  Raises ``ProtocolError`` for an invalid reason."""
    try:
        reason = DownReason(downed.reason)
    except ValueError as error:
        raise ProtocolError(f"actor message: {downed.reason!r} is no reason for an actor's end") from error
    failure: AsyncparError | None = None
    if reason is DownReason.FAILED:
        failure = RemoteError(downed.text, rank=ref.rank, type_name=downed.type_name, remote_traceback=downed.traceback)
    return Down(ref, reason, failure)
