"""Waiting for operations to be under way, for tests that end groups then."""

from __future__ import annotations

import threading
from typing import Any


class Pendings(set[Any]):
    """What a group has under way, once it is the group's ``_pending``: tells when there are ``count`` operations."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.is_full = threading.Event()

    def add(self, operation: Any) -> None:
        super().add(operation)
        if len(self) == self._count:
            self.is_full.set()
