"""The conversation of the doctors of two hosts: names, clocks, secrets, and whether data gets through.

Lines of JSON over one TCP connection.  Name, version and time are given to any caller.  That both hold the same secret
is shown by a keyed digest of a number that the other one has drawn, so the secret does not travel.

Ranks listen at ports that the system chooses, and a firewall may let only the doctor's port through.  So each of the
two opens a few such ports for the length of the conversation, and the other connects to them.  A doctor connects only
to the host that it connects to.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from asyncpar.core.addresses import join_address
from asyncpar.core.concurrency.doorkeeper import serve_streams
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError
from asyncpar.net.membership.host import host_name

DOCTOR_PORT: Final = 29399
BULK_BYTES: Final = 256 << 10
_LONGEST_LINE: Final = 4096
_SERVE_SECONDS: Final = 10.0
_PINGS: Final = 5
_PORTS: Final = 3
"""Ports of each side that are tried."""

_LEAST_PORT: Final = 1024
_MOST_PORT: Final = 65_535


class _PeerRequest(msgspec.Struct, frozen=True):
    """The request of one doctor to another."""

    ask: str = ""
    nonce: str = ""
    token: str = ""
    ports: tuple[int, ...] = ()
    within: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """The facts learned about a host; ``clock_offset`` is its clock minus ours, known to ``round_trip`` / 2 seconds.

    ``has_same_secret`` is None if either has none.  ``bulk_seconds`` None: small messages came through, and
    large ones did not.
    """

    host: str
    version: str
    python: str
    clock_offset: float
    round_trip: float
    has_same_secret: bool | None
    bulk_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortWays:
    """The ports, like those at which ranks listen, that could not be reached, and why: ``forth`` there, ``back`` here.

    None: the other doctor does not know this check.
    """

    forth: dict[int, str] | None
    back: dict[int, str] | None


async def serve_doctor(address: str, port: int, secret: bytes) -> asyncio.Server:
    """Answer doctors of other hosts.  Raises ``LaunchError`` if the port cannot be bound."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, ValueError, msgspec.DecodeError):
                async with asyncio.timeout(_SERVE_SECONDS):
                    await _serve(reader, writer, secret)
        finally:
            await close_stream(writer)

    try:
        return await serve_streams(serve, host=address or None, port=port, longest_line=_LONGEST_LINE)
    except OSError as error:
        raise LaunchError(
            f"--listen: {join_address(address or '*', port)} cannot be had ({os_reason(error)})"
        ) from error


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    async with AsyncExitStack() as stack:
        await _answer(reader, writer, secret, stack)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, stack: AsyncExitStack
) -> None:
    """Answer all requests; ``stack`` owns what is open meanwhile."""
    ports: list[int] = []
    while line := await reader.readline():
        request = msgspec.json.decode(line, type=_PeerRequest)
        answer: dict[str, Any] = {}
        match request.ask:
            case "ports":
                own = writer.get_extra_info("sockname")[0]
                ports = ports or await stack.enter_async_context(open_ports(own, request.token))
                answer = {"ports": ports}
            case "reach":
                asked = [port for port in request.ports[:_PORTS] if _LEAST_PORT <= port <= _MOST_PORT]
                peer = writer.get_extra_info("peername")[0]
                within = min(_SERVE_SECONDS / 2, request.within)
                answer = {"missed": await reach_ports(peer, asked, request.token, within)}
            case "who":
                answer = {
                    "host": host_name(),
                    "version": importlib.metadata.version("asyncpar"),
                    "python": platform.python_version(),
                    "proof": _proof(secret, request.nonce),
                }
            case "time":
                answer = {"time": time.time()}
            case "bulk":
                content = await reader.readexactly(BULK_BYTES)
                answer = {"digest": hashlib.sha256(content).hexdigest()}
                writer.write(json.dumps(answer).encode() + b"\n" + content)
                await writer.drain()
                continue
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


