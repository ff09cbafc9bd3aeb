"""The machines of a job's ranks on one host, by conversation; and options that are refused."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from asyncpar.core.observe.rank_reports import Phase
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.hosts.lineage import Decision, Lineage
from asyncpar.hosts.messages import (
    ChangePending,
    HostDraining,
    HostParked,
    JobClosed,
    JobStopped,
    MemberArrived,
    MemberDied,
    MemberDismissed,
    MemberDraining,
    MemberFailed,
    MemberHealing,
    MemberLeft,
    MemberReady,
    MemberReported,
    MemberResumed,
    MemberStopped,
    MembersWanted,
    MemberWaits,
    PlacedMember,
    WorldAnnounced,
    WorldChange,
    WorldEnded,
    WorldStarted,
)
from asyncpar.hosts.pipe_messages import (
    ChangeWaits,
    DonorsFound,
    DonorsWanted,
    Drained,
    JobOver,
    JoinWorld,
    LeaseWanted,
    LeaveJob,
    LeaveRefused,
    LeaveWanted,
    NotAdmitted,
    WorldFormed,
    WorldOver,
)
from asyncpar.hosts.restart_budget import RestartBudget
from asyncpar.launch.agents.agent_options import AgentOptions, parse_address, parse_join
from asyncpar.launch.agents.elastic_ranks import ElasticRanks
from asyncpar.launch.agents.host_protocol import (
    AbandonRank,
    GrantLease,
    HostTick,
    InterruptRanks,
    LeaveHost,
    NotifyLeader,
    OpenRendezvous,
    PrintLine,
    RankGone,
    RankResumed,
    RankSilent,
    RanksOver,
    RankWrote,
    SignalRank,
    SlotCommand,
    SlotEvent,
    StartRank,
    StateChanged,
    WriteToRank,
)
from asyncpar.launch.agents.job_record import (
    ElasticMode,
    JobEnd,
    SubmittedJob,
    decode_end,
    decode_record,
    encode_record,
)
from asyncpar.launch.agents.restarted_ranks import RestartedRanks
from asyncpar.launch.agents.restarted_world import HostRanks
from asyncpar.launch.agents.views import GroupView, HostView, RankView, show_group
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.options import LaunchOptions, ProgramKind
from asyncpar.launch.vitals import Condition, RankState


def record(mode: ElasticMode, *, slots: int = 1, spares: int = 0, restarts: int = 1) -> SubmittedJob:
    return SubmittedJob(
        version="1",
        name="job",
        mode=mode,
        program="job.py",
        arguments=(),
        kind=ProgramKind.SCRIPT,
        directory="/",
        environment={},
        slots=slots,
        spares=spares,
        least_hosts=1,
        most_hosts=2,
        last_call=5.0,
        max_restarts=restarts,
        restart_window=60.0,
        grace=5.0,
        timeout=30.0,
        silent_after=30.0,
    )


READY = ('{"restarts":0,"port":7}', '{"restarts":0,"port":0}')
"""The readiness of two hosts for a world: the first one has a port for ``MASTER_PORT``."""


def announced(generation: int, *members: PlacedMember) -> WorldAnnounced:
    return WorldAnnounced(
        generation=generation,
        members=members,
        lineage=Lineage(0, b""),
        decision=Decision.ABORT,
        change=WorldChange(generation=generation),
    )


class Host:
    """A conversation with the machine of host ``a``."""

    def __init__(
        self,
        mode: ElasticMode,
        *,
        certified: tuple[int, ...] | None = None,
        parked_within: float | None = None,
        is_launcher: bool = False,
        **settings: Any,
    ) -> None:
        names = count()
        job = record(mode, **settings)

        def draw() -> str:
            return str(next(names))

        self.machine: ElasticRanks | RestartedRanks
        if mode is ElasticMode.RANKS:
            self.machine = ElasticRanks(1, job, host="a", draw=draw)
        else:
            own = HostRanks(
                slots=job.slots, rendezvous="a:1", certified=certified, role=None if certified is None else "agent-4"
            )
            self.machine = RestartedRanks(
                1,
                job,
                host="a",
                own=own,
                free_port=lambda: 7,
                draw=draw,
                parked_within=parked_within,
                is_launcher=is_launcher,
            )
        self.now = 0.0
        self.last: list[SlotCommand] = self.machine.begin(0.0)

    def feed(self, event: SlotEvent) -> list[SlotCommand]:
        self.last = self.machine.handle(event, now=self.now)
        return self.last

    def wait(self, seconds: float) -> list[SlotCommand]:
        self.now += seconds
        return self.feed(HostTick())

    def gone(self, slot: int, code: int) -> list[SlotCommand]:
        end = RankEnd(generation=0, rank=slot, local_rank=slot, host="a", pid=1, returncode=code, at=self.now)
        return self.feed(RankGone(slot, end))

    def of(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.last if isinstance(command, kind)]

    @property
    def reported(self) -> list[Any]:
        return [command.event for command in self.of(NotifyLeader)]


def test_a_crashed_rank_starts_again_as_another_member_until_its_budget_is_gone() -> None:
    host = Host(ElasticMode.RANKS)
    assert host.of(StartRank) == [StartRank(0, "a/0/0")]
    host.gone(0, -signal.SIGKILL)
    assert host.reported == [MemberDied("a/0/0", "was killed by SIGKILL")]
    assert host.wait(0.2) == []
    assert host.wait(0.1) == [StartRank(0, "a/0/1")]
    host.gone(0, 3)
    died, closed = host.reported
    assert died == MemberDied("a/0/1", "exited with code 3")
    assert decode_end(closed.record).exit_code == 3
    host.feed(closed)
    assert host.of(RanksOver)


@pytest.mark.parametrize("is_outlived", [True, False])
def test_a_job_that_the_leader_stops_ends_for_its_reason_and_not_for_one_of_before(*, is_outlived: bool) -> None:
    host = Host(ElasticMode.RANKS)
    host.gone(0, -signal.SIGKILL)
    host.wait(1.0)
    if is_outlived:
        host.feed(announced(1, PlacedMember(name="b/0/0", host="b")))
    host.feed(JobStopped(1, "it is over"))
    assert host.of(WriteToRank) == [WriteToRank("a/0/1", JobOver("it is over"))]
    [closed] = host.reported
    end = decode_end(closed.record)
    if is_outlived:
        assert end == JobEnd(exit_code=1, message="it is over")
    else:
        assert end.exit_code == 128 + signal.SIGKILL
        assert end.message.startswith("it is over\nrank 0 failed first: was killed by SIGKILL")


def test_members_with_certificates_learn_whose_each_rank_of_their_world_has_to_show() -> None:
    names = map(str, range(10))
    machine = ElasticRanks(1, record(ElasticMode.RANKS, slots=2), host="a", draw=lambda: next(names), certified=(4, 5))
    assert machine.begin(0.0) == [StartRank(0, "a/0/0@rank-4"), StartRank(1, "a/1/1@rank-5")]
    machine.handle(RankWrote("a/1/1@rank-5", JoinWorld(Lineage(0, b""), "x")), now=0.0)
    members = [PlacedMember(name=name, host=name[0]) for name in ("b/0/0@rank-0", "a/1/1@rank-5")]
    commands = [one for one in machine.handle(announced(0, *members), now=0.0) if isinstance(one, WriteToRank)]
    worlds = [(one.member, one.message) for one in commands if isinstance(one.message, WorldFormed)]
    received = [(member, world.rank, world.certified) for member, world in worlds]
    assert received == [("a/1/1@rank-5", 1, (0, 5))]


def test_a_newcomer_is_healed_by_others_and_its_leader_knows() -> None:
    host = Host(ElasticMode.RANKS)
    asked = RankWrote("a/0/0", DonorsWanted())
    host.feed(asked)
    assert host.last == [WriteToRank("a/0/0", DonorsFound())]
    members = [PlacedMember(name=name, host=name[0], address=f"at {name}") for name in ("a/0/0", "b/0/0")]
    host.feed(announced(0, *members))
    host.feed(asked)
    commands = WriteToRank("a/0/0", DonorsFound((("b/0/0", "at b/0/0"),)))
    assert host.last == [NotifyLeader(MemberHealing("a/0/0", "a")), commands]


def test_a_member_that_asks_may_commit_unless_it_is_to_end() -> None:
    host = Host(ElasticMode.RANKS)
    asks = RankWrote("a/0/0", LeaseWanted())
    host.feed(asks)
    assert host.last == [GrantLease("a/0/0")]
    host.feed(MemberDismissed("a/0/0", "it did not answer"))
    host.feed(asks)
    assert host.last == []


def test_a_spare_waits_and_steps_in_for_a_rank_that_is_lost() -> None:
    host = Host(ElasticMode.RANKS, slots=2, spares=1)
    assert host.of(StartRank) == [StartRank(0, "a/0/0"), StartRank(1, "a/1/1"), StartRank(2, "a/2/2")]
    asks = DonorsWanted()
    assert [host.feed(RankWrote(member, asks)) != [] for member in ("a/2/2", "a/0/0", "a/1/1")] == [True, True, False]
    assert host.machine.spares == {1}
    placed = [PlacedMember(name=name, host="a", address=f"at {name}") for name in ("a/2/2", "a/0/0")]
    host.feed(announced(0, *placed))
    host.gone(0, -signal.SIGKILL)
    assert host.reported == [MemberDied("a/0/0", "was killed by SIGKILL"), MemberHealing("a/1/1", "a")]
    assert host.of(WriteToRank)[0].member == "a/1/1"
    assert host.wait(1.0) == [StartRank(0, "a/0/3")], "it starts again, and is the spare now"
    assert host.feed(RankWrote("a/0/3", asks)) == []
    assert host.machine.spares == {0}
    host.feed(RankSilent(2, "is stopped"))
    assert host.reported == [MemberStopped("a/2/2", "is stopped")], "the leader decides: others may have no state"
    assert host.feed(RankResumed(2)) == [NotifyLeader(MemberResumed("a/2/2"))]
    host.feed(MemberDismissed("a/2/2", "is stopped"))
    assert host.of(SignalRank) == [SignalRank(2, signal.SIGKILL)]
    assert host.of(WriteToRank)[0].member == "a/0/3", "who is declared lost has no place either"


def test_a_rank_that_is_stopped_before_it_has_the_state_is_ended_at_once() -> None:
    host = Host(ElasticMode.RANKS)
    assert host.feed(RankSilent(0, "is stopped")) == [SignalRank(0, signal.SIGKILL)]
    assert host.feed(RankResumed(0)) == []


def test_ranks_of_a_host_without_a_place_wait_until_a_host_is_lost() -> None:
    host = Host(ElasticMode.RANKS)
    placed = [PlacedMember(name=f"{name}/0/0", host=name, address=f"at {name}") for name in "bc"]
    host.feed(announced(0, *placed))
    assert host.feed(RankWrote("a/0/0", DonorsWanted())) == [PrintLine("rank a/0 waits: the job has all its 2 hosts")]
    assert host.machine.spares == {0}
    assert host.wait(60.0) == [], "it waits without a word"
    host.feed(announced(1, *placed[:1]))
    assert host.reported == [MemberHealing("a/0/0", "a")]
    assert host.of(WriteToRank) == [WriteToRank("a/0/0", DonorsFound((("b/0/0", "at b"),)))]


def test_ranks_of_a_host_without_a_place_ask_when_more_are_needed() -> None:
    host = Host(ElasticMode.RANKS)
    placed = [PlacedMember(name=f"{name}/0/0", host=name, address=f"at {name}") for name in "bc"]
    host.feed(announced(0, *placed))
    host.feed(RankWrote("a/0/0", DonorsWanted()))
    assert host.feed(WorldEnded(0, "c is lost")) == []
    host.feed(announced(1, *placed))
    assert host.feed(WorldEnded(1, "c is lost, and two hosts are needed")) == []
    host.feed(MembersWanted(1))
    assert host.reported == [MemberHealing("a/0/0", "a")]


def test_ranks_of_a_host_without_a_place_end_well_with_the_job() -> None:
    host = Host(ElasticMode.RANKS)
    host.feed(announced(0, *(PlacedMember(name=f"{name}/0/0", host=name) for name in "bc")))
    host.feed(RankWrote("a/0/0", DonorsWanted()))
    host.feed(JobClosed(number=1, record=encode_record(JobEnd(exit_code=0))))
    assert host.of(WriteToRank) == [WriteToRank("a/0/0", Drained())]
    assert host.gone(0, 0)[-1] == RanksOver(JobEnd(exit_code=0))


def test_a_rank_that_comes_too_late_for_the_last_place_reports_so_once_and_stays() -> None:
    host = Host(ElasticMode.RANKS)
    host.feed(announced(0, PlacedMember(name="b/0/0", host="b", address="at b")))
    host.feed(RankWrote("a/0/0", DonorsWanted()))
    waits = MemberWaits("a/0/0", "the job has all its 2 hosts")
    assert host.feed(waits) == [PrintLine("rank a/0 waits: the job has all its 2 hosts")]
    assert host.feed(waits) == []
    restarted = Host(ElasticMode.RESTART)
    waits = MemberWaits(restarted.reported[0].member, "the job has all its 2 hosts")
    assert restarted.feed(waits) == [PrintLine("this host waits: the job has all its 2 hosts")]


def test_a_spare_that_withdraws_is_answered_at_once_and_keeps_its_place() -> None:
    host = Host(ElasticMode.RANKS, slots=1, spares=1)
    asks = DonorsWanted()
    assert host.feed(RankWrote("a/1/1", asks)) != []
    assert host.feed(RankWrote("a/0/0", asks)) == []
    assert host.feed(RankWrote("a/1/1", asks)) != []


@pytest.mark.parametrize("asks_later", [False, True])
def test_a_spare_ends_well_with_the_job(asks_later: bool) -> None:
    host = Host(ElasticMode.RANKS, slots=1, spares=1)
    asks = DonorsWanted()
    host.feed(RankWrote("a/0/0", asks))
    if not asks_later:
        assert host.feed(RankWrote("a/1/1", asks)) == []
    host.gone(0, 0)
    left, closed = host.reported
    assert (left, decode_end(closed.record)) == (MemberLeft("a/0/0"), JobEnd(exit_code=0))
    commands = host.feed(closed)
    if asks_later:
        commands = host.feed(RankWrote("a/1/1", asks))
    assert commands == [WriteToRank("a/1/1", Drained())]
    assert host.gone(1, 0)[-1] == RanksOver(JobEnd(exit_code=0))


def test_spares_of_a_host_that_leaves_take_no_place() -> None:
    host = Host(ElasticMode.RANKS, slots=1, spares=1)
    for member in ("a/0/0", "a/1/1"):
        host.feed(RankWrote(member, DonorsWanted()))
    host.feed(RankWrote("a/0/0", JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(0, PlacedMember(name="a/0/0", host="a")))
    host.feed(LeaveHost(10.0, "got SIGTERM"))
    assert host.of(SignalRank) == [SignalRank(1, signal.SIGTERM)]
    host.gone(0, 0)
    assert host.of(WriteToRank) == []
    assert host.gone(1, -signal.SIGTERM)[-1] == RanksOver(None)


def test_where_others_go_on_a_slot_that_may_not_start_again_stays_empty() -> None:
    host = Host(ElasticMode.RANKS, restarts=0)
    host.feed(announced(0, PlacedMember(name="a/0/0", host="a"), PlacedMember(name="b/0/0", host="b")))
    host.gone(0, 1)
    assert host.reported == [MemberDied("a/0/0", "exited with code 1")]
    assert host.wait(60.0) == []


def test_a_slot_that_crashed_too_often_starts_again_when_its_crashes_are_long_ago() -> None:
    host = Host(ElasticMode.RANKS, restarts=1)
    host.feed(announced(0, PlacedMember(name="a/0/0", host="a"), PlacedMember(name="b/0/0", host="b")))
    host.gone(0, 1)
    assert StartRank(0, "a/0/1") in host.wait(1.0)
    host.gone(0, 1)
    assert host.wait(58.0) == []
    assert StartRank(0, "a/0/2") in host.wait(1.0), "60 s after the first crash"
    host.gone(0, 1)
    assert host.wait(0.5) == [], "the second crash was 59.5 s ago"
    ended = JobClosed(number=1, record=encode_record(JobEnd(exit_code=0)))
    host.feed(ended)
    assert host.machine.next_deadline is None


def test_a_rank_that_is_declared_lost_is_ended_and_its_end_is_no_crash() -> None:
    host = Host(ElasticMode.RANKS, restarts=0)
    host.feed(MemberDismissed("a/0/0", "did not answer"))
    assert host.of(SignalRank) == [SignalRank(0, signal.SIGKILL)]
    host.gone(0, -signal.SIGKILL)
    assert host.wait(0.0) == [StartRank(0, "a/0/1")]
    assert host.machine.restarts == {0: 0}


def test_a_rank_that_ends_well_completes_the_job_and_the_others_are_left_alone() -> None:
    host = Host(ElasticMode.RANKS, slots=2)
    host.gone(0, 0)
    left, closed = host.reported
    assert left == MemberLeft("a/0/0")
    assert decode_end(closed.record) == JobEnd(exit_code=0)
    assert host.feed(closed) == []
    assert host.gone(1, 0)[-1] == RanksOver(JobEnd(exit_code=0))


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_rank_that_is_being_healed_when_the_job_is_complete_ends_well(*, asks_first: bool) -> None:
    host = Host(ElasticMode.RANKS, slots=2)
    host.feed(announced(0, PlacedMember(name="a/0/0", host="a"), PlacedMember(name="b/0/0", host="b")))
    host.feed(RankWrote("a/1/1", DonorsWanted()))
    found = host.of(WriteToRank)[-1].message
    assert isinstance(found, DonorsFound)
    assert found.donors, "it learns who can send the state"
    complete = JobClosed(number=1, record=encode_record(JobEnd(exit_code=0)))
    if asks_first:
        host.feed(RankWrote("a/1/1", DonorsWanted()))
        host.feed(complete)
    else:
        host.feed(complete)
        host.feed(RankWrote("a/1/1", DonorsWanted()))  # those who could have given it are gone
        assert host.of(WriteToRank) == [WriteToRank("a/1/1", Drained())]
    assert host.feed(MemberDismissed("a/1/1", "all members are lost")) == [WriteToRank("a/1/1", Drained())]
    host.gone(0, 0)
    assert host.gone(1, 0)[-1] == RanksOver(JobEnd(exit_code=0))


def test_a_host_that_leaves_drains_its_ranks_and_ends_them_when_time_is_up() -> None:
    host = Host(ElasticMode.RANKS)
    host.feed(RankWrote("a/0/0", JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(0, PlacedMember(name="a/0/0", host="a")))
    world = host.of(WriteToRank)[0].message
    assert isinstance(world, WorldFormed)
    assert world.rank == 0
    host.feed(LeaveHost(10.0, "got SIGTERM"))
    assert host.reported == [HostDraining("a")]
    host.wait(10.0)
    assert host.of(SignalRank) == [SignalRank(0, signal.SIGTERM)]
    host.wait(5.0)
    assert host.of(SignalRank) == [SignalRank(0, signal.SIGKILL)]
    assert host.gone(0, -9)[-1] == RanksOver(None)


def in_world_of_two(**settings: Any) -> Host:
    """A host whose rank trains with one of another host."""
    host = Host(ElasticMode.RANKS, **settings)
    host.feed(RankWrote("a/0/0", JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(0, PlacedMember(name="a/0/0", host="a"), PlacedMember(name="b/0/0", host="b")))
    return host


def test_a_rank_that_gets_sigterm_leaves_at_the_end_of_a_step_and_starts_again() -> None:
    host = in_world_of_two(restarts=0)
    host.feed(RankWrote("a/0/0", LeaveWanted()))
    assert host.reported == [MemberDraining("a/0/0")]
    assert host.of(SignalRank) == []
    host.feed(MemberDismissed("a/0/0", "drained", is_drained=True))
    assert host.of(WriteToRank) == [WriteToRank("a/0/0", Drained())]
    host.gone(0, 0)
    assert host.reported == [MemberLeft("a/0/0")], "the job is not complete"
    assert host.wait(0.0) == [StartRank(0, "a/0/1")]
    assert host.machine.restarts == {0: 0}


def test_a_rank_that_gets_sigterm_does_not_start_again_where_its_host_leaves() -> None:
    host = in_world_of_two()
    host.feed(RankWrote("a/0/0", LeaveWanted()))
    host.feed(LeaveHost(10.0, "got SIGTERM"))
    host.feed(MemberDismissed("a/0/0", "drained", is_drained=True))
    assert host.gone(0, 0)[-1] == RanksOver(None)


def test_a_rank_that_asked_to_leave_and_comes_to_its_end_completes_the_job() -> None:
    host = in_world_of_two()
    host.feed(RankWrote("a/0/0", LeaveWanted()))
    host.gone(0, 0)
    left, closed = host.reported
    assert (left, decode_end(closed.record)) == (MemberLeft("a/0/0"), JobEnd(exit_code=0))


def end_of_time(host: Host) -> None:
    host.feed(LeaveHost(10.0, "got SIGTERM"))
    host.wait(10.0)


@pytest.mark.parametrize(
    "happens",
    [
        end_of_time,
        lambda host: host.feed(HostParked("no quorum")),
        lambda host: host.feed(announced(1, PlacedMember(name="a/0/0", host="a"))),
        lambda host: host.feed(JobClosed(number=1, record=encode_record(JobEnd(exit_code=0)))),
    ],
    ids=["it is being ended", "no quorum", "nobody else is there", "the job is complete"],
)
def test_a_rank_that_gets_sigterm_ends_at_once_where_it_cannot_hand_over(happens: Callable[[Host], Any]) -> None:
    host = in_world_of_two()
    happens(host)
    host.feed(RankWrote("a/0/0", LeaveWanted()))
    assert host.last == [WriteToRank("a/0/0", LeaveRefused())]


def test_a_rank_that_gets_sigterm_before_its_first_world_ends_at_once() -> None:
    host = Host(ElasticMode.RANKS)
    assert host.feed(RankWrote("a/0/0", LeaveWanted())) == [WriteToRank("a/0/0", LeaveRefused())]


def test_ranks_that_know_of_no_worlds_start_and_end_with_each() -> None:
    host = Host(ElasticMode.RESTART, slots=2)
    arrived = host.reported[0]
    assert isinstance(arrived, MemberArrived)
    own = PlacedMember(name=arrived.member, host="a", address=arrived.address)
    other = PlacedMember(name="b/all/0", host="b", address='{"slots": 1, "rendezvous": "b:1"}')
    host.feed(announced(3, own, other))
    assert host.of(OpenRendezvous) == [OpenRendezvous(3, 3)]
    assert host.reported == [MemberReady(own.name, 3, READY[0])]
    host.feed(WorldStarted(3, READY))
    places = [start.place for start in host.of(StartRank)]
    assert [(place.rank, place.world_size, place.group_rank) for place in places] == [(0, 3, 0), (1, 3, 0)]
    host.feed(WorldEnded(3, "b is lost"))
    assert host.of(SignalRank) == [SignalRank(slot, signal.SIGTERM) for slot in (0, 1)]
    host.gone(0, -signal.SIGTERM)
    host.gone(1, -signal.SIGTERM)
    [reported] = host.reported
    assert isinstance(reported, MemberReported)
    assert (reported.report.lineage, reported.why) == (Lineage(4, b""), "b is lost")


def test_ranks_that_start_with_each_world_learn_whose_certificates_its_ranks_have() -> None:
    host = Host(ElasticMode.RESTART, slots=2, certified=(8, 9))
    arrived = host.reported[0]
    other = PlacedMember(
        name="b/all/0", host="b", address='{"slots":1,"rendezvous":"b:2","certified":[5],"role":"agent-2"}'
    )
    own = PlacedMember(name="a/all/0", host="a", address=arrived.address)
    host.feed(announced(3, own, other))
    assert host.of(OpenRendezvous) == [OpenRendezvous(3, 3, (8, 9, 5))]
    host.feed(WorldStarted(3, READY))
    assert {(start.place.certified, start.place.rendezvous_role) for start in host.of(StartRank)} == {
        ((8, 9, 5), "agent-4")
    }
    host.feed(WorldEnded(3, "host b is lost"))
    host.gone(0, -signal.SIGTERM)
    host.gone(1, -signal.SIGTERM)
    host.feed(announced(4, other, own))
    assert host.of(OpenRendezvous) == []
    host.feed(WorldStarted(4, READY))
    assert [(start.place.rank, start.place.certified, start.place.rendezvous_role) for start in host.of(StartRank)] == [
        (1, (5, 8, 9), "agent-2"),
        (2, (5, 8, 9), "agent-2"),
    ]


def test_a_failed_rank_ends_the_others_of_its_host_and_says_why() -> None:
    host = Host(ElasticMode.RESTART, slots=2)
    own = PlacedMember(name=host.reported[0].member, host="a", address=host.reported[0].address)
    for generation, expected in ((0, MemberReported), (1, JobClosed)):
        host.feed(announced(generation, own))
        host.feed(WorldStarted(generation, READY[:1]))
        host.gone(1, 3)
        host.wait(1.0)
        assert host.of(SignalRank) == [SignalRank(0, signal.SIGTERM)]
        host.gone(0, -signal.SIGTERM)
        assert isinstance(host.reported[-1], expected)


def test_restarts_within_the_window_count_and_waits_grow() -> None:
    budget = RestartBudget[int](most=2, window=10.0)
    assert [budget.crash(0, at) for at in (0.0, 1.0, 2.0)] == [0.25, 0.5, None]
    assert budget.crash(1, 2.0) == 0.25
    assert budget.crash(0, 60.0) == 0.25


@pytest.mark.parametrize(("silent_after", "report_within"), [(20.0, 20.0), (None, 30.0), (math.inf, 604800.0)])
def test_ranks_that_live_on_have_as_long_to_report_as_to_be_silent(
    silent_after: float | None, report_within: float
) -> None:
    job = replace(record(ElasticMode.RANKS), silent_after=silent_after)
    assert job.terms.report_within == report_within
    assert replace(job, mode=ElasticMode.RESTART).terms.report_within == 11.0, "the grace, and a margin"


def test_records_travel_as_they_are_and_others_are_refused() -> None:
    job = record(ElasticMode.RANKS)
    assert decode_record(encode_record(job)) == job
    with pytest.raises(ProtocolError, match="of one version"):
        decode_record(b"\xc1")
    with pytest.raises(ProtocolError, match="of one version"):
        decode_end(b"\xc1")


@pytest.mark.parametrize("width", [None, 100, 40, 20])
def test_the_status_fits_narrow_terminals(width: int | None) -> None:
    ranks = (RankView(slot=0, rank=1, pid=7, restarts=2), RankView(slot=1, rank=None, pid=None, restarts=0))
    host = HostView(name="a", address="a:1", state="up", is_leader=True, is_voter=True, ranks=ranks)
    text = show_group(GroupView(leader="a", hosts=(host,), change="generation 1; left: b/0/0"), width=width)
    assert "leader a" in text.replace("\n", " ")
    assert width is None or max(map(len, text.splitlines())) <= max(width, 30)


def test_options_that_cannot_be_are_named() -> None:
    cases: dict[str, Callable[[], object]] = {
        "--name": lambda: AgentOptions(name="a b"),
        "--grace": lambda: AgentOptions(grace=-1.0),
        "--join": lambda: parse_join("a:x,b"),
        "--listen": lambda: parse_address("--listen", ":"),
        "--nnodes": lambda: LaunchOptions(program="x", nnodes=2, least_nnodes=3, elastic="ranks"),
        "--elastic": lambda: LaunchOptions(program="x", elastic="never"),
        "--host-name": lambda: LaunchOptions(program="x", host_name="a"),
        "--restart-window": lambda: LaunchOptions(program="x", restart_window=0.0),
    }
    for option, make in cases.items():
        with pytest.raises(UsageError, match=option):
            make()
    assert parse_join("a,[::1]:5") == ("a:29400", "[::1]:5")


def test_members_of_a_parked_host_are_in_no_world_until_there_is_a_quorum() -> None:
    host = Host(ElasticMode.RANKS)
    member = "a/0/0"
    host.feed(RankWrote(member, JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(0, PlacedMember(name=member, host="a")))
    revoked = WorldOver(0, "no quorum", is_planned=False)
    assert host.feed(HostParked("no quorum")) == [WriteToRank(member, revoked)]
    held: list[SlotEvent] = [announced(1, PlacedMember(name=member, host="a")), WorldEnded(1, "so"), ChangePending(1)]
    assert [host.feed(event) for event in held] == [[], [], []], "revoked at once, it would be followed by another"
    commands = host.feed(HostParked(""))
    kinds = [type(command.message) for command in commands if isinstance(command, WriteToRank)]
    assert kinds == [WorldFormed, WorldOver, ChangeWaits], "it goes on with what was announced meanwhile"


@pytest.mark.parametrize("is_planned", [True, False])
def test_ranks_learn_whether_their_world_ends_by_plan(is_planned: bool) -> None:
    host = Host(ElasticMode.RANKS)
    member = "a/0/0"
    host.feed(RankWrote(member, JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(0, PlacedMember(name=member, host="a")))
    revoked = WorldOver(0, "so", is_planned)
    assert host.feed(WorldEnded(0, "so", is_planned=is_planned)) == [WriteToRank(member, revoked)]


def test_ranks_of_a_parked_host_that_know_of_no_worlds_are_stopped_and_go_on() -> None:
    address = '{"slots": 2, "rendezvous": "a:1"}'
    started = Host(ElasticMode.RESTART, slots=2)
    member = next(one.event.member for one in started.last if isinstance(one, NotifyLeader))  # type: ignore[union-attr]
    started.feed(announced(0, PlacedMember(name=member, host="a", address=address)))
    started.feed(WorldStarted(0, READY[:1]))
    assert started.feed(HostParked("no quorum")) == [SignalRank(slot, signal.SIGSTOP) for slot in (0, 1)]
    assert started.feed(StateChanged(0, state(Condition.STOPPED))) == []
    ended = started.feed(WorldEnded(0, "it was replaced"))
    numbers = [one.signal_number for one in ended if isinstance(one, SignalRank)]
    assert numbers == [signal.SIGTERM, signal.SIGCONT] * 2, "a stopped process receives nothing"
    assert started.feed(HostParked("")) == [SignalRank(slot, signal.SIGCONT) for slot in (0, 1)]


def state(condition: Condition) -> RankState:
    return RankState(generation=0, rank=0, phase=Phase.MEMBER, condition=condition)


def test_ranks_that_their_agent_has_stopped_are_not_said_to_run_again() -> None:
    host = Host(ElasticMode.RESTART, slots=1)
    own = PlacedMember(name=host.reported[0].member, host="a", address=host.reported[0].address)
    host.feed(announced(0, own))
    host.feed(WorldStarted(0, READY[:1]))
    host.feed(HostParked("no quorum"))
    assert host.feed(StateChanged(0, state(Condition.STOPPED))) == []
    host.feed(HostParked(""))
    assert host.feed(StateChanged(0, state(Condition.WELL))) == []
    host.feed(StateChanged(0, state(Condition.STOPPED)))
    [line] = [one.text for one in host.of(PrintLine) if isinstance(one, PrintLine)]
    assert line.startswith("rank 0 is stopped")
    host.feed(StateChanged(0, state(Condition.WELL)))
    assert host.of(PrintLine) == [PrintLine("rank 0 runs again")]


def test_a_launcher_without_a_quorum_for_too_long_ends_its_ranks_and_the_job_here() -> None:
    host = Host(ElasticMode.RESTART, slots=1, parked_within=5.0)
    own = PlacedMember(name=host.reported[0].member, host="a", address=host.reported[0].address)
    host.feed(announced(0, own))
    host.feed(WorldStarted(0, READY[:1]))
    host.feed(HostParked("no quorum"))
    host.wait(4.0)
    host.feed(HostParked(""))
    host.wait(10.0)
    assert host.last == []
    host.feed(HostParked("no quorum"))
    host.wait(5.0)
    assert host.of(SignalRank) == [SignalRank(0, signal.SIGTERM), SignalRank(0, signal.SIGCONT)]
    host.gone(0, -signal.SIGTERM)
    [over] = host.of(RanksOver)
    assert over.end.exit_code == 1
    assert over.end.message.startswith("no quorum of the hosts was reached for 5 s (--reconnect-within)")


def launched(*, slots: int = 1) -> Host:
    """Return the host of a launcher whose ranks have started."""
    host = Host(ElasticMode.RESTART, slots=slots, is_launcher=True)
    own = PlacedMember(name=host.reported[0].member, host="a", address=host.reported[0].address)
    assert host.feed(announced(0, own)) != []
    assert host.of(PrintLine) == [], "a launcher prints only what differs from a start"
    host.feed(WorldStarted(0, READY[:1]))
    assert host.of(PrintLine) == []
    return host


def interrupted(host: str) -> JobClosed:
    message = f"the launcher on {host} got SIGINT"
    end = JobEnd(exit_code=130, message=message, signal_number=signal.SIGINT, interrupted=host)
    return JobClosed(number=1, record=encode_record(end))


def test_ranks_of_an_interrupted_launcher_get_its_signal_at_once_and_no_other_when_the_job_is_closed() -> None:
    host = launched()
    assert host.feed(InterruptRanks(signal.SIGINT)) == [SignalRank(0, signal.SIGINT)]
    assert host.feed(interrupted("a")) == []
    host.gone(0, -signal.SIGINT)
    [over] = host.of(RanksOver)
    assert over.end.exit_code == 130


def test_an_interrupted_launcher_that_cannot_learn_of_the_end_ends_alone() -> None:
    host = launched()
    host.feed(InterruptRanks(signal.SIGTERM))
    host.gone(0, -signal.SIGTERM)
    assert host.of(RanksOver) == []
    assert host.of(NotifyLeader) == [], "that its ranks have ended counts neither as done nor as a failure"
    host.wait(3.0)
    [over] = host.of(RanksOver)
    assert (over.end.exit_code, over.end.interrupted) == (143, "a")


def test_ranks_of_a_launcher_that_is_interrupted_before_they_start_do_not_start() -> None:
    host = Host(ElasticMode.RESTART, is_launcher=True)
    own = PlacedMember(name=host.reported[0].member, host="a", address=host.reported[0].address)
    host.feed(announced(0, own))
    assert host.feed(InterruptRanks(signal.SIGINT)) == []
    assert host.feed(WorldStarted(0, READY[:1])) == []
    host.feed(interrupted("a"))
    [over] = host.of(RanksOver)
    assert over.end.exit_code == 130


def test_ranks_of_other_hosts_get_the_signal_that_a_launcher_got_and_are_killed_after_the_grace_period() -> None:
    host = launched(slots=2)
    signals = [SignalRank(slot, signal.SIGINT) for slot in (0, 1)]
    assert host.feed(interrupted("b")) == [PrintLine("the launcher on b got SIGINT; stopping all ranks"), *signals]
    host.gone(0, -signal.SIGINT)
    late = PrintLine("ranks still run 5 s after they were asked to end; killing them")
    assert host.wait(5.0) == [late, AbandonRank(1)]


def test_a_launcher_prints_how_its_ranks_start_again() -> None:
    host = launched()
    own = PlacedMember(name="a/all/0", host="a", address='{"slots": 1, "rendezvous": "a:1"}')
    other = PlacedMember(name="b/all/9", host="b", address='{"slots": 1, "rendezvous": "b:1"}')
    host.gone(0, 3)
    assert host.of(PrintLine) == []
    host.feed(announced(1, own, other))
    host.feed(WorldStarted(1, READY))
    why, again = host.of(PrintLine)
    assert isinstance(why, PrintLine)
    assert why.text.startswith("rank 0 failed first: exited with code 3")
    assert again == PrintLine("starting all ranks again on 2 hosts (restart 1)")


def test_a_rank_that_the_others_do_not_admit_is_named_once_and_starts_again_ever_later() -> None:
    """Whether it finds that out itself, or they do when it waits for its world."""
    host = Host(ElasticMode.RANKS, restarts=3)
    others = PlacedMember(name="b/0/0", host="b")
    host.feed(announced(0, others))
    host.feed(RankWrote("a/0/0", NotAdmitted("its step 4 differs")))
    assert host.last == [PrintLine("rank a/0 is not admitted: its step 4 differs")]
    host.gone(0, 1)
    assert host.of(PrintLine) == [PrintLine("rank a/0 exited with code 1; it starts again in 0.25 s (restart 1 of 3)")]
    assert host.wait(0.25) == [StartRank(0, "a/0/1")]
    host.feed(RankWrote("a/0/1", NotAdmitted("its step 9 differs")))
    assert host.last == []
    assert isinstance(host.machine, ElasticRanks)
    assert host.machine.refusals == {0: "its step 9 differs"}
    host.gone(0, 1)
    assert host.wait(0.4) == []
    assert host.wait(0.1) == [StartRank(0, "a/0/2")]
    host.feed(MemberDismissed("a/0/2", "its step 20 differs", is_refused=True))
    assert host.last == [SignalRank(0, signal.SIGKILL)]
    host.gone(0, -signal.SIGKILL)
    assert host.of(StartRank) == []
    assert host.wait(1.0) == [StartRank(0, "a/0/3")]
    host.feed(RankWrote("a/0/3", JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(1, others, PlacedMember(name="a/0/3", host="a")))
    assert host.machine.refusals == {}


def test_a_newcomer_of_a_parked_host_waits_for_the_quorum_before_it_is_named_donors() -> None:
    """The members that a parked host knows of may be lost: asking them in vain would end the newcomer."""
    host = Host(ElasticMode.RANKS)
    host.feed(announced(0, PlacedMember(name="b/0/0", host="b", address="at b")))
    host.feed(HostParked("no quorum"))
    assert host.feed(RankWrote("a/0/0", DonorsWanted())) == []
    host.feed(announced(1, PlacedMember(name="c/0/0", host="c", address="at c")))
    assert host.of(WriteToRank) == []
    host.feed(HostParked(""))
    assert host.of(WriteToRank) == [WriteToRank("a/0/0", DonorsFound((("c/0/0", "at c"),)))]


def test_a_rank_that_ends_with_an_exception_outside_its_steps_is_lost_and_not_done() -> None:
    """Ranks that are done are not replaced: a job all of whose ranks crashed would never end."""
    host = Host(ElasticMode.RANKS)
    host.feed(RankWrote("a/0/0", LeaveJob(None, "ProtocolError: it came twice")))
    assert host.reported == [MemberDied("a/0/0", "ended with ProtocolError: it came twice")]
    host.feed(RankWrote("a/0/0", LeaveJob(4, "ValueError: 4")))
    assert host.reported == [MemberFailed("a/0/0", 4, "ValueError: 4")]
    host.feed(RankWrote("a/0/0", LeaveJob()))
    assert host.reported == [MemberLeft("a/0/0")]


def test_a_member_that_the_others_have_gone_on_without_is_ended_although_nobody_has_dismissed_it() -> None:
    host = Host(ElasticMode.RANKS, slots=2)
    placed = [PlacedMember(name=name, host="a") for name in ("a/0/0", "a/1/1")]
    for member in ("a/0/0", "a/1/1"):
        host.feed(RankWrote(member, JoinWorld(Lineage(0, b""), "x")))
    host.feed(announced(0, *placed))
    host.feed(RankWrote("a/1/1", LeaveJob()))
    commands = host.feed(announced(1, PlacedMember(name="b/0/0", host="b")))
    assert [one for one in commands if isinstance(one, SignalRank)] == [SignalRank(0, signal.SIGKILL)], (
        "the other one is done"
    )
