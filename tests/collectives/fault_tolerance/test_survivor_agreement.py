"""The machine of agreements among survivors, with ranks that die at every point."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from asyncpar.collectives.fault_tolerance.machine import (
    AgreementCalled,
    AgreementCommand,
    AgreementEvent,
    AgreementTick,
    DeclareLost,
    MemberExpelled,
    MemberLost,
    MemberSent,
    ReturnOutcome,
    SendToMember,
    SurvivorAgreement,
)
from asyncpar.collectives.fault_tolerance.messages import (
    AgreementKind,
    AgreementMessage,
    DecideOutcome,
    Outcome,
    decode_agreement,
    encode_agreement,
)
from asyncpar.errors import ProtocolError
from tests.soak import chosen, is_soak

SEEDS = chosen(800, soak=20_000)


class Network:
    """Machines of some ranks, joined by channels in order; ``dies_after`` says how many messages a rank sends."""

    def __init__(self, size: int, dies_after: dict[int, int], seed: int | None = None) -> None:
        self.ranks = tuple(range(3, 3 + size))  # ranks of the world are not places in the group
        self.random = None if seed is None else random.Random(seed)
        self.now = 0.0
        self.machines = {
            rank: SurvivorAgreement(me=rank, ranks=self.ranks, lost=(), timeout=10.0, now=0.0) for rank in self.ranks
        }
        self.flags = {rank: ~(1 << place) for place, rank in enumerate(self.ranks)}
        self.channels: dict[tuple[int, int], deque[AgreementMessage | None]] = {
            pair: deque() for pair in itertools.permutations(self.ranks, 2)
        }
        """Messages, and None where the end of the sender is seen."""
        self.left_to_send = {self.ranks[place]: count for place, count in dies_after.items()}
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.returned: dict[int, Outcome] = {}
        self.messages = 0

    def call(self, rank: int, kind: AgreementKind = "agree") -> None:
        self.feed(rank, AgreementCalled(kind, self.flags[rank], 10.0))

    def die(self, rank: int) -> None:
        """End ``rank``: what it has sent last may be lost, and the others see that, each at its time."""
        if rank in self.dead:
            return
        self.dead.add(rank)
        for other in self.ranks:
            if other != rank:
                channel = self.channels[rank, other]
                if self.random is not None:
                    for _ in range(self.random.randint(0, len(channel))):
                        channel.pop()
                channel.append(None)

    def feed(self, rank: int, event: AgreementEvent) -> None:
        if rank in self.dead:
            return
        for command in self.machines[rank].handle(event, now=self.now):
            if rank in self.dead:
                return
            self.obey(rank, command)

    def obey(self, rank: int, command: AgreementCommand) -> None:
        match command:
            case SendToMember(to, message):
                if self.left_to_send.get(rank, 1) == 0:
                    self.die(rank)
                    return
                if rank in self.left_to_send:
                    self.left_to_send[rank] -= 1
                self.messages += 1
                assert decode_agreement(encode_agreement(message), size=99) == message
                self.channels[rank, to].append(message)
            case DeclareLost(lost):
                self.cut(rank, lost)
            case ReturnOutcome(outcome):
                assert rank not in self.returned
                self.returned[rank] = outcome

    def cut(self, rank: int, lost: int) -> None:
        """``rank`` declares ``lost`` lost: it receives nothing more of it, and notifies it."""
        self.channels[lost, rank].clear()

    def step(self) -> bool:
        """Deliver the next message of a channel; False if there is none."""
        full = [pair for pair, channel in self.channels.items() if channel and pair[1] not in self.dead | self.stopped]
        if not full:
            return False
        sender, receiver = full[0] if self.random is None else self.random.choice(full)
        message = self.channels[sender, receiver].popleft()
        self.feed(receiver, MemberLost(sender) if message is None else MemberSent(sender, message))
        return True

    def run(self) -> None:
        for _ in range(5_000):
            if not self.step():
                return
        raise AssertionError("no end")

    def check(self) -> None:
        survivors = [rank for rank in self.ranks if rank not in self.dead]
        assert set(survivors) <= set(self.returned), f"without outcome: {set(survivors) - set(self.returned)}"
        assert len(set(self.returned.values())) <= 1, self.returned
        for outcome in self.returned.values():
            assert outcome.fault is None
            assert set(outcome.lost) <= self.dead
            for place, rank in enumerate(self.ranks):
                assert bool(outcome.flag & 1 << place) == (rank in outcome.lost), (rank, outcome)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_without_a_loss_all_get_the_and_in_four_messages_per_rank(size: int) -> None:
    network = Network(size, {})
    for rank in network.ranks:
        network.call(rank)
    network.run()
    network.check()
    assert set(network.returned) == set(network.ranks)
    assert network.messages == 4 * (size - 1)
    assert network.returned[3] == Outcome(~((1 << size) - 1), ())


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_rank_may_die_after_every_message(size: int) -> None:
    """Every set of ranks but one, each at every one of its messages, in two orders of calls; of large sets a sample."""
    for count in range(1, size):
        for places in itertools.combinations(range(size), count):
            few = count < 3 and (size < 5 or count < 2 or is_soak())
            most = range(3 * size) if few else range(0, 3 * size, chosen(5, soak=2))
            for points in itertools.product(most, repeat=count):
                for ranks in (range(3, 3 + size), range(2 + size, 2, -1)):
                    network = Network(size, dict(zip(places, points, strict=True)))
                    for rank in ranks:
                        network.call(rank)
                    network.run()
                    network.check()


def test_random_orders_losses_and_times() -> None:
    for seed in range(SEEDS):
        chance = random.Random(seed)
        size = chance.randint(2, 7)
        doomed = chance.sample(range(size), chance.randint(0, size - 1))
        network = Network(size, {place: chance.randint(0, 12) for place in doomed}, seed)
        waiting = list(network.ranks)
        chance.shuffle(waiting)
        while waiting or network.step():
            if waiting and chance.random() < 0.3:
                network.call(waiting.pop())
            elif waiting:
                network.step()
        try:
            network.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_ranks_that_died_before_the_call_are_named() -> None:
    network = Network(4, {})
    network.die(3)
    network.die(5)
    for rank in (4, 6):
        network.call(rank)
    network.run()
    network.check()
    assert network.returned[4].lost == (3, 5)


def test_a_loss_that_only_one_rank_has_seen_is_named_on_all() -> None:
    network = Network(4, {})
    network.dead.add(5)
    network.feed(6, MemberLost(5))
    for rank in (3, 4, 6):
        network.call(rank)
    network.run()
    assert {outcome.lost for outcome in network.returned.values()} == {(5,)}


def test_a_rank_that_dies_while_others_accept_is_named() -> None:
    network = Network(3, {})
    for rank in network.ranks:
        network.call(rank)
    while not any(isinstance(message, DecideOutcome) for channel in network.channels.values() for message in channel):
        if network.machines[3]._proposal is not None and 5 not in network.dead:  # noqa: SLF001  # this is the moment that the test is about
            network.channels[3, 5].clear()
            network.die(5)
        assert network.step()
    network.run()
    network.check()
    assert network.returned[4].lost == (5,)


def test_a_rank_that_does_not_call_ends_it_on_all() -> None:
    network = Network(3, {})
    network.call(4)
    network.call(5)
    while not network.returned and network.now < 30.0:
        network.now += 1.0
        for rank in network.ranks:
            network.feed(rank, AgreementTick())
        network.run()
    assert network.now == 10.0
    assert len(network.returned) == 3
    for outcome in network.returned.values():
        assert (outcome.fault, outcome.culprit) == ("timeout", 3)


@pytest.mark.parametrize("silent", [3, 4, 5])
def test_a_rank_that_does_not_answer_is_declared_lost(silent: int) -> None:
    network = Network(3, {})
    others = [rank for rank in network.ranks if rank != silent]
    network.stopped.add(silent)
    for rank in others:
        network.call(rank)
    while not network.returned and network.now < 30.0:
        network.now += 1.0
        for rank in others:
            network.feed(rank, AgreementTick())
        network.run()
    assert network.now <= 11.0
    assert {outcome.lost for outcome in network.returned.values()} == {(silent,)}
    assert all(outcome.fault is None for outcome in network.returned.values())


def test_different_calls_are_a_mismatch_on_all() -> None:
    network = Network(3, {})
    for rank in network.ranks:
        network.call(rank, "shrink" if rank == 4 else "agree")
    network.run()
    assert {outcome.fault for outcome in network.returned.values()} == {"mismatch"}
    assert len(network.returned) == 3


def test_a_rank_that_others_have_declared_lost_gets_no_outcome_and_sends_none() -> None:
    network = Network(3, {})
    network.call(3)
    network.feed(3, MemberExpelled("rank 4 has declared it lost"))
    assert network.returned[3].fault == "expelled"
    network.feed(4, MemberLost(3))
    network.feed(5, MemberLost(3))
    network.channels[3, 4].clear()
    network.channels[3, 5].clear()
    network.call(4)
    network.call(5)
    network.run()
    assert [network.returned[rank].lost for rank in (4, 5)] == [(3,), (3,)]


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode_agreement(DecideOutcome(Outcome(0, (9,))))])
def test_messages_that_cannot_be_meant_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="AGREE frame"):
        decode_agreement(payload, size=9)
