"""Dead letters: told messages that no actor handled."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncpar.errors import UsageError

_LOG = logging.getLogger(__name__)
MOST_RECENT: Final = 100


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that ``sender`` told ``actor`` on ``rank`` and that was not handled, for ``reason``."""

    sender: int
    rank: int
    actor: str
    endpoint: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.endpoint} of actor {self.actor!r} on rank {self.rank}, told by rank {self.sender}, was not done: "
            f"{self.reason}"
        )


class DeadLetters:
    """Count of the dead letters found on this rank, and the latest of them.

    They are found where the actor should have been, or at the sender if that rank is known to be gone.
    """

    def __init__(self) -> None:
        self.count = 0
        self.recent: deque[DeadLetter] = deque(maxlen=MOST_RECENT)
        """The last hundred, oldest first."""
        self._observers: list[Callable[[DeadLetter], None]] = []
        self._is_showing = False

    def subscribe(self, observer: Callable[[DeadLetter], None]) -> Callable[[], None]:
        """Call ``observer`` with each later dead letter, on the node's loop; return a callback that ends this.

        Dead letters that an observer causes are not passed on, since that would never end.
        """
        if not callable(observer):
            raise UsageError(f"observer: expected a function of one dead letter, got {observer!r}")
        self._observers.append(observer)

        def unsubscribe() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return unsubscribe

    def add(self, letter: DeadLetter) -> None:
        """Count ``letter`` and call the observers.  One that raises is logged and stays subscribed."""
        self.count += 1
        self.recent.append(letter)
        _LOG.warning("%s", letter)
        if self._is_showing:
            return
        self._is_showing = True
        try:
            for observer in list(self._observers):
                self._show(letter, observer)
        finally:
            self._is_showing = False

    def _show(self, letter: DeadLetter, observer: Callable[[DeadLetter], None]) -> None:
        try:
            observer(letter)
        except Exception:  # noqa: BLE001  # user code: it must not harm the sender of the message
            _LOG.exception("an observer of dead letters raised")
