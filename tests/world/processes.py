"""Worlds of real processes for tests: a rendezvous in the test, ranks as processes, no launcher in between."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer
from tests.fork_server import ROOT
from tests.soak import is_soak
from tests.world.forked import ForkedProgram, fork_program


class Rank:
    """One rank process; what it prints is one JSON value a line."""

    def __init__(
        self,
        rank: int,
        process: asyncio.subprocess.Process | ForkedProgram,
        rendezvous: RendezvousService | None = None,
    ) -> None:
        self.rank = rank
        self.process = process
        self.rendezvous = rendezvous

    async def next(self) -> Any:
        """Return the next value the rank prints."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, f"rank {self.rank} ended with {await self.process.wait()} instead of printing"
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)


async def start_program(
    command: Sequence[str], environment: Mapping[str, str], *, prefix: Sequence[str] = ()
) -> asyncio.subprocess.Process | ForkedProgram:
    """Run ``python -W error *command``, forked from a process that has asyncpar imported where nothing forbids it.

    ``prefix`` comes before the interpreter.
    """
    if not (prefix or is_soak()):
        return await fork_program(command, environment=environment)
    return await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-W",
        "error",
        *command,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )


@asynccontextmanager
async def process_world(
    size: int,
    script: Path,
    directory: Path,
    *arguments: str,
    transport: str | None = None,
    hosts: Sequence[str] | None = None,
) -> AsyncIterator[list[Rank]]:
    """Yield the ranks of a world of real processes that run ``script``; what is left of them is killed at the end.

    ``hosts`` names the host that each rank pretends to be on (default: all on one).
    """
    names = ["here"] * size if hosts is None else hosts
    secret_file = directory / f"secret-{secrets.token_hex(4)}"
    server = RpcServer(Credentials(create_secret(secret_file)))
    service = RendezvousService(job="test", world_size=size)
    membership_pb2_grpc.add_RendezvousServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    ranks: list[Rank] = []
    try:
        for rank in range(size):
            environment = LaunchEnvironment(
                rank=rank,
                local_rank=names[:rank].count(names[rank]),
                world_size=size,
                local_world_size=size,
                group_rank=0,
                group_world_size=1,
                master_addr="127.0.0.1",
                master_port=1,
                rendezvous=server.address,
                secret_file=str(secret_file),
                job="test",
                generation=0,
                restart_count=0,
                host=names[rank],
                host_id=names[rank],
                bind="127.0.0.1",
                timeout=30.0,
                transport=transport,
            )
            command = [str(script), *arguments]
            process = await start_program(command, {**os.environ, **environment.to_mapping(), "OMP_NUM_THREADS": "1"})
            ranks.append(Rank(rank, process, service))
        yield list(ranks)
    finally:
        for left in ranks:
            if left.process.returncode is None:
                left.process.kill()
            await left.process.communicate()
        service.close("the test is over")
        await server.stop(grace=0)
