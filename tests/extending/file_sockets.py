"""A lane of Unix sockets that are files: what an author of a lane writes, and all that ranks import of it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from asyncpar.core.config.transport import LaneCosts
from asyncpar.net.transport.handshaking import PEER_SECONDS, HandshakeProtocol, Medium, Porter
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.lane_kind import LaneDial, LaneGate, LaneKind, LaneListener
from asyncpar.net.transport.sockets import tune_unix
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake

MEDIUM = Medium(kind="filesocket", prepare=tune_unix, may_damage=False)
"""Unix sockets that are files, unlike those of ``shm``: ranks in containers that share a folder can use them."""


class FileListener(LaneListener):
    def __init__(self, gate: LaneGate) -> None:
        self._porter = Porter(
            MEDIUM,
            secret=gate.secret,
            busy_poll=gate.busy_poll,
            find_terms=gate.find_terms,
            on_lane=gate.on_lane,
            on_refused=gate.on_refused,
        )
        self._folder = tempfile.TemporaryDirectory()
        self._server: asyncio.Server | None = None

    @property
    def place(self) -> str:
        return str(Path(self._folder.name) / "lane")

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(self._porter.greet, self.place)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._porter.turn_away()
        self._folder.cleanup()


async def dial(wanted: LaneDial) -> Lane:
    handshake = Handshake.dial(wanted.terms, secret=wanted.secret, nonce=os.urandom(NONCE_BYTES))
    _, protocol = await asyncio.get_running_loop().create_unix_connection(
        lambda: HandshakeProtocol(handshake, MEDIUM, wanted.busy_poll, seconds=PEER_SECONDS), wanted.place
    )
    return await protocol.finished()


COSTS = LaneCosts(latency=26e-6, bandwidth=2.5e9)
KIND = LaneKind(name="filesocket", costs=COSTS, dial=dial, listen=FileListener, is_local=True)
