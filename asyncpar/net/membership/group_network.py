"""The network between the agents of a group, as ``WorldService`` needs it: gRPC, or that of a simulation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb

OnUp = Callable[[str], None]
"""Told the node that there is a connection to (again)."""
OnDown = Callable[[str, bool], None]
"""Told the node that there is no connection to, and whether that shows that its agent does not run any more."""
TakeFrame = Callable[[str, str, Any], None]
"""Gets the sender of a message, its address, and the message."""
AnswerNewcomer = Callable[[pb.EnterRequest], Awaitable[pb.EnterReply]]
"""Says whether an agent that wants a place gets it."""


class PeerConnection(Protocol):
    """The way to another agent."""

    address: str

    def send(self, message: object) -> None:
        """Send a message, if the connection lives long enough; never waits."""
        ...

    async def close(self) -> None:
        """Send what waits, for a moment, and end the connection."""
        ...


class GroupNetwork(Protocol):
    """Serves one agent, and connects it to others."""

    @property
    def address(self) -> str:
        """Where this agent serves (``host:port``)."""
        ...

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        """Take frames for ``node``, one start of this agent, from now on; those for others are refused."""
        ...

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> PeerConnection:
        """Return the way from ``own`` (node and address) to ``node``, which is connected until it is closed."""
        ...

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        """Ask the agent at ``address`` for a place.

        Raises ``ConnectionError`` if nobody answers there now, ``AuthenticationError`` if the secret is another one,
        and ``UsageError`` for what is no agent of this version.
        """
        ...
