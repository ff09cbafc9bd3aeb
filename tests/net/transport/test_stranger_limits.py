"""Limits of strangers on a gRPC server."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from asyncpar.core.descriptors import descriptor_limit, descriptor_reserve
from asyncpar.net.transport import rpc
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.net.transport.stranger_limits import LEAST_CONNECTIONS, server_limits


def most_connections(descriptors: int, others: int = 0) -> int:
    return dict(server_limits(descriptors, others))["grpc.max_allowed_incoming_connections"]


@pytest.mark.parametrize(("descriptors", "connections"), [(1024, 352), (20_000, 9_840), (10, LEAST_CONNECTIONS)])
def test_connections_take_half_of_the_spare_descriptors_at_most(descriptors: int, connections: int) -> None:
    assert most_connections(descriptors) == connections


@pytest.mark.parametrize("descriptors", [128, 256, 1024, 4096, 1 << 20])
def test_several_servers_together_leave_the_reserve(descriptors: int) -> None:
    taken = sum(most_connections(descriptors, others) for others in range(4))
    assert taken <= descriptors - descriptor_reserve(descriptors)


def test_the_limit_of_this_process_is_known() -> None:
    assert descriptor_limit() > 0
    assert all(0 < value < 1 << 31 for _, value in server_limits(descriptor_limit()))


async def test_a_connection_that_never_speaks_http_is_closed_and_so_is_one_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def few(descriptors: int, _others: int) -> list[tuple[str, int]]:
        limits = dict(server_limits(descriptors))
        limits |= {"grpc.server_handshake_timeout_ms": 150, "grpc.max_allowed_incoming_connections": 2}
        return list(limits.items())

    monkeypatch.setattr(rpc, "server_limits", few)
    server = RpcServer(Credentials(b"s" * 32))
    await server.start()
    try:
        async with asyncio.timeout(30):
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
            for reader, writer in idle:
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()  # to the end
                writer.close()
    finally:
        await server.stop(grace=0)
