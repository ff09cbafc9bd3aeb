"""The agent's side of its stream to the coordinator."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.errors import AuthenticationError
from asyncpar.launch import agent_machine
from asyncpar.launch.messages import ResumableStream, decode_order, encode_hello
from asyncpar.launch.protocol import AgentHello, Announcement, JobOutcome
from asyncpar.net.security.identity import COORDINATOR
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.tls_probe import check_tls

_RETRY_SECONDS = 0.1
_NAME_BYTES = 16
_PATIENCE = 3.0
"""Seconds without a coordinator before that is reported."""
_AGAIN_SECONDS = 30.0
_MOST_UNSENT = 256
"""The number of unsent messages beyond which droppable ones are dropped."""
_FINAL = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED})
EventTaker = Callable[[agent_machine.Event], None]


def _unanswered(address: str, timeout: float) -> str:
    return (
        f"no coordinator answers at {address} yet; waiting up to {timeout:g} s for the agent of the first host "
        "(--node-rank 0)"
    )


class CoordinatorClient:
    """Keeps a connection to the coordinator at ``address`` and passes its orders to ``take``.

    A broken connection is made again, for up to ``reconnect`` seconds; no message is lost or delivered twice.
    """

    def __init__(
        self, address: str, credentials: Credentials, *, timeout: float, take: EventTaker, reconnect: float = 5.0
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._timeout = timeout
        self._reconnect = reconnect
        self._take = take
        self._name = os.urandom(_NAME_BYTES)
        self._session: ResumableStream[pb.AgentEvent] = ResumableStream()
        self._outbox: asyncio.Queue[pb.AgentEvent | None] = asyncio.Queue()
        self._is_connected = False
        self.on_collect: Callable[[pb.Collect], None] = lambda _: None
        """Called when the coordinator asks for the reports of the ranks on this host."""
        self.has_finished = False
        """Whether the coordinator has sent the outcome; then ``run`` ends in a moment."""

    def send(self, message: pb.AgentEvent) -> None:
        """Send ``message``, in order, after the greeting."""
        self._outbox.put_nowait(self._session.send(message))

    def send_unnumbered(self, message: pb.AgentEvent) -> bool:
        """Send ``message`` if there is a connection that keeps up; otherwise drop it and return False."""
        if not self._is_connected or self._outbox.qsize() > _MOST_UNSENT:
            return False
        self._outbox.put_nowait(message)
        return True

    async def run(self, hello: AgentHello) -> None:
        """Stay connected until the job is over; report ``CoordinatorLost`` if no coordinator is found or it is lost."""
        loop = asyncio.get_running_loop()
        broken_at, cause = loop.time(), ""
        while True:
            left = self._timeout if not cause else broken_at + self._reconnect - loop.time()
            was_there, self._is_connected = bool(cause), False
            trouble, may_help = await self._try(hello, max(left, 0.0), may_come_back=was_there)
            if self.has_finished:
                return
            if self._is_connected or not cause:
                broken_at, cause = loop.time(), trouble
            if not may_help or loop.time() >= broken_at + self._reconnect:
                again = f"; it did not come back within {self._reconnect:g} s (--reconnect-within)" if was_there else ""
                self._take(agent_machine.CoordinatorLost((cause if may_help else trouble) + again))
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _try(self, hello: AgentHello, seconds: float, *, may_come_back: bool) -> tuple[str, bool]:
        """Serve one connection; return why it ended, and whether to try another one.

        ``may_come_back`` is the second value if no coordinator answers within ``seconds``.
        """
        try:
            await self._attend(hello, seconds)
        except grpc.aio.AioRpcError as error:
            return self._explain(error), error.code() not in _FINAL
        except AuthenticationError as error:
            return str(error), False
        except TimeoutError:
            return (
                f"no coordinator answered at {self._address} for {self._timeout:g} s; is the agent of the first host "
                "(--node-rank 0) running there, with the same --rdzv-endpoint?",
                may_come_back,
            )
        return f"the coordinator at {self._address} ended without a word", True

    async def _attend(self, hello: AgentHello, seconds: float) -> None:
        async with open_channel(self._address, self._credentials, peer=COORDINATOR) as channel:
            stub = membership_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]  # generated
            async with asyncio.timeout(seconds):
                await self._check_access(channel)
                commands = aiter(stub.Attend(self._messages(hello), wait_for_ready=True))
                welcome = await anext(commands)
            if self._session.received and not welcome.welcome.resumed:
                raise AuthenticationError(f"the coordinator at {self._address} is another one than before")
            self._is_connected = True
            self._session.take(welcome)
            async for command in commands:
                if command.HasField("collect"):
                    self.on_collect(command.collect)
                    continue
                if not self._session.take(command):
                    continue
                order = decode_order(command)
                if isinstance(order, JobOutcome):
                    self.has_finished = True
                    self._outbox.put_nowait(pb.AgentEvent())  # acknowledges the outcome
                    self._outbox.put_nowait(None)
                if order is not None:
                    self._take(order)

    async def _check_access(self, channel: grpc.aio.Channel) -> None:
        """Make one unary call, repeated until the server answers; it raises errors that a refused stream may hide.

        When a server refuses a stream while the client is still opening it, grpc.aio may report INTERNAL instead of the
        status that was sent.  Waiting inside gRPC for the server would hide a TLS handshake that can only fail.
        """
        stub = health_pb2_grpc.HealthStub(channel)
        now = asyncio.get_running_loop().time
        announced_at = now() + _PATIENCE - _AGAIN_SECONDS
        while True:
            try:
                await stub.Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await check_tls(self._address, self._credentials, COORDINATOR)
                if now() >= announced_at + _AGAIN_SECONDS and not self._session.received:
                    announced_at = now()
                    self._take(Announcement(_unanswered(self._address, self._timeout)))
            else:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _messages(self, hello: AgentHello) -> AsyncIterator[pb.AgentEvent]:
        """Yield the greeting, unacknowledged messages, and new ones until the outcome is acknowledged."""
        outbox: asyncio.Queue[pb.AgentEvent | None] = asyncio.Queue()
        for waiting in self._session.unacknowledged:
            outbox.put_nowait(waiting)
        self._outbox = outbox
        greeting = encode_hello(hello)
        greeting.hello.session = self._name
        greeting.received = self._session.received
        yield greeting
        while (message := await outbox.get()) is not None:
            message.received = self._session.received
            message.clock = time.monotonic()
            yield message

    def _explain(self, error: grpc.aio.AioRpcError) -> str:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return (
                f"the coordinator at {self._address} did not accept our secret; "
                "all agents of a job need the same --secret-file"
            )
        return f"lost the coordinator at {self._address} ({error.details() or error.code().name})"
