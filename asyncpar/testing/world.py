"""Many ranks in one process, on one event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from asyncpar.actors.runtime.gateway import ActorGateway
from asyncpar.bootstrap import Attach, WorldBootstrap, arena_settings, serve_links
from asyncpar.core.addresses import loopback
from asyncpar.core.concurrency.async_block import opened_by
from asyncpar.core.config.world import Member, World
from asyncpar.errors import UsageError
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.lane_kinds import parse_transport
from asyncpar.net.transport.rpc import Credentials
from asyncpar.node import Node, start_node
from asyncpar.observe.image import read_image
from asyncpar.observe.timeline import make_timeline, print_timeline
from asyncpar.testing.loop import VirtualTimeLoop


@opened_by("async with local_world(2) as nodes:")
async def local_world(
    size: int,
    *,
    transport: str | None = "inproc",
    hosts: Sequence[str] | None = None,
    pin: str | None = None,
    arena: bool = True,
    generation: int = 0,
    trace: bool = False,
) -> AsyncIterator[tuple[Node, ...]]:
    """Yield the nodes of a world of ``size`` ranks in this process, and stop them all at the end.

    ``transport`` is ``inproc`` (frames are passed in memory; the only one for ``run_virtual``), ``shm`` (Unix sockets;
    for ranks of one host), ``tcp`` or ``grpc`` (real sockets on loopback), or None for the choice of a launched job.
    ``hosts`` names the host that each rank pretends to be on (default: all on one), ``pin`` pins algorithms.  With
    ``shm`` and None the ranks of a host share memory, too, unless ``arena`` is false.  ``generation`` is the world's:
    pass a different one to a world that follows.  With ``trace`` the timeline of all ranks is printed at the end: the
    events of each, with their times (``asyncpar.observe.timeline``); in virtual time it is the same in every run.
    """
    if size < 1:
        raise UsageError(f"size: expected at least 1 rank, got {size}")
    transport = parse_transport(transport, besides=("inproc",))
    if transport != "inproc" and isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
        raise UsageError(f"transport: expected inproc in virtual time, which sockets do not keep, got {transport!r}")
    names = list(hosts) if hosts is not None else ["localhost"] * size
    if len(names) != size:
        raise UsageError(f"hosts: expected a name for each of {size} ranks, got {len(names)}")
    async with AsyncExitStack() as stack:
        if transport == "inproc":
            attaches = _attach_inproc(names, pin, generation)
        else:
            attaches = await _attach_sockets(stack, names, transport, pin, arena=arena, generation=generation)
        started = await asyncio.gather(*(start_node(attach) for attach in attaches), return_exceptions=True)
        nodes = tuple(node for node in started if isinstance(node, Node))
        try:
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
            yield nodes
        finally:
            if trace:
                images = {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}
                print(print_timeline(make_timeline(images)))  # noqa: T201
            await asyncio.gather(*(node.stop() for node in nodes))


def _members(hosts: Sequence[str], addresses: Sequence[str]) -> tuple[Member, ...]:
    return tuple(
        Member(rank=rank, host=host, host_id=host, local_rank=hosts[:rank].count(host), address=address)
        for rank, (host, address) in enumerate(zip(hosts, addresses, strict=True))
    )


def _attach_inproc(hosts: list[str], pin: str | None, generation: int) -> list[Attach]:
    world = World(members=_members(hosts, [""] * len(hosts)), generation=generation)
    fabric = InprocFabric()

    def attach_as(rank: int) -> Attach:
        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            stack.callback(fabric.leave, rank)
            connector = InprocConnector(fabric)
            return WorldBootstrap(world=world, rank=rank, connector=connector, join=fabric.join, pin=pin)

        return attach

    return [attach_as(rank) for rank in range(len(hosts))]


async def _attach_sockets(
    stack: AsyncExitStack, hosts: list[str], transport: str | None, pin: str | None, *, arena: bool, generation: int
) -> list[Attach]:
    credentials = Credentials(secrets.token_bytes(32))
    gateways = [ActorGateway() for _ in hosts]
    served = [
        await serve_links(stack, credentials, bind=loopback(), transport=transport, gateway=gateway)
        for gateway in gateways
    ]
    world = World(members=_members(hosts, [server.address for server, _ in served]), generation=generation)

    def attach_as(rank: int) -> Attach:
        server, connector = served[rank]

        async def attach(_stack: AsyncExitStack) -> WorldBootstrap:
            return WorldBootstrap(
                world=world,
                rank=rank,
                connector=connector,
                join=connector.join,
                server=server,
                pin=pin,
                lane=transport,
                secret=credentials.secret,
                arena=arena_settings(os.environ, transport) if arena else None,
                gateway=gateways[rank],
            )

        return attach

    return [attach_as(rank) for rank in range(len(hosts))]
