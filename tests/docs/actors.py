"""An actor for the pieces of programs in the documentation."""

from __future__ import annotations

import asyncpar as ap


class Counter(ap.Actor):
    """The counter of the README."""

    def __init__(self) -> None:
        self.total = 0

    @ap.endpoint
    async def add(self, n: int) -> int:
        self.total += n
        return self.total
