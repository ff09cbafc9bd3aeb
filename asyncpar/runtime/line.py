"""The way of a call's messages to the rank at its other end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from asyncpar.runtime import message
from asyncpar.runtime.post import Post
from asyncpar.transport.links import MAX_MESSAGE_BYTES
from asyncpar.wire.payload import Extension, PayloadEncoder, UnwrittenPayload


class Line:
    """Sends to one rank, in order; if it is gone, nothing happens here: the loss listener tells who waits for it."""

    __slots__ = ("_extension", "_post", "rank")

    def __init__(self, post: Post, rank: int, extension: Extension) -> None:
        self.rank = rank
        self._post = post
        self._extension = extension

    def say(self, envelope: message.Message) -> None:
        """Send a small message."""
        self._post.say(self.rank, envelope)

    def send(self, payload: memoryview) -> None:
        """Send what ``encode`` made, written."""
        self._post.send_quietly(self.rank, payload)

    def encode(self, value: Any, envelope: Callable[[msgspec.Raw], message.Message], *, what: str) -> UnwrittenPayload:
        """Return the message that carries a copy of ``value``.  Raises ``UsageError`` if it cannot be sent."""
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        return encoder.prepare(envelope(encoder.part(value, what=what)), what=what)
