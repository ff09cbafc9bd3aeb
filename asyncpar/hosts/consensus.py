"""Agreement on a chain of entries among a few voters that change with every entry: Paxos, one instance per entry.

Sans-I/O: ``handle`` takes events and returns commands; no clock, no sockets, no randomness but ``jitter``.

Each entry names the voters of the entry after it.  So entry ``n + 1`` is decided by the voters of entry ``n`` alone,
and a lost voter is replaced by the next entry: of four voters three go on, of these two, of these one.  Entries exist
only when a world changes, so nothing is gained by deciding several at a time.

An instance is single-decree Paxos (Lamport, "Paxos Made Simple", 2001), and the change of voters from one instance to
the next is that of "Reconfiguring a State Machine" (Lamport, Malkhi, Zhou, 2010) with one instance under way.  The
election is its first phase: *terms* are the ballots.  The measures that keep elections quiet are taken from Raft
(Ongaro, 2014, "Consensus: Bridging Theory and Practice"): heartbeats, the vote before the vote, and a leader that steps
down when it hears from no quorum.

Safety needs no clock.  It rests on the following: promises and acceptances are stored before they are answered; two
quorums of the same voters have a voter in common; a leader proposes the entry that the highest term has accepted, if
any; and every instance has a first phase of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from asyncpar.hosts.consensus_messages import (
    Acceptance,
    AcceptEntry,
    BeginLeading,
    Behind,
    Command,
    ConsensusTick,
    DurableState,
    Entry,
    EntryAccepted,
    Event,
    FollowLeader,
    Heartbeat,
    HeartbeatAck,
    Learn,
    LearnDecided,
    Message,
    MessageReceived,
    NodeUnreachable,
    Persist,
    Prepare,
    PreVote,
    PreVoteGranted,
    Promise,
    Propose,
    Refused,
    SendMessage,
    Term,
    has_quorum,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionTimes:
    """Times of an election, in seconds.

    A follower that hears from no leader for ``election`` asks for votes; the n-th voter waits n times ``stagger``
    longer.  A leader that hears from no quorum for ``lease`` steps down; that is less than ``election``, by more than
    clocks differ in rate.
    """

    heartbeat: float = 0.1
    election: float = 0.8
    stagger: float = 0.15
    lease: float = 0.6


class _Role(Enum):
    FOLLOWER = auto()
    PRE_CANDIDATE = auto()
    CANDIDATE = auto()
    LEADER = auto()


@dataclass(slots=True)
class _Campaign:
    """Answers to this node's requests for the entry after ``generation``."""

    generation: int
    acknowledged: set[str] = field(default_factory=set)
    inherited: Acceptance | None = None


