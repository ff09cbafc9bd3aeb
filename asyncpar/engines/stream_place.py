"""A place at the other end of standard streams, in a program that an engine starts there (``streamed_places.py``).

It describes itself, gets the caller's ``sys.path`` and the order, and then commands, in lines on its standard input; it
writes events in lines on its standard output, and an empty message now and then as a sign of life.  The end of its
input means that the caller has ended; then its ranks end, too.  A SIGTERM comes from the system that started the
program: the ranks have their grace period.

A message spans several lines if necessary, since Open MPI takes minutes for long ones.  MPICH loses input that is not
read yet, so the place requests each further line of a message with an empty one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

from asyncpar.core.concurrency.streams import close_stream
from asyncpar.engines.elastic_place import make_agent
from asyncpar.engines.interface import (
    Interrupt,
    PlaceEvent,
    PlaceLost,
    PlaceOrder,
    PlaceReport,
    decode_command,
    decode_order,
    encode,
)
from asyncpar.engines.polled_place import POLL_SECONDS

LINE_BYTES: Final = 1 << 20
"""The longest line: a part of a message, or other output of the system that started the program."""
PIECE_BYTES: Final = 1 << 13
"""Bytes of a message in one line, in base64."""
MARK: Final = b"asyncpar "
MORE: Final = b"asyncpar+"
"""The prefixes of the last line of a message and of the lines before; other lines are plain text."""
ANY_PORT: Final = 9
"""A port to which nothing is sent: it serves to find the route to a host."""


def to_lines(message: bytes) -> list[bytes]:
    """Split ``message`` into lines."""
    pieces = [message[start : start + PIECE_BYTES] for start in range(0, len(message), PIECE_BYTES)] or [b""]
    lines = [base64.b64encode(piece) + b"\n" for piece in pieces]
    return [*(MORE + line for line in lines[:-1]), MARK + lines[-1]]


def from_line(line: bytes) -> bytes:
    """Return the part of a message in a line."""
    return base64.b64decode(line[len(MARK) :])


class StreamPlace:
    """An agent, and the lines between it and the caller.

    ``asked_to_end`` is the cause of its end after a SIGTERM: it completes the sentence "Slurm's node X ...".
    """

    def __init__(self, order: PlaceOrder, writer: asyncio.StreamWriter, *, asked_to_end: str) -> None:
        self._number = order.number
        self._writer = writer
        self._asked_to_end = asked_to_end
        self._is_asked_to_end = False
        self._agent = make_agent(order, self._take)

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Run the ranks to their end, or to that of ``reader``."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ask_to_end)
        running = asyncio.create_task(self._agent.run(), name="asyncpar place behind streams")
        others = (
            asyncio.create_task(self._obey(reader, running), name="asyncpar commands"),
            asyncio.create_task(self._send_signs_of_life(), name="asyncpar signs of life"),
        )
        try:
            await asyncio.wait({running})
        finally:
            for task in others:
                task.cancel()
            await asyncio.wait(others)

    async def _obey(self, reader: asyncio.StreamReader, running: asyncio.Task[None]) -> None:
        while line := await reader.readline():
            self._agent.obey(decode_command(from_line(line)))
        running.cancel()

    async def _send_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self._writer.writelines(to_lines(b""))

    def _ask_to_end(self) -> None:
        self._is_asked_to_end = True
        self._agent.obey(Interrupt())

    def _take(self, event: PlaceEvent) -> None:
        if self._is_asked_to_end and isinstance(event, PlaceReport) and event.exit_code:
            event = PlaceLost(self._number, self._asked_to_end)
        self._writer.writelines(to_lines(encode(event)))


async def serve_caller(described: Mapping[str, str], *, asked_to_end: str) -> None:
    """Run the place ordered by the caller at the other end of the standard streams.

    ``described`` is the description that the caller gets first (``describe_process``); for ``asked_to_end`` see
    ``StreamPlace``.
    """
    reader, writer = await _open_streams()
    writer.writelines(to_lines(json.dumps(described).encode()))
    paths, order = await _receive(reader, writer), await _receive(reader, writer)
    if paths and order:  # otherwise the caller is gone
        sys.path += [path for path in json.loads(paths) if path not in sys.path]
        await StreamPlace(decode_order(order), writer, asked_to_end=asked_to_end).run(reader)
    await writer.drain()
    await close_stream(writer)


async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return a message, requesting each further line; empty if it is cut off."""
    received = bytearray()
    while line := await reader.readline():
        received += from_line(line)
        if line.startswith(MARK):
            return bytes(received)
        writer.writelines(to_lines(b""))
    return b""


async def _open_streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the standard streams; all other output goes to the standard error."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop), output)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)
