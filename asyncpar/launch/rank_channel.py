"""The agent's side of its connection to the observer's thread of one rank (see ``observe/service.py``)."""

from __future__ import annotations

import asyncio
import itertools
import socket
from contextlib import suppress

import msgspec

from asyncpar.core.concurrency.streams import close_stream
from asyncpar.observe.service import LENGTH, MOST_BYTES, ObserverReply, ObserverRequest, frame

_MOST_UNANSWERED = 8
"""The most requests that a rank may leave unanswered; one that is stopped gets no more."""


class RankChannel:
    """Asks one rank.  Owns ``connection``; ``close`` it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ObserverReply | None]] = {}
        self._unanswered: set[int] = set()
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_over = False

    async def ask(self, kind: str, *, within: float) -> ObserverReply | None:
        """Return the rank's answer; None if it does not answer within so many seconds, or has ended."""
        if self._is_over or len(self._unanswered) >= _MOST_UNANSWERED:
            return None
        number = next(self._numbers)
        answer: asyncio.Future[ObserverReply | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._unanswered.add(number)
        try:
            async with asyncio.timeout(within):
                if self._opening is None:
                    self._opening = asyncio.create_task(self._open(), name="asyncpar open a rank's line")
                await asyncio.wait({self._opening})
                if self._opening.cancelled():  # by close
                    return None
                writer = self._opening.result()
                if writer.is_closing():  # the rank has ended, which no read has noticed so far
                    return None
                writer.write(frame(ObserverRequest(number, kind)))
                return await answer
        except (TimeoutError, OSError):
            return None
        finally:
            self._waiting.pop(number, None)

    async def _open(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._connection)
        self._reading = asyncio.create_task(self._read(reader), name="asyncpar read a rank's line")
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MOST_BYTES:
                    break
                reply = msgspec.msgpack.decode(await reader.readexactly(length), type=ObserverReply)
                self._unanswered.discard(reply.number)
                answer = self._waiting.pop(reply.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        self._end()

    def _end(self) -> None:
        self._is_over = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)
        self._waiting.clear()

    async def close(self) -> None:
        """Stop asking.  Idempotent."""
        self._end()
        tasks = [task for task in (self._opening, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._opening is not None and not self._opening.cancelled() and self._opening.exception() is None:
            await close_stream(self._opening.result())
        else:
            self._connection.close()
