from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import UsageError
from asyncpar.hosts import consensus, consensus_messages
from asyncpar.hosts.consensus import ConsensusNode
from asyncpar.hosts.consensus_messages import (
    BeginLeading,
    ConsensusTick,
    DurableState,
    Entry,
    FollowLeader,
    LearnDecided,
    NodeUnreachable,
    Persist,
    Promise,
    Propose,
    has_quorum,
)
from tests.hosts.consensus_network import Network, UnsafeError
from tests.soak import chosen

SEEDS = range(chosen(8, soak=1000))
FAULTY_SECONDS = 6.0


def run(seed: int) -> Network:
    network = Network(seed, count=3 + seed % 4)
    network.run_shuffled(1500)
    network.run_with_faults(FAULTY_SECONDS)
    return network


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_never_decide_differently_and_go_on_once_the_faults_are_over(seed: int) -> None:
    assert len(run(seed).decided) > 3


def test_equal_seeds_give_equal_traces() -> None:
    assert run(7).trace == run(7).trace


class AnyTerm(ConsensusNode):
    """Accepts whatever comes, although it has promised a higher term."""

    def _must_refuse(self, term: consensus_messages.Term) -> bool:
        return False


class OwnValue(ConsensusNode):
    """Proposes its own value although another one was accepted."""

    def _promised(self, sender: str, promise: Promise, now: float) -> list[consensus_messages.Command]:
        return super()._promised(sender, replace(promise, accepted=None), now)


class LowestTerm(ConsensusNode):
    """Takes over the accepted value that it hears of last, not that of the highest term."""

    def _promised(self, sender: str, promise: Promise, now: float) -> list[consensus_messages.Command]:
        if promise.accepted is not None:
            self._campaign.inherited = None
        return super()._promised(sender, promise, now)


class OnePhase(ConsensusNode):
    """Leads the next instance without its first phase."""

    def _continue_leading(self, now: float) -> list[consensus_messages.Command]:
        if self._node not in self.decided.voters:
            return self._step_down(now)
        self._begin_asking()
        self._is_ready = True
        return [BeginLeading(self._led_term())]


class AnyGeneration(ConsensusNode):
    """Takes answers about earlier entries for answers about the next one."""

    def _receive(
        self, sender: str, message: consensus_messages.Message, now: float
    ) -> list[consensus_messages.Command]:
        if message.generation < self.decided.generation and not isinstance(message, consensus_messages.Learn):
            message = replace(message, generation=self.decided.generation)
        return super()._receive(sender, message, now)


class AnyVoter(ConsensusNode):
    """Counts the answers of nodes that do not vote on this entry."""

    def _asked_for_vote(self, sender: str, now: float) -> list[consensus_messages.Command]:
        return [
            consensus_messages.SendMessage(sender, consensus_messages.PreVoteGranted(self.decided.generation, None))
        ]

    def _acknowledged(
        self, sender: str, accepted: consensus_messages.EntryAccepted
    ) -> list[consensus_messages.Command]:
        if self._proposed is not None and accepted.term == self._term:
            self._campaign.acknowledged |= {sender}
            if len(self._campaign.acknowledged) * 2 > len(self.decided.voters) - 1:
                self._campaign.acknowledged |= set(self.decided.voters)
        return super()._acknowledged(sender, accepted)


def forgets_promises(_: random.Random, before: DurableState, after: DurableState) -> DurableState:
    return replace(after, promised=before.promised) if after.accepted == before.accepted else after


def forgets_acceptances(_: random.Random, before: DurableState, after: DurableState) -> DurableState:
    return replace(after, accepted=None)


def stores_late(chance: random.Random, before: DurableState, after: DurableState) -> DurableState:
    return before if chance.random() < 0.5 else after


def find(*, first: int = 0, **options: Any) -> int:
    """Return the first of 500 seeds from ``first`` on that shows that a safeguard is missing."""
    for seed in range(first, first + 500):
        try:
            Network(seed, count=3 + seed % 3, **options).run_shuffled(3000)
        except UnsafeError:
            return seed
    raise AssertionError("500 seeds did not notice that a safeguard is missing")


@pytest.mark.parametrize(
    ("node", "first"),
    [(AnyTerm, 0), (OwnValue, 0), (LowestTerm, 0), (OnePhase, 240), (AnyGeneration, 0), (AnyVoter, 0)],
)
def test_a_missing_safeguard_is_found(node: type[ConsensusNode], first: int) -> None:
    find(make=node, first=first)


@pytest.mark.parametrize(("stores", "first"), [(forgets_promises, 60), (forgets_acceptances, 0), (stores_late, 0)])
def test_a_disk_that_forgets_is_found(stores: Callable[..., DurableState], first: int) -> None:
    find(stores=stores, first=first)


