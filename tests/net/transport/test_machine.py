"""Negotiation as conversations: who dials, who waits, who is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from asyncpar.net.transport.machine import Accept, Answer, Defer, Negotiator, Proposal, Reason, Refuse

TOKEN = b"t" * 16


def negotiator(
    rank: int,
    *,
    size: int = 3,
    lanes: tuple[str, ...] = ("tcp", "grpc"),
    generation: int = 1,
    near: frozenset[int] = frozenset(),
    far: tuple[str, ...] | None = None,
) -> Negotiator:
    return Negotiator(job="job", generation=generation, rank=rank, size=size, lanes=lanes, near=near, far=far)


def ask(other: Negotiator, proposal: Proposal, *, is_up: bool = False, lost: str | None = None) -> Answer:
    return other.answer(proposal, token=TOKEN, is_up=is_up, lost=lost)


def test_a_proposal_is_accepted_with_the_lanes_that_both_use_in_the_dialers_order() -> None:
    one, other = negotiator(2, lanes=("grpc", "tcp")), negotiator(0)
    answer = ask(other, one.propose(0))
    assert isinstance(answer, Accept)
    assert answer.lanes == ("grpc", "tcp")
    assert (answer.terms.dialer, answer.terms.listener, answer.terms.token) == (2, 0, TOKEN)
    assert other.is_accepting(2)


def test_lanes_that_stay_inside_a_host_are_only_agreed_on_with_ranks_of_that_host() -> None:
    every = ("shm", "tcp", "grpc")
    one, near, far = (
        negotiator(rank, lanes=every, near=frozenset(host), far=every[1:])
        for rank, host in ((0, {0, 1}), (1, {0, 1}), (2, {2}))
    )
    assert one.lanes_to(1) == one.propose(1).lanes == every
    assert one.lanes_to(2) == one.propose(2).lanes == ("tcp", "grpc")
    answers = [ask(near, one.propose(1)), ask(far, one.propose(2)), ask(far, replace(one.propose(2), lanes=every))]
    assert [answer.lanes for answer in answers if isinstance(answer, Accept)] == [every, every[1:], every[1:]]


@pytest.mark.parametrize(("asked", "own", "agreed"), [(1, 1, 1), (4, 4, 4), (4, 2, 2), (2, 4, 2), (0, 4, 1)])
def test_the_smaller_number_of_connections_is_agreed_on(asked: int, own: int, agreed: int) -> None:
    other = Negotiator(job="job", generation=1, rank=0, size=3, lanes=("tcp",), connections=own)
    answer = ask(other, replace(negotiator(1).propose(0), connections=asked))
    assert isinstance(answer, Accept)
    assert (answer.terms.connections, answer.terms.connection) == (agreed, 0)


def test_an_agreement_is_good_for_one_lane() -> None:
    one, other = negotiator(1), negotiator(0)
    ask(other, one.propose(0))
    terms = other.find(TOKEN)
    assert terms is not None
    assert other.take(terms) is True
    assert other.take(terms) is False
    assert other.find(TOKEN) is None
    assert not other.is_accepting(1)


def test_a_newer_agreement_replaces_the_older_one() -> None:
    one, other = negotiator(1), negotiator(0)
    older = ask(other, one.propose(0))
    newer = other.answer(one.propose(0), token=b"n" * 16, is_up=False, lost=None)
    assert isinstance(older, Accept)
    assert isinstance(newer, Accept)
    assert other.find(TOKEN) is None
    assert other.take(older.terms) is False
    assert other.find(b"n" * 16) == newer.terms


def test_of_two_dials_at_once_the_one_of_the_lower_rank_wins() -> None:
    low, high = negotiator(0), negotiator(1)
    of_low, of_high = low.propose(1), high.propose(0)
    assert ask(low, of_high) == Defer()
    assert isinstance(ask(high, of_low), Accept)


def test_ranks_of_other_hosts_are_only_given_the_lanes_that_are_meant_for_them() -> None:
    every = ("shm", "tcp", "grpc")
    one = negotiator(0, lanes=every, near=frozenset({0, 1}), far=("grpc",))
    assert [one.lanes_to(rank) for rank in (1, 2)] == [every, ("grpc",)]
    assert one.propose(2).lanes == ("grpc",)
    one.end_dial(2)
    stranger = negotiator(2, lanes=every)
    answer = ask(one, stranger.propose(0))
    assert isinstance(answer, Accept)
    assert answer.lanes == ("grpc",)
    refusal = ask(one, replace(stranger.propose(0), lanes=("tcp",)))
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.NO_COMMON_LANE


def test_a_dial_that_is_over_puts_nobody_off() -> None:
    low, high = negotiator(0), negotiator(1)
    low.propose(1)
    low.end_dial(1)
    assert isinstance(ask(low, high.propose(0)), Accept)


def test_a_link_that_is_up_is_not_made_again() -> None:
    assert ask(negotiator(0), negotiator(1).propose(0), is_up=True) == Defer()
    assert ask(negotiator(1), negotiator(0).propose(1), is_up=True) == Defer()


def play(steps: tuple[str, ...]) -> set[str]:
    """Return who connects.  a, b: rank 0 or 1 begins to dial unless it has accepted.  A, B: its proposal arrives."""
    sides = {"a": negotiator(0), "b": negotiator(1)}
    proposals: dict[str, Proposal] = {}
    connecting: set[str] = set()
    for step in steps:
        me, other, peer = ("a", "b", 1) if step in "aA" else ("b", "a", 0)
        if step == me and not sides[me].is_accepting(peer) and me not in proposals:
            proposals[me] = sides[me].propose(peer)
        elif step != me and me in proposals and me not in connecting:
            if isinstance(ask(sides[other], proposals[me]), Accept):
                connecting.add(me)
            else:
                del proposals[me]
                sides[me].end_dial(peer)
    return connecting


def test_whatever_the_order_of_events_never_do_both_sides_connect() -> None:
    outcomes = [play(steps) for steps in product("abAB", repeat=6)]
    assert {"a", "b"} not in outcomes
    assert {"a"} in outcomes
    assert {"b"} in outcomes


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"wire_version": 3}, Reason.NO_COMMON_LANE, "rank 0 speaks version 4 of the wire, rank 1 3; install the same"),
        ({"wire_version": 0, "job": "other"}, Reason.NO_COMMON_LANE, "of the wire, rank 1 an earlier one; install"),
        ({"job": "other"}, Reason.WRONG_WORLD, "rank 0 belongs to job 'job', not 'other'"),
        ({"generation": 7}, Reason.STALE_GENERATION, "rank 0 is in generation 1, rank 1 in 7"),
        ({"listener": 2}, Reason.WRONG_WORLD, "this is rank 0 of 3; rank 1 asked for rank 2"),
        ({"dialer": 0}, Reason.WRONG_WORLD, "rank 0"),
        ({"dialer": 3}, Reason.WRONG_WORLD, "rank 3"),
        ({"lanes": ()}, Reason.NO_COMMON_LANE, "rank 1 uses nothing"),
        (
            {"lanes": ("pigeon",)},
            Reason.NO_COMMON_LANE,
            "rank 1 uses pigeon, rank 0 uses tcp or grpc; give",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_says_why(change: dict[str, object], reason: Reason, message: str) -> None:
    answer = ask(negotiator(0), replace(negotiator(1).propose(0), **change))  # type: ignore[arg-type]
    assert isinstance(answer, Refuse)
    assert answer.reason is reason
    assert message in answer.message


def test_a_rank_that_is_lost_is_refused_with_the_cause() -> None:
    assert ask(negotiator(0), negotiator(1).propose(0), lost="it crashed") == Refuse(Reason.LOST, "it crashed")


@pytest.mark.parametrize(("one", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_payloads_are_checked_unless_both_sides_want_none(one: bool, other: bool) -> None:
    sides = [
        Negotiator(job="job", generation=1, rank=rank, size=2, lanes=("tcp",), checks_payloads=wish)
        for rank, wish in enumerate((one, other))
    ]
    answer = sides[1].answer(sides[0].propose(1), token=b"t" * 16, is_up=False, lost=None)
    assert isinstance(answer, Accept)
    assert answer.terms.checks_payloads is (one or other)
