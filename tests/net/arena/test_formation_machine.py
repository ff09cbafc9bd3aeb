"""Formation as conversations: all of them get an arena, or none, and everyone is told."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from asyncpar.net.arena.formation_machine import (
    MAX_PROBLEM_CHARACTERS,
    ArenaVerdict,
    Came,
    Command,
    Conclude,
    Event,
    Expired,
    Formation,
    Gone,
    Ready,
    SegmentOffer,
    SendVerdict,
    Sent,
    ShareOffers,
    Unable,
    check_roster,
)

RANKS = (2, 5, 7)
GO = ArenaVerdict()


def offer(rank: int, *, terms: str = "arena=8") -> SegmentOffer:
    return SegmentOffer(
        rank=rank,
        terms=terms,
        nonce=bytes(32),
        control_bytes=1,
        heap_bytes=2,
        process=str(rank),
        cores=b"\x03",
        quota=2.0,
        maps_heaps=True,
    )


def play(formation: Formation, *events: Event) -> list[Command]:
    return [command for event in events for command in formation.handle(event)]


def gathered() -> Formation:
    """Everyone has come and offered."""
    formation = Formation(RANKS)
    play(formation, Sent(2, offer(2)), Came(5), Sent(5, offer(5)), Came(7), Sent(7, offer(7)))
    return formation


def test_when_all_have_offered_and_are_ready_there_is_an_arena() -> None:
    formation = Formation(RANKS)
    assert play(formation, Sent(2, offer(2)), Came(7), Sent(7, offer(7)), Came(5)) == []
    assert formation.handle(Sent(5, offer(5))) == [ShareOffers((offer(2), offer(5), offer(7)))]
    assert play(formation, Sent(7, Ready()), Sent(2, Ready())) == []
    assert formation.handle(Sent(5, Ready())) == [SendVerdict(5, GO), SendVerdict(7, GO), Conclude(GO)]


def test_in_whatever_order_they_come_the_roster_is_shared_once_and_in_order() -> None:
    for order in permutations(RANKS):
        formation = Formation(RANKS)
        commands = [play(formation, Came(rank), Sent(rank, offer(rank))) for rank in order]
        assert commands == [[], [], [ShareOffers((offer(2), offer(5), offer(7)))]]


def test_two_ranks_of_which_one_convenes_are_enough() -> None:
    formation = Formation((0, 1))
    play(formation, Sent(0, offer(0)), Came(1), Sent(1, offer(1)), Sent(0, Ready()))
    assert formation.handle(Sent(1, Ready())) == [SendVerdict(1, GO), Conclude(GO)]


@pytest.mark.parametrize("unable", RANKS)
def test_one_rank_that_is_unable_ends_it_for_all(unable: int) -> None:
    formation = gathered()
    no = ArenaVerdict(f"rank {unable}: no memory")
    assert formation.handle(Sent(unable, Unable("no memory"))) == [SendVerdict(5, no), SendVerdict(7, no), Conclude(no)]


def test_a_rank_that_comes_after_the_end_gets_the_verdict_at_once() -> None:
    formation = Formation(RANKS)
    no = ArenaVerdict("rank 2: no memory")
    assert formation.handle(Sent(2, Unable("no memory"))) == []
    assert formation.handle(Came(7)) == [SendVerdict(7, no)]
    assert formation.handle(Sent(7, offer(7))) == []
    assert formation.handle(Came(5)) == [SendVerdict(5, no), Conclude(no)]
    assert play(formation, Gone(5, "closed"), Expired()) == []


def test_a_rank_that_goes_away_ends_it_for_the_others_and_is_to_blame() -> None:
    formation = gathered()
    no = ArenaVerdict("rank 5 is gone: reset", 5)
    assert formation.handle(Gone(5, "reset")) == [SendVerdict(7, no), Conclude(no)]


def test_a_rank_that_goes_away_before_another_comes_does_not_keep_it_waiting() -> None:
    formation = Formation(RANKS)
    no = ArenaVerdict("rank 5 is gone: reset", 5)
    assert play(formation, Sent(2, offer(2)), Came(5), Gone(5, "reset")) == []
    assert formation.handle(Came(7)) == [SendVerdict(7, no), Conclude(no)]


def test_who_does_not_come_in_time_is_named_and_to_blame() -> None:
    formation = Formation((2, 5, 7, 8))
    play(formation, Sent(2, offer(2)), Came(5), Sent(5, offer(5)))
    no = ArenaVerdict("ranks 7, 8 did not come in time", 7)
    assert formation.handle(Expired()) == [SendVerdict(5, no), Conclude(no)]


def test_who_does_not_get_ready_in_time_is_named_and_to_blame() -> None:
    formation = gathered()
    play(formation, Sent(2, Ready()), Sent(5, Ready()))
    no = ArenaVerdict("rank 7 did not get ready in time", 7)
    assert formation.handle(Expired()) == [SendVerdict(5, no), SendVerdict(7, no), Conclude(no)]


def test_after_a_failure_nobody_waits_beyond_the_deadline_for_those_who_never_come() -> None:
    formation = Formation(RANKS)
    no = ArenaVerdict("rank 2: no memory")
    assert play(formation, Sent(2, Unable("no memory")), Came(5)) == [SendVerdict(5, no)]
    assert formation.handle(Expired()) == [Conclude(no)]
    assert formation.handle(Came(7)) == []


def test_different_settings_are_quoted() -> None:
    formation = Formation(RANKS)
    play(formation, Sent(2, offer(2)), Came(7))
    no = ArenaVerdict("the ranks have different settings: rank 2 arena=8, rank 7 arena=16")
    assert formation.handle(Sent(7, offer(7, terms="arena=16"))) == [SendVerdict(7, no)]


@pytest.mark.parametrize("event", [Sent(5, offer(7)), Sent(5, offer(5)), Sent(5, Ready())])
def test_a_rank_that_speaks_out_of_turn_ends_it_and_is_to_blame(event: Event) -> None:
    formation = Formation(RANKS)
    play(formation, Sent(2, offer(2)), Came(5), Sent(5, offer(5)), Came(7))
    finish = formation.handle(event)[-1]
    assert isinstance(finish, Conclude)
    assert "out of turn" in finish.verdict.problem
    assert finish.verdict.culprit == 5


def test_being_ready_twice_ends_it() -> None:
    formation = gathered()
    finish = play(formation, Sent(5, Ready()), Sent(5, Ready()))[-1]
    assert finish == Conclude(ArenaVerdict("rank 5 was ready out of turn", 5))


def test_nothing_changes_a_verdict() -> None:
    formation = gathered()
    play(formation, *(Sent(rank, Ready()) for rank in RANKS))
    assert play(formation, Gone(5, "reset"), Sent(7, Unable("oh")), Expired(), Came(5)) == []


def test_a_long_problem_is_cut_to_what_a_message_carries() -> None:
    formation = Formation((0, 1))
    formation.handle(Came(1))
    finish = formation.handle(Sent(1, Unable("x" * MAX_PROBLEM_CHARACTERS)))[-1]
    assert isinstance(finish, Conclude)
    assert len(finish.verdict.problem) == MAX_PROBLEM_CHARACTERS


def test_a_roster_is_checked_by_every_rank_that_gets_it() -> None:
    offers = [offer(rank) for rank in RANKS]
    assert check_roster(offers, ranks=RANKS, own=offer(5)) == ""
    assert check_roster(offers[:2], ranks=RANKS, own=offer(5)) == "the roster names ranks [2, 5], expected [2, 5, 7]"
    other = msgspec.structs.replace(offer(5), process="other")
    assert check_roster(offers, ranks=RANKS, own=other) == "the roster does not repeat what rank 5 offered"