@pytest.mark.parametrize(
    "quorum",
    [
        lambda voters, there: 2 * len(set(voters) & set(there)) >= len(voters),
        lambda voters, there: len(set(voters) & set(there)) >= max(1, len(voters) // 2),
    ],
    ids=["any half", "less than half"],
)
def test_quorums_that_do_not_overlap_are_found(quorum: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "has_quorum", quorum)
    find()


@pytest.mark.parametrize("count", range(1, 6))
def test_two_quorums_always_have_a_voter_in_common(count: int) -> None:
    voters = [f"n{number}" for number in range(count)]
    sets = [[voters[i] for i in range(count) if mask >> i & 1] for mask in range(2**count)]
    quorums = [set(some) for some in sets if has_quorum(voters, some)]
    assert all(one & other for one in quorums for other in quorums)
    assert all(has_quorum(voters, some) or has_quorum(voters, set(voters) - set(some)) for some in sets)


def alone(now: float = 0.0) -> ConsensusNode:
    state = DurableState(decided=Entry(generation=0, voters=("a",), nodes=("a",)))
    return ConsensusNode("a", state, now=now, jitter=lambda: 0.0)


def test_a_single_voter_leads_and_decides_at_once() -> None:
    node = alone()
    commands = node.handle(ConsensusTick(), now=node.next_deadline + 1.0)
    assert FollowLeader("a") in commands
    assert node.leads
    commands = node.handle(Propose(b"one", ("a",), ("a",)), now=3.0)
    decided = [command.entry.content for command in commands if isinstance(command, LearnDecided)]
    assert decided == [b"one"]
    assert node.leads
    commands = node.handle(Propose(b"two", ("a",), ("a",)), now=3.0)
    assert node.decided.generation == 2


def test_what_is_answered_was_stored_before() -> None:
    node = alone()
    stored = DurableState(decided=node.decided)
    for at in (1.0, 2.0):
        for command in node.handle(ConsensusTick(), now=at):
            if isinstance(command, Persist):
                stored = command.state
            elif isinstance(command, BeginLeading):
                assert stored.promised == command.term


def test_a_leader_that_hears_no_quorum_steps_down_before_another_is_elected() -> None:
    network = Network(3, count=3, is_calm=True)
    network.run(5.0)
    [leader] = {machine.node.leader for machine in network.machines.values() if machine.node is not None}
    assert leader is not None
    others = [name for name in network.machines if name != leader]
    network.broken = {pair for name in others for pair in ((leader, name), (name, leader))}
    network.trace.clear()
    network.run(3.0)
    changes = [(at, name, command) for at, name, command in network.trace if isinstance(command, FollowLeader)]
    assert changes[0][1] == leader
    assert changes[0][2] == FollowLeader(None)
    elected = next(at for at, name, command in changes if name in others and command.leader in others)
    assert changes[0][0] < elected < changes[0][0] + 1.5


def test_a_broken_connection_to_the_leader_brings_the_election_forward() -> None:
    network = Network(3, count=3, is_calm=True)
    network.run(5.0)
    [leader] = {machine.node.leader for machine in network.machines.values() if machine.node is not None}
    assert leader is not None
    network.machines[leader].node = None
    network.run(0.1)
    start = network.now
    for name in network.machines:
        network.feed(name, NodeUnreachable(leader))
        network.arm(name)
    network.trace.clear()
    network.run(3.0)
    elected = next(at for at, name, command in network.trace if isinstance(command, BeginLeading))
    assert elected - start < 0.5  # virtual seconds


@pytest.mark.parametrize("voters", [(), ("a", "a"), tuple("abcdef"), ("z",)])
def test_an_entry_names_one_to_five_different_voters_among_its_nodes(voters: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="voters: expected"):
        Entry(generation=1, voters=voters, nodes=tuple("abcdef"))


def test_contact_is_what_a_leader_with_a_quorum_has_heard() -> None:
    three = Entry(generation=0, voters=("a", "b", "c"), nodes=("a", "b", "c"))
    leader, follower = (
        ConsensusNode(name, DurableState(decided=three), now=0.0, jitter=lambda: 0.0) for name in ("a", "b")
    )
    term = consensus_messages.Term(1, "a")

    def beat(echo: float | None, now: float) -> consensus_messages.Message:
        message = consensus_messages.MessageReceived("a", consensus_messages.Heartbeat(0, term, echo))
        answer = follower.handle(message, now=now)[-1]
        assert isinstance(answer, consensus_messages.SendMessage)
        return answer.message

    acknowledged = beat(None, 5.0)
    assert acknowledged == consensus_messages.HeartbeatAck(0, term, 5.0)
    assert follower.contact == 0.0, "it does not know that it was heard"
    beat(5.0, 5.1)
    assert follower.contact == 5.0
    beat(1e6, 5.2)
    assert follower.contact == 5.0, "an echo of another clock counts for nothing"
    assert leader.contact == 0.0


def test_a_leader_waits_a_lease_for_voters_that_have_just_come() -> None:
    alone = Entry(generation=0, voters=("a",), nodes=("a",))
    node = ConsensusNode("a", DurableState(decided=alone), now=-60.0, jitter=lambda: 0.0)
    node.handle(ConsensusTick(), now=0.0)
    node.handle(Propose(b"", ("a", "b", "c"), ("a", "b", "c")), now=0.1)
    assert node.leader == "a"
    node.handle(ConsensusTick(), now=0.3)
    assert node.leader == "a", "nobody has had the time to answer"
    node.handle(ConsensusTick(), now=1.0)
    assert node.leader is None
