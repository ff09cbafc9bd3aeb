"""Serve the coordinator over gRPC: the machine decides, this carries messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.errors import AuthenticationError
from asyncpar.launch.coordinator_events import (
    AgentArrived,
    AgentLost,
    AgentStopped,
    AnnounceExit,
    Assign,
    Command,
    Condemn,
    Event,
    Finish,
    Interrupted,
    OpenGeneration,
    RankChanged,
    RankEnded,
    Stop,
    Tick,
)
from asyncpar.launch.coordinator_machine import CoordinatorMachine, JobSettings
from asyncpar.launch.messages import (
    decode_failure,
    decode_hello,
    decode_state,
    encode_assignment,
    encode_condemn,
    encode_finish,
    encode_stop,
)
from asyncpar.launch.plan import Assignment, Outcome
from asyncpar.membership.service import RendezvousService
from asyncpar.security.identity import agent_role
from asyncpar.transport.tls import check_caller

_log = logging.getLogger(__name__)
Beginning = Callable[[], tuple[str, int]]


class CoordinatorService(membership_pb2_grpc.CoordinatorServicer):
    """The `Coordinator` servicer; it also tells the rendezvous of the same job what it has to know.

    ``begin_generation`` is called when all agents are there; it returns the MASTER_ADDR and the free MASTER_PORT.
    """

    def __init__(self, settings: JobSettings, rendezvous: RendezvousService, begin_generation: Beginning) -> None:
        self._machine = CoordinatorMachine(settings, now=asyncio.get_running_loop().time())
        self._rendezvous = rendezvous
        self._begin_generation = begin_generation
        self._master = ("", 0)
        self._agents = itertools.count()
        self._outboxes: dict[int, asyncio.Queue[pb.AgentCommand | None]] = {}
        self._hosts: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def open(self) -> None:
        """Begin to measure how long the agents take to come."""
        self._arm()

    async def wait_empty(self) -> None:
        """Return when no agent attends."""
        await self._is_empty.wait()

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    async def Attend(  # noqa: N802  # the name in the proto
        self,
        request_iterator: AsyncIterator[pb.AgentEvent],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one agent until it is told to finish or goes away; gRPC cancels this when its connection breaks."""
        agent = next(self._agents)
        outbox: asyncio.Queue[pb.AgentCommand | None] = asyncio.Queue()
        self._outboxes[agent] = outbox
        self._is_empty.clear()
        cause = "its connection closed"
        try:
            await context.write(pb.AgentCommand(welcome=pb.Welcome()))
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(self._listen(agent, request_iterator, outbox, context))
                while (command := await outbox.get()) is not None:
                    await context.write(command)
                    if command.HasField("finish"):
                        break
                listening.cancel()
        except* grpc.aio.BaseError as errors:
            cause = f"its connection broke: {errors.exceptions[0]}"
        finally:
            del self._outboxes[agent]
            if not self._outboxes:
                self._is_empty.set()
            self._feed(AgentLost(agent, cause))

    async def _listen(
        self,
        agent: int,
        requests: AsyncIterator[pb.AgentEvent],
        outbox: asyncio.Queue[pb.AgentCommand | None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async for request in requests:
            if request.HasField("hello"):
                try:
                    check_caller(context, request.hello.job, agent_role(request.hello.node_rank))
                except AuthenticationError as error:
                    _log.warning("an agent was refused: %s", error)
                    outbox.put_nowait(encode_finish(Outcome(1, f"the coordinator refused this agent: {error}")))
                    return
            event = self._event(agent, request)
            if event is not None:
                self._feed(event)
        outbox.put_nowait(None)

    def _event(self, agent: int, request: pb.AgentEvent) -> Event | None:
        match request.WhichOneof("event"):
            case "hello":
                self._hosts[agent] = request.hello.host
                return AgentArrived(agent, decode_hello(request.hello))
            case "rank_ended":
                now = asyncio.get_running_loop().time()
                ended = request.rank_ended
                failure = decode_failure(ended, host=self._hosts.get(agent, "?"), now=now)
                return RankEnded(agent, ended.generation, ended.rank, failure)
            case "stopped":
                return AgentStopped(agent, request.stopped.generation)
            case "state":
                return RankChanged(agent, decode_state(request.state))
            case "interrupted":
                return Interrupted(agent, request.interrupted.signal_number)
        return None

    def _feed(self, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        for command in self._machine.handle(event, now=now):
            self._obey(command)
        self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.next_deadline
        self._timer = None if deadline is None else loop.call_at(deadline, self._feed, Tick())

    def _obey(self, command: Command) -> None:
        match command:
            case OpenGeneration(generation, world_size):
                self._master = self._begin_generation()
                self._rendezvous.open(generation=generation, world_size=world_size)
            case AnnounceExit(generation, rank, how):
                self._rendezvous.exited(generation=generation, rank=rank, how=how)
            case Assign(agent, assignment):
                self._send(agent, encode_assignment(self._with_master(assignment)))
            case Stop():
                self._send(command.agent, encode_stop(command))
            case Condemn():
                self._send(command.agent, encode_condemn(command))
            case Finish(agent, outcome):
                self._send(agent, encode_finish(outcome))

    def _with_master(self, assignment: Assignment) -> Assignment:
        return replace(assignment, master_addr=self._master[0], master_port=self._master[1])

    def _send(self, agent: int, message: pb.AgentCommand) -> None:
        outbox = self._outboxes.get(agent)
        if outbox is not None:
            outbox.put_nowait(message)
