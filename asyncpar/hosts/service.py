"""The group of agents, as seen by one of them: consensus and, while this agent leads, the decisions about worlds.

The machines decide (``consensus.py``, ``worlds.py``); this module carries their messages, timers and the file of votes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence

from asyncpar import __version__
from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.errors import ProtocolError
from asyncpar.hosts import consensus_messages as consensus
from asyncpar.hosts.codec import decode_entry, decode_group, encode_entry, encode_group
from asyncpar.hosts.consensus import ConsensusNode, ElectionTimes
from asyncpar.hosts.consensus_messages import Entry
from asyncpar.hosts.entry import find_place
from asyncpar.hosts.group import PARKED_SECONDS, AgentSilence, GroupNode, GroupState, HostFacts, choose_voters
from asyncpar.hosts.messages import (
    ChangePending,
    CommandsWanted,
    GroupHost,
    HostCommand,
    HostDismissed,
    HostEvent,
    HostLeaving,
    HostParked,
    JobWaits,
    MemberArrived,
    MemberDied,
    MembersWanted,
    WorldAnnounced,
    WorldEnded,
    WorldNotice,
    WorldStarted,
    WorldStatus,
)
from asyncpar.hosts.network import GroupNetwork, PeerConnection
from asyncpar.hosts.votes import VoteFile, VoteFileError
from asyncpar.hosts.worlds import (
    CommandHosts,
    HostReported,
    LeaderCommand,
    NodeGone,
    NodeJoined,
    ProposeState,
    StateDecided,
    VotersDue,
    WorldEvent,
    WorldMachine,
    WorldTick,
)
from asyncpar.net.security.identity import Role, add_role, role_in

_log = logging.getLogger(__name__)
_TIMES = ElectionTimes(heartbeat=0.2, election=1.2, stagger=0.2, lease=0.9)
_TICK_SECONDS = 0.1
_PAUSE_SECONDS = 0.5
"""An agent that does nothing for longer was stopped, or starved."""
_SOONEST_SECONDS = 0.01
_LEAVE_SECONDS = 10.0
"""Seconds for which a leaving host waits until the others can do without its vote: longer than most of their pauses."""
_LONG_AGO = 60.0
_NO_QUORUM = "no quorum of the voters can be reached"
_NODE_BYTES = 6
MOST_STRANGERS = 8
"""Most connections to nodes that are not in the group."""


class WorldService:
    """One agent's part in the group.

    See ``WorldGroup``.  ``name`` is that of the host, unique in the group; ``join`` are addresses of agents, none to
    found a group; ``votes`` is the file of its votes, from which it resumes if there are any; ``is_witness``: it votes,
    but has no members; ``role`` is the one in its certificate, if it has one.
    """

    def __init__(
        self,
        *,
        name: str,
        network: GroupNetwork,
        join: Sequence[str],
        votes: VoteFile,
        is_witness: bool = False,
        role: Role | None = None,
    ) -> None:
        self.name = name
        self._network = network
        self._join = tuple(join)
        self._votes = votes
        self._is_witness = is_witness
        self._id = add_role(f"{name}#{secrets.token_hex(_NODE_BYTES)}", role)
        self._facts = HostFacts()
        self._own: set[str] = set()
        """Members of this start of the agent."""
        self._outbox: asyncio.Queue[HostCommand | None] = asyncio.Queue()
        self._peers: dict[str, PeerConnection] = {}
        self._node: ConsensusNode | None = None
        self._state = GroupState(nodes=())
        self._machine: WorldMachine | None = None
        self._leader: str | None = None
        self._before: str | None = None
        """The previous leader."""
        self._passed_on: set[HostCommand] = set()
        self._early: list[HostCommand] = []
        """The leader's commands about a world that this agent has not learnt of yet."""
        self._waiting: list[HostReported] = []
        """Reports to this agent when it was about to lead."""
        self._commanded: list[HostCommand] = []
        """Commands about the current world sent by this agent as the leader."""
        self._silence = AgentSilence()
        self._is_parked = False
        self._is_leaving = False
        self._leaves_at_once = False
        """Whether this host leaves without waiting for the others."""
        self._is_dismissed = False
        self._trouble: Exception | None = None
        self._awake_at = self._slept = 0.0
        self._clock: asyncio.TimerHandle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Found the group, enter it, or resume as the voter that this host was.

        Raises ``UsageError`` if it has a host of that name, or is of another version, ``AuthenticationError`` if it has
        another secret, ``LaunchError`` if nobody answers, or the stored votes cannot be read.
        """
        own = GroupNode(node=self._id, name=self.name, address=self._network.address, is_witness=self._is_witness)
        stored = self._votes.read()
        state = await find_place(own, stored, self._join, self._network, version=_version())
        self._id = state.node
        if state != stored:
            self._votes.write(state)
        is_alone = state.decided.voters == (self._id,)
        began = self._now() - (_LONG_AGO if is_alone else 0.0)  # there is no other node whose heartbeat to wait for
        self._node = ConsensusNode(self._id, state, now=began, jitter=random.random, times=_TIMES)
        self._network.serve(self._id, self._take_frame, self._answer_newcomer)
        self._awake_at = self._now()
        self._learn(state.decided)
        self._arm()
        self._ticking = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    @property
    def commands(self) -> AsyncIterator[HostCommand]:
        """See ``WorldGroup``.  Raises the error that keeps this agent from taking part any longer."""
        return self._commands()

    async def _commands(self) -> AsyncIterator[HostCommand]:
        while (command := await self._outbox.get()) is not None:
            yield command
        if self._trouble is not None:
            raise self._trouble

    @property
    def lease(self) -> float:
        """See ``WorldGroup``."""
        if self._node is None or self._is_parked or self._is_dismissed:
            return 0.0
        return max(0.0, self._node.contact + PARKED_SECONDS - self._now())

    def report(self, event: HostEvent) -> None:
        """See ``WorldGroup``."""
        if isinstance(event, MemberArrived):
            self._own.add(event.member)
        self._facts.note(event)
        self._report_to_leader(event)

    async def status(self) -> WorldStatus:
        """See ``WorldGroup``."""
        state, voters = self._state, () if self._node is None else self._node.decided.voters
        leader = next((node.name for node in state.nodes if node.node == self._leader), None)
        hosts = tuple(
            GroupHost(name=node.name, address=node.address, is_voter=node.node in voters, is_witness=node.is_witness)
            for node in state.nodes
        )
        parked = _NO_QUORUM if self._is_parked else ""
        return WorldStatus(
            leader=leader, hosts=hosts, world=state.world, job=state.job, closed=state.closed, parked=parked
        )

    async def stop(self) -> None:
        """See ``WorldGroup``."""
        self._is_leaving = True
        if len(self._state.nodes) > 1 and not self._is_dismissed:
            self.report(HostLeaving(self.name))
            try:
                async with asyncio.timeout(_LEAVE_SECONDS):
                    while self._is_missed():
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:  # the others will notice that it is gone
                pass
        for timer in (self._clock, self._ticking):
            if timer is not None:
                timer.cancel()
        self._node = None
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._outbox.put_nowait(None)

    def leave_at_once(self) -> None:
        """End ``stop`` at once, whatever the others know: they end, too, or a second signal has arrived."""
        self._leaves_at_once = True
        self._changed.set()

    def _is_missed(self) -> bool:
        """Decide whether the others need the vote of this leaving host, and can still learn that it leaves."""
        nodes = [node.node for node in self._state.nodes]
        are_gone = all(self._silence.is_gone(node) for node in nodes if node != self._id)
        return self._id in nodes and not are_gone and not self._leaves_at_once

    # -- consensus -----------------------------------------------------------------------------------------------------

    def _feed(self, event: consensus.Event) -> None:
        if self._node is None:
            return
        try:
            for command in self._node.handle(event, now=self._now()):
                self._obey(command)
        except VoteFileError as error:
            self._fail(error)

    def _obey(self, command: consensus.Command) -> None:
        match command:
            case consensus.Persist(state):
                self._votes.write(state)
            case consensus.SendMessage(node, message):
                if node in self._peers:
                    self._peers[node].send(message)
            case consensus.LearnDecided(entry):
                self._learn(entry)
            case consensus.FollowLeader(leader):
                self._follow(leader)
            case consensus.BeginLeading():
                self._lead()

    def _fail(self, error: Exception) -> None:
        """Stop voting: this agent's votes can no longer be stored."""
        self._trouble = self._trouble or error
        self._node = None
        self._outbox.put_nowait(None)

    def _learn(self, entry: Entry) -> None:
        before, self._state = self._state, decode_group(entry.content)
        self._connect(entry.nodes)
        self._changed.set()
        self._facts.prune(self._state)
        if self._leader is not None and self._leader not in entry.nodes and self._leader != self._id:
            asyncio.get_running_loop().call_soon(self._feed, consensus.NodeUnreachable(self._leader))  # it has left
        if self._id not in entry.nodes:
            self._dismiss()
            return
        state = self._state
        if not before.nodes and not state.is_job_open:
            return  # a newcomer has nothing to do with a job that is over
        if state.job is not None and state.job != before.job:
            self._outbox.put_nowait(state.job)
        if state.closed is not None and state.closed != before.closed:
            self._outbox.put_nowait(state.closed)
        if state.world is not None and state.world != before.world:
            self._passed_on.clear()
            self._commanded.clear()
            self._outbox.put_nowait(state.world)
            self._disown(state.world)
            early, self._early = self._early, []
            for command in early:
                self._pass_on(command)

    def _disown(self, world: WorldAnnounced) -> None:
        """Report members of an earlier start of this agent, which ended with it."""
        for member in world.members:
            if member.host == self.name and member.name not in self._own:
                self.report(MemberDied(member.name, "was lost when its agent was started again"))

    def _dismiss(self) -> None:
        if not self._is_leaving and not self._is_dismissed:
            self._is_dismissed = True
            self._outbox.put_nowait(HostDismissed("it did not answer them"))

    @property
    def is_dismissed(self) -> bool:
        """Whether the others have gone on without this agent; it may enter again, as a new one."""
        return self._is_dismissed

    def _connect(self, nodes: Sequence[str]) -> None:
        for node in self._state.nodes:
            if node.node != self._id and node.node not in self._peers:
                self._open(node.node, node.address)
        for name in [name for name in self._peers if name not in nodes]:
            self._drop(name)

    def _drop(self, node: str) -> None:
        peer = self._peers.pop(node)
        self._silence.forget(node)
        asyncio.ensure_future(peer.close())  # noqa: RUF006  # it takes a moment at most

    def _open(self, node: str, address: str) -> None:
        own = (self._id, self._network.address)
        self._silence.connects(node, self._awake())
        self._peers[node] = self._network.connect(own, node, address, on_up=self._is_up, on_down=self._is_down)

    def _follow(self, leader: str | None) -> None:
        if self._leader is not None and self._leader != leader:
            self._before = self._leader
        if leader is not None and leader != self._leader:
            name = next((node.name for node in self._state.nodes if node.node == leader), leader)
            _log.info("%s leads the group", "this host" if leader == self._id else name)
        self._leader = leader
        if leader != self._id:
            self._machine = None
            if leader is not None:
                self._waiting.clear()
                self._report_facts()
                if leader in self._peers:
                    self._peers[leader].send(CommandsWanted())

    def _consider_parking(self, node: ConsensusNode) -> None:
        """Park before others may go on without this host; resume when a leader hears from it."""
        is_parked = self._now() - node.contact > PARKED_SECONDS
        if is_parked != self._is_parked:
            self._is_parked = is_parked
            self._outbox.put_nowait(HostParked(_NO_QUORUM if is_parked else ""))

    # -- leading -------------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        """Propose the next change, as the leader."""
        if self._machine is None:
            self._machine = WorldMachine(self._state, now=self._awake())
            self._commanded.clear()
            self._silence.begin(self._peers, self._awake(), before=self._before)
            self._direct(WorldTick(self._quiet()))  # first: facts are judged by which hosts are heard from
            waiting, self._waiting = self._waiting, []
            for reported in waiting:
                self._direct(reported)
            self._report_facts()
        else:
            self._direct(StateDecided(self._state))

    def _direct(self, event: WorldEvent) -> None:
        machine = self._machine
        if machine is not None:
            for command in machine.handle(event, now=self._awake()):
                self._carry_out(command)

    def _carry_out(self, command: LeaderCommand) -> None:
        match command:
            case ProposeState(state):
                node = self._node
                if node is None:
                    return
                voters = choose_voters(state, node.decided.voters, self._id, self._silence.has_responded)
                nodes = tuple(one.node for one in state.nodes)
                if nodes:
                    self._feed(consensus.Propose(encode_group(state), voters, nodes))
            case CommandHosts(given):
                if not isinstance(given, JobWaits):  # it is of this moment
                    self._commanded = [*_still_current(self._commanded, given), given]
                self._pass_on(given)
                for one in self._state.nodes:
                    if one.node in self._peers:
                        self._peers[one.node].send(given)

    def _quiet(self) -> frozenset[str]:
        """Return the hosts that nobody can rely on now."""
        others = (node for node in self._state.nodes if node.node != self._id)
        return frozenset(node.name for node in others if self._silence.is_quiet(node.node, self._awake()))

    def _look_at_agents(self) -> None:
        """Find lost agents."""
        holders = frozenset() if self._machine is None else self._machine.holders
        for node, why in self._silence.lost(self._state, holders, self._awake(), own=self._id):
            if node != self._id:
                self._direct(NodeGone(node, why))

    def _look_for_voters(self) -> None:
        """Make admitted agents voters once they are heard from."""
        if self._node is None or not self._node.leads:
            return
        before = self._node.decided.voters
        if set(choose_voters(self._state, before, self._id, self._silence.has_responded)) - set(before):
            self._direct(VotersDue())

    # -- frames --------------------------------------------------------------------------------------------------------

    def _take_frame(self, sender: str, address: str, message: object) -> None:
        if self._node is None:
            return
        if any(node.node == sender for node in self._state.nodes):
            self._silence.heard(sender, self._awake())
        elif not isinstance(message, consensus.Message) or not self._has_room_for(sender):
            return  # from a former agent, or from one that never was in the group
        if isinstance(message, consensus.Message):
            if sender not in self._peers:
                self._open(sender, address)  # it may have to learn that it is not a member
            self._feed(consensus.MessageReceived(sender, message))
        elif isinstance(message, CommandsWanted):
            self._repeat(sender)
        elif isinstance(message, HostEvent):
            if self._machine is None and self._leader in (None, self._id):  # its voters take it for the leader
                self._waiting.append(HostReported(sender, message))
            self._direct(HostReported(sender, message))
        elif sender == self._leader:
            self._pass_on(message)  # type: ignore[arg-type]  # what remains

    def _has_room_for(self, stranger: str) -> bool:
        """Return whether there is a connection to ``stranger``, or room for one.

        Former agents learn over it that they are out.
        """
        strangers = self._peers.keys() - {node.node for node in self._state.nodes}
        return stranger in strangers or len(strangers) < MOST_STRANGERS

    def _repeat(self, sender: str) -> None:
        """Repeat all commands about the current world, to an agent that follows this one from now on."""
        if self._machine is not None and sender in self._peers:
            for command in self._commanded:
                self._peers[sender].send(command)

    def _pass_on(self, command: HostCommand) -> None:
        """Pass on a command of the leader, once in the current world."""
        generation = -1 if self._state.world is None else self._state.world.generation
        if (
            isinstance(command, WorldStarted | WorldEnded | ChangePending | MembersWanted | WorldNotice)
            and command.generation != generation
        ):
            if command.generation > generation:
                self._early.append(command)
            return
        if command not in self._passed_on and not self._is_dismissed:
            self._passed_on = {*_still_current(self._passed_on, command), command}
            self._outbox.put_nowait(command)

    def _report_to_leader(self, event: HostEvent) -> None:
        if self._leader == self._id:
            self._direct(HostReported(self._id, event))
        elif self._leader in self._peers:
            self._peers[self._leader].send(event)

    def _report_facts(self) -> None:
        for event in self._facts.all():
            self._report_to_leader(event)

    def _is_up(self, node: str) -> None:
        self._silence.accepts(node)
        if node == self._leader:
            self._report_facts()
        if self._machine is not None and any(one.node == node for one in self._state.nodes):
            for command in self._commanded:
                self._peers[node].send(command)

    def _is_down(self, node: str, is_gone: bool) -> None:
        if node not in self._peers:
            return
        if not any(one.node == node for one in self._state.nodes):
            self._drop(node)
            return
        if is_gone:
            self._silence.refused(node, self._awake())
            self._changed.set()
        self._feed(consensus.NodeUnreachable(node))
        self._arm()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _awake(self) -> float:
        """Return the time by which others are judged: time for which this agent was stopped does not count.

        They may have sent messages meanwhile that are still unread.
        """
        now = self._now()
        if now - self._awake_at > _PAUSE_SECONDS:
            self._slept += now - self._awake_at
        self._awake_at = now
        return now - self._slept

    def _arm(self) -> None:
        """Feed a due tick to consensus, and set the timer for the next one."""
        if self._node is not None and self._now() >= self._node.next_deadline:
            self._feed(consensus.ConsensusTick())
        if self._clock is not None:
            self._clock.cancel()
        if self._node is not None:
            at = max(self._node.next_deadline, self._now() + _SOONEST_SECONDS)
            self._clock = asyncio.get_running_loop().call_at(at, self._arm)

    def _tick(self) -> None:
        if self._node is None:
            return
        self._awake()
        if self._machine is not None:
            self._direct(WorldTick(self._quiet()))
            self._look_at_agents()
            self._look_for_voters()
        if self._node is not None:
            self._consider_parking(self._node)
        self._ticking = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    # -- newcomers -----------------------------------------------------------------------------------------------------

    async def _answer_newcomer(self, request: pb.EnterRequest) -> pb.EnterReply:
        if request.version != _version():
            return pb.EnterReply(
                refusal=f"version: the group is of asyncpar {_version()}, this agent of "
                f"{request.version or 'another'}; install the same version on all hosts"
            )
        if request.known:
            try:
                self._take_known(request.node, decode_entry(request.known))
            except ProtocolError as error:
                return pb.EnterReply(refusal=f"--state-dir: {error}")
        if self._machine is None:
            leader = next((node.address for node in self._state.nodes if node.node == self._leader), "")
            if leader and leader != self._network.address:
                return pb.EnterReply(leader_address=leader)
            return pb.EnterReply(refusal="the group has no leader now", is_passing=True)
        taken = self._state.named(request.name)
        if taken is not None and taken.node != request.node:
            return pb.EnterReply(
                refusal=f"--name: a host called {request.name!r} is in the group already, at {taken.address}; give "
                "this one another --name",
                is_passing=True,  # it may be dead without being known to be
            )
        role = role_in(request.node)
        same = next((node for node in self._state.nodes if role is not None and role_in(node.node) == role), None)
        if same is not None and same.name != request.name:
            return pb.EnterReply(
                refusal=f"--certs: {role} is in the group already, as {same.name!r} at {same.address}; each host needs "
                "the directory that `asyncpar certs init` made for it",
                is_passing=True,
            )
        newcomer = GroupNode(
            node=request.node, name=request.name, address=request.address, is_witness=request.is_witness
        )
        self._direct(NodeJoined(newcomer))
        for _ in range(100):
            node = self._node
            if node is not None and newcomer.node in node.decided.nodes:
                return pb.EnterReply(entry=encode_entry(node.decided))
            await asyncio.sleep(0.02)
        return pb.EnterReply(refusal="the group could not decide on it", is_passing=True)

    def _take_known(self, sender: str, known: Entry) -> None:
        """Learn an entry that a former voter knows decided, if it is of this group: no agent's start is in two groups.

        Raises ``ProtocolError`` for an entry that cannot be read.
        """
        decode_group(known.content)
        if self._node is not None and set(known.nodes) & set(self._node.decided.nodes):
            self._feed(consensus.MessageReceived(sender, consensus.Learn(known.generation, known)))


def _still_current(commands: Iterable[HostCommand], given: HostCommand) -> Iterable[HostCommand]:
    """Return those of ``commands`` that ``given`` does not supersede."""
    subject = _subject(given)
    return commands if subject is None else [one for one in commands if _subject(one) != subject]


def _subject(command: HostCommand) -> tuple[str, ...] | None:
    """Return the subject of ``command`` if a later one about it supersedes it."""
    match command:
        case WorldNotice(notice=notice):
            return "notice", notice.member, notice.name
        case JobWaits():
            return ("waits",)
    return None


def _version() -> str:
    return __version__
