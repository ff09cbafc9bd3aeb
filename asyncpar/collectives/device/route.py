"""Test by the ranks of a group of whether NCCL has a route between their hosts.

The first communicator of a group on several hosts is tried before it is used: made, and used for one byte.  Each rank
reports the result to the first one, which notifies all: if the test has failed anywhere, for whatever reason, or takes
too long, no rank uses NCCL in this group from then on.  So all ranks go the same way, even with operations agreed on
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.operation import Operation
from asyncpar.device.fabric import DeviceError

_TO_FIRST, _FROM_FIRST = 4, 5
"""Tags after those of agreements and of messages."""

_TEXT_BYTES: Final = 184
_LONGEST: Final = 60.0
"""Seconds that NCCL has if an operation may take any time; otherwise it has half of the operation's."""


class NoRoute(DeviceError):  # noqa: N818
    """NCCL does not connect the ranks of a group, as all of them know; the message names the rank and the failure."""


class RouteProof:
    """One operation's part in the test: ``ranks`` are those of the group, and ``place`` is this rank's index."""

    def __init__(self, operation: Operation, ranks: Sequence[int], place: int) -> None:
        self._operation, self._ranks, self._place = operation, ranks, place
        timeout = operation.home.limits.timeout
        self.seconds = _LONGEST if timeout is None else min(_LONGEST, timeout / 2)
        self._reports: dict[int, Array] = {}
        self._coming: dict[int, asyncio.Future[None]] = {}

    def begin(self) -> None:
        """Post the receives of the other ranks' reports."""
        tag = _FROM_FIRST if self._place else _TO_FIRST
        for rank in self._ranks[:1] if self._place else self._ranks[1:]:
            self._reports[rank] = np.zeros(_TEXT_BYTES, np.uint8)
            future = self._operation.post(rank, tag, self._reports[rank].data)
            if future is not None:
                self._coming[rank] = future

    async def settle(self, trouble: str) -> str:
        """Report this rank's ``trouble``; return the failure of any rank, "" if there is none."""
        own = f"rank {self._ranks[self._place]}: {trouble}" if trouble else ""
        if self._place:
            await self._send(self._ranks[:1], _TO_FIRST, own)
            await self._receive(_FROM_FIRST)
            return _text(self._reports[self._ranks[0]])
        if not own:
            await self._all_or_a_failure()
        found = own or self._failure()
        await self._send(self._ranks[1:], _FROM_FIRST, found)
        await self._receive(_TO_FIRST)
        return found

    @property
    def has_failed(self) -> bool:
        """Whether another rank has reported a failure."""
        return bool(self._failure())

    def _failure(self) -> str:
        """Return the failure that another rank has reported, "" if there is none."""
        return next(
            (text for rank, report in self._reports.items() if self._is_there(rank) and (text := _text(report))), ""
        )

    def _is_there(self, rank: int) -> bool:
        future = self._coming.get(rank)
        return future is None or (future.done() and not future.cancelled() and future.exception() is None)

    async def _all_or_a_failure(self) -> None:
        """Wait until all ranks have reported success, or one a failure."""
        while not self._failure():
            late = next((rank for rank, future in self._coming.items() if not future.done()), None)
            if late is None:
                return
            gate: asyncio.Future[None] = self._operation.context.loop.create_future()
            for future in self._coming.values():
                future.add_done_callback(partial(_open, gate))
            await self._operation.wait(late, gate)

    async def _send(self, ranks: Sequence[int], tag: int, text: str) -> None:
        words = np.zeros(_TEXT_BYTES, np.uint8)
        content = text.encode()[: _TEXT_BYTES - 1]
        words[: len(content)] = np.frombuffer(content, np.uint8)
        for rank, sending in [(rank, self._operation.send(rank, tag, words.data)) for rank in ranks]:
            if sending is not None:
                await self._operation.sent(rank, sending)

    async def _receive(self, tag: int) -> None:
        for rank in list(self._coming):
            await self._operation.received(rank, tag, self._coming.pop(rank))


def _open(gate: asyncio.Future[None], _: asyncio.Future[None]) -> None:
    if not gate.done():
        gate.set_result(None)


def _text(report: Array) -> str:
    return report.tobytes().rstrip(b"\0").decode(errors="replace")
