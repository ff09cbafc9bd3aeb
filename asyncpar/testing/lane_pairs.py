"""A pair of connected lanes under test, and an owner of a lane that records its events."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from asyncpar.errors import PeerLost
from asyncpar.net.transport.lane import Lane, Sending
from asyncpar.net.wire.frame import FrameHeader, FrameKind

S = TypeVar("S", bound="LaneSuite")

PATIENCE_SECONDS = 20.0
"""Seconds that a suite waits for an event that must happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePair:
    """Two connected lanes that are not started, and a function that cuts their channel like a failing network."""

    one: Lane
    other: Lane
    sever: Callable[[], Awaitable[None]]


@dataclass
class RecordingEvents:
    """An owner of a lane that records its events.

    ``lend_for`` decides where payloads land; by default each gets fresh memory.
    """

    lend_for: Callable[[FrameHeader], memoryview | None] = lambda header: memoryview(bytearray(header.length))
    frames: list[tuple[FrameHeader, bytes]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    _place: memoryview | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def lend(self, header: FrameHeader) -> memoryview | None:
        self._place = self.lend_for(header)
        return self._place

    def landed(self, header: FrameHeader) -> None:
        assert self._place is not None, "landed was called for a dropped payload"
        self.frames.append((header, bytes(self._place)))
        self._changed.set()

    def lost(self, cause: str) -> PeerLost:
        self.losses.append(cause)
        self._changed.set()
        return PeerLost(cause, cause=cause)

    @property
    def tags(self) -> list[int]:
        """Tags of the frames that landed, in order."""
        return [header.tag for header, _ in self.frames]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so`` returns True; raise ``TimeoutError`` if that takes too long."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def until_tag(self, tag: int) -> None:
        """Wait until the frame with ``tag`` has landed."""
        await self.until(lambda: tag in self.tags)

    async def until_lost(self) -> None:
        """Wait until the loss of the lane is reported."""
        await self.until(lambda: bool(self.losses))


def frame(tag: int, payload: bytes | bytearray, *, kind: FrameKind = FrameKind.BULK) -> tuple[FrameHeader, memoryview]:
    """Return the arguments of ``Lane.send`` for one frame, of ``kind``."""
    return FrameHeader(kind, 0, 1, 0, tag, 0, len(payload)), memoryview(payload)


@functools.lru_cache(maxsize=16)
def pattern(length: int, seed: int = 0) -> bytes:
    """Return ``length`` bytes in which a shift, a swap or a repetition shows; they differ by ``seed``."""
    words = np.arange(min(1021, length // 4 + 1), dtype="<u4") * np.uint32(2654435761) + np.uint32(seed)
    block = words.tobytes()
    return (block * (length // len(block) + 1))[:length]


async def finished(sending: Sending | None) -> None:
    """Wait until a send's memory may be reused."""
    if sending is not None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await sending.done


def on_loop(scenario: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """Make a test of a scenario: run it on a loop chosen by the suite."""

    @functools.wraps(scenario)
    def run(self: S) -> None:
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            runner.run(scenario(self))

    return run


class LaneSuite(ABC):
    """Tests of a lane: the factory of its lanes, and the loop on which they run."""

    large: ClassVar[int] = 16 * 1024 * 1024
    """More bytes than a channel holds by itself; a lane whose channels hold less is tested faster with less."""

    has_back_pressure: ClassVar[bool] = True
    """Whether a sender is held back while its receiver does not read.  (Inside a process, delivery is immediate.)"""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop to run on; override it to test on uvloop."""
        return asyncio.new_event_loop()

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[LanePair]:
        """Make a connected pair; the context closes everything that is left of it."""
