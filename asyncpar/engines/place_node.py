"""A rank on the event loop of the engine's own process: a node for actors, and no process of its own."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.secret import Secret
from asyncpar.engines.function_call import decode_call, encode_value
from asyncpar.engines.interface import Interrupt, Kill, PlaceCommand, PlaceEvent, PlaceOrder, PlaceReport
from asyncpar.engines.mesh import serve_actors_at
from asyncpar.engines.place_agent import report_of
from asyncpar.errors import AsyncparError
from asyncpar.net.membership.credentials import write_secret
from asyncpar.net.membership.host import host_id, host_name
from asyncpar.net.transport.rpc import split_address

_log = logging.getLogger(__name__)


class PlaceNode:
    """Serves actors as rank ``order.number``; its program is a call of ``serve_actors``.  Used as ``PlaceAgent`` is."""

    def __init__(self, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> None:
        self._order = order
        self._take = take
        self._serving: asyncio.Task[None] | None = None

    def obey(self, command: PlaceCommand) -> None:
        """Carry out ``command``."""
        if isinstance(command, Interrupt | Kill) and self._serving is not None:
            self._serving.cancel()

    async def run(self) -> None:
        """Serve until the caller leaves; the last event is a ``PlaceReport``."""
        self._serving = asyncio.create_task(self._serve_privately(), name="asyncpar node on a worker")
        try:
            await asyncio.wait({self._serving})
            self._take(self._report(self._serving))
        finally:
            if not self._serving.done():
                self._serving.cancel()
                await asyncio.wait({self._serving})

    def _report(self, serving: asyncio.Task[None]) -> PlaceReport:
        if serving.cancelled():
            return PlaceReport(exit_code=1, message="it was ended")
        error = serving.exception()
        if error is None:
            return PlaceReport(values={self._order.number: encode_value(None, may_pickle=False)})
        if not isinstance(error, AsyncparError):
            _log.error("place %d broke", self._order.number, exc_info=error)
        return report_of(error)

    async def _serve_privately(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="asyncpar-place-"))  # mode 0700
        try:
            await self._serve(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _serve(self, directory: Path) -> None:
        order, host = self._order, host_name()
        secret = directory / "secret"
        write_secret(secret, Secret(order.secret))
        _, (rendezvous, size, may_pickle), _, _ = decode_call(order.program)
        environment = LaunchEnvironment(
            rank=order.number,
            local_rank=0,
            world_size=size,
            local_world_size=1,
            group_rank=order.number,
            group_world_size=order.places,
            master_addr=order.address,
            master_port=split_address(rendezvous)[1],
            rendezvous=rendezvous,
            secret_file=str(secret),
            job=order.job,
            generation=0,
            restart_count=0,
            host=host,
            host_id=host_id(host),
            bind=order.address,
            timeout=order.timeout,
            transport=order.transport,
        )
        await serve_actors_at(environment, may_pickle)
