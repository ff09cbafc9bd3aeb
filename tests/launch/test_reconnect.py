"""Connections between the hosts of a job break and come back: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import pytest

from asyncpar.core.addresses import split_address
from tests.hosts.fixed_hosts import until
from tests.launch.proxies import ResettingProxy
from tests.ports import free_port
from tests.soak import chosen

Launcher = Any  # the class lives in conftest.py


@pytest.mark.parametrize("turns", chosen((0, 1, 2, 4), soak=range(8)))
async def test_the_proxy_may_reset_connections_at_any_moment_of_their_end(turns: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, ResettingProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as proxy:
        host, port = split_address(proxy.address)
        _, writer = await asyncio.open_connection(host, port)
        await until(lambda: proxy.connections == 2)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # with RST
        for _ in range(turns):
            await asyncio.sleep(0)
        proxy.reset()
        await until(lambda: not proxy.connections)


BODY = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            open(f"{sys.argv[1]}/began-{rank}", "a").write("x")
            for step in range(10):
                x = np.ones(4)
                await node.world.all_reduce(x)
                assert x[0] == node.world.size
                await asyncio.sleep(0.1)
            open(f"{sys.argv[1]}/ended-{rank}", "a").write("x")

    ap.run(main)
"""


@pytest.mark.process
async def test_a_job_outlives_resets_while_it_forms_runs_and_ends(launcher: Launcher, tmp_path: Any) -> None:
    port = free_port()
    out = tmp_path / "out"
    out.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    script = launcher.script(BODY)
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "j", "--secret-file", str(secret))
    async with ResettingProxy(f"127.0.0.1:{port}") as proxy:
        ends = [f"127.0.0.1:{port}", proxy.address]
        agents = [
            launcher.start(*common, "--node-rank", str(rank), "--rdzv-endpoint", end, script, str(out))
            for rank, end in enumerate(ends)
        ]
        while any(agent.poll() is None for agent in agents):
            await asyncio.sleep(0.4)
            proxy.reset()
        done = [await asyncio.to_thread(launcher.finish, agent) for agent in agents]
    assert [end.returncode for end in done] == [0, 0], [end.stderr for end in done]
    assert proxy.resets >= 4
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        f"{what}-{rank}": "x" for what in ("began", "ended") for rank in range(2)
    }
