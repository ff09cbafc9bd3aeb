"""Serve the coordinator over gRPC: the machine decides, this module carries its messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from asyncpar import __version__
from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.addresses import free_port, host_of_peer
from asyncpar.errors import AuthenticationError, UsageError
from asyncpar.launch.coordinator_machine import CoordinatorMachine, JobPhase, JobSettings
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.job import JobSecret, LaunchJob
from asyncpar.launch.job_view import WholeJob, describe_job
from asyncpar.launch.messages import (
    ResumableStream,
    decode_hello,
    decode_rank_end,
    decode_state,
    decode_wait_report,
    encode_order,
)
from asyncpar.launch.protocol import (
    AgentArrived,
    AgentAssignment,
    AgentLost,
    AgentStopped,
    AnnounceExit,
    CallerRefused,
    Command,
    CoordinatorTick,
    Event,
    JobInterrupted,
    JobOutcome,
    OpenGeneration,
    RankChanged,
    RankEnded,
    RankReported,
    SendOrder,
)
from asyncpar.launch.wait_board import name_missing
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.security.identity import agent_role
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.net.transport.tls import check_caller
from asyncpar.observe.summary import JobSummary

_log = logging.getLogger(__name__)
Beginning = Callable[[], tuple[str, int]]


class CoordinatorService(membership_pb2_grpc.CoordinatorServicer):
    """The `Coordinator` servicer; it also opens the generations of the job's rendezvous and reports ended ranks there.

    ``begin_generation`` is called when all agents have arrived; it returns the MASTER_ADDR and the free MASTER_PORT.
    """

    def __init__(
        self,
        settings: JobSettings,
        rendezvous: RendezvousService,
        begin_generation: Beginning,
        view: WholeJob | None = None,
    ) -> None:
        self.view = view or WholeJob(JobSummary(job=settings.job, pid=os.getpid(), time=0.0, nnodes=settings.nnodes))
        self._machine = CoordinatorMachine(settings, now=asyncio.get_running_loop().time())
        self._rendezvous = rendezvous
        self._begin_generation = begin_generation
        self._master = ("", 0)
        self._agents = itertools.count()
        self._reconnect = settings.reconnect
        self._connected: dict[bytes, ConnectedAgent] = {}
        self._by_agent: dict[int, ConnectedAgent] = {}
        self._hosts: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def failures(self) -> tuple[RankEnd, ...]:
        """The ranks that failed, the one that explains the others first."""
        return self._machine.failures

    def open(self) -> None:
        """Start the time limit within which the agents must arrive."""
        self._arm()

    async def wait_empty(self) -> None:
        """Return when no agent is connected."""
        await self._is_empty.wait()

    def close(self) -> None:
        """Cancel all timers: nothing is decided any more."""
        timers = [connected.timer for connected in self._connected.values()]
        for timer in (self._timer, *timers):
            if timer is not None:
                timer.cancel()

    async def Attend(  # noqa: N802  # the name in the proto
        self,
        request_iterator: AsyncIterator[pb.AgentEvent],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one connection of an agent; gRPC cancels this when it breaks.

        The agent may reconnect within ``reconnect`` seconds after that, and then resumes.
        """
        requests = aiter(request_iterator)
        greeting = await anext(requests, None)
        if greeting is None or not greeting.HasField("hello"):
            return
        try:
            check_caller(context, greeting.hello.job, agent_role(greeting.hello.node_rank))
        except AuthenticationError as error:
            _log.warning("an agent was refused: %s", error)
            self.refused(context.peer(), str(error))
            await context.write(pb.AgentCommand(welcome=pb.Welcome()))
            refusal = encode_order(JobOutcome(1, f"the coordinator refused this agent: {error}"))
            refusal.number = 1
            await context.write(refusal)
            return
        connected, is_new = self._find(greeting)
        outbox = connected.connect(greeting)
        cause = "its connection closed"
        try:
            welcome = pb.AgentCommand(welcome=pb.Welcome(resumed=not is_new), received=connected.session.received)
            await context.write(welcome)
            if is_new:
                self._hosts[connected.agent] = greeting.hello.host
                self.view.arrived(connected.agent, greeting.hello.host, connected.send_unnumbered)
                self._feed(AgentArrived(connected.agent, decode_hello(greeting.hello)))
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(self._listen(connected, requests, outbox))
                while (command := await outbox.get()) is not None:
                    command.received = connected.session.received
                    await context.write(command)
                listening.cancel()
        except* grpc.aio.BaseError as errors:
            cause = f"its connection broke: {errors.exceptions[0]}"
        finally:
            if connected.outbox is outbox:
                self._away(connected, cause)

    def _find(self, greeting: pb.AgentEvent) -> tuple[ConnectedAgent, bool]:
        """Return the agent that sent ``greeting``, and whether it is a new one."""
        name = greeting.hello.session
        known = self._connected.get(name)
        if known is not None and known.node_rank == greeting.hello.node_rank:
            return known, False
        connected = ConnectedAgent(next(self._agents), name or os.urandom(16), greeting.hello.node_rank)
        self._connected[connected.name] = connected
        self._by_agent[connected.agent] = connected
        self._is_empty.clear()
        return connected, True

    def _away(self, connected: ConnectedAgent, cause: str) -> None:
        """Handle the end of a connection: an agent that has the outcome is lost at once, others if they stay away."""
        connected.outbox = None
        is_through = connected.has_outcome and not connected.session.unacknowledged
        if is_through or self._reconnect <= 0.0 or self._machine.phase == JobPhase.FORMING:
            self._lose(connected, cause)
            return
        cause += f", and it did not come back within {self._reconnect:g} s"
        connected.timer = asyncio.get_running_loop().call_later(self._reconnect, self._lose, connected, cause)

    def _lose(self, connected: ConnectedAgent, cause: str) -> None:
        self._connected.pop(connected.name, None)
        self._by_agent.pop(connected.agent, None)
        self.view.left(connected.agent)
        if not self._connected:
            self._is_empty.set()
        self._feed(AgentLost(connected.agent, cause))

    async def _listen(
        self,
        connected: ConnectedAgent,
        requests: AsyncIterator[pb.AgentEvent],
        outbox: asyncio.Queue[pb.AgentCommand | None],
    ) -> None:
        async for request in requests:
            if connected.outbox is not outbox:
                return  # there is a newer connection
            if self.view.take(connected.agent, request):
                continue
            connected.compare_clocks(request.clock)
            if connected.session.take(request):
                event = self._event(connected, request)
                if event is not None:
                    self._feed(event)
        outbox.put_nowait(None)

    def _event(self, connected: ConnectedAgent, request: pb.AgentEvent) -> Event | None:
        agent = connected.agent
        match request.WhichOneof("event"):
            case "rank_ended":
                host = self._hosts.get(agent, "?")
                return RankEnded(agent, decode_rank_end(request.rank_ended, host=host, offset=connected.offset))
            case "stopped":
                return AgentStopped(agent, request.stopped.generation)
            case "state":
                return RankChanged(agent, decode_state(request.state))
            case "told":
                report = decode_wait_report(request.told)
                return RankReported(agent, name_missing(report, self._rendezvous.missing, self._machine.host_of))
            case "interrupted":
                return JobInterrupted(agent, request.interrupted.signal_number)
        return None

    def refused(self, peer: str, why: str) -> None:
        """Record that a call of ``peer`` (as gRPC names it) was refused."""
        self._feed(CallerRefused(f"an agent at {host_of_peer(peer)}", why))

    def _feed(self, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        for command in self._machine.handle(event, now=now):
            self._obey(command)
        self.view.changed(phase=self._machine.phase.value)
        self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.next_deadline
        self._timer = None if deadline is None else loop.call_at(deadline, self._feed, CoordinatorTick())

    def _obey(self, command: Command) -> None:
        match command:
            case OpenGeneration(generation, world_size, restarts, reason):
                self._master = self._begin_generation()
                self._rendezvous.open(generation=generation, world_size=world_size)
                self.view.began(generation, world_size, restarts=restarts, reason=reason)
            case AnnounceExit(generation, rank, how):
                self._rendezvous.exited(generation=generation, rank=rank, how=how)
            case SendOrder(agent, order):
                if isinstance(order, AgentAssignment):
                    order = replace(order, master_addr=self._master[0], master_port=self._master[1])
                self._send(agent, encode_order(order))

    def _send(self, agent: int, message: pb.AgentCommand) -> None:
        connected = self._by_agent.get(agent)
        if connected is not None:
            connected.has_outcome = connected.has_outcome or message.HasField("finish")
            connected.send(message)


class ConnectedAgent:
    """One agent over all its connections; ``has_outcome``: the outcome was sent to it."""

    def __init__(self, agent: int, name: bytes, node_rank: int) -> None:
        self.agent = agent
        self.name = name
        self.node_rank = node_rank
        self.session: ResumableStream[pb.AgentCommand] = ResumableStream()
        self.outbox: asyncio.Queue[pb.AgentCommand | None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.has_outcome = False
        self.offset = math.inf
        """Seconds by which the clock of its host is behind ours, plus the shortest transit time of a message."""

    def compare_clocks(self, clock: float) -> None:
        """Compare ``clock``, its host's time when it sent the message that has just arrived, with ours."""
        if math.isfinite(clock):
            self.offset = min(self.offset, asyncio.get_running_loop().time() - clock)

    def connect(self, greeting: pb.AgentEvent) -> asyncio.Queue[pb.AgentCommand | None]:
        """Replace the connection, if any, by a new one; return the queue of messages to be sent over it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.outbox is not None:
            self.outbox.put_nowait(None)
        self.session.take(greeting)
        self.outbox = asyncio.Queue()
        for command in self.session.unacknowledged:
            self.outbox.put_nowait(command)
        return self.outbox

    def send(self, message: pb.AgentCommand) -> None:
        """Send ``message`` now, or when the agent has reconnected."""
        self.session.send(message)
        if self.outbox is not None:
            self.outbox.put_nowait(message)

    def send_unnumbered(self, message: pb.AgentCommand) -> None:
        """Send ``message`` if the agent is connected; it is not repeated."""
        if self.outbox is not None:
            self.outbox.put_nowait(message)


_FAREWELL_PATIENCE = 3.0


class CoordinatorServer:
    """Serves coordinator and rendezvous inside ``async with``, if this is the first host.

    ``address`` is the coordinator's; ``is_here``: this process serves it.  Entering raises ``UsageError`` when the port
    cannot be bound, unless another agent of the job may have been faster.
    """

    def __init__(self, job: LaunchJob, secret: JobSecret) -> None:
        self._job = job
        self._secret = secret
        self._server: RpcServer | None = None
        self._rendezvous = RendezvousService(job=job.placement.job)
        self.view = WholeJob(describe_job(job))
        """The agents' reports of the job, if it is served here."""
        self._coordinator = CoordinatorService(self._settings(), self._rendezvous, self._begin_generation, self.view)
        self.address = job.placement.coordinator

    @property
    def is_here(self) -> bool:
        return self._server is not None

    @property
    def failures(self) -> tuple[RankEnd, ...]:
        """The failed ranks of all hosts, the one that explains the others first."""
        return self._coordinator.failures

    async def __aenter__(self) -> CoordinatorServer:
        placement = self._job.placement
        if placement.serve_at is None:
            return self
        certificates = None if self._job.certificates is None else self._job.certificates.coordinator
        credentials = Credentials(self._secret.secret, certificates)
        server = RpcServer(credentials, bind=placement.serve_at[0], port=placement.serve_at[1])
        membership_pb2_grpc.add_RendezvousServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            self._rendezvous, server.server
        )
        membership_pb2_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            self._coordinator, server.server
        )
        try:
            await server.start()
        except UsageError:
            if placement.may_connect:  # another agent of the job was first
                return self
            raise
        server.on_refused = self._coordinator.refused
        self._coordinator.open()
        self._server = server
        self.address = placement.coordinator or server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait a bounded time until the other agents have the outcome, then stop the server."""
        if self._server is None:
            return
        try:
            async with asyncio.timeout(_FAREWELL_PATIENCE):
                await self._coordinator.wait_empty()
        except TimeoutError:  # an agent that does not disconnect gets no more messages
            self._rendezvous.close("the job has ended")
        self._coordinator.close()
        self._secret.clear_rendezvous_path()
        await self._server.stop(grace=0.2)

    def _settings(self) -> JobSettings:
        options = self._job.options
        return JobSettings(
            job=self._job.placement.job,
            nnodes=options.nnodes,
            max_restarts=options.max_restarts,
            restart_window=options.restart_window,
            timeout=options.timeout,
            grace=options.grace,
            silence=self._job.silence,
            reconnect=options.reconnect,
            version=__version__,
        )

    def _begin_generation(self) -> tuple[str, int]:
        """Begin a generation when all agents have come; return MASTER_ADDR and MASTER_PORT."""
        self._secret.clear_rendezvous_path()  # no more hosts will join
        address = self._job.placement.master_addr
        return address, free_port(address)
