"""The order of operations that are matched by name: one for all ranks, of what all are ready for."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import cast

import pytest

from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.channel import Offer
from asyncpar.net.arena.order_log import RING, OrderLog, behind_order_log
from asyncpar.net.arena.sequencer import NAMED, Readiness, Sequencer, open_sequencer
from tests.soak import chosen

A, B, C = NAMED | 1, NAMED | 2, NAMED | 3
NUMBER = 77
SLOT = 64 << 10


class FakeSegment:
    """Words that everyone shares, as on a processor that keeps stores in order."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(2 * SLOT))

    def words(self, offset: int, count: int) -> memoryview:
        return self._memory[offset : offset + 8 * count].cast("Q")


class FakeArena:
    """The arena of ``rank``; messages wait in ``mail``, by sender and receiver."""

    def __init__(
        self,
        rank: int,
        segments: dict[int, FakeSegment],
        mail: dict[tuple[int, int], deque[tuple[int, int]]],
        polls: bool,
    ) -> None:
        self.rank = rank
        self.segments = segments
        self.polls = polls
        self._mail = mail

    def ring(self, rank: int, number: int, word: int) -> None:
        self._mail[self.rank, rank].append((number, word))


class Group:
    """The sequencers of all ranks of a group; ranks of the world are 10, 11, 12, ..."""

    def __init__(self, size: int, *, polls: bool) -> None:
        self.size = size
        self.ranks = [10 + place for place in range(size)]
        self.lost: set[int] = set()
        self.mail: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        segments = {rank: FakeSegment() for rank in self.ranks}
        offers = [Offer(4096, SLOT // 2)] * size
        arenas = [FakeArena(rank, segments, self.mail, polls) for rank in self.ranks]
        self.order_logs = [
            OrderLog(cast(Arena, arena), number=NUMBER, ranks=self.ranks, place=place, offers=offers)
            for place, arena in enumerate(arenas)
        ]
        self.sequencers: list[Sequencer] = [open_sequencer(order_log, self.lost) for order_log in self.order_logs]
        self.turns: list[list[int]] = [[] for _ in self.ranks]

    def look(self, place: int) -> list[int]:
        """Let a rank read the turns that are new to it."""
        new = self.sequencers[place].turns()
        self.turns[place] += new
        return new

    def deliver(self, sender: int, receiver: int) -> None:
        """Let a rank read the oldest message of another."""
        number, word = self.mail[self.ranks[sender], self.ranks[receiver]].popleft()
        for counts in self.order_logs[receiver].counts:
            if counts.number == number:
                cell = counts.progress[counts.ranks.index(self.ranks[sender])]
                cell[0] = max(cell[0], word)

    def settle(self) -> None:
        """Deliver everything, and let everyone look, until nothing happens any more."""
        happens = True
        while happens:
            happens = False
            for (sender, receiver), messages in list(self.mail.items()):
                while messages:
                    self.deliver(self.ranks.index(sender), self.ranks.index(receiver))
                    happens = True
            for place in range(self.size):
                happens |= bool(self.look(place))


def test_what_all_have_announced_is_complete_in_the_order_in_which_that_came_about() -> None:
    roll = Readiness(3)
    for place, entry in ((0, A), (1, B), (0, B), (2, B), (1, A), (2, C), (2, A)):
        roll.record(place, entry)
    assert list(roll.complete) == [B, A]
    assert (roll.absent(A), roll.absent(C), roll.absent(NAMED | 9)) == ([], [0, 1], [0, 1, 2])


def test_what_was_taken_back_is_forgotten() -> None:
    roll = Readiness(2)
    for number in range(1000):
        roll.record(1, NAMED | number)
        roll.record(1, number)
    assert len(roll) == 0
    roll.record(0, A)
    assert roll.absent(A) == [1]


def test_one_that_takes_it_back_does_not_take_it_from_the_others() -> None:
    roll = Readiness(3)
    for place, entry in ((0, A), (1, A), (0, A ^ NAMED), (2, A)):
        roll.record(place, entry)
    assert (list(roll.complete), roll.absent(A)) == ([], [0])


def test_what_is_complete_cannot_be_taken_back() -> None:
    roll = Readiness(2)
    for place, entry in ((0, A), (1, A), (1, A ^ NAMED)):
        roll.record(place, entry)
    assert list(roll.complete) == [A]


@pytest.mark.parametrize("polls", [True, False])
def test_turns_are_given_to_what_all_have_announced(polls: bool) -> None:
    group = Group(3, polls=polls)
    for place, entries in enumerate(([A, B], [B, C, A], [B])):
        group.sequencers[place].announce(entries)
    group.settle()
    assert group.turns == [[B]] * 3
    group.sequencers[2].announce([C, A])
    group.settle()
    assert group.turns == [[B, A]] * 3


def test_without_polling_a_rank_knows_what_it_has_received_and_no_more() -> None:
    group = Group(2, polls=False)
    group.sequencers[0].announce([A])
    group.sequencers[1].announce([A])
    assert group.look(0) == []
    assert not group.sequencers[0].has_news()
    group.deliver(1, 0)
    assert group.sequencers[0].has_news()
    assert group.look(0) == [A]
    assert group.look(1) == []
    group.deliver(0, 1)
    assert group.look(1) == [A]


@pytest.mark.parametrize("polls", [True, False])
def test_a_ring_is_not_overrun(polls: bool) -> None:
    group = Group(2, polls=polls)
    member = group.sequencers[1]
    assert member.room == RING
    member.announce([NAMED | number for number in range(RING)])
    assert member.room == 0
    group.settle()
    assert member.room == RING
    member.announce([NAMED | number for number in range(RING, 2 * RING)])
    for start in range(0, 2 * RING, RING // 2):
        group.sequencers[0].announce([NAMED | number for number in range(start, start + RING // 2)])
        group.settle() if start == 3 * RING // 2 else group.look(0)
    assert group.turns == [[NAMED | number for number in range(2 * RING)]] * 2


def test_the_order_waits_for_the_rank_that_is_furthest_behind() -> None:
    group = Group(3, polls=True)
    for start in (0, RING):
        for sequencer in group.sequencers:
            sequencer.announce([NAMED | number for number in range(start, start + RING)])
        group.look(0)
        group.look(1)
    assert [len(turns) for turns in group.turns] == [RING, RING, 0]
    assert group.sequencers[0].is_busy
    group.settle()
    assert [len(turns) for turns in group.turns] == [2 * RING] * 3
    assert not group.sequencers[0].is_busy


@pytest.mark.parametrize("polls", [True, False])
def test_who_has_not_announced_is_known(polls: bool) -> None:
    group = Group(3, polls=polls)
    group.sequencers[0].announce([A])
    group.sequencers[2].announce([A, B])
    group.settle()
    assert group.sequencers[0].absent(A) == [1]
    assert group.sequencers[2].absent(A) == [1]
    assert group.sequencers[2].absent(B) == [0, 1]
    group.sequencers[0].announce([A ^ NAMED])
    assert group.sequencers[2].absent(A) == [1, 0]


@pytest.mark.parametrize("polls", [True, False])
def test_when_a_rank_is_lost_the_sequencer_ends_the_order(polls: bool) -> None:
    group = Group(3, polls=polls)
    for sequencer in group.sequencers:
        sequencer.announce([A])
    group.look(0)
    group.lost.add(group.ranks[2])
    assert group.sequencers[0].is_busy
    assert not group.sequencers[1].has_ended
    group.settle()
    for sequencer in group.sequencers:
        sequencer.announce([B])
    group.settle()
    assert group.turns == [[A]] * 3
    assert [sequencer.has_ended for sequencer in group.sequencers] == [True] * 3
    assert [sequencer.has_news() for sequencer in group.sequencers] == [False] * 3
    assert not group.sequencers[0].is_busy


@pytest.mark.parametrize("polls", [True, False])
def test_what_a_lost_sequencer_has_given_a_turn_keeps_it(polls: bool) -> None:
    group = Group(2, polls=polls)
    for sequencer in group.sequencers:
        sequencer.announce([A, B])
    if not polls:
        group.deliver(1, 0)
    group.look(0)
    if not polls:
        group.deliver(0, 1)
    group.lost.add(group.ranks[0])
    assert group.look(1) == [A, B]
    assert group.sequencers[1].has_ended


@pytest.mark.parametrize("polls", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_announced_and_given_up_in_whatever_order_all_agree(polls: bool, seed: int) -> None:
    """Random announcements, with news that are late: each rank reads the same turns, and none is missing."""
    chance = random.Random(seed)
    size = chance.randint(2, 4)
    group = Group(size, polls=polls)
    numbers = [NAMED | number for number in range(1200)]
    waiting = [chance.sample(numbers, len(numbers)) for _ in range(size)]
    given_up: set[int] = set()
    while any(waiting):
        place = chance.randrange(size)
        sequencer = group.sequencers[place]
        match chance.randrange(4):
            case 0 if waiting[place]:
                entries = waiting[place][-min(sequencer.room, chance.randint(1, 60)) :] if sequencer.room else []
                del waiting[place][len(waiting[place]) - len(entries) :]
                if entries:
                    sequencer.announce(entries)
                    if chance.random() < 0.3 and sequencer.room:
                        sequencer.announce([entries[0] ^ NAMED])
                        given_up.add(entries[0])
            case 1:
                group.look(place)
            case _:
                pairs = [pair for pair, messages in group.mail.items() if messages]
                if pairs:
                    sender, receiver = chance.choice(pairs)
                    group.deliver(group.ranks.index(sender), group.ranks.index(receiver))
    group.settle()
    first = group.turns[0]
    assert group.turns == [first] * size
    assert len(set(first)) == len(first)
    assert set(numbers) - given_up <= set(first)


def test_a_channel_finds_its_place_behind_the_order_log() -> None:
    for size in (2, 9, chosen(100, soak=300)):
        offer = Offer(4096, 64 << 10)
        rest = behind_order_log(offer, size)
        assert rest.offset % 64 == 0
        assert rest.offset + 2 * rest.slot_bytes == offer.offset + 2 * offer.slot_bytes
        order_log = OrderLog(
            cast(Arena, FakeArena(0, dict.fromkeys(range(size), FakeSegment()), defaultdict(deque), True)),
            number=1,
            ranks=range(size),
            place=0,
            offers=[offer] * size,
        )
        assert all(8 * len(words) <= rest.offset - offer.offset for words in order_log._words)  # noqa: SLF001  # the words lie in memory of all ranks: how many there are shows nowhere else
