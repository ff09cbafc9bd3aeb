"""Worlds without a launcher: one process serves the rendezvous; each process has one rank and the secret in a file."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.addresses import split_address
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.net.membership.credentials import write_secret
from asyncpar.net.membership.host import host_id, host_name
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer


async def serve_rendezvous(stack: AsyncExitStack, *, job: str, size: int, secret: bytes, address: str) -> str:
    """Serve the rendezvous of a world at a free port of ``address``, until ``stack`` closes; return its address."""
    server = RpcServer(Credentials(secret), bind=address, port=0)
    service = RendezvousService(job=job, world_size=size)
    membership_pb2_grpc.add_RendezvousServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        service, server.server
    )
    await server.start()
    stack.push_async_callback(server.stop, grace=0.2)
    return server.address


def make_environment(
    stack: AsyncExitStack,
    *,
    rank: int,
    size: int,
    rendezvous: str,
    job: str,
    secret: bytes,
    address: str,
    timeout: float,
    transport: str | None = None,
) -> LaunchEnvironment:
    """Return the place of ``rank`` of ``size`` in this process, whose IP address is ``address``.

    The secret is in a directory that only this user can enter, which ``stack`` removes.
    """
    directory = Path(tempfile.mkdtemp(prefix="asyncpar-place-"))  # mode 0700
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    write_secret(directory / "secret", secret)
    host, (name, port) = host_name(), split_address(rendezvous)
    return LaunchEnvironment(
        rank=rank,
        local_rank=0,
        world_size=size,
        local_world_size=1,
        group_rank=rank,
        group_world_size=size,
        master_addr=name,
        master_port=port,
        rendezvous=rendezvous,
        secret_file=str(directory / "secret"),
        job=job,
        generation=0,
        restart_count=0,
        host=host,
        host_id=host_id(host),
        bind=address,
        timeout=timeout,
        transport=transport,
    )