async def meet(address: str, port: int, secret: bytes, *, within: float) -> PeerReport:
    """Return the report of the doctor at ``address``.

    Raises ``OSError`` (``TimeoutError`` included) if nothing answers, ``ValueError`` if it is no doctor.
    """
    async with asyncio.timeout(within):
        reader, writer = await asyncio.open_connection(address, port, limit=_LONGEST_LINE)
    try:
        async with asyncio.timeout(within):
            nonce = secrets.token_hex(16)
            who = await _ask(reader, writer, ask="who", nonce=nonce)
            trip, offset = min([await _ping(reader, writer) for _ in range(_PINGS)])
        proof = who.get("proof") or ""
        return PeerReport(
            host=str(who.get("host", address))[:64],
            version=str(who.get("version", "?"))[:64],
            python=str(who.get("python", "?"))[:64],
            clock_offset=offset,
            round_trip=trip,
            has_same_secret=hmac.compare_digest(proof, _proof(secret, nonce)) if proof and secret else None,
            bulk_seconds=await _bulk(reader, writer, within),
        )
    finally:
        await close_stream(writer)


async def try_ports(address: str, port: int, own: str, *, within: float) -> PortWays:
    """Connect to ports that the doctor at ``address`` opens, and have it connect to such ports at ``own``, ours.

    Raises as ``meet`` does.
    """
    async with asyncio.timeout(within):
        reader, writer = await asyncio.open_connection(address, port, limit=_LONGEST_LINE)
    token = secrets.token_hex(16)
    try:
        async with open_ports(own, token) as here, asyncio.timeout(_SERVE_SECONDS):
            there = (await _ask(reader, writer, ask="ports", token=token)).get("ports")
            forth = None if there is None else await reach_ports(address, map(int, there), token, within)
            missed = (await _ask(reader, writer, ask="reach", token=token, ports=here, within=within)).get("missed")
            back = None if missed is None else {int(port): str(why)[:200] for port, why in missed.items()}
            return PortWays(forth=forth, back=back)
    finally:
        await close_stream(writer)


@asynccontextmanager
async def open_ports(address: str, token: str) -> AsyncIterator[list[int]]:
    """Listen at ports that the system chooses; send ``token`` to each caller."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(token.encode()[:_LONGEST_LINE] + b"\n")
        await close_stream(writer)

    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(await serve_streams(greet, host=address)) for _ in range(_PORTS)]
        yield [server.sockets[0].getsockname()[1] for server in servers]


async def reach_ports(address: str, ports: Iterable[int], token: str, within: float) -> dict[int, str]:
    """Return, for those of ``ports`` where no connection yields ``token``, the reason."""
    tried = list(ports)
    found = await asyncio.gather(*(_reach(address, port, token, within) for port in tried))
    return {port: why for port, why in zip(tried, found, strict=True) if why}


async def _reach(address: str, port: int, token: str, within: float) -> str:
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(address, port, limit=_LONGEST_LINE)
            try:
                answer = await reader.readline()
            finally:
                await close_stream(writer)
    except TimeoutError:
        return f"nothing within {within:g} s"
    except (OSError, ValueError) as error:
        return os_reason(error)
    return "" if answer == token.encode() + b"\n" else "something else answers"


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **request: object) -> dict[str, Any]:
    writer.write(json.dumps(request).encode() + b"\n")
    await writer.drain()
    try:
        answer = json.loads(await reader.readline())
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ValueError("what answers is no doctor of asyncpar")  # of the content
    return answer


async def _ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[float, float]:
    """Return the round trip, and the offset of the other clock at its middle."""
    sent, began = time.time(), time.perf_counter()
    answer = await _ask(reader, writer, ask="time")
    trip = time.perf_counter() - began
    return trip, float(answer["time"]) - (sent + trip / 2)


async def _bulk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, within: float) -> float | None:
    """Return the seconds for ``BULK_BYTES`` there and back, None if they do not get through."""
    content, began = os.urandom(BULK_BYTES), time.perf_counter()
    try:
        async with asyncio.timeout(within):
            writer.write(json.dumps({"ask": "bulk"}).encode() + b"\n" + content)
            await writer.drain()
            json.loads(await reader.readline())
            if await reader.readexactly(BULK_BYTES) != content:
                return None
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        writer.transport.abort()  # the rest does not get through, and closing would wait for it
        return None
    return time.perf_counter() - began


def _proof(secret: bytes, nonce: str) -> str:
    return hmac.new(secret, b"asyncpar doctor " + nonce.encode(), "sha256").hexdigest() if secret else ""
