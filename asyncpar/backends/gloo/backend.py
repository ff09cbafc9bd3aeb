"""The Gloo backend: the collectives of asyncpar over point-to-point messages of ``torch.distributed``.

As with MPI, the messages of asyncpar's own algorithms travel, rather than Gloo's collectives being called.  Between
hosts Gloo's connections are neither encrypted nor authenticated: that is for networks where this does not matter.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

from asyncpar.attachment import PIN, Attach, Attachment
from asyncpar.backends.config import BackendConfig, missing_library
from asyncpar.backends.errors import BackendUnavailable
from asyncpar.backends.gloo.meeting import Met, meet
from asyncpar.backends.gloo.office import GlooOffice
from asyncpar.backends.message_connector import MessageConnector
from asyncpar.collectives.communicator import Communicator
from asyncpar.config.world import Member, World
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.node import start_node


@asynccontextmanager
async def open_gloo(config: BackendConfig) -> AsyncIterator[Communicator]:
    """Be a rank among those that meet as ``torch.distributed`` does.

    Where they meet is ``config.rendezvous``, by default what ``torchrun`` sets in the environment (``MASTER_ADDR``,
    ``MASTER_PORT``); rank and world size are those of the configuration, else ``RANK`` and ``WORLD_SIZE`` of the
    environment.  Raises ``BackendUnavailable`` without torch, ``UsageError`` for a place that nobody has named,
    ``PeerTimeout`` when ranks do not come within ``config.timeout``.
    """
    config.refuse("gloo", "transport")
    torch, distributed = load_torch()
    rank, size = _place(config)
    opening = asyncio.get_running_loop().run_in_executor(None, _open, distributed, config, rank, size)
    met = await opening
    node = await start_node(attach_gloo(torch, met, rank))
    try:
        yield node.world
    finally:
        await node.stop()


def load_torch() -> tuple[Any, Any]:
    """Return the modules ``torch`` and ``torch.distributed``.  Raises ``BackendUnavailable`` without Gloo in them."""
    try:
        import torch
        import torch.distributed as distributed
    except ImportError as error:
        raise missing_library("gloo", "torch", error) from error
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise BackendUnavailable("backend: gloo needs a build of torch that has it, and this one does not")
    return torch, distributed


def _place(config: BackendConfig) -> tuple[int, int]:
    rank, size = config.rank, config.world_size
    rank = _number("rank", "RANK") if rank is None else rank
    size = _number("world_size", "WORLD_SIZE") if size is None else size
    if not 0 <= rank < size:
        raise UsageError(f"rank: expected 0..{size - 1}, got {rank}")
    return rank, size


def _number(field: str, variable: str) -> int:
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{field}: expected it in the configuration or as {variable} in the environment, got {text!r}")
    return int(text)


def _open(distributed: Any, config: BackendConfig, rank: int, size: int) -> Met:
    """Find the others.  Blocks."""
    if config.rendezvous is None and size == 1:
        return meet(distributed.HashStore(), distributed, rank=rank, size=size, timeout=config.timeout)
    patience = {} if config.timeout is None else {"timeout": timedelta(seconds=config.timeout)}
    try:
        found = next(distributed.rendezvous(config.rendezvous or "env://", rank, size, **patience))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, distributed.DistStoreError | distributed.DistNetworkError):
            raise PeerTimeout(f"rank {rank}: found no meeting place for the gloo backend: {error}", rank=0) from error
        raise UsageError(f"rendezvous: {error}") from error
    return meet(found[0], distributed, rank=rank, size=size, timeout=config.timeout)


def attach_gloo(torch: Any, met: Met, rank: int) -> Attach:
    """Attach as ``rank`` to the world of those that have met."""
    members = tuple(
        Member(rank=other, host=host, host_id=host, local_rank=met.hosts[:other].count(host))
        for other, host in enumerate(met.hosts)
    )

    async def attach(stack: AsyncExitStack) -> Attachment:
        office = GlooOffice(torch, met.group, rank=rank, size=len(members))
        stack.push_async_callback(office.close)
        connector = MessageConnector(office, kind="gloo")
        return Attachment(
            world=World(members=members, job="gloo"),
            rank=rank,
            connector=connector,
            join=connector.join,
            pin=os.environ.get(PIN),
            lane="gloo",
        )

    return attach