class ConsensusNode:
    """One node: a voter or not, depending on the last decided entry."""

    def __init__(
        self,
        node: str,
        state: DurableState,
        *,
        now: float,
        jitter: Callable[[], float],
        times: ElectionTimes = ElectionTimes(),  # immutable
    ) -> None:
        """``jitter`` returns numbers from 0.0 to 1.0, which keep candidates apart."""
        self._node, self._state, self._times, self._jitter = node, state, times, jitter
        self._role = _Role.FOLLOWER
        self._leader: str | None = None
        self._term: Term | None = None
        self._followed: Term | None = None
        self._leads_in: Term | None = None
        """The term in which this node follows the leader."""
        self._campaign = _Campaign(state.decided.generation)
        self._proposed: Entry | None = None
        self._is_ready = False
        self._seen = state.promised.number if state.promised is not None else 0
        self._received_at: dict[str, float] = {}
        self._echoes: dict[str, float] = {}
        self._contact = now
        self._prepared_at = now
        self._leader_seen_at = now
        self._beat_at = now
        self._elect_at = now + self._patience()

    @property
    def decided(self) -> Entry:
        """The last entry that this node knows to be decided."""
        return self._state.decided

    @property
    def leader(self) -> str | None:
        """The leader, as far as this node knows."""
        return self._leader

    @property
    def leads(self) -> bool:
        """Whether this node leads and may propose."""
        return self._role is _Role.LEADER and self._is_ready and self._proposed is None

    @property
    def contact(self) -> float:
        """The time, by this node's clock, at which a leader with a quorum last heard from this node, at the earliest.

        No leader has declared it lost before that.
        """
        return self._contact

    @property
    def next_deadline(self) -> float:
        """The time at which a ``ConsensusTick`` is due."""
        return min(self._beat_at, self._elect_at)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        match event:
            case MessageReceived(sender, message):
                commands = self._receive(sender, message, now)
            case NodeUnreachable(node):
                commands = self._unreachable(node, now)
            case Propose():
                commands = self._propose(event)
            case ConsensusTick():
                commands = self._tick(now)
        while self._role is _Role.LEADER and self._campaign.generation != self.decided.generation:
            commands += self._continue_leading(now)
        return commands

    # Time.

    def _patience(self) -> float:
        """Return the seconds for which this node waits for a leader: voters do not all campaign at once."""
        voters = self.decided.voters
        place = voters.index(self._node) if self._node in voters else len(voters)
        return self._times.election + (place + self._jitter()) * self._times.stagger

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if now >= self._beat_at:
            self._beat_at = now + self._times.heartbeat
            commands += self._beat(now)
        if now >= self._elect_at:
            commands += self._canvass(now)
        return commands

    def _beat(self, now: float) -> list[Command]:
        """Resend unanswered messages; as a leader, show that it lives, or step down."""
        match self._role:
            case _Role.FOLLOWER:
                return []
            case _Role.PRE_CANDIDATE:
                return self._ask(PreVote(self.decided.generation))
            case _Role.CANDIDATE:
                return self._ask(self._preparation())
            case _Role.LEADER:
                since = now - self._times.lease
                alive = {node for node, at in self._received_at.items() if at > since} | {self._node}
                if has_quorum(self.decided.voters, alive):
                    self._contact = max(self._contact, since)
                elif now > self._prepared_at + self._times.lease:  # else voters may be new, and not have answered yet
                    return self._step_down(now)
                self._elect_at = now + self._patience()
                others = [node for node in self._audience() if node != self._node]
                commands: list[Command] = [SendMessage(node, self._heartbeat(node)) for node in others]
                if self._proposed is not None:
                    return commands + self._ask(AcceptEntry(self.decided.generation, self._led_term(), self._proposed))
                return commands if self._is_ready else commands + self._ask(self._preparation())

    def _heartbeat(self, node: str) -> Heartbeat:
        return Heartbeat(self.decided.generation, self._led_term(), self._echoes.get(node))

    def _audience(self) -> tuple[str, ...]:
        return self.decided.nodes

    def _ask(self, message: Message) -> list[Command]:
        """Send ``message`` to the voters that have not answered it."""
        missing = [node for node in self.decided.voters if node not in self._campaign.acknowledged]
        return [SendMessage(node, message) for node in missing if node != self._node]

    def _preparation(self) -> Prepare:
        return Prepare(self.decided.generation, self._led_term())

    def _led_term(self) -> Term:
        assert self._term is not None, "a candidate and a leader have a term"
        return self._term

    # Elections.

    def _canvass(self, now: float) -> list[Command]:
        """Ask whether there would be votes: a node that was away must not disturb those that have a leader."""
        self._elect_at = now + self._patience()
        commands: list[Command] = [] if self._leader is None else [FollowLeader(None)]
        self._leader = None
        if self._node not in self.decided.voters:
            self._role = _Role.FOLLOWER
            return commands + [SendMessage(node, Behind(self.decided.generation)) for node in self._audience()]
        self._role, self._term = _Role.PRE_CANDIDATE, None
        self._begin_asking()
        self._campaign.acknowledged.add(self._node)
        self._beat_at = now + self._times.heartbeat
        if has_quorum(self.decided.voters, self._campaign.acknowledged):
            return commands + self._run(now)
        return commands + self._ask(PreVote(self.decided.generation))

    def _begin_asking(self) -> None:
        self._campaign = _Campaign(self.decided.generation)
        self._proposed, self._is_ready = None, False

    def _run(self, now: float) -> list[Command]:
        """Become a candidate in a term above all those that this node has seen."""
        self._seen += 1
        self._role, self._term = _Role.CANDIDATE, Term(self._seen, self._node)
        self._elect_at = now + self._patience()
        self._received_at = {}
        return self._prepare(now)

    def _prepare(self, now: float) -> list[Command]:
        """Begin phase 1 for the entry after the last decided one; this node's own promise comes first."""
        self._begin_asking()
        self._prepared_at = now
        term = self._led_term()
        persisted = self._store(promised=term)
        asked = self._ask(self._preparation())
        return persisted + asked + self._promised(self._node, Promise(self.decided.generation, term, self._mine()), now)

    def _mine(self) -> Acceptance | None:
        return self._state.accepted

    def _promised(self, sender: str, promise: Promise, now: float) -> list[Command]:
        if promise.term != self._term or self._role not in (_Role.CANDIDATE, _Role.LEADER) or self._is_ready:
            return []
        self._received_at[sender] = now
        campaign = self._campaign
        campaign.acknowledged.add(sender)
        found = promise.accepted
        if found is not None and (campaign.inherited is None or found.term > campaign.inherited.term):
            campaign.inherited = found
        if not has_quorum(self.decided.voters, campaign.acknowledged):
            return []
        commands: list[Command] = []
        self._contact = max(self._contact, self._prepared_at)
        if self._role is _Role.CANDIDATE:
            self._role, self._leader, self._beat_at, self._echoes = _Role.LEADER, self._node, now, {}
            commands.append(FollowLeader(self._node))
        self._is_ready = True
        if campaign.inherited is not None:
            return commands + self._begin_accepting(campaign.inherited.entry)
        return [*commands, BeginLeading(self._led_term())]

    def _step_down(self, now: float) -> list[Command]:
        led = self._leader == self._node
        self._role, self._term, self._proposed, self._is_ready = _Role.FOLLOWER, None, None, False
        self._elect_at = now + self._patience()
        if not led:
            return []
        self._leader = None
        return [FollowLeader(None)]

    def _unreachable(self, node: str, now: float) -> list[Command]:
        """Ask for votes soon if it was the leader."""
        self._received_at.pop(node, None)
        if node == self._leader and self._role is _Role.FOLLOWER:
            self._leader_seen_at = now - self._times.election
            soon = now + self._patience() - self._times.election
            self._elect_at = min(self._elect_at, soon)
        return []

    # Deciding.

    def _propose(self, proposal: Propose) -> list[Command]:
        if not self.leads:
            return []
        return self._begin_accepting(
            Entry(
                generation=self.decided.generation + 1,
                voters=proposal.voters,
                nodes=proposal.nodes,
                content=proposal.content,
            )
        )

    def _begin_accepting(self, entry: Entry) -> list[Command]:
        """Begin phase 2; this node's own acceptance comes first."""
        self._proposed = entry
        self._campaign = _Campaign(self.decided.generation)
        term = self._led_term()
        commands = self._store(accepted=Acceptance(term, entry))
        commands += self._ask(AcceptEntry(self.decided.generation, term, entry))
        return commands + self._acknowledged(self._node, EntryAccepted(self.decided.generation, term))

    def _acknowledged(self, sender: str, accepted: EntryAccepted) -> list[Command]:
        entry = self._proposed
        if accepted.term != self._term or entry is None:
            return []
        self._campaign.acknowledged.add(sender)
        if not has_quorum(self.decided.voters, self._campaign.acknowledged):
            return []
        before = self._audience()
        commands = self._decide(entry)
        audience = dict.fromkeys((*before, *self._audience()))
        learn = Learn(entry.generation, entry)
        return commands + [SendMessage(node, learn) for node in audience if node != self._node]

    def _decide(self, entry: Entry) -> list[Command]:
        accepted = self._state.accepted
        if accepted is not None and accepted.entry.generation <= entry.generation:
            accepted = None
        self._state = replace(self._state, decided=entry, accepted=accepted)
        return [Persist(self._state), LearnDecided(entry)]

    def _store(self, *, promised: Term | None = None, accepted: Acceptance | None = None) -> list[Command]:
        """Store a promise, or an acceptance, which is also a promise; do nothing if it is stored."""
        if accepted is not None:
            state = replace(self._state, promised=accepted.term, accepted=accepted)
        else:
            state = replace(self._state, promised=promised)
        if state == self._state:
            return []
        self._state = state
        return [Persist(state)]

    # Messages.

    def _receive(self, sender: str, message: Message, now: float) -> list[Command]:
        mine = self.decided.generation
        if isinstance(message, Learn):
            return self._learn(sender, message.entry, now) if message.generation > mine else []
        if message.generation > mine:
            return [SendMessage(sender, Behind(mine))]
        if message.generation < mine:
            return [SendMessage(sender, Learn(mine, self.decided))]
        if not self._may_take_part(sender, message):
            return []
        return self._answer(sender, message, now) or self._count(sender, message, now)

    def _may_take_part(self, sender: str, message: Message) -> bool:
        """Decide whether ``sender`` may take part in deciding the next entry by sending ``message``.

        Only voters lead, ask for votes and give them; a former node, or one that never was one, has no say.
        """
        if isinstance(message, Refused | HeartbeatAck | Behind):  # from a follower, which may have been a voter
            return sender in self.decided.nodes
        return sender in self.decided.voters

    def _answer(self, sender: str, message: Message, now: float) -> list[Command]:
        """Answer a request of a candidate or a leader."""
        match message:
            case PreVote():
                return self._asked_for_vote(sender, now)
            case Prepare(_, term):
                return self._asked_to_promise(sender, term, now)
            case AcceptEntry(_, term, entry):
                return self._asked_to_accept(sender, term, entry, now)
            case Heartbeat(_, term, echo):
                return self._beaten(sender, term, echo, now)
        return []

    def _count(self, sender: str, message: Message, now: float) -> list[Command]:
        """Count the answer to a request of this node."""
        match message:
            case PreVoteGranted(_, promised):
                return self._vote_offered(sender, promised, now)
            case Promise():
                return self._promised(sender, message, now)
            case EntryAccepted():
                self._received_at[sender] = now
                return self._acknowledged(sender, message)
            case Refused(_, promised):
                return self._refused(promised, now)
            case HeartbeatAck(_, term, at) if term == self._term:
                self._received_at[sender] = now
                self._echoes[sender] = at
        return []

    def _continue_leading(self, now: float) -> list[Command]:
        """Prepare the next entry after a decision, if this node is a voter for it."""
        return self._prepare(now) if self._node in self.decided.voters else self._step_down(now)

    def _learn(self, sender: str, entry: Entry, now: float) -> list[Command]:
        """Adopt a decision from another node, which ends the one that this node was about to make."""
        commands = self._decide(entry)
        if self._role is not _Role.FOLLOWER:
            commands += self._step_down(now)
        if sender in entry.nodes:
            self._elect_at = now + self._patience()
        return commands

    def _asked_for_vote(self, sender: str, now: float) -> list[Command]:
        has_leader = self._role is _Role.LEADER or (
            self._leader is not None and now - self._leader_seen_at < self._times.election
        )
        if has_leader:
            return []
        return [SendMessage(sender, PreVoteGranted(self.decided.generation, self._state.promised))]

    def _vote_offered(self, sender: str, promised: Term | None, now: float) -> list[Command]:
        if promised is not None:
            self._seen = max(self._seen, promised.number)
        if self._role is not _Role.PRE_CANDIDATE:
            return []
        self._campaign.acknowledged.add(sender)
        return self._run(now) if has_quorum(self.decided.voters, self._campaign.acknowledged) else []

    def _must_refuse(self, term: Term) -> bool:
        promised = self._state.promised
        return promised is not None and term < promised

    def _refuse(self, sender: str) -> list[Command]:
        promised = self._state.promised
        assert promised is not None, "only a promise refuses"
        return [SendMessage(sender, Refused(self.decided.generation, promised))]

    def _yield_to(self, term: Term, now: float) -> list[Command]:
        """Take part in ``term``, which ends an attempt of this node in a lower one."""
        self._seen = max(self._seen, term.number)
        if self._term is not None and self._term < term:
            return self._step_down(now)
        return []

    def _asked_to_promise(self, sender: str, term: Term, now: float) -> list[Command]:
        if self._must_refuse(term):
            return self._refuse(sender)
        commands = self._yield_to(term, now)
        self._elect_at = now + self._patience()
        commands += self._store(promised=term)
        return [*commands, SendMessage(sender, Promise(self.decided.generation, term, self._mine()))]

    def _asked_to_accept(self, sender: str, term: Term, entry: Entry, now: float) -> list[Command]:
        if self._must_refuse(term):
            return self._refuse(sender)
        commands = self._yield_to(term, now) + self._follow(sender, term, now)
        commands += self._store(accepted=Acceptance(term, entry))
        return [*commands, SendMessage(sender, EntryAccepted(self.decided.generation, term))]

    def _refused(self, promised: Term, now: float) -> list[Command]:
        self._seen = max(self._seen, promised.number)
        if self._term is None or promised <= self._term:
            return []
        return self._step_down(now)

    def _beaten(self, sender: str, term: Term, echo: float | None, now: float) -> list[Command]:
        if self._must_refuse(term):
            return self._refuse(sender)
        if self._followed is not None and term < self._followed:
            return []
        self._followed = term
        if echo is not None and echo <= now:  # an echo from an earlier start may be from another clock
            self._contact = max(self._contact, echo)
        commands = self._yield_to(term, now) + self._follow(sender, term, now)
        return [*commands, SendMessage(sender, HeartbeatAck(self.decided.generation, term, now))]

    def _follow(self, leader: str, term: Term, now: float) -> list[Command]:
        """Follow ``leader``, which has to be notified of everything anew in each term."""
        self._leader_seen_at, self._elect_at = now, now + self._patience()
        if self._role is _Role.PRE_CANDIDATE:
            self._role = _Role.FOLLOWER
        if self._leader == leader and self._leads_in == term:
            return []
        self._leader, self._leads_in = leader, term
        return [FollowLeader(leader)]
