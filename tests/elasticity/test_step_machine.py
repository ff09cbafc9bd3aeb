"""The order of calls in a step, the vote, and the end of a step with its world."""

from __future__ import annotations

import itertools

import pytest

from asyncpar.elasticity.portions import Portions
from asyncpar.elasticity.step_machine import StepMachine, StepPhase, decode_vote, encode_vote
from asyncpar.errors import UsageError
from asyncpar.hosts.lineage import Lineage, MemberReport, first_lineage, is_sound, lineage_at, target_step

CALLS = ("begin", "add", "reduce", "reduced", "update", "prepare", "commit")


def call(machine: StepMachine, name: str) -> None:
    match name:
        case "begin":
            machine.begin(Portions(2, 2), 0)
        case "add":
            machine.record_added(0)
        case "update":
            machine.check_update()
        case _:
            getattr(machine, name)()


def test_a_step_goes_through_its_phases_in_order() -> None:
    machine = StepMachine(3)
    for name in CALLS:
        call(machine, name)
    assert machine.phase is StepPhase.COMMITTED
    machine.abort()
    assert machine.phase is StepPhase.COMMITTED


@pytest.mark.parametrize("done", range(len(CALLS) + 1))
def test_every_other_call_is_refused_in_every_phase(done: int) -> None:
    allowed = {4: {"update", "prepare"}, 5: {"update", "prepare"}}.get(done, set(CALLS[done : done + 1]))
    for name in set(CALLS) - allowed:
        machine = StepMachine(3)
        for before in CALLS[:done]:
            call(machine, before)
        phase = machine.phase
        with pytest.raises(UsageError, match=r"step 3|portion"):
            call(machine, name)
        assert machine.phase is phase


def test_reduce_names_the_portions_that_are_missing() -> None:
    machine = StepMachine(0)
    machine.begin(Portions(8, 2), 1)
    machine.record_added(5)
    with pytest.raises(UsageError, match="missing 4, 6, 7"):
        machine.reduce()


def test_a_block_without_reduce_says_so() -> None:
    machine = StepMachine(0)
    machine.begin(Portions(8, 2), 1)
    with pytest.raises(UsageError, match=r"without `await step\.reduce"):
        machine.prepare()


def test_a_replay_has_no_portions() -> None:
    machine = StepMachine(0)
    machine.begin_replay()
    with pytest.raises(UsageError, match="newcomer"):
        machine.record_added(0)
    machine.reduce()


def lineages(count: int) -> list[Lineage]:
    return [first_lineage(bytes([number])) for number in range(count)]


def test_votes_agree_exactly_if_lineages_do() -> None:
    many = lineages(40)
    for one, other in itertools.product(many, many):
        both = decode_vote(encode_vote(one, is_pending=False) & encode_vote(other, is_pending=False))
        assert both.agrees == (one == other)
    assert all(encode_vote(one, is_pending=True) < 1 << 64 for one in many)


def test_one_who_knows_of_a_change_tells_all() -> None:
    (one,) = lineages(1)
    for knows in itertools.product((False, True), repeat=3):
        word = (1 << 64) - 1
        for is_pending in knows:
            word &= encode_vote(one, is_pending=is_pending)
        assert decode_vote(word).is_pending == any(knows)


def history(steps: int) -> list[Lineage]:
    chain = [first_lineage(b"")]
    for number in range(steps):
        chain.append(chain[-1].child(bytes([number])))
    return chain


def report(committed: int, prepared: bool) -> MemberReport:
    chain = history(committed + 1)
    return MemberReport(generation=1, lineage=chain[committed], prepared=chain[committed + 1] if prepared else None)


@pytest.mark.parametrize(
    ("reports", "target"),
    [
        ([(5, False), (5, False)], 5),
        ([(5, True), (5, False)], 5),
        ([(5, True), (5, True)], 6),  # one who is lost may have committed it
        ([(6, False), (5, True)], 6),
        ([(6, True), (5, True)], 6),  # step 6 lacks the vote of the second
        ([(6, True), (6, True)], 7),
        ([(5, True)], 6),
    ],
)
def test_a_step_is_rolled_forward_exactly_if_it_may_have_been_committed(
    reports: list[tuple[int, bool]], target: int
) -> None:
    made = [report(*one) for one in reports]
    assert target_step(made) == target
    assert is_sound(made)
    assert {lineage_at(one, target) for one in made} == {history(target)[target]}


def test_a_commit_without_everybodys_vote_is_noticed() -> None:
    assert not is_sound([report(6, False), report(5, False)])
    assert lineage_at(report(5, False), 6) is None
