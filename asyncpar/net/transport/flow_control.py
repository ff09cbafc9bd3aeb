"""Flow control of a link: when payloads may be sent, and how frames meet the receives posted for them.

Theory of operation.  A small payload (up to ``EAGER_LIMIT``) is sent at once; if no receive is posted for it yet, it
waits in the receiver's ``Inbox``.  The sum of such bytes is bounded by ``EAGER_WINDOW``: the sender's ``Outbox`` spends
credit for each, and gets it back in a CREDIT frame when the payload has been consumed.  A larger payload, or a small
one without credit, is sent only after a GRANT, which is sent when memory is posted for it.  So memory is bounded, and
since no frame ever blocks another in the channel, operations may complete in any order without a deadlock.

Both classes only decide; frames to send go through ``emit``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from asyncpar.errors import OperationMismatch, ProtocolError
from asyncpar.net.wire.frame import HEADER_BYTES, MESSAGE_GROUP, FrameHeader, FrameKind, Key

EAGER_LIMIT = 64 * 1024
"""Largest payload in bytes that may be sent before it is granted.  Part of the protocol: equal on all ranks."""

EAGER_WINDOW = 4 * 1024 * 1024
"""Most bytes (with headers) of unconsumed eager payloads per link and direction."""

MAX_PENDING = 65_536
"""Most grants and requests per link that wait for their counterpart."""


class Waiter(Protocol):
    """The part of ``asyncio.Future`` that the inbox needs."""

    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...
    def exception(self) -> BaseException | None: ...


class Referee(Protocol):
    """Decisions of the owner of operations about frames."""

    def is_stale(self, group: int, sequence: int) -> bool:
        """Return whether this operation is over here, so that frames for it must be dropped."""
        ...

    def mismatch(self, header: FrameHeader) -> None:
        """Report a frame whose fingerprint differs from that of the receive posted for its key."""
        ...


class _Receive(msgspec.Struct):
    fingerprint: int
    buffer: memoryview
    waiter: Waiter


class _Early(msgspec.Struct):
    fingerprint: int
    buffer: memoryview


class _Landing(msgspec.Struct):
    """The place where the payload of ``header`` is arriving."""

    header: FrameHeader
    place: _Receive | _Early


class Inbox:
    """Matches arriving frames with posted receives, for one link."""

    def __init__(self, *, referee: Referee, emit: Callable[[FrameKind, Key, int, int], None]) -> None:
        self._referee = referee
        self._emit = emit
        self._posted: dict[Key, _Receive] = {}
        self._early: dict[Key, _Early] = {}
        self._requested: set[Key] = set()
        self._landing: _Landing | None = None
        self._held = 0
        self._owed = 0

    @property
    def early_bytes(self) -> int:
        """Bytes of payloads for which no receive has been posted yet."""
        return self._held

    def due_bytes(self, key: Key) -> int:
        """Return the number of bytes expected for ``key``; 0 if nothing is posted for it."""
        receive = self._posted.get(key)
        return 0 if receive is None else len(receive.buffer)

    def is_arriving(self, key: Key) -> bool:
        """Return whether the payload for ``key`` is arriving right now."""
        return self._landing is not None and self._landing.header.key == key

    def take_early(self, key: Key, fingerprint: int, buffer: memoryview) -> bool:
        """Copy the payload for ``key`` into ``buffer`` if it has already arrived; return whether it had.

        Raises ``OperationMismatch`` if a payload of another length waits for ``key``.
        """
        early = self._early.get(key)
        if early is None or early.fingerprint != fingerprint:
            return False
        del self._early[key]
        self._consume(len(early.buffer))
        _check_length(key, expected=len(buffer), got=len(early.buffer))
        buffer[:] = early.buffer
        return True

    def post(self, key: Key, fingerprint: int, buffer: memoryview, waiter: Waiter) -> None:
        """Post ``buffer`` for ``key``, after ``take_early`` found nothing."""
        assert key not in self._posted, f"a receive for {key} is already posted"
        self._posted[key] = _Receive(fingerprint, buffer, waiter)
        early = self._early.get(key)
        if early is not None:
            header = FrameHeader(FrameKind.EAGER, 0, *key, early.fingerprint, len(early.buffer))
            self._referee.mismatch(header)
        elif len(buffer) > EAGER_LIMIT or key in self._requested:
            self._requested.discard(key)
            self._emit(FrameKind.GRANT, key, fingerprint, len(buffer))

    def withdraw(self, key: Key) -> bool:
        """Withdraw a posted receive; return True if its payload is arriving right now, so that the lane must divert."""
        receive = self._posted.pop(key, None)
        landing = self._landing
        if receive is None or landing is None or landing.place is not receive:
            return False
        self._landing = None
        if landing.header.kind is FrameKind.EAGER:
            self._return_credit(landing.header.length)
        return True

    def forget(self, group: int, sequence: int | None = None) -> None:
        """Drop early payloads for an operation that is over."""
        over = (group,) if sequence is None else (group, sequence)
        for key in [key for key in self._early if key[: len(over)] == over]:
            self._consume(len(self._early.pop(key).buffer))
        if self._requested:
            self._requested = {key for key in self._requested if key[: len(over)] != over}

    def lend(self, header: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of an EAGER or BULK frame; None drops it."""
        key = header.key
        receive = self._posted.get(key)
        if receive is not None and receive.waiter.done():  # cancelled: its memory is not ours any more
            del self._posted[key]
            receive = None
        if receive is not None and receive.fingerprint == header.fingerprint:
            if header.length != len(receive.buffer):
                self._refuse(header, receive)
                return None
            self._landing = _Landing(header, receive)
            return receive.buffer
        if receive is not None:
            self._referee.mismatch(header)
        elif header.kind is FrameKind.EAGER and not self._referee.is_stale(header.group, header.sequence):
            return self._hold(header)
        if header.kind is FrameKind.EAGER:
            self._return_credit(header.length)
        return None

    def landed(self, header: FrameHeader) -> None:
        """Complete the payload for which memory was last lent."""
        landing, self._landing = self._landing, None
        assert landing is not None, "a payload landed that was not lent for"
        key = header.key
        place = landing.place
        if isinstance(place, _Receive):
            del self._posted[key]
            if header.kind is FrameKind.EAGER:
                self._return_credit(header.length)
            if not place.waiter.done():
                place.waiter.set_result(None)
            return
        if key in self._early:
            raise ProtocolError(f"two payloads were sent for {key}")
        if self._referee.is_stale(header.group, header.sequence):
            self._consume(header.length)
            return
        self._early[key] = place
        posted = self._posted.get(key)
        if posted is not None:
            self._match_late(key, posted)

    def request(self, header: FrameHeader) -> None:
        """Handle a peer's REQUEST for a grant for ``header.key``."""
        receive = self._posted.get(header.key)
        if receive is not None:
            if receive.fingerprint != header.fingerprint:
                self._referee.mismatch(header)
            elif len(receive.buffer) <= EAGER_LIMIT:  # a larger one was granted when it was posted
                self._emit(FrameKind.GRANT, header.key, receive.fingerprint, len(receive.buffer))
        elif not self._referee.is_stale(header.group, header.sequence):
            if len(self._requested) >= MAX_PENDING:
                raise ProtocolError(f"more than {MAX_PENDING} requests wait for a receive")
            self._requested.add(header.key)

    def fail(self, error: BaseException) -> None:
        """End every posted receive with ``error``: nothing more arrives, and nothing may be written any more.

        Payloads that have already arrived stay, for receives posted later.
        """
        self._landing = None
        self._requested.clear()
        posted, self._posted = self._posted, {}
        for receive in posted.values():
            _fail(receive.waiter, error)

    def _hold(self, header: FrameHeader) -> memoryview:
        if header.length > EAGER_LIMIT:
            raise ProtocolError(f"eager payload: at most {EAGER_LIMIT} bytes are allowed, got {header.length}")
        if self._held + header.length + HEADER_BYTES > EAGER_WINDOW:
            raise ProtocolError(f"eager payloads: the peer overspent its credit of {EAGER_WINDOW} bytes")
        self._held += header.length + HEADER_BYTES
        early = _Early(header.fingerprint, memoryview(bytearray(header.length)))
        self._landing = _Landing(header, early)
        return early.buffer

    def _match_late(self, key: Key, receive: _Receive) -> None:
        """Match a receive that was posted while its payload was arriving elsewhere."""
        early = self._early[key]
        if early.fingerprint != receive.fingerprint:
            self._referee.mismatch(FrameHeader(FrameKind.EAGER, 0, *key, early.fingerprint, len(early.buffer)))
            return
        del self._early[key], self._posted[key]
        self._consume(len(early.buffer))
        if receive.waiter.done():
            return
        try:
            _check_length(key, expected=len(receive.buffer), got=len(early.buffer))
        except OperationMismatch as error:
            _fail(receive.waiter, error)
            return
        receive.buffer[:] = early.buffer
        receive.waiter.set_result(None)

    def _refuse(self, header: FrameHeader, receive: _Receive) -> None:
        """Fail a receive whose length differs from that of the peer's payload, and drop the payload."""
        del self._posted[header.key]
        if header.kind is FrameKind.EAGER:
            self._return_credit(header.length)
        if not receive.waiter.done():
            try:
                _check_length(header.key, expected=len(receive.buffer), got=header.length)
            except OperationMismatch as error:
                _fail(receive.waiter, error)

    def _consume(self, length: int) -> None:
        self._held -= length + HEADER_BYTES
        self._return_credit(length)

    def _return_credit(self, length: int) -> None:
        """Return credit in batches, so that small messages do not each cost a frame."""
        self._owed += length + HEADER_BYTES
        if self._owed >= EAGER_WINDOW // 4:
            owed, self._owed = self._owed, 0
            self._emit(FrameKind.CREDIT, Key(0, 0, 0), 0, owed)


