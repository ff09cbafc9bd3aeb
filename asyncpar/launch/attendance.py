"""The agent's side of its stream to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.errors import AuthenticationError
from asyncpar.launch import agent_events
from asyncpar.launch.messages import decode_command, encode_hello
from asyncpar.launch.plan import Hello
from asyncpar.security.identity import COORDINATOR
from asyncpar.transport.rpc import Credentials, open_channel
from asyncpar.transport.tls_probe import check_tls

_RETRY_SECONDS = 0.1
EventTaker = Callable[[agent_events.Event], None]


class Attendance:
    """Attends at the coordinator at ``address``; what it says becomes events for ``take``."""

    def __init__(self, address: str, credentials: Credentials, *, timeout: float, take: EventTaker) -> None:
        self._address = address
        self._credentials = credentials
        self._timeout = timeout
        self._take = take
        self._outbox: asyncio.Queue[pb.AgentEvent] = asyncio.Queue()

    def tell(self, message: pb.AgentEvent) -> None:
        """Send ``message``, in order, after the greeting."""
        self._outbox.put_nowait(message)

    async def run(self, hello: Hello) -> None:
        """Attend until the coordinator goes away, which becomes ``CoordinatorLost``; also if it never was there."""
        try:
            await self._attend(hello)
        except grpc.aio.AioRpcError as error:
            self._take(agent_events.CoordinatorLost(self._explain(error)))
        except AuthenticationError as error:
            self._take(agent_events.CoordinatorLost(str(error)))
        except TimeoutError:
            self._take(
                agent_events.CoordinatorLost(
                    f"no coordinator answered at {self._address} for {self._timeout:g} s; is the agent of the first "
                    "host (--node-rank 0) running there, with the same --rdzv-endpoint?"
                )
            )
        else:
            self._take(agent_events.CoordinatorLost(f"the coordinator at {self._address} ended without a word"))

    async def _attend(self, hello: Hello) -> None:
        async with open_channel(self._address, self._credentials, peer=COORDINATOR) as channel:
            stub = membership_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]  # generated
            async with asyncio.timeout(self._timeout):
                await self._knock(channel)
                commands = aiter(stub.Attend(self._messages(hello), wait_for_ready=True))
                await anext(commands)  # the welcome
            async for command in commands:
                event = decode_command(command)
                if event is not None:
                    self._take(event)

    async def _knock(self, channel: grpc.aio.Channel) -> None:
        """Make one plain call, as often as it takes, which raises what a refused stream may hide.

        When a server refuses a stream while the client is still opening it, grpc.aio may report INTERNAL instead of the
        status that was sent.  Waiting inside gRPC for the server would hide a TLS handshake that can only fail.
        """
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                await stub.Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await check_tls(self._address, self._credentials, COORDINATOR)
            else:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _messages(self, hello: Hello) -> AsyncIterator[pb.AgentEvent]:
        yield encode_hello(hello)
        while True:
            yield await self._outbox.get()

    def _explain(self, error: grpc.aio.AioRpcError) -> str:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return (
                f"the coordinator at {self._address} did not accept our secret; "
                "all agents of a job need the same --secret-file"
            )
        return f"lost the coordinator at {self._address} ({error.details() or error.code().name})"
