"""The director of elastic worlds in tests, by conversation."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from asyncpar.hosts.director import (
    LAST_PATIENCE,
    READY_PATIENCE,
    REPORT_PATIENCE,
    DirectorCommand,
    ElasticDirector,
)
from asyncpar.hosts.lineage import Lineage, MemberReport, first_lineage
from asyncpar.hosts.messages import ChangePending, MemberDismissed, WorldEnded, WorldStarted
from asyncpar.hosts.next_world import JOIN_PATIENCE, FormWorld, WorldRules

START = first_lineage(b"state")


def formed(commands: list[DirectorCommand]) -> FormWorld | None:
    return next((command for command in commands if isinstance(command, FormWorld)), None)


def evicted(commands: list[DirectorCommand]) -> list[str]:
    return [command.member for command in commands if isinstance(command, MemberDismissed)]


def begun(size: int) -> ElasticDirector:
    director = ElasticDirector(size)
    for number in range(size):
        director.arrive(f"m{number}", START, 0.0)
    assert director.generation == 0
    return director


def report_all(
    director: ElasticDirector, suspects: Mapping[int, tuple[int, ...]], lineage: Lineage = START
) -> list[DirectorCommand]:
    """All members report; ``suspects`` says by rank whom each does not hear."""
    commands: list[DirectorCommand] = []
    for rank, member in enumerate(director.members):
        told = tuple((other, "silent") for other in suspects.get(rank, ()))
        report = MemberReport(generation=director.generation, lineage=lineage, suspects=told)
        commands += director.report(member, report, 1.0)
    return commands


def test_two_members_that_do_not_hear_each_other_once_stay_together() -> None:
    director = begun(3)
    world = formed(report_all(director, {0: (2,), 2: (0,)}))
    assert world is not None
    assert world.members == ("m0", "m1", "m2")


def test_one_of_two_members_that_never_hear_each_other_is_lost_and_the_others_go_on() -> None:
    director = begun(3)
    report_all(director, {0: (2,), 2: (0,)})
    commands = report_all(director, {0: (2,)})
    assert evicted(commands) == ["m2"]
    world = formed(commands)
    assert world is not None
    assert world.members == ("m0", "m1")
    assert world.change.left == ("m2",)


def test_the_member_that_most_do_not_hear_is_lost() -> None:
    director = begun(4)
    suspects = {0: (1,), 2: (1,), 3: (1,)}
    report_all(director, suspects)
    commands = report_all(director, suspects)
    assert evicted(commands) == ["m1"]
    world = formed(commands)
    assert world is not None
    assert world.members == ("m0", "m2", "m3")


def test_a_step_in_between_makes_it_two_matters() -> None:
    director = begun(3)
    report_all(director, {0: (2,)})
    assert evicted(report_all(director, {0: (2,)}, START.child(b"one"))) == []
    assert evicted(report_all(director, {0: (1,)}, START.child(b"one"))) == []
    assert evicted(report_all(director, {0: (1,)}, START.child(b"one"))) == ["m1"]


def test_pairs_that_take_turns_in_not_hearing_each_other_do_not_go_on_for_ever() -> None:
    director = begun(3)
    assert evicted(report_all(director, {0: (2,)})) == []
    assert evicted(report_all(director, {0: (1,)})) == []
    assert evicted(report_all(director, {0: (2,)})) == ["m2"]


def test_a_world_starts_once_when_all_its_members_can_be_connected_to() -> None:
    director = begun(2)
    assert director.ready("m0", 0, "m0:1") == []
    assert director.ready("m0", 0, "m0:1") == []
    assert director.ready("m1", 7, "m1:1") == []
    assert director.ready("m1", 0, "m1:1") == [WorldStarted(0, ("m0:1", "m1:1"))]
    assert director.ready("m1", 0, "m1:1") == []
    assert director.tick(2 * READY_PATIENCE) == []


def test_a_member_that_does_not_come_into_its_world_is_lost() -> None:
    director = begun(3)
    director.ready("m0", 0, "m0:1")
    director.ready("m2", 0, "m2:1")
    assert director.tick(0.9 * READY_PATIENCE) == []
    commands = director.tick(1.1 * READY_PATIENCE)
    assert evicted(commands) == ["m1"]
    assert [command.generation for command in commands if isinstance(command, WorldEnded)] == [0]
    world = formed(report_all(director, {}))
    assert world is not None
    assert world.members == ("m0", "m2")


def test_a_newcomer_that_begins_anew_is_in_no_world_until_it_arrives_again() -> None:
    director = begun(1)
    director.arrive("new", START, 0.0)
    director.withdraw("new", 0.0)
    world = formed(report_all(director, {}))
    assert world is not None
    assert world.members == ("m0",)
    director.arrive("new", START, 0.0)
    world = formed(report_all(director, {}))
    assert world is not None
    assert world.members == ("m0", "new")


@pytest.mark.parametrize(
    ("lost", "newcomers", "members"),
    [
        (["m1"], ["x"], ("m0", "x", "m2", "m3")),
        (["m0", "m2"], ["x", "y"], ("x", "m1", "y", "m3")),
        (["m0", "m2"], ["x"], ("x", "m1", "m3")),
        (["m3"], ["x", "y"], ("m0", "m1", "m2", "x", "y")),
        ([], ["x"], ("m0", "m1", "m2", "m3", "x")),
        (["m1", "m2"], [], ("m0", "m3")),
    ],
)
def test_newcomers_take_the_numbers_of_those_who_have_left(
    lost: list[str], newcomers: list[str], members: tuple[str, ...]
) -> None:
    director = begun(4)
    revoked: list[bool] = []
    for name in lost:
        revoked += [one.is_planned for one in director.lost(name, "was killed", 0.0) if isinstance(one, WorldEnded)]
    for name in newcomers:
        director.arrive(name, START, 0.0)
    for member in [name for name in ("m0", "m1", "m2", "m3") if name not in lost]:
        commands = director.report(member, MemberReport(generation=0, lineage=START), 0.0)
        revoked += [one.is_planned for one in commands if isinstance(one, WorldEnded)]
    world = formed(commands)
    assert world is not None
    assert world.members == members
    assert revoked == [not lost]


def test_a_world_formed_with_a_newcomer_that_begins_anew_meanwhile_is_over() -> None:
    director = begun(1)
    director.arrive("new", START, 0.0)
    assert formed(report_all(director, {})) is not None
    commands = director.withdraw("new", 0.0)
    assert [command.generation for command in commands if isinstance(command, WorldEnded)] == [1]
    world = formed(report_all(director, {}))
    assert world is not None
    assert world.members == ("m0",)


def test_members_that_are_drained_leave_one_at_a_time_and_none_with_one_that_is_lost() -> None:
    director = begun(4)
    director.drain("m0")
    director.drain("m1")
    director.lost("m3", "was killed", 1.0)
    sizes = []
    for _ in range(3):
        commands = report_all(director, {})
        world = formed(commands)
        assert world is not None
        sizes.append(world.members)
        is_told = any(isinstance(command, ChangePending) for command in commands)
        assert is_told == (len(sizes) < 3), "who is still to leave can do so after the next step"
    assert sizes == [("m0", "m1", "m2"), ("m1", "m2"), ("m2",)]


def test_a_member_that_arrives_when_all_others_have_left_is_told_so() -> None:
    director = begun(1)
    director.lost("m0", "left", 0.0)
    assert evicted(director.arrive("late", START, 1.0)) == ["late"]
    assert director.tick(100.0) == []


def test_a_newcomer_makes_a_change_as_soon_as_it_is_there() -> None:
    director = begun(2)
    assert ChangePending(0) in director.arrive("new", START, 1.0)


def steps_after(count: int) -> list[Lineage]:
    """Return the lineages of the beginning and of ``count`` steps."""
    found = [START]
    for number in range(count):
        found.append(found[-1].child(f"step {number}".encode()))
    return found


def test_members_wait_once_for_a_newcomer_that_is_some_steps_behind_but_quick() -> None:
    director, history = begun(2), steps_after(5)
    director.arrive("new", history[0], 0.0)
    director.progress("new", history[1], 0.5)
    assert formed(report_all(director, {}, history[5])) is None
    for step in range(2, 5):
        assert formed(director.progress("new", history[step], 1.0 + 0.5 * step)) is None
    world = formed(director.progress("new", history[5], 3.5))
    assert world is not None
    assert world.members == ("m0", "m1", "new")


def test_members_do_not_wait_for_a_newcomer_that_would_take_too_long() -> None:
    director, history = begun(2), steps_after(5)
    director.arrive("new", history[0], 0.0)
    director.progress("new", history[1], 2.0)
    world = formed(report_all(director, {}, history[5]))
    assert world is not None
    assert world.members == ("m0", "m1")
    assert director.progress("new", history[5], 9.0) != [], "the next time it comes after a step that it follows"


def test_members_wait_for_a_newcomer_for_a_while_at_most() -> None:
    director, history = begun(2), steps_after(2)
    director.arrive("new", history[0], 0.0)
    assert formed(report_all(director, {}, history[2])) is None
    assert formed(director.tick(1.0 + 0.9 * JOIN_PATIENCE)) is None
    world = formed(director.tick(1.0 + 1.1 * JOIN_PATIENCE))
    assert world is not None
    assert world.members == ("m0", "m1")


def test_a_stopped_member_is_missed_at_the_next_tick_if_another_one_that_has_the_state_is_heard() -> None:
    director = begun(3)
    director.stopped("m1", "is stopped", 1.0)
    assert evicted(director.tick(1.1)) == ["m1"]
    assert director.members == ("m0", "m2")


def test_a_member_that_goes_on_before_the_next_tick_is_not_missed() -> None:
    director = begun(2)
    director.stopped("m1", "is stopped", 1.0)
    director.resumed("m1")
    assert evicted(director.tick(1.1)) == []


def test_the_last_members_that_have_the_state_may_be_stopped_as_long_as_others_may_be_silent() -> None:
    heard = {"m0"}
    director = ElasticDirector(2, rules=WorldRules(is_responding=lambda member: member in heard))
    for number in range(2):
        director.arrive(f"m{number}", START, 0.0)
    director.ready("m0", 0, "m0:1")
    director.ready("m1", 0, "m1:1")
    heard.clear()
    director.stopped("m1", "is stopped", 1.0)
    assert evicted(director.tick(5.0)) == [], "m0 has the state, but is not heard"
    director.stopped("m0", "is stopped", 5.0)
    director.stopped("m1", "is stopped", 6.0)
    assert director.holders == ()
    assert evicted(director.tick(1.0 + REPORT_PATIENCE - 0.1)) == []
    assert evicted(director.tick(1.0 + REPORT_PATIENCE)) == ["m1"], (
        "since it was stopped first, however often it is said"
    )
    assert director.members == ("m0",)
    director.resumed("m0")
    assert evicted(director.tick(12.0)) == [], "it goes on"
    assert director.members == ("m0",)


def test_members_that_are_all_late_have_more_time_for_their_reports() -> None:
    director = begun(2)
    director.ready("m0", 0, "m0:1")
    director.ready("m1", 0, "m1:1")
    director.arrive("m2", START, 0.5)
    director.lost("m2", "was killed", 0.6)
    director.report("m0", MemberReport(generation=0, lineage=START, suspects=((1, "silent"),)), 1.0)
    director.lost("m0", "was killed", 1.0)
    assert evicted(director.tick(1.1 + REPORT_PATIENCE)) == [], "it is the last one that has the state"
    assert evicted(director.tick(1.1 + REPORT_PATIENCE + LAST_PATIENCE)) == ["m1"]


def test_members_that_leave_do_not_keep_the_state_for_one_that_is_stopped_or_late() -> None:
    director = begun(3)
    director.drain("m0")
    director.lost("m2", "was killed", 0.5)
    assert director.holders == ("m1",)
    director.stopped("m1", "is stopped", 1.0)
    assert evicted(director.tick(1.1)) == [], "nobody else stays who has the state"
    director.resumed("m1")
    director.report("m0", MemberReport(generation=0, lineage=START), 1.2)
    assert evicted(director.tick(1.3 + REPORT_PATIENCE)) == []
    world = formed(director.report("m1", MemberReport(generation=0, lineage=START), 12.0))
    assert world is not None
    assert "m1" in world.members


def test_where_all_leave_nobody_is_waited_for_longer_than_usual() -> None:
    director = begun(2)
    for member in ("m0", "m1"):
        director.drain(member)
    assert director.holders == ("m0", "m1")
    director.stopped("m1", "is stopped", 1.0)
    assert evicted(director.tick(1.1)) == ["m1"]
