"""Processes of hosts that are stopped: a pause is not a death.

A process that is stopped (SIGSTOP, a debugger) says nothing, but its kernel still accepts connections to where it
listens.  One that runs says something, or closes them; where none runs, they are refused.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asyncpar.core.addresses import resolve, route_to, split_address
from asyncpar.core.concurrency.doorkeeper import serve_streams
from asyncpar.core.concurrency.streams import close_stream

STOPPED_SECONDS = 0.5
"""Seconds after which the other end of a silent connection is taken for a stopped process."""

REACH_SECONDS = 1.0
"""Seconds that a connection may take."""


class PauseProbe:
    """Finds out whether the process that listens at ``address`` is there but does not run.

    All probes of a process that is stopped use one connection, which its kernel keeps, so a pause may take any time;
    keepalive probes end the connection where no kernel answers any more.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def is_stopped(self) -> bool:
        """Return whether the process is stopped, after ``REACH_SECONDS`` and ``STOPPED_SECONDS`` at most."""
        try:
            if self._stream is None:
                self._stream = await self._reach()
        except OSError:  # nobody is there (TimeoutError is an OSError)
            return False
        try:
            async with asyncio.timeout(STOPPED_SECONDS):
                await self._stream[0].read(1)
        except TimeoutError as error:
            if error.errno is None:
                return True
        except OSError:  # it is gone
            pass
        await self.aclose()
        return False

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        from asyncpar.net.transport.sockets import tune_tcp  # with numpy, which a launcher does without

        async with asyncio.timeout(REACH_SECONDS):
            reader, writer = await asyncio.open_connection(*split_address(self._address))
        tune_tcp(writer.get_extra_info("socket"))
        return reader, writer

    async def aclose(self) -> None:
        """Close the connection, if there is one; the next probe opens another."""
        if self._stream is not None:
            (_, writer), self._stream = self._stream, None
            await close_stream(writer)


class PauseListener:
    """Listens, on the way to ``peer``, for nothing but ``PauseProbe``: connections are closed as they come."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Return the port; 0 if this host cannot listen there."""
        host, port = split_address(self._peer)
        with suppress(OSError):
            source = await asyncio.to_thread(lambda: route_to(resolve(host), port))
            self._server = await serve_streams(_close, host=source)
            return int(self._server.sockets[0].getsockname()[1])
        return 0

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None


async def _close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await close_stream(writer)
