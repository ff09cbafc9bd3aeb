"""A proxy between ranks that damages one place of what goes through it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

KINDS = (
    "flip",
    "drop bytes",
    "swap bytes",
    "replay bytes",
    "drop read",
    "swap reads",
    "replay read",
    "cut",
    "silence",
)
"""Kinds of faults.  Those of reads meet whole frames where these are small; silence swallows all that follows."""

_HISTORY = 1 << 17


@dataclass(frozen=True)
class Fault:
    """What happens to the byte at ``offset`` of one direction, and ``size`` bytes from there."""

    kind: str
    is_from_dialer: bool
    offset: int
    size: int
    bit: int

    @classmethod
    def draw(cls, dice: random.Random, *, volume: int) -> Fault:
        """Return a fault somewhere in ``volume`` bytes, often near their beginning."""
        offset = dice.randrange(volume) if dice.random() < 0.7 else dice.randrange(min(volume, 600))
        size = int(2 ** dice.uniform(0, 16))
        return cls(dice.choice(KINDS), dice.random() < 0.5, offset, size, dice.randrange(8))


class Damage:
    """One direction of one connection: bytes in, bytes out.  ``arm`` begins to count."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.has_happened = False
        self.is_cut = False
        self._position = 0
        self._history = b""
        self._drop = 0
        self._held: bytes | None = None
        self._hold = 0
        self._is_silent = False

    def arm(self, fault: Fault) -> None:
        self.fault, self._position = fault, 0

    def change(self, chunk: bytes) -> bytes:
        """Return what comes out for ``chunk``."""
        fault, start = self.fault, self._position
        self._position += len(chunk)
        if fault is not None and not self.has_happened and fault.offset < start + len(chunk):
            self.has_happened = True
            changed = self._strike(fault, chunk, max(0, fault.offset - start))
        else:
            changed = self._go_on(chunk)
        self._history = (self._history + chunk)[-_HISTORY:]
        return changed

    def _strike(self, fault: Fault, chunk: bytes, place: int) -> bytes:
        before, after = chunk[:place], chunk[place:]
        match fault.kind:
            case "flip":
                return before + bytes([after[0] ^ 1 << fault.bit]) + after[1:]
            case "drop bytes":
                self._drop = max(0, fault.size - len(after))
                return before + after[fault.size :]
            case "swap bytes":
                self._hold = fault.size
                self._held = b""
                return before + self._go_on(after)
            case "replay bytes":
                return before + (self._history + before)[-fault.size :] + after
            case "swap reads":
                self._held = chunk
                return b""
            case "replay read":
                return chunk + chunk
            case "cut":
                self.is_cut = True
                return before
            case "silence":
                self._is_silent = True
                return before
        return b""

    def _go_on(self, chunk: bytes) -> bytes:
        if self._is_silent:
            return b""
        dropped = min(self._drop, len(chunk))
        self._drop -= dropped
        chunk = chunk[dropped:]
        if self._held is None:
            return chunk
        if self._hold:
            taken = min(self._hold, len(chunk))
            self._held, chunk = self._held + chunk[:taken], chunk[taken:]
            self._hold -= taken
        if not chunk:
            return b""
        held, self._held = self._held, None
        return chunk + held


class FaultyProxy:
    """Forwards connections to ``target``; ``arm`` damages one place of the one that has carried most since."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._pairs: list[tuple[Damage, Damage]] = []
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def has_struck(self) -> bool:
        """Has the fault happened?"""
        return any(damage.has_happened for pair in self._pairs for damage in pair)

    def arm(self, fault: Fault, which: int) -> None:
        """Let ``fault`` happen on connection ``which`` of those that are open."""
        if self._pairs:
            self._pairs[which % len(self._pairs)][0 if fault.is_from_dialer else 1].arm(fault)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        pair = Damage(), Damage()
        self._pairs.append(pair)
        forward = None
        try:
            far, forward = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(near, forward, pair[0]))
                tasks.create_task(self._pump(far, back, pair[1]))
        except (OSError, asyncio.CancelledError, BaseExceptionGroup):
            pass  # one side went away, or the test is over
        finally:
            self._pairs.remove(pair) if not self.has_struck else None
            for writer in (back, forward):
                if writer is not None:
                    writer.transport.abort()
            self._pumps.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, damage: Damage) -> None:
        while chunk := await reader.read(65_536):
            writer.write(damage.change(chunk))
            if damage.is_cut:
                raise ConnectionResetError
            await writer.drain()
        writer.write_eof()


@asynccontextmanager
async def proxy(target: tuple[str, int]) -> AsyncIterator[FaultyProxy]:
    """Yield a proxy in front of ``target``."""
    made = FaultyProxy(target)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
