"""Find bytes that were sent and never came: once a second each end tells the other how many have come.

Theory of operation.  A frame that is lost, or of which bytes are lost, is found by the frames behind it, whose numbers
or checksums do not fit.  If none follow, both ends would wait.  So after traffic, and while a frame is incomplete, each
end says in POSITION frames, which have numbers like all others, how many bytes it has read.  If that is less than what
left this host ``patience`` seconds ago, and for as long the difference has not become less, the difference is lost.
While much is being sent this is not judged: what is lost is then found by what comes in its place.  An end says nothing
while its loop is late or it does not read, or did not a second ago: it may not have seen what is there.
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
"""A peer that sends more since the difference was least is busy."""


class Positions:
    """Decide, for one connection.  Sans-I/O; call ``tick`` every ``TICK_SECONDS``.

    Where bytes come in pieces that count only when they are complete, ``piece_bytes`` is the size of the largest and
    ``piece_seconds`` what such a piece may take beyond ``patience``, a smaller one in proportion.
    """

    def __init__(self, *, patience: float, piece_bytes: int = 1, piece_seconds: float = 0.0) -> None:
        self._patience = patience
        self._piece_bytes = piece_bytes
        self._piece_seconds = piece_seconds
        self._marks: deque[tuple[float, int]] = deque()
        self._marked = 0
        self._backlog = math.inf
        """The least difference, since there is one, between what was written and what the peer says has come."""
        self._written = 0
        self._since = 0.0
        self._heard = 0
        self._traffic = (0, 0)
        self._last_tick: float | None = None
        self._was_reading = True
        self._left = 0

    def mark(self, now: float, written: int) -> None:
        """Note that ``written`` bytes have left this host by ``now``."""
        if written > self._marked and len(self._marks) < _MOST_MARKS:
            self._marked = written
            self._marks.append((now, written))

    def tick(self, now: float, *, sent: int, received: int, is_in_frame: bool, is_reading: bool) -> bool:
        """Return whether to tell the peer how many bytes have come.

        ``sent`` and ``received`` grow with traffic, ``received`` also by POSITION frames.
        """
        last, self._last_tick = self._last_tick, now
        traffic = (sent, received - self._heard * SEALED_BYTES)
        if traffic != self._traffic:
            self._traffic = traffic
            self._left = int(self._patience) + 3
        is_late = last is not None and now - last > TICK_SECONDS + _LATE_SECONDS
        has_read, self._was_reading = is_reading and self._was_reading, is_reading
        if is_late or not has_read or not (self._left or is_in_frame):
            return False
        self._left = max(0, self._left - 1)
        return True

    def heard(self, now: float, position: int, *, written: int) -> None:
        """Note that the peer has ``position`` of ``written`` bytes.  Raises ``FrameDamaged`` if some are lost."""
        self._heard += 1
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
