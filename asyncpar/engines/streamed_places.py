"""Places whose agents are at the other end of a program's standard streams: ``srun`` on a node, ``mpiexec`` on a host.

Orders, including the secret, and commands go down, events come up, in lines (``stream_place.py``).  A program whose
caller is gone sees the end of its input, at which it ends its ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from asyncpar.engines.interface import (
    Handle,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlaceOrder,
    PlaceReport,
    decode_event,
    encode,
)
from asyncpar.engines.polled_place import ANSWER_SECONDS, LEASE_SECONDS, check_process
from asyncpar.engines.stream_place import LINE_BYTES, MARK, MORE, from_line, to_lines
from asyncpar.errors import LaunchError

_END_SECONDS: Final = 10.0


class StreamedProgram:
    """A program whose standard streams this process has, and its last lines of output that are not the agent's."""

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=8)
        self._listening = asyncio.create_task(self._listen(), name=f"asyncpar words of {name}")

    @classmethod
    async def begin(cls, command: Sequence[str], environment: Mapping[str, str]) -> StreamedProgram:
        """Start ``command``, isolated from the terminal's signals."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=dict(environment),  # uvloop accepts nothing else
            start_new_session=True,
            limit=LINE_BYTES,
        )
        return cls(process, command[0])

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def cause(self) -> str:
        """Return its last lines, once it has ended."""
        await self._process.wait()
        await asyncio.wait({self._listening})
        return "; ".join(self._last_lines) or f"exit code {self.exit_code}"

    async def read_line(self) -> bytes:
        """Return the next line of its output; empty at the end."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def read_message(self) -> bytes | None:
        """Return the next message of the agent, empty for a sign of life; None at the end."""
        message = bytearray()
        while line := await self.read_line():
            if line.startswith((MARK, MORE)):
                message += from_line(line)
            else:
                self._keep(line)
            if line.startswith(MARK):
                return bytes(message)
        return None

    async def write(self, lines: bytes) -> None:
        """Write to its input.  Raises ``OSError``."""
        assert self._process.stdin is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            self._process.stdin.write(lines)
            await self._process.stdin.drain()

    async def send(self, message: bytes) -> None:
        """Send a message before the agent runs; the place requests each further line.  Raises ``OSError``."""
        first, *others = to_lines(message)
        await self.write(first)
        for line in others:
            async with asyncio.timeout(ANSWER_SECONDS):
                if await self.read_message() is None:
                    raise BrokenPipeError(await self.cause())
            await self.write(line)

    async def end(self, kill: Callable[[], Awaitable[None]] | None = None) -> None:
        """End the program by closing its input; if that fails, ``kill`` what it has started elsewhere, then itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not await self._has_ended():
            if kill is not None:
                await kill()
            with suppress(ProcessLookupError):  # it has ended meanwhile
                self._process.terminate()
        if not await self._has_ended():
            self._process.kill()
            await self._process.wait()
        self._listening.cancel()
        await asyncio.wait({self._listening})

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        """Keep the text of a line, without the rules around it."""
        text = line.decode(errors="replace").strip("= \t\r\n")
        if text.strip("-"):
            self._last_lines.append(text)

    async def _has_ended(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        return self.exit_code is not None


class StreamedPlaces:
    """The places of one job, each behind the streams of a program; an engine's ``start``, ``failures``, ``release``."""

    def __init__(self) -> None:
        self._programs: list[StreamedProgram] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Queue[PlaceLost] = asyncio.Queue()

    async def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the program of the next place."""
        self._programs.append(await StreamedProgram.begin(command, environment))

    async def describe(self, number: int, name: str, *, seconds: float) -> dict[str, str]:
        """Return the description that place ``number``, called ``name``, gives of itself, when its Python has started.

        Raises ``LaunchError`` with the program's message if it ends before, or after ``seconds`` without an answer, and
        ``UsageError`` if it has other versions than the caller.
        """
        program = self._programs[number]
        try:
            async with asyncio.timeout(seconds):
                message = await program.read_message()
                if message is None:
                    raise LaunchError(f"{name} cannot run asyncpar: {await program.cause()}")
        except TimeoutError as error:
            raise LaunchError(f"{name} gives no answer within {seconds:g} s (timeout=)") from error
        described: dict[str, str] = json.loads(message)
        check_process(name, described)
        return described

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        """Do the same as ``PlacementEngine.start``."""
        program = self._programs[order.number]
        try:
            await program.send(json.dumps([path or os.getcwd() for path in sys.path]).encode())
            await program.send(encode(order))
        except OSError as error:
            raise LaunchError(f"{place.name} is not reached: {error}") from error
        reading = asyncio.create_task(self._read(order.number, program, take), name=f"asyncpar events of {place.name}")
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return StreamHandle(program)

    async def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield places whose program ends, or that give no sign of life."""
        while True:
            yield await self._lost.get()

    async def release(self, kill: Callable[[int], Awaitable[None]] | None = None) -> None:
        """End all programs; ``kill`` gets the number of a place whose program does not end by the end of its input."""
        for reading in self._reading:
            reading.cancel()
        programs, self._programs = self._programs, []
        await asyncio.gather(
            *(program.end(None if kill is None else partial(kill, number)) for number, program in enumerate(programs))
        )

    async def _read(self, number: int, program: StreamedProgram, take: Callable[[PlaceEvent], None]) -> None:
        """Pass on the events of a place until its report; report if it is lost before."""
        try:
            while True:
                async with asyncio.timeout(LEASE_SECONDS):
                    message = await program.read_message()
                if message is None:
                    self._lost.put_nowait(PlaceLost(number, f"died ({await program.cause()})"))
                    return
                if not message:
                    continue
                event = decode_event(message)
                take(event)
                if isinstance(event, PlaceReport | PlaceLost):
                    return
        except TimeoutError:
            self._lost.put_nowait(PlaceLost(number, f"gives no answer within {LEASE_SECONDS:g} s"))
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing would be reported of this place again
            self._lost.put_nowait(PlaceLost(number, f"is not understood ({type(error).__name__}: {error})"))


class StreamHandle(Handle):
    """An agent at the other end of a program's streams."""

    def __init__(self, program: StreamedProgram) -> None:
        self._program = program

    async def send(self, command: PlaceCommand) -> None:
        await self._program.write(b"".join(to_lines(encode(command))))
