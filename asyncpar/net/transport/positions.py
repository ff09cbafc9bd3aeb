"""Detection of bytes that were sent but never arrived: each end reports its received bytes once a second.

Theory of operation.  A frame that is lost, or of which bytes are lost, is detected by the frames behind it, whose
numbers or checksums do not match.  If none follow, both ends would wait.  So after traffic, and while a frame is
incomplete, each end reports in POSITION frames, which are numbered like all others, how many bytes it has read.  If
that is less than what left this host ``patience`` seconds ago, and the difference has not shrunk for as long, the
difference is lost.  While much is being sent this is not judged: a loss is then detected by the bytes that arrive in
its place.  An end reports nothing while its loop is late or it does not read, or did not a second ago: it may not have
seen all that has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from asyncpar.net.wire.frame import SEALED_BYTES, FrameDamaged

TICK_SECONDS: Final = 1.0

_LATE_SECONDS: Final = 0.5
_MOST_MARKS: Final = 64
_BUSY_BYTES: Final = 65_536
"""A peer that has sent more since the difference was smallest is busy."""


class Positions:
    """Decides for one connection.  Sans-I/O; call ``tick`` every ``TICK_SECONDS``.

    If bytes come in pieces that count only when complete, ``piece_bytes`` is the size of the largest and
    ``piece_seconds`` the time that such a piece may take beyond ``patience``, a smaller one in proportion.
    """

    def __init__(self, *, patience: float, piece_bytes: int = 1, piece_seconds: float = 0.0) -> None:
        self._patience = patience
        self._piece_bytes = piece_bytes
        self._piece_seconds = piece_seconds
        self._marks: deque[tuple[float, int]] = deque()
        self._marked = 0
        self._backlog = math.inf
        """The smallest difference so far between the bytes written and those that the peer reports as received."""
        self._written = 0
        self._since = 0.0
        self._reports = 0
        self._traffic = (0, 0)
        self._last_tick: float | None = None
        self._was_reading = True
        self._left = 0

    def mark(self, now: float, written: int) -> None:
        """Record that ``written`` bytes have left this host by ``now``."""
        if written > self._marked and len(self._marks) < _MOST_MARKS:
            self._marked = written
            self._marks.append((now, written))

    def tick(self, now: float, *, sent: int, received: int, is_in_frame: bool, is_reading: bool) -> bool:
        """Return whether to report the received bytes to the peer.

        ``sent`` and ``received`` grow with traffic, ``received`` also by POSITION frames.
        """
        last, self._last_tick = self._last_tick, now
        traffic = (sent, received - self._reports * SEALED_BYTES)
        if traffic != self._traffic:
            self._traffic = traffic
            self._left = int(self._patience) + 3
        is_late = last is not None and now - last > TICK_SECONDS + _LATE_SECONDS
        has_read, self._was_reading = is_reading and self._was_reading, is_reading
        if is_late or not has_read or not (self._left or is_in_frame):
            return False
        self._left = max(0, self._left - 1)
        return True

    def receive(self, now: float, position: int, *, written: int) -> None:
        """Record that the peer has ``position`` of ``written`` bytes.  Raises ``FrameDamaged`` if some are lost."""
        self._reports += 1
        while self._marks and self._marks[0][1] <= position:
            self._marks.popleft()
        backlog = written - position
        is_busy = written - self._written > _BUSY_BYTES
        if not self._marks or backlog < self._backlog or is_busy:
            self._backlog, self._written, self._since = backlog if self._marks else math.inf, written, now
        elif min(now - self._marks[0][0], now - self._since) >= self._patience_with(backlog):
            raise FrameDamaged(f"of {self._marks[0][1]} bytes that were sent only {position} have come")

    def _patience_with(self, backlog: int) -> float:
        return self._patience + self._piece_seconds * min(1.0, backlog / self._piece_bytes)
