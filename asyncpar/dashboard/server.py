"""Server of a dashboard in the launcher's process: one address, one token.

Connections without the token are bounded, since they use file descriptors of the process that supervises the ranks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from typing import Any, Final

from aiohttp import web

from asyncpar.core.addresses import join_address, open_listener
from asyncpar.core.concurrency.doorkeeper import Doorkeeper, turn_backlog
from asyncpar.core.system_errors import os_reason
from asyncpar.dashboard.app import Dashboard, FlightView, OutputRead
from asyncpar.dashboard.log_tail import LogTail
from asyncpar.errors import UsageError

_SHUTDOWN_PATIENCE: Final = 0.5
_FAREWELL_SECONDS: Final = 0.3


class DashboardServer:
    """Serves inside ``async with`` at ``address``; ``url`` is the one for users to open.

    ``host`` is an address of this machine, ``port`` 0 any free one; ``names`` are those of proxies, ``token`` None a
    new one; ``output`` reads the output of ranks, ``flight`` inspects their records.  Entering raises ``UsageError``
    when the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        names: Collection[str] = (),
        token: str | None = None,
        tail: LogTail | None = None,
        output: OutputRead | None = None,
        flight: FlightView | None = None,
    ) -> None:
        self._host, self._port = host, port
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.tail = LogTail() if tail is None else tail
        self._keeper = Doorkeeper()
        self.dashboard = Dashboard(
            self.token,
            names=[host, *names],
            lines=self.tail.after,
            output=output,
            flight=flight,
            trust=self._keeper.trust,
        )
        self._runner = web.AppRunner(
            self.dashboard.application, access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN_PATIENCE
        )
        self._listening: asyncio.Server | None = None
        self.latest: dict[str, Any] | None = None

    async def __aenter__(self) -> DashboardServer:
        await self._runner.setup()
        assert self._runner.server is not None
        greet = self._keeper.before(self._runner.server)
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                greet, sock=open_listener(self._host, self._port), backlog=turn_backlog()
            )
        except OSError as error:
            await self._runner.cleanup()
            raise UsageError(
                f"--dashboard: {self.address} cannot be bound ({os_reason(error)}); give another port"
            ) from error
        self._port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    @property
    def address(self) -> str:
        return join_address(self._host, self._port)

    @property
    def url(self) -> str:
        return f"http://{self.address}/#token={self.token}"

    async def show(self, picture: dict[str, Any]) -> None:
        """Show ``picture``; that of the job's end is given a moment to reach browsers."""
        self.latest = picture
        await self.dashboard.show(picture)
        if picture["ended"] and self.dashboard.browsers:
            await asyncio.sleep(_FAREWELL_SECONDS)
