"""The rendezvous machine, by conversation."""

from __future__ import annotations

import pytest

from asyncpar.core.config.world import Member
from asyncpar.net.membership.machine import (
    Close,
    Command,
    DeadlineTick,
    Exited,
    Join,
    Leave,
    Open,
    RefusalKind,
    RefuseRank,
    RendezvousMachine,
    Welcome,
)


def join(
    call: int,
    rank: int,
    *,
    size: int = 3,
    generation: int = 0,
    job: str = "job",
    settings: str = "",
    deadline: float = 30.0,
    address: str | None = None,
    session: str = "",
) -> Join:
    member = Member(rank=rank, host="here", address=address or f"here:{4000 + rank}")
    return Join(
        call=call,
        job=job,
        generation=generation,
        world_size=size,
        member=member,
        settings=settings,
        deadline=deadline,
        session=session,
    )


def kinds(commands: list[Command]) -> dict[int, RefusalKind]:
    return {command.call: command.refusal.kind for command in commands if isinstance(command, RefuseRank)}


def message(commands: list[Command]) -> str:
    (only,) = {command.refusal.message for command in commands if isinstance(command, RefuseRank)}
    return only


def machine(size: int | None = 3) -> RendezvousMachine:
    return RendezvousMachine(job="job", world_size=size)


def test_everyone_gets_the_same_world_when_the_last_rank_comes() -> None:
    rendezvous = machine()
    assert rendezvous.handle(join(10, 2), now=0.0) == []
    assert rendezvous.handle(join(11, 0), now=0.1) == []
    commands = rendezvous.handle(join(12, 1), now=0.2)
    assert [command.call for command in commands] == [10, 11, 12]
    worlds = {command.world for command in commands if isinstance(command, Welcome)}
    (world,) = worlds
    assert [member.rank for member in world.members] == [0, 1, 2]
    assert (world.generation, world.job) == (0, "job")
    assert rendezvous.next_deadline is None


def test_a_late_world_names_the_missing_ranks() -> None:
    rendezvous = machine(size=5)
    for call, rank in enumerate((0, 3)):
        rendezvous.handle(join(call, rank, size=5), now=0.0)
    assert rendezvous.next_deadline == 30.0
    assert rendezvous.handle(DeadlineTick(), now=29.9) == []
    commands = rendezvous.handle(DeadlineTick(), now=30.0)
    assert kinds(commands) == {0: RefusalKind.TIMEOUT, 1: RefusalKind.TIMEOUT}
    assert "missing ranks 1, 2, 4" in message(commands)
    assert all(isinstance(command, RefuseRank) and command.refusal.ranks == (1, 2, 4) for command in commands)


def test_each_rank_waits_for_its_own_time_only() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0, deadline=5.0), now=0.0)
    rendezvous.handle(join(1, 1, deadline=9.0), now=0.0)
    assert list(kinds(rendezvous.handle(DeadlineTick(), now=5.0))) == [0]
    assert rendezvous.next_deadline == 9.0


def test_a_rank_that_comes_twice_ends_the_wait_of_all() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0), now=0.0)
    rendezvous.handle(join(1, 1), now=0.0)
    commands = rendezvous.handle(join(2, 1, address="there:9"), now=0.0)
    assert kinds(commands) == dict.fromkeys((0, 1, 2), RefusalKind.USAGE)
    assert "here:4001" in message(commands)
    assert "there:9" in message(commands)
    assert kinds(rendezvous.handle(join(3, 2), now=1.0)) == {3: RefusalKind.USAGE}


def test_a_second_node_of_a_rank_is_told_that_a_rank_joins_once() -> None:
    rendezvous = machine(size=1)
    rendezvous.handle(join(0, 0, size=1), now=0.0)
    commands = rendezvous.handle(join(1, 0, size=1, address="here:9"), now=1.0)
    assert kinds(commands) == {1: RefusalKind.USAGE}
    assert "joined this world already, at" in message(commands)
    assert "a rank joins once: keep one node for the whole program" in message(commands)


