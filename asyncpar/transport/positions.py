"""Find bytes that were sent and never came: once a second each end tells the other how many have come.

Theory of operation.  A frame that is lost, or of which bytes are lost, is found by the frames behind it, whose numbers
or checksums do not fit.  If none follow, both ends would wait.  So after traffic, and while a frame is incomplete, each
end says in POSITION frames, which have numbers like all others, how many bytes it has read.  If it says less, and the
same again for ``patience`` seconds, than what had left this host as long ago, the difference is lost.  An end says
nothing while its loop is late or it does not read: it may not have seen what is there.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from asyncpar.wire.integrity import SEALED_BYTES, FrameDamaged

TICK_SECONDS: Final = 1.0

_LATE_SECONDS: Final = 0.5
_MOST_MARKS: Final = 64


class Positions:
    """Decide, for one connection.  Sans-I/O; call ``tick`` every ``TICK_SECONDS``."""

    def __init__(self, *, patience: float) -> None:
        self._patience = patience
        self._marks: deque[tuple[float, int]] = deque()
        self._position = -1
        self._said_since = 0.0
        self._heard = 0
        self._traffic = (0, 0)
        self._last_tick: float | None = None
        self._left = 0

    def mark(self, now: float, written: int) -> None:
        """``written`` bytes have left this host by ``now``."""
        is_new = written > (self._marks[-1][1] if self._marks else max(self._position, 0))
        if is_new and len(self._marks) < _MOST_MARKS:
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
        if is_late or not is_reading or not (self._left or is_in_frame):
            return False
        self._left = max(0, self._left - 1)
        return True

    def heard(self, now: float, position: int) -> None:
        """The peer says that ``position`` bytes have come.  Raises ``FrameDamaged`` if others are lost."""
        self._heard += 1
        if position != self._position:
            self._position, self._said_since = position, now
        while self._marks and self._marks[0][1] <= position:
            self._marks.popleft()
        if self._marks and min(now - self._marks[0][0], now - self._said_since) >= self._patience:
            raise FrameDamaged(f"of {self._marks[0][1]} bytes that were sent only {position} have come")
