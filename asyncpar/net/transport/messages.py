"""Receipt of messages: unsolicited payloads of group 0, delivered in the order of their sequence numbers.

Small ones arrive eagerly and spend the link's credit until they are released; larger ones are granted while the bytes
delivered but not yet released stay below a budget.  So a slow consumer slows its senders down, and memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from asyncpar.errors import ProtocolError
from asyncpar.net.transport.flow_control import EAGER_LIMIT, EAGER_WINDOW, MAX_PENDING
from asyncpar.net.wire.frame import HEADER_BYTES, FrameHeader, FrameKind, Key, allocate

OnMessage = Callable[[memoryview, Callable[[], None]], None]
"""Called with a payload and the function that releases its budget, which must be called once."""


class MessageInbox:
    """Messages from one peer: grants, order, budget.  Decides only; ``emit`` sends."""

    def __init__(
        self,
        *,
        deliver: OnMessage,
        emit: Callable[[FrameKind, Key, int, int], None],
        max_bytes: int,
        budget: int,
        allocate: Callable[[int], memoryview] = allocate,
    ) -> None:
        self.deliver = deliver
        self._emit = emit
        self._max_bytes = max_bytes
        self._budget = budget
        self._allocate = allocate
        self._next = 0
        self._ready: dict[int, tuple[FrameHeader, memoryview] | None] = {}
        """Messages that are complete but not next; None if the sender withdrew the message."""
        self._granted: dict[Key, int] = {}
        self._queue: OrderedDict[Key, int] = OrderedDict()
        self._landing: memoryview | None = None
        self._eager_held = 0
        self._bulk_held = 0
        self._owed = 0

    def request(self, header: FrameHeader, length: int) -> None:
        """Grant the peer ``length`` bytes as soon as the budget allows (one message at least)."""
        if length > self._max_bytes:
            raise ProtocolError(
                f"message: at most {self._max_bytes} bytes are allowed, the peer wants to send {length}"
            )
        if len(self._queue) >= MAX_PENDING:
            raise ProtocolError(f"more than {MAX_PENDING} messages wait for a grant")
        if header.key in self._queue or header.key in self._granted:
            raise ProtocolError(f"message {header.sequence} was announced twice")
        self._queue[header.key] = length
        self._grant()

    def accept(self, header: FrameHeader, payload: memoryview) -> bool:
        """Deliver a copy of a whole eager message; return False if it is not the next."""
        if header.sequence != self._next or self._ready:
            return False
        self._admit_eager(header)
        self._next += 1
        self.deliver(memoryview(bytearray(payload)), partial(self._release, header))
        return True

    def lend(self, header: FrameHeader) -> memoryview:
        """Return new memory for the payload."""
        self._landing = self._reserve(header)
        return self._landing

    def reserve_granted(self, key: Key) -> tuple[FrameHeader, memoryview]:
        """Return new memory for a granted message that arrives other than in one frame, and its header."""
        header = FrameHeader(FrameKind.BULK, 0, *key, 0, self._granted.get(key, 0))
        return header, self._reserve(header)

    def _reserve(self, header: FrameHeader) -> memoryview:
        if header.kind is FrameKind.BULK:
            if self._granted.pop(header.key, None) != header.length:
                raise ProtocolError(f"message {header.sequence}: {header.length} bytes came without a grant for them")
        else:
            self._admit_eager(header)
        if header.sequence < self._next or header.sequence in self._ready:
            raise ProtocolError(f"message {header.sequence} came twice")
        return self._allocate(header.length)

    def landed(self, header: FrameHeader) -> None:
        """Deliver the messages that are now complete and in order."""
        landing, self._landing = self._landing, None
        assert landing is not None
        self.complete(header, landing)

    def complete(self, header: FrameHeader, landing: memoryview) -> None:
        """Deliver the message in ``landing``, as soon as it is its turn."""
        if header.sequence == self._next and not self._ready:
            self._next += 1
            self.deliver(landing, partial(self._release, header))
            return
        self._ready[header.sequence] = (header, landing)
        self._deliver_ready()

    def taken_back(self, header: FrameHeader) -> None:
        """Stop waiting for a message that the sender announced but will not send."""
        if header.sequence < self._next or header.sequence in self._ready:
            raise ProtocolError(f"message {header.sequence} was taken back after it came")
        if len(self._ready) >= MAX_PENDING:
            raise ProtocolError(f"more than {MAX_PENDING} messages wait for an earlier one")
        self._ready[header.sequence] = None
        self._queue.pop(header.key, None)
        self._bulk_held -= self._granted.pop(header.key, 0)
        self._deliver_ready()
        self._grant()

    def _deliver_ready(self) -> None:
        while self._next in self._ready:
            entry = self._ready.pop(self._next)
            self._next += 1
            if entry is not None:
                ready, payload = entry
                self.deliver(payload, partial(self._release, ready))

    def _admit_eager(self, header: FrameHeader) -> None:
        if header.length > EAGER_LIMIT:
            raise ProtocolError(f"eager message: at most {EAGER_LIMIT} bytes are allowed, got {header.length}")
        self._eager_held += header.length + HEADER_BYTES
        if self._eager_held > EAGER_WINDOW:
            raise ProtocolError(f"eager messages: the peer overspent its credit of {EAGER_WINDOW} bytes")

    def _release(self, header: FrameHeader) -> None:
        if header.kind is FrameKind.BULK:
            self._bulk_held -= header.length
            self._grant()
            return
        self._eager_held -= header.length + HEADER_BYTES
        self._owed += header.length + HEADER_BYTES
        if self._owed >= EAGER_WINDOW // 4:
            owed, self._owed = self._owed, 0
            self._emit(FrameKind.CREDIT, Key(0, 0, 0), 0, owed)

    def _grant(self) -> None:
        while self._queue and len(self._granted) < MAX_PENDING:
            key, length = next(iter(self._queue.items()))
            if self._bulk_held > 0 and self._bulk_held + length > self._budget:
                return
            del self._queue[key]
            self._bulk_held += length
            self._granted[key] = length
            self._emit(FrameKind.GRANT, key, 0, length)