def test_a_rank_that_left_may_come_again() -> None:
    rendezvous = machine(size=2)
    rendezvous.handle(join(0, 1, size=2), now=0.0)
    rendezvous.handle(Leave(0), now=0.5)
    rendezvous.handle(join(1, 1, size=2), now=1.0)
    assert [command.call for command in rendezvous.handle(join(2, 0, size=2), now=1.0)] == [1, 2]


def test_another_world_size_ends_the_wait_of_all() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0), now=0.0)
    commands = rendezvous.handle(join(1, 1, size=4), now=0.0)
    assert kinds(commands) == dict.fromkeys((0, 1), RefusalKind.USAGE)
    assert message(commands) == "world_size: expected 3, rank 1 came with 4"


def test_a_rank_out_of_range_is_named() -> None:
    assert message(machine().handle(join(0, 3), now=0.0)) == "rank: expected 0..2, got 3"


def test_settings_that_differ_are_quoted() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0, settings="transport=tcp"), now=0.0)
    commands = rendezvous.handle(join(1, 2, settings="transport=grpc"), now=0.0)
    assert kinds(commands) == dict.fromkeys((0, 1), RefusalKind.USAGE)
    assert "rank 0 has 'transport=tcp', rank 2 has 'transport=grpc'" in message(commands)


def test_strangers_are_refused_and_nobody_else_notices() -> None:
    rendezvous = RendezvousMachine(job="job", world_size=2, generation=3)
    rendezvous.handle(join(0, 0, size=2, generation=3), now=0.0)
    assert kinds(rendezvous.handle(join(1, 1, size=2, generation=2), now=0.0)) == {1: RefusalKind.STALE}
    assert kinds(rendezvous.handle(join(2, 1, size=2, generation=4), now=0.0)) == {2: RefusalKind.USAGE}
    assert kinds(rendezvous.handle(join(3, 1, size=2, generation=3, job="other"), now=0.0)) == {3: RefusalKind.USAGE}
    assert len(rendezvous.handle(join(4, 1, size=2, generation=3), now=0.0)) == 2


def test_an_exit_before_joining_is_told_to_those_who_wait_and_those_who_come() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0), now=0.0)
    commands = rendezvous.handle(Exited(0, 1, "exited with code 3"), now=0.1)
    assert kinds(commands) == {0: RefusalKind.LOST}
    assert message(commands) == "rank 1 exited with code 3 before it joined the world"
    assert kinds(rendezvous.handle(join(1, 2), now=0.2)) == {1: RefusalKind.LOST}


def test_an_exit_before_anyone_came_is_remembered() -> None:
    rendezvous = machine()
    assert rendezvous.handle(Exited(0, 1, "exited with code 0"), now=0.1) == []
    commands = rendezvous.handle(join(0, 0), now=0.2)
    assert kinds(commands) == {0: RefusalKind.LOST}


@pytest.mark.parametrize("first", [0, 1])
def test_who_comes_late_hears_of_the_rank_that_went_first_and_not_of_those_that_it_ended(first: int) -> None:
    rendezvous = machine(size=3)
    rendezvous.handle(Exited(0, first, "exited with code 3"), now=0.1)
    rendezvous.handle(join(0, 1 - first, size=3), now=0.2)  # it is told, fails, and goes
    rendezvous.handle(Exited(0, 1 - first, "exited with code 1"), now=0.3)
    commands = rendezvous.handle(join(1, 2, size=3), now=0.4)
    assert message(commands) == f"rank {first} exited with code 3 before it joined the world"


def test_an_exit_after_the_world_was_made_changes_nothing() -> None:
    rendezvous = machine(size=1)
    rendezvous.handle(join(0, 0, size=1), now=0.0)
    assert rendezvous.handle(Exited(0, 0, "exited with code 0"), now=0.1) == []


