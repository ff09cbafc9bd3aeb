"""A TCP proxy that resets what runs through it."""

from __future__ import annotations

import asyncio
import socket
import struct


class ResettingProxy:
    """Passes connections on to ``target``, as ``host:port``; use as ``async with``."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.refuses = False
        self.hangs = False
        """Whether connections are accepted and nothing goes through them, as where a process is stopped."""
        self.resets = 0

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def connections(self) -> int:
        """Open sockets: two of each connection that is passed on."""
        return len(self._writers)

    async def __aenter__(self) -> ResettingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """End every connection with RST, on both sides."""
        self.resets += bool(self._writers)
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            if sock.fileno() < 0:  # its end has closed the socket, and the task that serves it has not run since
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            if self.refuses:
                return
            if self.hangs:
                await reader.read()
                return
            back, onward = await asyncio.open_connection(self._host, self._port)
            self._writers.add(onward)
            await asyncio.gather(_pump(reader, onward), _pump(back, writer))
        except OSError:
            return  # one side is gone: so is the other
        finally:
            for each in (writer, onward):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    raise ConnectionResetError("the end")
