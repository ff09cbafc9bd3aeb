"""How far work in a thread has come, and the wish that it should end."""

from __future__ import annotations


class Stopped(Exception):  # noqa: N818
    """The work was told to stop."""


class Progress:
    """Shared by a thread and the loop that waits for it.

    ``done`` grows while the work goes on: one that stands still for long hangs.
    """

    def __init__(self) -> None:
        self.done = 0
        self._is_stopped = False

    def advance(self, amount: int) -> None:
        """Say that so much more is done.  Raises ``Stopped`` when it is not wanted any more."""
        self.done += amount
        if self._is_stopped:
            raise Stopped

    def stop(self) -> None:
        """Let the work end at its next ``advance``."""
        self._is_stopped = True