def _fail(waiter: Waiter, error: BaseException) -> None:
    """End ``waiter`` unless it has ended; asyncio does not warn if it is never awaited."""
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()


def _check_length(key: Key, *, expected: int, got: int) -> None:
    if expected != got:
        raise OperationMismatch(
            f"group {key.group:#x} operation #{key.sequence} message {key.tag}: "
            f"this rank expects {expected} bytes, the peer sent {got}"
        )


class SendNow(msgspec.Struct, frozen=True):
    """The payload may be sent as a frame of this kind."""

    kind: FrameKind


class Wait(msgspec.Struct, frozen=True):
    """A grant must come first; ``ask``: it has to be requested."""

    ask: bool


EAGER_NOW = SendNow(FrameKind.EAGER)
BULK_NOW = SendNow(FrameKind.BULK)


class Outbox:
    """Credit and grants of one direction of a link."""

    def __init__(self, *, referee: Referee) -> None:
        self._referee = referee
        self._credit = EAGER_WINDOW
        self._grants: dict[Key, tuple[int, int]] = {}

    def admit(self, key: Key, length: int) -> SendNow | Wait:
        """Decide how to send a payload of ``length`` bytes.

        Raises ``OperationMismatch`` if the receiver granted another length.
        """
        if self.spend(length):
            return EAGER_NOW
        granted = self._grants.pop(key, None)
        if granted is None:
            return Wait(ask=length <= EAGER_LIMIT or key.group == MESSAGE_GROUP)
        check_grant(key, granted[1], length)
        return BULK_NOW

    def spend(self, length: int) -> bool:
        """Spend credit for a payload of ``length`` bytes; return False if it may not be sent eagerly."""
        cost = length + HEADER_BYTES
        if length > EAGER_LIMIT or cost > self._credit:
            return False
        self._credit -= cost
        return True

    def credit(self, amount: int) -> None:
        """Add ``amount`` bytes that the receiver has consumed."""
        self._credit += amount
        if self._credit > EAGER_WINDOW:
            raise ProtocolError(f"credit: the peer returned {self._credit - EAGER_WINDOW} bytes more than were sent")

    def granted(self, header: FrameHeader, length: int) -> None:
        """Store a grant that came before its send."""
        if header.group == MESSAGE_GROUP or self._referee.is_stale(header.group, header.sequence):
            return  # no operation waits for it any longer
        if len(self._grants) >= MAX_PENDING:
            raise ProtocolError(f"more than {MAX_PENDING} grants wait for a send")
        self._grants[header.key] = (header.fingerprint, length)

    def forget(self, group: int, sequence: int | None = None) -> None:
        """Drop the grants of an operation that is over."""
        over = (group,) if sequence is None else (group, sequence)
        for key in [key for key in self._grants if key[: len(over)] == over]:
            del self._grants[key]

    def grant_fingerprint(self, key: Key) -> int | None:
        """Return the fingerprint of the grant that waits for ``key``; None if there is none."""
        grant = self._grants.get(key)
        return None if grant is None else grant[0]


def check_grant(key: Key, granted: int, length: int) -> None:
    """Raise ``OperationMismatch`` unless the receiver granted the length of the send."""
    if granted != length:
        raise OperationMismatch(
            f"group {key.group:#x} operation #{key.sequence} message {key.tag}: "
            f"this rank sends {length} bytes, the peer expects {granted}"
        )
