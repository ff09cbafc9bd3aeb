"""``init_method="asyncpar://"``: a store that does not wait for all ranks, so that missing ranks are named.

With ``env://`` and ``tcp://`` torch waits until all ranks have connected to the store of rank 0, and then reports only
how many have not.  Here the store exists as soon as rank 0 does, and the ranks rendezvous in it (see ``attach_store``).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from asyncpar.core.addresses import join_address
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, PeerTimeout, UsageError
from asyncpar.torch.errors import as_torch

_RETRY_SECONDS = 0.05
_ATTEMPT_SECONDS = 5.0
_LAST_PORT = 65535
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEndpoint:
    """The address of the store, and this rank; ``is_ours``: rank 0 holds the store rather than an agent."""

    host: str
    port: int
    rank: int
    size: int
    is_ours: bool

    @classmethod
    def parse(cls, url: str, environment: Mapping[str, str]) -> StoreEndpoint:
        """Parse ``asyncpar://host:port?rank=0&world_size=2``; missing parts come from ``environment``, as for
        ``env://``.

        Raises ``UsageError`` naming the missing or wrong part.
        """
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"init_method: expected asyncpar://host:port, got {url!r}") from error
        if (port is None) != (parts.hostname is None):
            raise UsageError(f"init_method: expected asyncpar://host:port, or asyncpar:// alone, got {url!r}")
        size = _number("world_size", query.get("world_size"), "WORLD_SIZE", environment)
        rank = _number("rank", query.get("rank"), "RANK", environment)
        if not 0 <= rank < size:
            raise UsageError(f"rank: expected 0..{size - 1}, got {rank}")
        return cls(
            host=parts.hostname or _variable("MASTER_ADDR", environment),
            port=_port(port, environment),
            rank=rank,
            size=size,
            is_ours=environment.get(_AGENT_STORE) != "True",
        )


def open_store(
    url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Rendezvous handler of torch: yield the store of ``url``, the rank and the size, once.

    Raises ``UsageError``, ``PeerTimeout`` if rank 0 has not arrived after ``timeout``, and ``LaunchError`` if torch
    cannot create the store.
    """
    try:
        endpoint = StoreEndpoint.parse(url, os.environ)
        store = _open(endpoint, timeout)
    except (PeerTimeout, LaunchError, UsageError) as error:
        raise as_torch(error) from None
    yield store, endpoint.rank, endpoint.size


def _open(endpoint: StoreEndpoint, timeout: timedelta) -> dist.Store:
    """Return the store: a new one on rank 0, elsewhere as soon as rank 0 has created it."""
    serves = endpoint.is_ours and endpoint.rank == 0
    if not serves:
        _wait_for_server(endpoint, timeout.total_seconds())
    try:
        return dist.TCPStore(
            endpoint.host,
            endpoint.port,
            endpoint.size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        where = join_address(endpoint.host, endpoint.port)
        wanted = "; expected an address of this host, and a port that nobody uses" if serves else ""
        raise LaunchError(f"rank {endpoint.rank}: torch could not make a store at {where}{wanted}: {reason}") from error


def _wait_for_server(endpoint: StoreEndpoint, seconds: float) -> None:
    """Wait until a server listens at the endpoint.  Raises ``PeerTimeout`` after ``seconds``.

    This polls, like torch's own client; but that one ignores Ctrl-C until its time is over and shows C++ frames.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            attempt = min(_ATTEMPT_SECONDS, max(left, _RETRY_SECONDS))
            socket.create_connection((endpoint.host, endpoint.port), timeout=attempt).close()
        except OSError as error:
            if left <= 0.0:
                raise _no_server(endpoint, seconds, error) from error
            time.sleep(min(_RETRY_SECONDS, left))
        else:
            return


def _no_server(endpoint: StoreEndpoint, seconds: float, error: OSError) -> PeerTimeout:
    where = join_address(endpoint.host, endpoint.port)
    reason = os_reason(error)
    who = f"rank 0 of {endpoint.size}" if endpoint.is_ours else "the agent that holds the store"
    cause = f"{who} has not come within {seconds:.1f} s: nobody serves a store at {where} ({reason})"
    return PeerTimeout(
        f"rank {endpoint.rank}: {cause}",
        rank=0 if endpoint.is_ours else None,
        operation="opening the store",
        cause=cause,
    )


def _number(name: str, given: str | None, variable: str, environment: Mapping[str, str]) -> int:
    text = given if given is not None else _variable(variable, environment)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name if given is not None else variable}: expected a whole number, got {text!r}")
    return int(text)


def _port(given: int | None, environment: Mapping[str, str]) -> int:
    port = _number("port", None if given is None else str(given), "MASTER_PORT", environment)
    if not 0 < port <= _LAST_PORT:
        raise UsageError(f"{'MASTER_PORT' if given is None else 'port'}: expected 1..{_LAST_PORT}, got {port}")
    return port


def _variable(name: str, environment: Mapping[str, str]) -> str:
    text = environment.get(name)
    if not text:
        raise UsageError(f"{name}: expected a value in the environment, it is not set")
    return text
