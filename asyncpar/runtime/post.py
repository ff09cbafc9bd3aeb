"""The way messages leave a rank: over a link, or, to this rank itself, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncpar.errors import PeerLost
from asyncpar.runtime import message
from asyncpar.transport.lane import Sending
from asyncpar.transport.links import Links
from asyncpar.wire.payload import PayloadEncoder
from asyncpar.wire.segments import Payload


class Post:
    """Sends payloads to ranks, in order for each rank.  ``deliver`` gets those for this rank."""

    def __init__(self, links: Links, deliver: Callable[[int, memoryview], None]) -> None:
        self._links = links
        self._deliver = deliver

    def send(self, rank: int, payload: Payload) -> Sending | None:
        """Send ``payload``, to which nobody writes until the sending has ended or was released; None if it has.

        Raises ``PeerLost`` if the rank is known to be gone.
        """
        if rank == self._links.rank:
            assert isinstance(payload, memoryview), "what stays on its rank is copied"
            self._deliver(rank, payload)
            return None
        sending = self._links.link(rank).send_message(payload)
        if sending is not None:
            sending.done.add_done_callback(_look_at)
        return sending

    def send_quietly(self, rank: int, payload: Payload) -> Sending | None:
        """Send ``payload``, as ``send``, to a rank that need not be there any more."""
        try:
            return self.send(rank, payload)
        except PeerLost:
            return None  # nobody is left to hear it; those who wait for that rank are told by the loss listener

    def say(self, rank: int, envelope: message.Message) -> None:
        """Send a small message to a rank that need not be there any more."""
        self.send_quietly(rank, PayloadEncoder().finish(envelope, what="actor message"))


def _look_at(done: asyncio.Future[None]) -> None:
    """See how a send ended: if the peer was lost, whoever waits for it is told by the loss listener."""
    if not done.cancelled():
        done.exception()
