"""The hosts of a job whose number is fixed, as its first host sees them: that one decides, alone, and keeps no votes.

It is the *coordinator* of the job, in what users read, and the launchers of all hosts are its *agents*.

Each other host keeps one stream to the first one (``further_host.py``).  Messages are numbered, and sent again after a
reconnection, so each arrives once and in order.  A host whose connection stays broken is lost, and with it the job; one
that is only silent, or whose process is stopped, is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import msgspec

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.addresses import host_of_peer, join_address, place_of_peer
from asyncpar.errors import AuthenticationError, ProtocolError
from asyncpar.hosts import pauses
from asyncpar.hosts.codec import decode_message, encode_message
from asyncpar.hosts.group import GroupNode, GroupState
from asyncpar.hosts.host_arrivals import HostArrivals
from asyncpar.hosts.messages import (
    GroupHost,
    HostCommand,
    HostEvent,
    HostLeaving,
    HostLost,
    JobWaits,
    MemberArrived,
    MemberProgressed,
    ViewGiven,
    ViewWanted,
    WorldStatus,
    number_host,
    shown_host,
)
from asyncpar.hosts.worlds import (
    CommandHosts,
    HostReported,
    LeaderCommand,
    NodeJoined,
    ProposeState,
    StateDecided,
    WorldEvent,
    WorldMachine,
    WorldTick,
)
from asyncpar.net.security.identity import agent_role
from asyncpar.net.transport.tls import check_caller

_log = logging.getLogger(__name__)
_TICK_SECONDS = 0.25
_FAREWELL_SECONDS = 3.0
"""Seconds that the other hosts may take to learn that the job is over."""
_VIEW_SECONDS = 1.2
"""Seconds that another host may take to report on its ranks; it reports those that do not answer before that."""
_SESSION_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """The introduction of a host to the first one.

    ``node_rank`` None: any free place; ``version`` is that of its package.
    """

    job: str
    nnodes: int
    node_rank: int | None
    host: str
    version: str


class NumberedStream:
    """One side of a host's stream, over all its connections.

    Each side numbers its messages and keeps them until the other side acknowledges them; every frame carries an
    acknowledgement.  After a connection has broken, unacknowledged messages are sent again, and duplicates are dropped
    by their number.
    """

    def __init__(self) -> None:
        self.received = 0
        self.unacknowledged: deque[pb.HostFrame] = deque()
        self._sent = 0

    def number(self, message: object) -> pb.HostFrame:
        """Return the frame of ``message``, which is kept."""
        self._sent += 1
        frame = pb.HostFrame(number=self._sent, content=encode_message(message))
        self.unacknowledged.append(frame)
        return frame

    def take(self, frame: pb.HostFrame) -> bool:
        """Drop the messages that ``frame`` acknowledges; return whether it has a new one."""
        while self.unacknowledged and self.unacknowledged[0].number <= frame.received:
            self.unacknowledged.popleft()
        if frame.number <= self.received:  # unnumbered, or a duplicate
            return False
        self.received = frame.number
        return True


class FirstHost(membership_pb2_grpc.FirstHostServicer):
    """The group of a job's hosts as the first one knows it; see ``WorldGroup``.  It is also the service for the others.

    ``own`` introduces this host.  ``reconnect`` is how long another one may be without a connection, in seconds;
    ``on_complete`` is called when all hosts have come.
    """

    def __init__(self, own: Introduction, *, reconnect: float, on_complete: Callable[[], None] = lambda: None) -> None:
        self._own = own
        self._reconnect = reconnect
        self._on_complete = on_complete
        self._hosts: dict[str, _Attending | None] = {}
        """All hosts by name, in the order of their arrival; this one is None."""
        self._places: dict[str, int | None] = {}
        """The places that they ask for."""
        self._given: dict[str, int] = {}
        """The places that they have, once all are here."""
        self._numbers = itertools.count()
        self._sessions: dict[bytes, _Attending] = {}
        self._early: list[HostReported] = []
        """Members that have arrived before all hosts were here: only then it is clear which place is whose."""
        self._refusals = HostArrivals()
        self._state = GroupState(nodes=())
        self._machine = WorldMachine(self._state, now=self._now(), absent=self._absent_places)
        self._outbox: asyncio.Queue[HostCommand | None] = asyncio.Queue()
        self._views: dict[int, tuple[str, asyncio.Future[bytes | None]]] = {}
        """By number: the host that is asked, and its answer."""
        self._requests = itertools.count(1)
        self._changed = asyncio.Event()
        self.name = self._admit(own, None)
        """The name of this host in the group."""
        self._ticking = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    # -- the group, as the agent of this host uses it ------------------------------------------------------------------

    @property
    def commands(self) -> AsyncIterator[HostCommand]:
        """See ``WorldGroup``."""
        return self._commands()

    async def _commands(self) -> AsyncIterator[HostCommand]:
        while (command := await self._outbox.get()) is not None:
            yield command

    @property
    def lease(self) -> float:
        """See ``WorldGroup``: nobody declares this host lost."""
        return float("inf")

    @property
    def is_dismissed(self) -> bool:
        """See ``WorldGroup``."""
        return False

    def report(self, event: HostEvent) -> None:
        """See ``WorldGroup``."""
        self._take(self.name, event)

    async def status(self) -> WorldStatus:
        """See ``WorldGroup``."""
        state = self._state
        hosts = tuple(GroupHost(name=name, address="") for name in self._hosts)
        return WorldStatus(leader=self.name, hosts=hosts, world=state.world, job=state.job, closed=state.closed)

    async def view(self, host: str, request: bytes) -> bytes | None:
        """Return the answer of ``host`` to ``request``, which its agent understands; None if it does not answer."""
        attending = self._hosts.get(host)
        if attending is None:
            return None
        number = next(self._requests)
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._views[number] = host, answer
        try:
            attending.send_unnumbered(ViewWanted(number, request))
            async with asyncio.timeout(_VIEW_SECONDS):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._views[number]

    def _answer(self, host: str, request: int, content: bytes | None) -> None:
        asked, answer = self._views.get(request, ("", None))
        if answer is not None and asked == host and not answer.done():
            answer.set_result(content)

    async def stop(self) -> None:
        """Return when the other hosts know that the job is over, or take too long."""
        self._ticking.cancel()
        try:
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while any(one is not None and one.stream.unacknowledged for one in self._hosts.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:  # they will notice that this one is gone
            pass
        for attending in self._sessions.values():
            attending.close()
        self._outbox.put_nowait(None)

    def leave_at_once(self) -> None:
        """See ``WorldGroup``: the others learn of the end while this host ends its ranks."""

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tick(self) -> None:
        self._direct(WorldTick())
        self._ticking = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _direct(self, event: WorldEvent) -> None:
        commands = self._machine.handle(event, now=self._now())
        while commands:
            commands = self._carry_out(commands)

    def _carry_out(self, commands: list[LeaderCommand]) -> list[LeaderCommand]:
        """Carry out ``commands``, and return those that follow from them: what is proposed here is decided at once."""
        following: list[LeaderCommand] = []
        for command in commands:
            match command:
                case CommandHosts(given):
                    self._command(given)
                case ProposeState(state):
                    before, self._state = self._state, state
                    for name in ("job", "closed", "world"):
                        decided = getattr(state, name)
                        if decided is not None and decided != getattr(before, name):
                            self._command(decided)
                    following += self._machine.handle(StateDecided(state), now=self._now())
        return following

    def _command(self, command: HostCommand) -> None:
        self._outbox.put_nowait(command)
        for attending in self._hosts.values():
            if attending is not None:
                attending.send(command)

    def _take(self, host: str, event: HostEvent) -> None:
        """Take an event of ``host``."""
        attending = self._hosts.get(host)
        if isinstance(event, HostLeaving) and attending is not None:
            self._lose(attending, "it has left")
            return
        if isinstance(event, MemberArrived):  # hosts do not know their names here
            event = msgspec.structs.replace(event, host=host, place=self._given.get(host))
        if isinstance(event, MemberArrived | MemberProgressed) and len(self._hosts) < self._own.nnodes:
            self._early.append(HostReported(host, event))
            return
        self._direct(HostReported(host, event))

    # -- hosts that come and go ----------------------------------------------------------------------------------------

    def _admit(self, host: Introduction, attending: _Attending | None) -> str:
        """Give ``host`` a place; return its name in the group."""
        name = number_host(host.host, next(self._numbers))
        self._hosts[name], self._places[name] = attending, host.node_rank
        if attending is not None and self._state.is_job_open and self._state.job is not None:
            attending.send(self._state.job)
        self._direct(NodeJoined(GroupNode(node=name, name=name, address="")))
        if len(self._hosts) == self._own.nnodes:
            self._begin()
        return name

    def _begin(self) -> None:
        """Let the members begin, now that all hosts are here; those that ask for no place fill the gaps in turn."""
        self._on_complete()
        taken = {place for place in self._places.values() if place is not None}
        gaps = (place for place in range(self._own.nnodes) if place not in taken)
        self._given = {name: next(gaps) if place is None else place for name, place in self._places.items()}
        early, self._early = self._early, []
        for reported in early:
            event = reported.event
            if isinstance(event, MemberArrived):
                event = msgspec.structs.replace(event, place=self._given[reported.node])
            self._direct(HostReported(reported.node, event))

    def _absent_places(self) -> list[int]:
        """Return the places of the hosts that are missing, none if those that are here do not all have one."""
        absent = [place for place in range(self._own.nnodes) if place not in self._places.values()]
        return absent if len(absent) == self._own.nnodes - len(self._hosts) else []

    def _clear_place_of(self, host: Introduction) -> None:
        """Let ``host`` have the place of one without a connection, which need not come back while the job forms."""
        if self._state.world is not None:
            return
        is_full = len(self._hosts) >= self._own.nnodes
        for name, attending in list(self._hosts.items()):
            if attending is None or attending.outbox is not None:
                continue
            place = self._places[name]
            if place == host.node_rank if None not in (place, host.node_rank) else is_full:
                attending.close()
                self._lose(attending, "another one has its place")
                return

    def _judge(self, host: Introduction) -> str:
        """Return why there is no place for ``host``, "" if there is one."""
        own = self._own
        if host.version != own.version:
            return f"the coordinator has asyncpar {own.version}, this agent {host.version}; install the same"
        if host.job != own.job:
            return f"--rdzv-id: the coordinator runs job {own.job!r}, this agent came for {host.job!r}"
        if host.nnodes != own.nnodes:
            return f"--nnodes: the coordinator expects {own.nnodes}, this agent says {host.nnodes}"
        if len(self._hosts) >= own.nnodes:
            return f"--nnodes: all {own.nnodes} agents of the job are there already"
        for name, place in self._places.items():
            if place is not None and place == host.node_rank:
                return f"--node-rank: {place} is taken by an agent on {shown_host(name)}"
        return ""

    def refused(self, peer: str, why: str) -> None:
        """Report on all hosts that a call of ``peer`` (as gRPC names it) was refused."""
        self._report_refused(f"an agent at {host_of_peer(peer)}", why)

    def _report_refused(self, who: str, why: str) -> None:
        text = self._refusals.refuse(who, why)
        if text:
            self._print(text)

    def _print(self, text: str) -> None:
        """Print ``text`` on all hosts."""
        if self._state.job is not None:
            self._command(JobWaits(self._state.job.number, text, -1))

    def _away(self, attending: _Attending, cause: str) -> None:
        """Handle the end of a connection: a host that knows the end is gone at once, others if they stay away."""
        attending.outbox = None
        self._changed.set()
        if self._hosts.get(attending.name) is not attending:
            return
        is_through = not self._state.is_job_open and not attending.stream.unacknowledged
        if is_through or self._reconnect <= 0.0:
            self._lose(attending, cause)
            return
        cause += f", and it did not come back within {self._reconnect:g} s"
        attending.absence = asyncio.create_task(self._await_return(attending, cause), name="asyncpar await a host")

    async def _await_return(self, attending: _Attending, cause: str) -> None:
        """Lose a host that does not come back, which ends this; one that is stopped has its time when it runs again."""
        was_stopped = False
        async with contextlib.aclosing(pauses.PauseProbe(attending.listens_at)) as probe:
            while True:
                await asyncio.sleep(self._reconnect)
                is_stopped = attending.listens_at != "" and await probe.is_stopped()
                if not (is_stopped or was_stopped):
                    break
                if is_stopped and not attending.is_awaited:
                    attending.is_awaited = True
                    who = f"the agent on {shown_host(attending.name)}"
                    self._print(f"{who} does not answer, as if it were stopped; waiting for it")
                was_stopped = is_stopped
        attending.absence = None
        self._lose(attending, cause)

    def _lose(self, attending: _Attending, cause: str) -> None:
        self._sessions.pop(attending.session, None)
        name = attending.name
        if self._hosts.get(name) is not attending:
            return
        del self._hosts[name], self._places[name]
        for request in list(self._views):
            self._answer(name, request, None)
        self._early = [one for one in self._early if one.node != name]
        self._changed.set()
        if not self._state.is_job_open:
            return
        if self._state.world is None:
            self._direct(HostReported(name, HostLeaving(name)))
        else:
            self._command(HostLost(name, cause))

    # -- connections ---------------------------------------------------------------------------------------------------

    async def Attend(  # noqa: N802  # the name in the proto
        self, request_iterator: AsyncIterator[pb.HostFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one connection of another host; gRPC cancels this when it breaks."""
        requests = aiter(request_iterator)
        greeting = await anext(requests, None)
        if greeting is None or not greeting.HasField("hello"):
            return
        attending, is_new, refusal = self._receive(greeting, context)
        if attending is None:
            await context.write(pb.HostFrame(welcome=refusal))
            return
        outbox = attending.connect(greeting)
        place = place_of_peer(context.peer())
        attending.listens_at = join_address(place[0], greeting.hello.port) if place and greeting.hello.port else ""
        if attending.is_awaited:
            attending.is_awaited = False
            self._print(f"the agent on {shown_host(attending.name)} answers again")
        cause = "its connection closed"
        try:
            await context.write(
                pb.HostFrame(welcome=pb.HostWelcome(resumed=not is_new), received=attending.stream.received)
            )
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(self._listen(attending, requests, outbox))
                while (frame := await outbox.get()) is not None:
                    frame.received = attending.stream.received
                    await context.write(frame)
                listening.cancel()
        except* grpc.aio.BaseError as errors:
            cause = f"its connection broke: {errors.exceptions[0]}"
        except* ProtocolError as errors:
            cause = str(errors.exceptions[0])
        finally:
            if attending.outbox is outbox:
                self._away(attending, cause)

    def _receive(
        self, greeting: pb.HostFrame, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[_Attending | None, bool, pb.HostWelcome]:
        """Return the host that sends ``greeting`` and whether it is a new one; None, and why, if there is no place."""
        hello = greeting.hello
        node_rank = hello.node_rank if hello.HasField("node_rank") else None
        try:
            check_caller(context, hello.job, agent_role(hello.node_rank))
        except AuthenticationError as error:
            _log.warning("an agent was refused: %s", error)
            self.refused(context.peer(), str(error))
            return None, False, pb.HostWelcome(refusal=f"the coordinator refused this agent: {error}", exit_code=1)
        known = self._sessions.get(hello.session)
        if known is not None and known.node_rank == node_rank:
            return known, False, pb.HostWelcome()
        host = Introduction(
            job=hello.job, nnodes=hello.nnodes, node_rank=node_rank, host=hello.host, version=hello.version
        )
        if self._state.closed is not None:
            return None, False, pb.HostWelcome(refusal="the job has ended already", exit_code=1)
        self._clear_place_of(host)
        if refusal := self._judge(host):
            self._report_refused(f"the agent on {host.host}", refusal)
            return None, False, pb.HostWelcome(refusal=refusal, exit_code=2)
        attending = _Attending(hello.session or os.urandom(_SESSION_BYTES), node_rank)
        self._sessions[attending.session] = attending
        attending.name = self._admit(host, attending)
        return attending, True, pb.HostWelcome()

    async def _listen(
        self,
        attending: _Attending,
        requests: AsyncIterator[pb.HostFrame],
        outbox: asyncio.Queue[pb.HostFrame | None],
    ) -> None:
        async for frame in requests:
            if attending.outbox is not outbox:
                return  # there is a newer connection
            is_new = attending.stream.take(frame)
            self._changed.set()
            if not frame.content or (frame.number and not is_new):
                continue
            message = decode_message(frame.content)
            if isinstance(message, ViewGiven):
                self._answer(attending.name, message.request, message.content)
            elif is_new:
                self._take(attending.name, message)
        outbox.put_nowait(None)


class _Attending:
    """Another host over all its connections."""

    def __init__(self, session: bytes, node_rank: int | None) -> None:
        self.session = session
        self.node_rank = node_rank
        self.name = ""
        self.stream = NumberedStream()
        self.outbox: asyncio.Queue[pb.HostFrame | None] | None = None
        self.absence: asyncio.Task[None] | None = None
        """Awaits the return of a host that has no connection."""
        self.is_awaited = False
        """Whether it was reported that its process is stopped."""
        self.listens_at = ""
        """Where connections show whether its process is stopped; "": unknown."""

    def connect(self, greeting: pb.HostFrame) -> asyncio.Queue[pb.HostFrame | None]:
        """Replace the connection, if any, by a new one; return the queue of frames to be sent over it."""
        self._end_absence()
        if self.outbox is not None:
            self.outbox.put_nowait(None)
        self.stream.take(greeting)
        self.outbox = asyncio.Queue()
        for frame in self.stream.unacknowledged:
            self.outbox.put_nowait(frame)
        return self.outbox

    def send(self, message: object) -> None:
        """Send ``message`` now, or when the host has reconnected."""
        frame = self.stream.number(message)
        if self.outbox is not None:
            self.outbox.put_nowait(frame)

    def send_unnumbered(self, message: object) -> None:
        """Send ``message`` if the host is connected; it is not repeated."""
        if self.outbox is not None:
            self.outbox.put_nowait(pb.HostFrame(content=encode_message(message)))

    def close(self) -> None:
        """End the connection once all frames are sent; nothing is decided about the host any more."""
        self._end_absence()
        if self.outbox is not None:
            self.outbox.put_nowait(None)

    def _end_absence(self) -> None:
        if self.absence is not None:
            self.absence.cancel()
            self.absence = None
