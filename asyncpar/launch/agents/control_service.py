"""The service that answers commands: submit a job, end it, report on it, make a host leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from asyncpar._proto.asyncpar.v1 import agents_pb2 as pb
from asyncpar._proto.asyncpar.v1 import agents_pb2_grpc
from asyncpar.errors import AsyncparError, AuthenticationError, LaunchError, UsageError
from asyncpar.hosts.messages import GroupHost, JobClosed, JobOpened, WorldGroup, WorldStatus
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import JobEnd, decode_end, decode_record, encode_record
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
from asyncpar.launch.agents.views import GroupView, HostView, JobView
from asyncpar.net.security.identity import ANY_AGENT
from asyncpar.net.transport.rpc import Credentials
from asyncpar.net.transport.tls import check_caller

Request = TypeVar("Request")
Serve = Callable[[Request], Awaitable[msgspec.Struct]]

_TAKEN_SECONDS = 10.0
"""Seconds that the group may take to accept a request, changes of leader included."""
_LOOK_SECONDS = 1.0
"""Seconds that another agent may take to report its state."""
_STARTING_SECONDS = 3.0
"""Seconds that a caller waits for an agent that takes no part in its group yet."""
_POLL = 0.02

_NOTHING = msgspec.msgpack.encode(Nothing())


class ControlService(agents_pb2_grpc.AgentsServicer):
    """The `Agents` servicer of the host ``name``."""

    def __init__(
        self,
        name: str,
        group: WorldGroup,
        agent: HostAgent,
        credentials: Credentials,
        *,
        on_refused: Callable[[str, str], None],
        is_for_one_job: bool = False,
    ) -> None:
        """``on_refused`` is called with the peer that was refused (as gRPC names it) and the reason."""
        self._name = name
        self.address = ""
        """The address where it is served (``host:port``)."""
        self._group = group
        self._agent = agent
        self._credentials = credentials
        self._is_for_one_job = is_for_one_job
        self._on_refused = on_refused

    async def Submit(self, request: pb.AgentsRequest, context: Any) -> pb.AgentsReply:  # noqa: N802
        """See ``submit``."""
        return await self._answer(request, context, SubmitRequest, self.submit)

    async def Cancel(self, request: pb.AgentsRequest, context: Any) -> pb.AgentsReply:  # noqa: N802
        """See ``cancel``."""
        return await self._answer(request, context, CancelRequest, self.cancel)

    async def Status(self, request: pb.AgentsRequest, context: Any) -> pb.AgentsReply:  # noqa: N802
        """See ``status``."""
        return await self._answer(request, context, Nothing, self.status)

    async def Look(self, request: pb.AgentsRequest, context: Any) -> pb.AgentsReply:  # noqa: N802
        """See ``look``."""
        return await self._answer(request, context, Nothing, self.look)

    async def Observe(self, request: pb.AgentsRequest, context: Any) -> pb.AgentsReply:  # noqa: N802
        """See ``observe``."""
        return await self._answer(request, context, ObserveRequest, self.observe)

    async def Drain(self, request: pb.AgentsRequest, context: Any) -> pb.AgentsReply:  # noqa: N802
        """See ``drain``."""
        return await self._answer(request, context, DrainRequest, self.drain)

    async def submit(self, request: SubmitRequest) -> Submitted:
        """Open a job and return its number; idempotent per launcher.  Raises ``UsageError`` if another job runs."""
        status = await self._group.status()
        last = None if status.job is None else decode_record(status.job.record)
        if status.job is not None and last is not None and last.ticket and last.ticket == request.record.ticket:
            return Submitted(number=status.job.number)
        number = 1 if status.job is None else status.job.number + 1
        if status.job is not None and last is not None and not _is_closed(status):
            raise UsageError(
                f"launch: the agents run job {status.job.number} ({last.name}); wait for its end, or end it with "
                "Ctrl-C at its launcher"
            )
        content = encode_record(request.record)
        self._group.report(JobOpened(number=number, terms=request.record.terms, record=content))
        taken = await self._until(lambda now: now.job is not None and now.job.number >= number, "the job")
        assert taken.job is not None
        if taken.job.number != number or taken.job.record != content:
            raise UsageError("launch: another job was submitted at the same moment; try again")
        return Submitted(number=number)

    async def cancel(self, request: CancelRequest) -> Nothing:
        """End a job; one that is over stays as it is."""
        end = JobEnd(exit_code=request.exit_code, message=request.why)
        self._group.report(JobClosed(number=request.number, record=encode_record(end)))
        await self._until(
            lambda now: now.job is None or now.job.number != request.number or _is_closed(now), "the end of the job"
        )
        return Nothing()

    async def look(self, _: Nothing) -> HostReport:
        """Report the state of this host."""
        status = await self._group.status()
        host = next((one for one in status.hosts if one.name == self._name), GroupHost(name=self._name, address=""))
        exit_code, failure = self._agent.failure
        return HostReport(
            view=HostView(
                name=self._name,
                address=host.address or self.address,
                state=self._state_of(host, status),
                is_leader=status.leader == self._name,
                is_voter=host.is_voter,
                version=program_version(),
                ranks=self._agent.ranks(),
                failure=failure,
            ),
            is_idle=self._agent.is_idle,
            exit_code=exit_code,
        )

    def _state_of(self, host: GroupHost, status: WorldStatus) -> str:
        if host.is_draining or self._agent.is_leaving:
            return "draining"
        if host.is_witness:
            return "witness"
        placed = set() if status.world is None else {member.host for member in status.world.members}
        is_running = status.job is not None and not _is_closed(status)
        is_full = status.job is not None and len(placed) >= status.job.terms.most_hosts
        return "waiting" if is_running and is_full and host.name not in placed else "up"

    async def observe(self, request: ObserveRequest) -> HostObserved:
        """Report what the ranks of this host do, to the agent of another one."""
        return (await request.answer(self._agent.watch)).bounded

    async def status(self, _: Nothing) -> GroupView:
        """Report the state of the group, asking all of its hosts."""
        status = await self._group.status()
        reports = await asyncio.gather(*(self._report_of(host, status) for host in status.hosts))
        world = status.world
        return GroupView(
            leader=status.leader,
            hosts=tuple(report.view for report in reports),
            job=_job_view(status, reports),
            generation=None if world is None else world.generation,
            world_size=0 if world is None else len(world.members),
            world_hosts=0 if world is None else len({member.host for member in world.members}),
            change="" if world is None else str(world.change),
            parked=status.parked,
            is_for_one_job=self._is_for_one_job,
        )

    async def _report_of(self, host: GroupHost, status: WorldStatus) -> HostReport:
        if host.name == self._name:
            return await self.look(Nothing())
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                return await ControlClient(host.address, self._credentials).look()
        except (TimeoutError, AsyncparError):
            view = HostView(
                name=host.name,
                address=host.address,
                state="unknown",
                is_leader=status.leader == host.name,
                is_voter=host.is_voter,
            )
            return HostReport(view=view, is_idle=True)

    async def drain(self, request: DrainRequest) -> Nothing:
        """Make a host leave.  Raises ``UsageError`` if there is none of that name."""
        status = await self._group.status()
        hosts = {host.name: host for host in status.hosts}
        if request.host not in hosts:
            raise UsageError(f"HOST: expected one of {', '.join(sorted(hosts))}, got {request.host!r}")
        if request.host == self._name:
            self._agent.leave("this host is drained", grace=request.grace)
            return Nothing()
        await ControlClient(hosts[request.host].address, self._credentials).drain(request)
        return Nothing()

    async def _answer(
        self, request: pb.AgentsRequest, context: Any, kind: type[Request], serve: Serve[Request]
    ) -> pb.AgentsReply:
        """Answer authorized callers: where there are certificates, those that present one of an agent."""
        certificates = self._credentials.certificates
        try:
            check_caller(context, "" if certificates is None else certificates.identity.job, ANY_AGENT)
        except AuthenticationError as error:
            self._on_refused(context.peer(), str(error))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        version = program_version()
        if request.version != version:
            return pb.AgentsReply(
                refusal=f"this agent is of asyncpar {version}, and was asked by {request.version or 'an older one'}; "
                "install the same version on all hosts"
            )
        if not await self._takes_part():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it takes no part in its group (any more, or yet)")
        try:
            result = await serve(msgspec.msgpack.decode(request.content or _NOTHING, type=kind))
        except msgspec.DecodeError as error:
            return pb.AgentsReply(refusal=f"the request cannot be read: {error}")
        except (AsyncparError, grpc.aio.AioRpcError) as error:
            return pb.AgentsReply(refusal=str(error))
        return pb.AgentsReply(content=msgspec.msgpack.encode(result))

    async def _takes_part(self) -> bool:
        """Return whether this agent is in its group.  If not, it knows no job, or an old one, and decides nothing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STARTING_SECONDS
        while self._name not in [host.name for host in (await self._group.status()).hosts]:
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def _until(self, is_so: Callable[[WorldStatus], bool], what: str) -> WorldStatus:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _TAKEN_SECONDS
        while not is_so(status := await self._group.status()):
            if loop.time() > deadline:
                why = status.parked or "the group has no leader"
                raise LaunchError(f"the agents have not taken {what} within {_TAKEN_SECONDS:g} s: {why}")
            await asyncio.sleep(_POLL)
        return status


def _is_closed(status: WorldStatus) -> bool:
    return status.job is not None and status.closed is not None and status.closed.number == status.job.number


def _job_view(status: WorldStatus, reports: list[HostReport]) -> JobView | None:
    if status.job is None:
        return None
    record = decode_record(status.job.record)
    end = decode_end(status.closed.record) if status.closed is not None and _is_closed(status) else None
    state = "running" if end is None else "over" if all(report.is_idle for report in reports) else "ending"
    late = max((report.exit_code for report in reports), default=0)
    failures = [report.view.failure for report in reports if report.view.failure]
    return JobView(
        number=status.job.number,
        name=record.name,
        mode=record.mode,
        nnodes=f"{record.least_hosts}:{record.most_hosts}",
        state=state,
        exit_code=None if end is None else end.exit_code or late,
        message="" if end is None else end.message or "; ".join(failures),
    )
