"""The backend ``nccl``: a world in which all ranks move device arrays by NCCL, or that does not open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncpar.backends.backend import OpenBackend, open_native
from asyncpar.backends.config import BackendConfig, BackendUnavailable
from asyncpar.collectives.communicator import Communicator, engine_of
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.device.records import version_text


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclOfRank:
    """The NCCL of one rank: its ``version``, or the ``reason`` why there is none."""

    reason: str
    version: int


def nccl_over(open_world: OpenBackend) -> OpenBackend:
    """Return the backend of the world that ``open_world`` opens, if NCCL moves the device arrays of all its ranks.

    Arrays of numpy use the lanes of that world.  Opening raises ``BackendUnavailable`` on all ranks, naming the first
    rank with missing requirements and what to install there, or two ranks whose versions differ.
    """

    @asynccontextmanager
    async def open_backend(config: BackendConfig) -> AsyncIterator[Communicator]:
        config.refuse("nccl", "rendezvous")
        async with open_world(config) as communicator:
            communicator.timeout = config.timeout
            await check_nccl(communicator)
            yield communicator

    return open_backend


async def check_nccl(communicator: Communicator) -> None:
    """Raise ``BackendUnavailable`` on all ranks unless all have NCCL of the same version."""
    host = DeviceHost.of(engine_of(communicator).table)
    version = 0 if host.fabric is None else host.fabric.versions.nccl
    mine = NcclOfRank(reason="" if host.fabric is not None else host.reason or "it has no NCCL", version=version)
    every = await communicator.all_gather_object(mine, key="backend nccl", wanted=NcclOfRank)
    problem = find_problem(every, communicator.ranks)
    if problem is not None:
        raise BackendUnavailable(f"backend: {problem}")


def find_problem(every: Sequence[NcclOfRank], ranks: Sequence[int]) -> str | None:
    """Return why the ``ranks`` of the world cannot use NCCL together, and what to do; None if they can."""
    for one, rank in zip(every, ranks, strict=True):
        if one.reason:
            return f"rank {rank} has no NCCL: {one.reason}; without NCCL use native, mpi or gloo on all ranks"
    for one, rank in zip(every, ranks, strict=True):
        if one.version != every[0].version:
            return (
                f"rank {ranks[0]} has NCCL {version_text(every[0].version)} and rank {rank} has "
                f"{version_text(one.version)}; install the same on all ranks"
            )
    return None


open_nccl: OpenBackend = nccl_over(open_native)
"""Joins the world like the native backend, and ensures that NCCL moves the device arrays of all ranks."""
