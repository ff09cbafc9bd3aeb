"""The way messages leave a rank: over a link, or, to this rank itself, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncpar.errors import PeerLost
from asyncpar.runtime import message
from asyncpar.transport.links import Links
from asyncpar.wire.payload import PayloadEncoder


class Post:
    """Sends payloads to ranks, in order for each rank.  ``deliver`` gets those for this rank."""

    def __init__(self, links: Links, deliver: Callable[[int, memoryview], None]) -> None:
        self._links = links
        self._deliver = deliver

    def send(self, rank: int, payload: memoryview) -> None:
        """Send ``payload``, which nobody writes to any more.  Raises ``PeerLost`` if the rank is known to be gone."""
        if rank == self._links.rank:
            self._deliver(rank, payload)
            return
        sending = self._links.send_message(rank, payload)
        if sending is not None:
            sending.done.add_done_callback(_look_at)

    def send_quietly(self, rank: int, payload: memoryview) -> None:
        """Send ``payload`` to a rank that need not be there any more."""
        try:
            self.send(rank, payload)
        except PeerLost:
            return  # nobody is left to hear it; those who wait for that rank are told by the loss listener

    def say(self, rank: int, envelope: message.Message) -> None:
        """Send a small message to a rank that need not be there any more."""
        self.send_quietly(rank, PayloadEncoder().finish(envelope, what="actor message"))


def _look_at(done: asyncio.Future[None]) -> None:
    """See how a send ended: if the peer was lost, whoever waits for it is told by the loss listener."""
    if not done.cancelled():
        done.exception()
