"""A client of the agent at an address."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import grpc
import grpc.aio
import msgspec

from asyncpar._proto.asyncpar.v1 import agents_pb2 as pb
from asyncpar._proto.asyncpar.v1 import agents_pb2_grpc
from asyncpar.errors import AuthenticationError, LaunchError, UsageError
from asyncpar.launch.agents.requests import (
    CancelRequest,
    DrainRequest,
    HostObserved,
    HostReport,
    Nothing,
    ObserveRequest,
    SubmitRequest,
    Submitted,
    program_version,
)
from asyncpar.launch.agents.views import GroupView
from asyncpar.net.security.identity import ANY_AGENT
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.tls_probe import check_tls

Answer = TypeVar("Answer", bound=msgspec.Struct)

_SECONDS = 15.0


class NoAgent(LaunchError):  # noqa: N818
    """No agent answers at the address."""


class ControlClient:
    """Asks the agent at ``address`` (``host:port``); each call opens a connection of its own.

    Calls raise ``NoAgent`` when no agent answers, ``AuthenticationError`` when the secret or the certificates do not
    match, and ``UsageError`` with the agent's message when it refuses.
    """

    def __init__(self, address: str, credentials: Credentials, *, seconds: float = _SECONDS) -> None:
        self.address = address
        self._credentials = credentials
        self._seconds = seconds

    async def submit(self, request: SubmitRequest) -> Submitted:
        """Submit a job, and return its number."""
        return await self._ask("Submit", request, Submitted)

    async def cancel(self, request: CancelRequest) -> None:
        """End a job."""
        await self._ask("Cancel", request, Nothing)

    async def status(self) -> GroupView:
        """Return the state of the group."""
        return await self._ask("Status", Nothing(), GroupView)

    async def look(self) -> HostReport:
        """Return the state of the agent's host."""
        return await self._ask("Look", Nothing(), HostReport)

    async def observe(self, request: ObserveRequest) -> HostObserved:
        """Return the reports of the ranks on the agent's host."""
        return await self._ask("Observe", request, HostObserved)

    async def drain(self, request: DrainRequest) -> None:
        """Make a host leave the group."""
        await self._ask("Drain", request, Nothing)

    async def _ask(self, method: str, request: msgspec.Struct, kind: type[Answer]) -> Answer:
        message = pb.AgentsRequest(version=program_version(), content=msgspec.msgpack.encode(request))
        try:
            async with (
                asyncio.timeout(self._seconds),
                open_channel(self.address, self._credentials, peer=ANY_AGENT) as channel,
            ):
                stub = agents_pb2_grpc.AgentsStub(channel)  # type: ignore[no-untyped-call]  # generated
                reply = await getattr(stub, method)(message)
        except TimeoutError as error:
            raise NoAgent(f"the agent at {self.address} did not answer within {self._seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                await check_tls(self.address, self._credentials, ANY_AGENT)
            raise self._explain(error) from error
        if reply.refusal:
            raise UsageError(reply.refusal)
        return msgspec.msgpack.decode(reply.content, type=kind)

    def _explain(self, error: grpc.aio.AioRpcError) -> LaunchError | AuthenticationError:
        match error.code():
            case grpc.StatusCode.UNAUTHENTICATED:
                return AuthenticationError(
                    f"the agent at {self.address} did not accept our secret; give the --secret-file of its group"
                )
            case grpc.StatusCode.PERMISSION_DENIED:
                return AuthenticationError(f"the agent at {self.address} refused this call: {error.details()}")
            case grpc.StatusCode.UNIMPLEMENTED:
                return NoAgent(f"what answers at {self.address} is no agent of this version; see `asyncpar agent`")
            case _:
                return NoAgent(
                    f"no agent answers at {self.address} ({error.details() or error.code().name}); start one with "
                    "`asyncpar agent`, or name the address of one with --agent"
                )
