"""The network between the agents of a group, as ``WorldService`` needs it: gRPC, or that of a simulation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb

OnUp = Callable[[str], None]
"""Called with the node to which there is a connection (again)."""
OnDown = Callable[[str, bool], None]
"""Called with the node to which there is no connection, and whether that shows that its agent no longer runs."""
TakeFrame = Callable[[str, str, Any], None]
"""Called with the sender of a message, its address, and the message."""
AnswerNewcomer = Callable[[pb.EnterRequest], Awaitable[pb.EnterReply]]
"""Decides whether an agent that requests a place gets it."""


class PeerConnection(Protocol):
    """The connection to another agent."""

    address: str

    def send(self, message: object) -> None:
        """Send a message, if the connection lives long enough; never waits."""
        ...

    async def close(self) -> None:
        """Send waiting messages, for a moment at most, and end the connection."""
        ...


class GroupNetwork(Protocol):
    """Serves one agent, and connects it to others."""

    @property
    def address(self) -> str:
        """The address at which this agent serves (``host:port``)."""
        ...

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        """Accept frames for ``node``, one start of this agent, from now on; those for others are refused."""
        ...

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> PeerConnection:
        """Return the connection from ``own`` (node and address) to ``node``, which is kept up until it is closed."""
        ...

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        """Request a place from the agent at ``address``.

        Raises ``ConnectionError`` if nobody answers there now, ``AuthenticationError`` if the secret is another one,
        and ``UsageError`` if the server is not an agent of this version.
        """
        ...
