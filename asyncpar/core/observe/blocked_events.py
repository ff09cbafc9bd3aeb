"""Records of the code that blocks the event loop, and for how long, in the event ring."""

from __future__ import annotations

import re
from typing import Final

from asyncpar.core.observe.loop_watch import Blocked
from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import EventKind

_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in (\S+)')


class BlockedEvents:
    """Writes the reports of a loop watch (``record``) to ``recorder``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ticket = NO_TICKET

    def record(self, blocked: Blocked) -> None:
        """Begin an event when the loop is blocked, and end it when the loop resumes.  Called in the watching thread.

        Its ``sequence`` is the time in microseconds for which the loop had been blocked when that was detected.
        """
        if blocked.is_over:
            self._recorder.end(self._ticket)
            return
        frames = _FRAME.findall(blocked.stack)
        site = 0
        if frames:
            file, line, function = frames[-1]
            site = self._recorder.place(file, int(line), function)
        word = self._recorder.name("blocked loop", {"by": blocked.what})
        self._ticket = self._recorder.begin(EventKind.BLOCKED, word, sequence=round(blocked.seconds * 1e6), site=site)
