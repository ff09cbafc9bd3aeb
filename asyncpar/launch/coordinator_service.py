"""Serve the coordinator over gRPC: the machine decides, this carries messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
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
from asyncpar.launch.coordinator_machine import CoordinatorMachine, JobSettings, Phase
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
from asyncpar.launch.session import Session
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.security.identity import agent_role
from asyncpar.net.transport.tls import check_caller

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
        self._reconnect = settings.reconnect
        self._attendants: dict[bytes, _Attendant] = {}
        self._by_agent: dict[int, _Attendant] = {}
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
        timers = [attendant.timer for attendant in self._attendants.values()]
        for timer in (self._timer, *timers):
            if timer is not None:
                timer.cancel()

    async def Attend(  # noqa: N802  # the name in the proto
        self,
        request_iterator: AsyncIterator[pb.AgentEvent],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one connection of an agent; gRPC cancels this when it breaks.

        The agent stays one for ``reconnect`` seconds after that, and goes on where it was if it comes back.
        """
        requests = aiter(request_iterator)
        greeting = await anext(requests, None)
        if greeting is None or not greeting.HasField("hello"):
            return
        try:
            check_caller(context, greeting.hello.job, agent_role(greeting.hello.node_rank))
        except AuthenticationError as error:
            _log.warning("an agent was refused: %s", error)
            await context.write(pb.AgentCommand(welcome=pb.Welcome()))
            refusal = encode_finish(Outcome(1, f"the coordinator refused this agent: {error}"))
            refusal.number = 1
            await context.write(refusal)
            return
        attendant, is_new = self._find(greeting)
        outbox = attendant.connect(greeting)
        cause = "its connection closed"
        try:
            welcome = pb.AgentCommand(welcome=pb.Welcome(resumed=not is_new), received=attendant.session.received)
            await context.write(welcome)
            if is_new:
                self._hosts[attendant.agent] = greeting.hello.host
                self._feed(AgentArrived(attendant.agent, decode_hello(greeting.hello)))
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(self._listen(attendant, requests, outbox))
                while (command := await outbox.get()) is not None:
                    command.received = attendant.session.received
                    await context.write(command)
                listening.cancel()
        except* grpc.aio.BaseError as errors:
            cause = f"its connection broke: {errors.exceptions[0]}"
        finally:
            if attendant.outbox is outbox:
                self._away(attendant, cause)

    def _find(self, greeting: pb.AgentEvent) -> tuple[_Attendant, bool]:
        """Return the agent that ``greeting`` is of, and whether it is a new one."""
        name = greeting.hello.session
        known = self._attendants.get(name)
        if known is not None and known.node_rank == greeting.hello.node_rank:
            return known, False
        attendant = _Attendant(next(self._agents), name or os.urandom(16), greeting.hello.node_rank)
        self._attendants[attendant.name] = attendant
        self._by_agent[attendant.agent] = attendant
        self._is_empty.clear()
        return attendant, True

    def _away(self, attendant: _Attendant, cause: str) -> None:
        """The connection of an agent has ended: it is gone if all is said, or does not come back in time."""
        attendant.outbox = None
        is_through = attendant.is_told and not attendant.session.unacknowledged
        if is_through or self._reconnect <= 0.0 or self._machine.phase == Phase.FORMING:
            self._lose(attendant, cause)
            return
        cause += f", and it did not come back within {self._reconnect:g} s"
        attendant.timer = asyncio.get_running_loop().call_later(self._reconnect, self._lose, attendant, cause)

    def _lose(self, attendant: _Attendant, cause: str) -> None:
        self._attendants.pop(attendant.name, None)
        self._by_agent.pop(attendant.agent, None)
        if not self._attendants:
            self._is_empty.set()
        self._feed(AgentLost(attendant.agent, cause))

    async def _listen(
        self,
        attendant: _Attendant,
        requests: AsyncIterator[pb.AgentEvent],
        outbox: asyncio.Queue[pb.AgentCommand | None],
    ) -> None:
        async for request in requests:
            if attendant.outbox is not outbox:
                return  # there is a newer connection
            if attendant.session.take(request):
                event = self._event(attendant.agent, request)
                if event is not None:
                    self._feed(event)
        outbox.put_nowait(None)

    def _event(self, agent: int, request: pb.AgentEvent) -> Event | None:
        match request.WhichOneof("event"):
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
        attendant = self._by_agent.get(agent)
        if attendant is not None:
            attendant.is_told = attendant.is_told or message.HasField("finish")
            attendant.send(message)


class _Attendant:
    """One agent, over all its connections; ``is_told`` says that it was sent the outcome."""

    def __init__(self, agent: int, name: bytes, node_rank: int) -> None:
        self.agent = agent
        self.name = name
        self.node_rank = node_rank
        self.session: Session[pb.AgentCommand] = Session()
        self.outbox: asyncio.Queue[pb.AgentCommand | None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_told = False

    def connect(self, greeting: pb.AgentEvent) -> asyncio.Queue[pb.AgentCommand | None]:
        """A connection begins, in place of any other; return what is to be sent over it."""
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
        """Send ``message`` now, or when the agent is back."""
        self.session.send(message)
        if self.outbox is not None:
            self.outbox.put_nowait(message)
