"""The socket of a launcher or an agent through which commands of its user inspect the job.

One request per connection: a frame each way (see ``observe/service.py``).  The directory of the socket is private, so
a process that can connect belongs to the user or to root.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from asyncpar.core.concurrency.doorkeeper import serve_streams
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.errors import LaunchError
from asyncpar.observe.service import LENGTH, frame, read_frame
from asyncpar.observe.summary import JobSummary, RankAnswer, unpack

if TYPE_CHECKING:
    from asyncpar.launch.job_view import JobWatch

_MOST_REQUEST_BYTES: Final = 1 << 16
_REQUEST_SECONDS: Final = 2.0
_LONGEST_PATH: Final = 100
_CONNECTION_SECONDS: Final = 60.0  # of the user's own commands, whose answers may be long


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for ``status``, or for the reports of ``kind`` from ``ranks`` (None: all)."""

    kind: str
    ranks: tuple[int, ...] | None = None


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer: ``job`` to ``status``, ``ranks`` to everything else."""

    job: JobSummary | None = None
    ranks: tuple[RankAnswer, ...] = ()
    error: str = ""


@asynccontextmanager
async def serve_control(path: Path, watch: JobWatch) -> AsyncIterator[None]:
    """Serve at ``path`` inside the block.  Raises ``OSError``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
                async with asyncio.timeout(_REQUEST_SECONDS):
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    content = await reader.readexactly(min(length, _MOST_REQUEST_BYTES))
                writer.write(frame(await _answer(content, watch)))
                await writer.drain()
        finally:
            await close_stream(writer)

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        listening.bind(name)
    server = await serve_streams(serve, listening=listening, seconds=_CONNECTION_SECONDS)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of ``path`` that fits the 107 bytes (103 on macOS) that the kernel allows."""
    if len(os.fsencode(path)) < _LONGEST_PATH:
        yield str(path)
        return
    if not hasattr(os, "O_PATH"):
        with tempfile.TemporaryDirectory(prefix="ap", dir="/tmp") as shorter:  # gettempdir() itself may be too long
            os.symlink(path.parent, f"{shorter}/d")
            yield f"{shorter}/d/{path.name}"
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


async def _answer(content: bytes, watch: JobWatch) -> ControlReply:
    try:
        request = msgspec.msgpack.decode(content, type=ControlRequest)
    except msgspec.DecodeError as error:
        return ControlReply(error=f"the request cannot be read: {error}")
    if request.kind == "status":
        return ControlReply(job=await watch.status())
    return ControlReply(ranks=tuple(await watch.collect(request.kind, request.ranks)))


def ask_control(path: Path, request: ControlRequest, *, within: float) -> ControlReply:
    """Return the answer of the launcher at ``path``; blocks.  Raises ``LaunchError`` if it does not answer in time."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(within)
            with _short(path) as name:
                connection.connect(name)
            connection.sendall(frame(request))
            reply = unpack(read_frame(connection), ControlReply)
    except TimeoutError as error:
        raise LaunchError(f"the launcher of the job does not answer within {within:g} s; is it stopped?") from error
    except (OSError, EOFError, msgspec.DecodeError) as error:
        why = str(error) or "it has ended"
        raise LaunchError(f"the launcher of the job at {path} does not answer: {why}") from error
    if reply.error:
        raise LaunchError(reply.error)
    return reply
