"""The pipe of a rank process to its agent, over an inherited socket, and its gRPC servers for other ranks."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from asyncpar.actors.runtime.gateway import ActorGateway
from asyncpar.bootstrap import WorldBootstrap, answer_agent, arena_settings, serve_links
from asyncpar.core.addresses import loopback
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.core.config.world import World
from asyncpar.core.system_errors import os_reason
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.pipe import Served
from asyncpar.elasticity.snapshot_service import RemoteDonor, add_snapshot_service
from asyncpar.errors import LaunchError, ProtocolError, UsageError
from asyncpar.hosts.pipe_messages import MOST_BYTES, AgentMessage, RankMessage, decode_agent_line, encode_line
from asyncpar.net.membership.credentials import read_elastic_credentials
from asyncpar.net.security.identity import role_in
from asyncpar.net.transport.rpc import RpcServer

_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_BIND = "ASYNCPAR_BIND"


class SocketPipe:
    """See ``RankPipe``: JSON objects, one per line, on the socket that ``environment`` names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises ``UsageError`` if ``environment`` names no open socket, or no secret."""
        text = environment.get(ELASTIC_PIPE, "")
        secret = environment.get(_SECRET_FILE)
        if not text.isdecimal() or not secret:
            raise UsageError(f"{ELASTIC_PIPE}: expected the number of an open socket, and {_SECRET_FILE}; got {text!r}")
        try:
            self._socket = socket.socket(fileno=os.dup(int(text)))
        except OSError as error:
            raise UsageError(f"{ELASTIC_PIPE}: descriptor {text} is not an open socket ({os_reason(error)})") from error
        answer_agent(environment)
        self._credentials = read_elastic_credentials(environment)
        self._bind = environment.get(_BIND) or loopback()
        self._stack = AsyncExitStack()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """See ``RankPipe``."""
        return self._writer is not None and not self._writer.is_closing()

    async def open(self, take: Callable[[AgentMessage], None], end: Callable[[Exception], None]) -> None:
        """See ``RankPipe``."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MOST_BYTES)
        reading = asyncio.create_task(_read(reader, take, end), name="asyncpar director")
        self._stack.push_async_callback(_end_task, reading)
        self._stack.push_async_callback(close_stream, self._writer)

    def write(self, message: RankMessage) -> None:
        """See ``RankPipe``."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_line(message))

    async def serve_snapshots(self, shelf: SnapshotShelf) -> str:
        """See ``RankPipe``."""
        server = RpcServer(self._credentials, bind=self._bind)
        add_snapshot_service(server.server, shelf, self._credentials.certificates)
        await server.start()
        self._stack.push_async_callback(server.stop, grace=0.0)
        return server.address

    def donor(self, name: str, address: str) -> RemoteDonor:
        """See ``RankPipe``."""
        return RemoteDonor(name, address, self._credentials, role_in(name))

    async def serve_links(self, stack: AsyncExitStack, certified: Sequence[int] | None) -> Served:
        """See ``RankPipe``."""
        credentials, gateway = self._credentials.in_world(certified), ActorGateway()
        server, connector = await serve_links(stack, credentials, bind=self._bind, transport=None, gateway=gateway)

        def bootstrap(world: World, rank: int) -> WorldBootstrap:
            return WorldBootstrap(
                world=world,
                rank=rank,
                connector=connector,
                join=connector.join,
                server=server,
                secret=credentials.secret,
                arena=arena_settings(os.environ, None),
                gateway=gateway,
            )

        return server.address, bootstrap

    async def close(self) -> None:
        """See ``RankPipe``."""
        if self._writer is not None:
            with suppress(OSError):
                await self._writer.drain()
        await self._stack.aclose()


async def _read(
    reader: asyncio.StreamReader, take: Callable[[AgentMessage], None], end: Callable[[Exception], None]
) -> None:
    try:
        while line := await reader.readline():
            take(decode_agent_line(line))
        end(LaunchError("the director of this job is gone"))
    except OSError as error:
        end(LaunchError(f"the director of this job is gone: {error}"))
    except (ProtocolError, ValueError) as error:  # ValueError: a line is too long
        end(ProtocolError(f"the director of this job sent an unexpected message: {error}"))


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
