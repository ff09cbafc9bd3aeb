"""Sends of a link that its lane has not got yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncpar.errors import OperationMismatch, PeerLost
from asyncpar.net.transport.lane import Sending, fail_future
from asyncpar.net.wire.frame import Payload


class DeferredSending(Sending):
    """A send that waits for its grant, or for the lane to come up."""

    __slots__ = ("_has_gone", "_inner", "_is_dropped", "fingerprint", "payload")

    def __init__(self, fingerprint: int, payload: Payload, done: asyncio.Future[None]) -> None:
        self.fingerprint = fingerprint
        self.payload: Payload = payload
        self.done = done
        self._inner: Sending | None = None
        self._is_dropped = False
        self._has_gone = False

    def begin(self, send: Callable[[], Sending | None]) -> None:
        """Start the real send, and end as it ends."""
        if self._is_dropped:
            return
        try:
            inner = send()
        except (PeerLost, OperationMismatch) as error:
            fail_future(self.done, error)
            return
        if inner is not None:
            self._inner = inner
            inner.done.add_done_callback(self._finish)
        else:
            self._has_gone = True
            if not self.done.done():
                self.done.set_result(None)

    @property
    def waiting_bytes(self) -> int:
        if self._has_gone:
            return 0
        return len(self.payload) if self._inner is None else self._inner.waiting_bytes

    def release(self) -> bool:
        goes_out = self._has_gone if self._inner is None else self._inner.release()
        self._is_dropped = True
        self.payload = memoryview(b"")
        self.done.cancel()
        return goes_out

    def _finish(self, inner: asyncio.Future[None]) -> None:
        error = None if inner.cancelled() else inner.exception()
        if inner.cancelled():
            self.done.cancel()
        elif error is not None:
            fail_future(self.done, error)
        elif not self.done.done():
            self.done.set_result(None)


class MessageSending(Sending):
    """A message that is not gone yet.  Taking it back tells the receiver, who would wait for it before later ones."""

    __slots__ = ("_inner", "_taken_back")

    def __init__(self, inner: Sending, taken_back: Callable[[], None]) -> None:
        self._inner = inner
        self._taken_back: Callable[[], None] | None = taken_back
        self.done = inner.done

    @property
    def waiting_bytes(self) -> int:
        return self._inner.waiting_bytes

    def release(self) -> bool:
        goes_out = self._inner.release()
        taken_back, self._taken_back = self._taken_back, None
        if not goes_out and taken_back is not None:
            taken_back()
        return goes_out
