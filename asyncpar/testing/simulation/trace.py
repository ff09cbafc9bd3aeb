"""The events of a simulation as a hash, and optionally as text."""

from __future__ import annotations

import gc
import hashlib
import struct
from collections.abc import Callable
from typing import Final

_PACK: Final = struct.Struct("<dII").pack


class Trace:
    """A running hash over turns of processes, deliveries and faults, with their virtual times.

    With ``lines``, a list, deliveries and faults are appended to it as text.
    """

    def __init__(self, lines: list[str] | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._update = self._hash.update
        self._lines = lines
        self.events = 0
        """The number of deliveries and faults so far."""

    def turn(self, now: float, process: int, callbacks: int) -> None:
        """Record a turn of a process with ``callbacks`` callbacks."""
        self._update(_PACK(now, process, callbacks))

    def event(self, now: float, content: bytes, describe: Callable[[], str]) -> None:
        """Record a delivery or a fault."""
        self.events += 1
        self._update(_PACK(now, 0, len(content)))
        self._update(content)
        if self._lines is not None:
            self._lines.append(f"{now:.6f} {describe()}")

    def collect_garbage(self) -> None:
        """Free objects in cycles, at a moment that is the same in every run."""
        gc.collect()

    @property
    def digest(self) -> str:
        """The hash so far, in hex."""
        return self._hash.hexdigest()
