"""The Gloo backend: the collectives of asyncpar over point-to-point messages of ``torch.distributed``.

As with MPI, Gloo carries the messages of asyncpar's own algorithms; its collectives are not used.  Between hosts Gloo's
connections are neither encrypted nor authenticated: use it only on networks where this does not matter.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from asyncpar.backends.config import BackendConfig, BackendUnavailable, missing_library
from asyncpar.backends.gloo.progress import GlooProgress
from asyncpar.backends.message_lane import MessageConnector
from asyncpar.bootstrap import PIN, Attach, WorldBootstrap
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.addresses import loopback
from asyncpar.core.concurrency.worker import call_in_daemon_thread
from asyncpar.core.config.transport import LaneCosts
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.node import start_node

_COSTS = LaneCosts(latency=200e-6, bandwidth=1e9)
_FOR_EVER = timedelta(days=3650)
"""Gloo breaks connections on which nothing arrives for its timeout, but the time limit of operations is ours to set."""


@dataclass(frozen=True, slots=True)
class Met:
    """A process group of all ranks, and the names of their hosts."""

    group: Any
    hosts: list[str]


def meet(store: Any, distributed: Any, *, rank: int, size: int, timeout: float | None) -> Met:
    """Wait for all ranks in ``store`` of torch and join them in a separate process group.

    On one host it listens on loopback only.  Raises ``PeerTimeout`` naming the ranks that do not arrive within
    ``timeout`` seconds.
    """
    patience = _FOR_EVER if timeout is None else timedelta(seconds=timeout)
    attempt = store.add(f"asyncpar/opened/{rank}", 1)
    own = distributed.PrefixStore(f"asyncpar/{attempt}", store)
    own.set(f"host/{rank}", socket.gethostname())
    keys = [f"host/{other}" for other in range(size)]
    try:
        own.wait(keys, patience)
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not own.check([key])]
        raise PeerTimeout(
            f"rank {rank}: waited {timeout} s for rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} "
            "to open the gloo backend",
            rank=missing[0] if missing else None,
            cause="it did not open the backend",
        ) from error
    hosts = [own.get(key).decode() for key in keys]
    return Met(_join(distributed, own, rank, size, is_alone=len(set(hosts)) == 1), hosts)


def _join(distributed: Any, store: Any, rank: int, size: int, *, is_alone: bool) -> Any:
    gloo = distributed.ProcessGroupGloo
    if not is_alone:
        return gloo(store, rank, size, _FOR_EVER)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=loopback())]
    options._timeout = _FOR_EVER
    return gloo(store, rank, size, options)


@asynccontextmanager
async def open_gloo(config: BackendConfig) -> AsyncIterator[Communicator]:
    """Open the backend as one of the ranks that rendezvous like those of ``torch.distributed``.

    They meet at ``config.rendezvous``, by default at the address that ``torchrun`` sets in the environment
    (``MASTER_ADDR``, ``MASTER_PORT``); rank and world size are those of the configuration, else ``RANK`` and
    ``WORLD_SIZE`` of the environment.  Raises ``BackendUnavailable`` without torch, ``UsageError`` for a missing rank
    or size, ``PeerTimeout`` if ranks do not arrive within ``config.timeout``.
    """
    config.refuse("gloo", "transport")
    torch, distributed = load_torch()
    rank, size = _place(config)
    met = await call_in_daemon_thread(partial(_open, distributed, config, rank, size), "asyncpar gloo")
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
    """Meet the other ranks.  Blocks."""
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
    """Attach as ``rank`` to the world of the ranks that have met."""
    members = tuple(
        Member(rank=other, host=host, host_id=host, local_rank=met.hosts[:other].count(host))
        for other, host in enumerate(met.hosts)
    )

    async def attach(stack: AsyncExitStack) -> WorldBootstrap:
        engine = GlooProgress(torch, met.group, rank=rank, size=len(members))
        stack.push_async_callback(engine.close)
        connector = MessageConnector(engine, kind="gloo")
        return WorldBootstrap(
            world=World(members=members, job="gloo"),
            rank=rank,
            connector=connector,
            join=connector.join,
            pin=os.environ.get(PIN),
            lane=_COSTS,
        )

    return attach
