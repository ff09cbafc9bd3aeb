"""The network between the agents of a group, and the one over gRPC: ordered frames to each, and reports of losses.

A simulation has another one (``testing/simulation``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc
import grpc.aio

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar._proto.asyncpar.v1 import group_pb2_grpc
from asyncpar.errors import AuthenticationError, ProtocolError, UsageError
from asyncpar.hosts.codec import decode_message, encode_message
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import ANY_AGENT, role_in
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.transport.tls import check_caller
from asyncpar.net.transport.tls_probe import check_tls

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


_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 3.0
_CLOSE_SECONDS = 2.0
"""Seconds within which the other agent must have read all frames before a connection is closed."""
_CONNECT_SECONDS = 0.2
"""Seconds for which a connection that is being closed may take to come up, if frames wait for it."""
_OTHER_START = "another start of that agent serves here"
_ENDED = "its agent has ended the connection"
_MOST_WAITING = 4096
"""Most frames that wait for a connection; more are dropped: anything that matters is sent again."""


class GroupPeer:
    """The connection to another agent; ``send`` never waits.

    Frames in transit when a connection breaks are lost; ``on_up`` is called when there is a connection (again),
    ``on_down`` when it breaks, or none can be made.
    """

    def __init__(
        self,
        own: tuple[str, str],
        node: str,
        address: str,
        credentials: Credentials,
        *,
        on_up: OnUp,
        on_down: OnDown,
    ) -> None:
        """``own`` are node and address of this agent."""
        self.node = node
        self.address = address
        self._own = own
        self._credentials = credentials
        self._on_up = on_up
        self._on_down = on_down
        self._outbox: asyncio.Queue[pb.GroupFrame | None] = asyncio.Queue(_MOST_WAITING)
        """Frames to write, None after the last one."""
        self._is_connected = False
        self._is_closing = False
        self._task = asyncio.create_task(self._run(), name=f"asyncpar group {node}")

    def send(self, message: object) -> None:
        """Send a message, if the connection lives long enough."""
        sender, address = self._own
        content = encode_message(message)
        frame = pb.GroupFrame(sender=sender, sender_address=address, receiver=self.node, content=content)
        if not self._outbox.full():
            self._outbox.put_nowait(frame)

    async def close(self) -> None:
        """Send waiting frames, and end the connection once the other agent has read them, or takes too long."""
        patience = _CLOSE_SECONDS if self._is_connected else 0.0 if self._outbox.empty() else _CONNECT_SECONDS
        self._is_closing = True
        if not self._outbox.full():
            self._outbox.put_nowait(None)
        await asyncio.wait({self._task}, timeout=patience)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        role = role_in(self.node) or ANY_AGENT
        async with open_channel(self.address, self._credentials, peer=role, adds_token=False) as channel:
            stub = group_pb2_grpc.GroupStub(channel)  # type: ignore[no-untyped-call]  # generated
            while True:
                why = await self._talk(stub.Exchange(metadata=self._credentials.metadata()))
                if self._is_closing:
                    return
                is_gone = "refused" in why or _OTHER_START in why or why == _ENDED
                self._on_down(self.node, is_gone)
                while not self._outbox.empty():
                    self._outbox.get_nowait()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _talk(self, call: Any) -> str:
        """Send frames over one connection; return the reason why it has ended."""
        try:
            await (
                call.initial_metadata()
            )  # the call is accepted: only now may large frames follow, see connection_watch
            if call.done():
                await call.read()
                return _ENDED
            self._is_connected = True
            self._on_up(self.node)
            writing = asyncio.create_task(self._write(call))
            try:
                await call.read()  # only the end ever arrives
            finally:
                writing.cancel()
                await asyncio.wait({writing})
            return _ENDED
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        finally:
            self._is_connected = False
            call.cancel()

    async def _write(self, call: Any) -> None:
        """Write waiting frames; the other agent ends a completed call once it has read all of them."""
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the reader gets the reason
            while (frame := await self._outbox.get()) is not None:
                await call.write(frame)
            await call.done_writing()


class GroupServicer(group_pb2_grpc.GroupServicer):
    """Accepts frames for this agent, and requests of newcomers for a place.

    With ``certificates`` both are for agents that act under the role in their own certificate; others are refused and
    reported to ``on_refused``.
    """

    def __init__(self, certificates: Certificates | None, on_refused: Callable[[str, str], None]) -> None:
        self._certificates = certificates
        self._on_refused = on_refused
        self._node: str | None = None
        self._take: TakeFrame | None = None
        self._answer: AnswerNewcomer | None = None

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        """Accept frames for ``node`` from now on."""
        self._node, self._take, self._answer = node, take, answer

    async def Enter(self, request: pb.EnterRequest, context: Any) -> pb.EnterReply:  # noqa: N802
        """Answer the request of a newcomer."""
        await self._check(context, request.node)
        if self._answer is None:
            return pb.EnterReply(refusal="this agent is only starting", is_passing=True)
        return await self._answer(request)

    async def Exchange(self, request_iterator: AsyncIterator[pb.GroupFrame], context: Any) -> None:  # noqa: N802
        """Accept frames until the sender ends."""
        await context.send_initial_metadata(())
        sender = None
        async for frame in request_iterator:
            if frame.sender != sender:
                await self._check(context, frame.sender)
                sender = frame.sender
            if frame.receiver != self._node or self._take is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, _OTHER_START)
                return
            try:
                message = decode_message(frame.content)
            except ProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            self._take(frame.sender, frame.sender_address, message)

    async def _check(self, context: Any, node: str) -> None:
        """Abort the call of a caller without the certificate named in ``node``."""
        if self._certificates is None:
            return
        role = role_in(node)
        try:
            if role is None or not ANY_AGENT.includes(role):
                raise AuthenticationError(f"it calls as {node}, which names no certificate of an agent")
            check_caller(context, self._certificates.identity.job, role)
        except AuthenticationError as error:
            self._on_refused(context.peer(), str(error))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))


class RpcGroupNetwork:
    """The network of agents over gRPC (see ``GroupNetwork``); its services are added to ``server``."""

    def __init__(self, server: RpcServer, credentials: Credentials) -> None:
        self._server = server
        self._credentials = credentials
        self._servicer = GroupServicer(credentials.certificates, server.refused)
        group_pb2_grpc.add_GroupServicer_to_server(self._servicer, server.server)  # type: ignore[no-untyped-call]

    @property
    def address(self) -> str:
        """See ``GroupNetwork``."""
        return self._server.address

    def serve(self, node: str, take: TakeFrame, answer: AnswerNewcomer) -> None:
        """See ``GroupNetwork``."""
        self._servicer.serve(node, take, answer)

    def connect(self, own: tuple[str, str], node: str, address: str, *, on_up: OnUp, on_down: OnDown) -> GroupPeer:
        """See ``GroupNetwork``."""
        return GroupPeer(own, node, address, self._credentials, on_up=on_up, on_down=on_down)

    async def ask(self, address: str, request: pb.EnterRequest) -> pb.EnterReply:
        """See ``GroupNetwork``."""
        try:
            async with (
                asyncio.timeout(_ANSWER_SECONDS),
                open_channel(address, self._credentials, peer=ANY_AGENT) as channel,
            ):
                stub = group_pb2_grpc.GroupStub(channel)  # type: ignore[no-untyped-call]  # generated
                reply: pb.EnterReply = await stub.Enter(request)
        except TimeoutError as error:
            raise ConnectionError(f"nothing for {_ANSWER_SECONDS:g} s") from error
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise AuthenticationError(
                    f"the agent at {address} did not accept our secret; all agents of a group need the same "
                    "--secret-file"
                ) from error
            if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                raise AuthenticationError(f"the agent at {address} let this one not in: {error.details()}") from error
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise UsageError(f"--join: what answers at {address} is no agent, or one of another version") from error
            await check_tls(address, self._credentials, ANY_AGENT)
            raise ConnectionError(error.details() or error.code().name) from error
        return reply
