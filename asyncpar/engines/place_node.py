"""A rank on the event loop of the engine's own process: a node for actors, without a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from asyncpar.core.config.secret import Secret
from asyncpar.engines.function_call import decode_call, encode_value
from asyncpar.engines.interface import Interrupt, Kill, PlaceCommand, PlaceEvent, PlaceOrder, PlaceReport
from asyncpar.engines.mesh import serve_actors_at
from asyncpar.engines.place_agent import report_of
from asyncpar.engines.rendezvous import make_environment
from asyncpar.errors import AsyncparError

_log = logging.getLogger(__name__)


class PlaceNode:
    """Serves actors as rank ``order.number``; its program is a call of ``serve_actors``.  Used as ``PlaceRun`` is."""

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
        self._serving = asyncio.create_task(self._serve(), name="asyncpar node on a worker")
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

    async def _serve(self) -> None:
        order = self._order
        _, (rendezvous, size, may_pickle), _, _ = decode_call(order.program)
        async with AsyncExitStack() as stack:
            environment = make_environment(
                stack,
                rank=order.number,
                size=size,
                rendezvous=rendezvous,
                job=order.job,
                secret=Secret(order.secret),
                address=order.address,
                timeout=order.timeout,
                transport=order.transport,
            )
            await serve_actors_at(environment, may_pickle)
