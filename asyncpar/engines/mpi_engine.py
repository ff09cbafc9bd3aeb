"""Places on the hosts of an MPI: an ``mpiexec`` for each host runs the agent, and its streams carry orders and events.

``mpiexec`` gives its input to one process only, so each starts one.  Nothing here calls an MPI library, and only
options that MPICH, Open MPI and Intel MPI share are used.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from asyncpar.core.addresses import is_loopback, loopback, resolve, route_to
from asyncpar.engines.interface import (
    Handle,
    JobSpec,
    Place,
    PlaceEvent,
    PlaceLost,
    PlacementEngine,
    PlaceOrder,
)
from asyncpar.engines.mpi_place import MPI_VARIABLES
from asyncpar.engines.streamed_places import StreamedPlaces
from asyncpar.errors import UsageError

_ANY_CORE: Final = {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
"""Without these Open MPI binds the agent, and so all ranks that it starts, to one core."""


class MpiEngine(PlacementEngine):
    """Hosts on which ``mpiexec`` starts processes; () is its default host, usually this one.

    ``mpiexec`` is the command with its own options, ``python`` Python on the hosts.
    """

    def __init__(
        self, *, hosts: Sequence[str] = (), mpiexec: str | Sequence[str] = "mpiexec", python: str = sys.executable
    ) -> None:
        if isinstance(hosts, str):
            raise UsageError(f"hosts: expected a list of names, got {hosts!r}; pass [{hosts!r}]")
        self._hosts = tuple(hosts) or ("",)
        self._mpiexec = (mpiexec,) if isinstance(mpiexec, str) else tuple(mpiexec)
        if not self._mpiexec:
            raise UsageError("mpiexec: expected a program with its options, got none")
        self._python = python
        self._places = StreamedPlaces()

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        if shutil.which(self._mpiexec[0]) is None:
            raise UsageError(
                f"mpiexec: {self._mpiexec[0]} is not in PATH; install MPICH or Open MPI, or pass its path: "
                "mpiexec=[PROGRAM, OPTION, ...]"
            )
        per_place = spec.per_place or -(-spec.ranks // len(self._hosts))
        size = -(-spec.ranks // per_place)
        if size > len(self._hosts):
            raise UsageError(
                f"ranks: expected at most {len(self._hosts) * per_place}, {per_place} on each of {len(self._hosts)} "
                f"hosts, got {spec.ranks}; hosts= names more, per_place= puts more on each"
            )
        hosts = self._hosts[:size]
        caller = await asyncio.to_thread(_own_address, hosts)
        environment = {name: text for name, text in os.environ.items() if not name.startswith(MPI_VARIABLES)}
        for host in hosts:
            await self._places.begin(self._command(host, caller), _ANY_CORE | environment)
        return [await self._describe(number, host, spec, per_place) for number, host in enumerate(hosts)]

    def _command(self, host: str, caller: str) -> list[str]:
        where = ["-host", host] if host else []
        return [*self._mpiexec, "-n", "1", *where, self._python, "-m", "asyncpar.engines.mpi_place", caller]

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        return await self._places.start(place, order, take)

    def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield hosts whose ``mpiexec`` ends, or that give no sign of life."""
        return self._places.failures()

    async def release(self) -> None:
        await self._places.release()

    async def _describe(self, number: int, host: str, spec: JobSpec, slots: int) -> Place:
        """Return the place on a host, when its Python has started."""
        name = f"mpiexec's host {host}".rstrip()
        seen = await self._places.describe(number, name, seconds=spec.timeout)
        return Place(name=name, host=seen["host"], address=seen["address"], slots=slots)


def _own_address(hosts: Sequence[str]) -> str:
    """Return the address by which ``hosts`` reach this one: loopback, if all of them are this host."""
    for host in filter(None, hosts):
        try:
            address = resolve(host)
            if not is_loopback(address):
                return route_to(address)
        except OSError as error:
            raise UsageError(f"hosts: there is no way to {host!r} from here: {error}") from error
    return loopback()
