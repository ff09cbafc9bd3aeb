"""Sending of actor messages: over a link, or directly to the dispatcher where the receiver is this rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from asyncpar.actors.runtime import message
from asyncpar.errors import PeerLost
from asyncpar.net.transport.lane import Sending
from asyncpar.net.transport.links import MAX_MESSAGE_BYTES, Links
from asyncpar.net.wire.frame import Payload
from asyncpar.net.wire.payload import Extension, PayloadEncoder, UnwrittenPayload


class Outbound:
    """Sends payloads to ranks, in order for each rank.  ``deliver`` is called with those for this rank."""

    def __init__(self, links: Links) -> None:
        self.deliver: Callable[[int, memoryview], None]
        """Set once, before the first message."""
        self.recorder = links.recorder
        self.observer = links.observer
        self._links = links

    def host_of(self, rank: int) -> str:
        """Return the name of the host of a rank."""
        return self._links.world.members[rank].host

    def send(self, rank: int, payload: Payload) -> Sending | None:
        """Send ``payload``, whose memory must not change until the result has ended or is released; None if it has.

        Raises ``PeerLost`` if the rank is known to be gone.
        """
        if rank == self._links.rank:
            assert isinstance(payload, memoryview), "what stays on its rank is copied"
            self.deliver(rank, payload)
            return None
        sending = self._links.link(rank).send_message(payload)
        if sending is not None:
            sending.done.add_done_callback(_retrieve_outcome)
        return sending

    def send_quietly(self, rank: int, payload: Payload) -> Sending | None:
        """Send ``payload``, like ``send``, to a rank that may be lost."""
        try:
            return self.send(rank, payload)
        except PeerLost:
            return None  # the loss listener ends the waits for that rank

    def send_message(self, rank: int, envelope: message.Message) -> None:
        """Send a small message to a rank that may be lost."""
        self.send_quietly(rank, PayloadEncoder().finish(envelope, what="actor message"))


def _retrieve_outcome(done: asyncio.Future[None]) -> None:
    """Retrieve the outcome of a send; if the peer was lost, the loss listener ends its calls."""
    if not done.cancelled():
        done.exception()


class ReplyChannel:
    """Sends the messages of calls to one rank, in order.  Sending to a lost rank has no effect."""

    __slots__ = ("_extension", "_outbound", "rank")

    def __init__(self, outbound: Outbound, rank: int, extension: Extension) -> None:
        self.rank = rank
        self._outbound = outbound
        self._extension = extension

    def send_message(self, envelope: message.Message) -> None:
        """Send a small message."""
        self._outbound.send_message(self.rank, envelope)

    def send(self, payload: memoryview) -> None:
        """Send an encoded and written payload."""
        self._outbound.send_quietly(self.rank, payload)

    def encode(self, value: Any, envelope: Callable[[msgspec.Raw], message.Message], *, what: str) -> UnwrittenPayload:
        """Encode the message that carries a copy of ``value``.  Raises ``UsageError`` if it cannot be sent."""
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        return encoder.prepare(envelope(encoder.part(value, what=what)), what=what)
