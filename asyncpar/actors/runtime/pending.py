"""What waits for an answer at its caller, and what an answer that is no result means there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.delivery import Delivery
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.streams.feeds import Feeds
from asyncpar.actors.runtime.streams.reading import Inlet
from asyncpar.actors.runtime.window import OutboundMessage
from asyncpar.errors import (
    ActorDown,
    AsyncparError,
    MailboxFull,
    NotFound,
    PeerLost,
    PeerTimeout,
    RemoteError,
    UsageError,
)
from asyncpar.net.wire.payload import PayloadDecoder, PayloadEncoder


@dataclass(slots=True, eq=False)
class Pending:
    """A call, or a request to the system of a rank, that waits for its answer.

    ``outgoing`` is the call's; a request has none.  ``origin`` is the message in whose endpoint it was made.
    """

    call: int
    ref: ActorRef[Any]
    endpoint: str
    result: PayloadDecoder[Any]
    future: asyncio.Future[Any]
    outgoing: OutboundMessage | None = None
    origin: Delivery | None = None
    inlet: Inlet[Any] | None = field(default=None, init=False)
    """Where the items of the endpoint go, if it was called for a stream."""
    feeds: Feeds | None = field(default=None, init=False)
    """The streams that the call brings along."""

    def __str__(self) -> str:
        return f"{self.endpoint} of {self.ref!r}"


class ResultOf:
    """The name of a result, which is put together only when somebody reads it."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __str__(self) -> str:
        return f"the result of {self._pending}"


def lost_during(error: PeerLost, operation: str) -> PeerLost:
    """Return ``error`` for one operation that it ended."""
    text = f"{operation}: {error}"
    return PeerLost(text, rank=error.rank, host=error.host, operation=operation, cause=error.cause)


def error_of(failure: message.Failure, rank: int, operation: str) -> AsyncparError:
    """Return what a caller must raise for ``failure``."""
    text = f"rank {rank}: {operation}: {failure.text}"
    match failure.reason:
        case message.USAGE:
            return UsageError(f"{operation}: {failure.text}")
        case message.ABSENT:
            return NotFound(f"{operation}: {failure.text}")
        case message.STOPPED:
            return ActorDown(text, rank=rank, operation=operation)
        case message.FULL:
            return MailboxFull(text, rank=rank, operation=operation)
        case message.DEADLINE:
            return PeerTimeout(text, rank=rank, operation=operation)
        case message.CLOSED:
            return PeerLost(text, rank=rank, operation=operation, cause=failure.text)
        case _:
            return RemoteError(failure.text, rank=rank, type_name=failure.type_name, remote_traceback=failure.traceback)


class EncodedArguments(tuple[Any, ...]):
    """Positional arguments that have been encoded, together with the named ones, for any number of calls."""

    encoder: PayloadEncoder
    positional: list[msgspec.Raw]
    named: dict[str, msgspec.Raw]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Any],
        encoder: PayloadEncoder,
        positional: list[msgspec.Raw],
        named: dict[str, msgspec.Raw],
    ) -> Self:
        """Return ``arguments`` with what ``encoder`` made of them and of the named ones."""
        encoded = cls(arguments)
        encoded.encoder, encoded.positional, encoded.named = encoder, positional, named
        return encoded