def test_a_rank_whose_answer_got_lost_gets_it_again_and_an_impostor_does_not() -> None:
    rendezvous = machine(size=1)
    (first,) = rendezvous.handle(join(0, 0, size=1), now=0.0)
    (again,) = rendezvous.handle(join(1, 0, size=1), now=1.0)
    assert isinstance(first, Welcome)
    assert again == Welcome(1, first.world)
    assert kinds(rendezvous.handle(join(2, 0, size=1, address="there:9"), now=1.0)) == {2: RefusalKind.USAGE}


def test_a_new_generation_fences_the_old_one() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0), now=0.0)
    commands = rendezvous.handle(Open(1, 1), now=1.0)
    assert kinds(commands) == {0: RefusalKind.STALE}
    (welcome,) = rendezvous.handle(join(1, 0, size=1, generation=1), now=1.0)
    assert isinstance(welcome, Welcome)
    assert welcome.world.generation == 1


def test_a_generation_of_another_job_is_for_its_ranks_only() -> None:
    rendezvous = machine()
    rendezvous.handle(Open(1, 1, "other"), now=1.0)
    assert kinds(rendezvous.handle(join(0, 0, size=1, generation=1), now=1.0)) == {0: RefusalKind.USAGE}
    (welcome,) = rendezvous.handle(join(1, 0, size=1, generation=1, job="other"), now=1.0)
    assert isinstance(welcome, Welcome)
    assert welcome.world.job == "other"


def test_a_rank_that_comes_before_the_opening_waits_for_it() -> None:
    rendezvous = machine(size=None)
    assert rendezvous.handle(join(0, 0, size=1), now=0.0) == []
    assert [type(command) for command in rendezvous.handle(Open(0, 1), now=1.0)] == [Welcome]


def test_opening_the_same_generation_again_keeps_who_waits() -> None:
    rendezvous = machine(size=2)
    rendezvous.handle(join(0, 0, size=2), now=0.0)
    assert rendezvous.handle(Open(0, 2), now=0.0) == []
    assert len(rendezvous.handle(join(1, 1, size=2), now=0.0)) == 2


def test_closing_refuses_all() -> None:
    rendezvous = machine()
    rendezvous.handle(join(0, 0), now=0.0)
    assert kinds(rendezvous.handle(Close("the job ended"), now=1.0)) == {0: RefusalKind.CLOSED}
    assert kinds(rendezvous.handle(join(1, 1), now=1.0)) == {1: RefusalKind.CLOSED}


def test_a_rank_that_asks_again_because_its_connection_broke_is_no_second_one() -> None:
    rendezvous = machine(2)
    assert rendezvous.handle(join(0, 0, size=2, session="a"), now=0.0) == []
    assert rendezvous.handle(join(1, 0, size=2, session="a"), now=1.0) == []
    assert rendezvous.handle(Leave(0), now=1.1) == []
    welcomes = rendezvous.handle(join(2, 1, size=2, session="b"), now=2.0)
    assert [command.call for command in welcomes] == [1, 2]
    assert all(isinstance(command, Welcome) for command in welcomes)
    assert kinds(machine(2).handle(join(0, 0, size=2, session="a"), now=0.0)) == {}


def test_another_process_with_the_same_rank_is_a_second_one() -> None:
    rendezvous = machine(2)
    assert rendezvous.handle(join(0, 0, size=2, session="a"), now=0.0) == []
    assert kinds(rendezvous.handle(join(1, 0, size=2, session="b"), now=1.0)) == dict.fromkeys(
        (0, 1), RefusalKind.USAGE
    )


@pytest.mark.parametrize(("size", "end"), [(21, ", 19, 20"), (22, ", 19, 20 and 1 more"), (99, ", 20 and 78 more")])
def test_twenty_missing_ranks_are_named_and_the_others_counted(size: int, end: str) -> None:
    rendezvous = machine(size)
    rendezvous.handle(join(0, 0, size=size), now=0.0)
    assert message(rendezvous.handle(DeadlineTick(), now=30.0)).endswith(end)
