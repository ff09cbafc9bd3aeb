"""Several hosts whose ranks start again with every world: the machines of their leader and of all hosts."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from itertools import count

import pytest

from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import FailureReport, Phase
from asyncpar.core.observe.waits import CONDITION_WORDS, WaitNotice
from asyncpar.hosts.group import GroupNode, GroupState
from asyncpar.hosts.messages import HostLost, JobOpened, JobWaits
from asyncpar.hosts.worlds import (
    CommandHosts,
    HostReported,
    LeaderCommand,
    NodeGone,
    NodeJoined,
    ProposeState,
    StateDecided,
    WorldEvent,
    WorldMachine,
    WorldTick,
)
from asyncpar.launch.agents.host_protocol import (
    AnnounceExit,
    HostTick,
    NotifyLeader,
    NotifyOfCondition,
    NotifyRanks,
    OpenRendezvous,
    PrintLine,
    RankGone,
    RankPlace,
    RanksOver,
    SignalRank,
    SlotCommand,
    SlotEvent,
    StartRank,
    StateChanged,
    WaitChanged,
)
from asyncpar.launch.agents.job_record import ElasticMode, JobEnd, SubmittedJob, encode_record
from asyncpar.launch.agents.restarted_ranks import RestartedRanks
from asyncpar.launch.agents.restarted_world import HostRanks
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.options import ProgramKind
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.launch.wait_board import WaitReport
from tests.soak import chosen


def job(
    least: int,
    most: int,
    restarts: int,
    timeout: float,
    stopped_after: float | None = 3.0,
    *,
    is_fixed: bool = False,
) -> SubmittedJob:
    return SubmittedJob(
        version="1",
        name="job",
        mode=ElasticMode.RESTART,
        program="job.py",
        arguments=(),
        kind=ProgramKind.SCRIPT,
        directory="/",
        environment={},
        slots=2,
        least_hosts=least,
        most_hosts=most,
        last_call=5.0,
        max_restarts=restarts,
        restart_window=600.0,
        grace=5.0,
        timeout=timeout,
        stopped_after=stopped_after,
        is_fixed=is_fixed,
    )


def state(condition: Condition, *, place: str = "") -> StateChanged:
    """Return the event that the rank of slot 0 is in ``condition`` from now on."""
    return StateChanged(0, RankState(generation=0, rank=0, phase=Phase.MEMBER, condition=condition, place=place))


class Host:
    """A host with the processes of its ranks; a process ends with the signal that it gets."""

    def __init__(
        self, name: str, machine: RestartedRanks, send: Callable[[str, SlotCommand], None], ahead: float = 0.0
    ) -> None:
        self.name, self.machine, self._send = name, machine, send
        self.ahead = ahead
        """Seconds by which its clock is ahead of the others'."""
        self.is_deaf = False
        """Whether its processes do not end, whatever signal they get."""
        self.places: dict[int, RankPlace] = {}
        self.running: set[int] = set()
        self.others: list[SlotCommand] = []
        """Commands that are neither for processes nor for the leader."""
        self.waits: list[str] = []
        """Reports that the job waits for hosts, which its agent prints."""
        self.end: JobEnd | None = None
        self._signalled: list[tuple[int, int]] = []

    @property
    def lines(self) -> list[str]:
        return [one.text for one in self.others if isinstance(one, PrintLine)]

    def obey(self, commands: list[SlotCommand]) -> None:
        for command in commands:
            match command:
                case StartRank(slot, _, place):
                    assert slot not in self.running
                    assert place is not None
                    self.running.add(slot)
                    self.places[slot] = place
                case SignalRank(slot, number) if number in (signal.SIGTERM, signal.SIGKILL):
                    self._signalled.append((slot, number))
                case NotifyLeader():
                    self._send(self.name, command)
                case RanksOver(end):
                    self.end = end
                case _:
                    self.others.append(command)

    def take_signals(self, now: float) -> None:
        signalled, self._signalled = self._signalled, []
        for slot, number in signalled:
            if slot in self.running and not self.is_deaf:
                self.gone(slot, -number, now)

    def feed(self, event: SlotEvent, now: float) -> None:
        self.obey(self.machine.handle(event, now=now + self.ahead))

    def gone(
        self, slot: int, code: int, now: float, *, blames: int | None = None, ago: float = 0.0, raised: str = ""
    ) -> None:
        """Let a process end, which has failed ``ago``, and has ``raised`` an exception or ``blames`` another rank."""
        self.running.remove(slot)
        place = self.places[slot]
        report = None
        if blames is not None or raised:
            name = raised or "PeerLost"
            report = FailureReport(
                type_name=name, message="oh", traceback="oh", is_peer_error=blames is not None, blames=blames
            )
        end = RankEnd(
            generation=place.generation,
            rank=place.rank,
            local_rank=slot,
            host=self.name,
            pid=7,
            returncode=code,
            at=now + self.ahead - ago,
            report=report,
        )
        self.feed(RankGone(slot, end), now)


class Cluster:
    """A leader, and hosts ``a``, ``b``, ... with two ranks each unless ``slots`` says otherwise."""

    def __init__(
        self,
        least: int,
        most: int,
        *,
        restarts: int = 0,
        slots: dict[str, int] | None = None,
        places: dict[str, int] | None = None,
        timeout: float = 30.0,
        are_launchers: bool = False,
        is_fixed: bool = False,
        stopped_after: float | None = 3.0,
        ahead: dict[str, float] | None = None,
    ) -> None:
        self._ahead = ahead or {}
        self._are_launchers = are_launchers or is_fixed
        self.now = 0.0
        self._job = job(least, most, restarts, timeout, stopped_after, is_fixed=is_fixed)
        self._slots, self._places = slots or {}, places or {}
        self._draws = count()
        self._number = 1
        self.hosts: dict[str, Host] = {}
        self._sent: list[tuple[str, NotifyLeader]] = []
        opened = JobOpened(number=1, terms=self._job.terms, record=encode_record(self._job))
        self.missing: list[int] = []
        """The ranks that have not joined the world."""
        self.state = GroupState(nodes=(), job=opened)
        self.leader = WorldMachine(self.state, now=0.0)

    def open_next(self) -> None:
        """Open the next job, which is like the one that has ended; every host takes part in it."""
        self._number += 1
        opened = JobOpened(number=self._number, terms=self._job.terms, record=encode_record(self._job))
        names = list(self.hosts)
        self.hosts.clear()
        self._direct(HostReported(names[0], opened))
        self._begin(*names)

    def arrive(self, *names: str) -> None:
        for name in names:
            self._direct(NodeJoined(GroupNode(node=name, name=name, address=name)))
        self._begin(*names)

    def _begin(self, *names: str) -> None:
        for name in names:
            own = HostRanks(slots=self._slots.get(name, 2), rendezvous=f"{name}:1", place=self._places.get(name))
            machine = RestartedRanks(
                self._number,
                self._job,
                host=name,
                own=own,
                free_port=lambda: 7,
                draw=lambda: str(next(self._draws)),
                missing=lambda: self.missing,
                is_launcher=self._are_launchers,
            )
            ahead = self._ahead.get(name, 0.0)
            host = Host(name, machine, lambda sender, one: self._sent.append((sender, one)), ahead)  # type: ignore[arg-type]
            self.hosts[name] = host
            host.obey(machine.begin(self.now + ahead))
            if self.state.world is not None:
                host.feed(self.state.world, self.now)
        self._settle()

    def lose(self, name: str) -> None:
        del self.hosts[name]
        self._sent = [(sender, sent) for sender, sent in self._sent if sender != name]
        self._direct(NodeGone(name, "its agent is gone"))
        self._settle()

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps in which everyone does what is due."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            self._direct(WorldTick())
            for host in list(self.hosts.values()):
                host.feed(HostTick(), self.now)
            self._settle()
            for host in list(self.hosts.values()):
                host.take_signals(self.now)
            self._settle()

    def feed(self, name: str, event: SlotEvent) -> None:
        self.hosts[name].feed(event, self.now)
        self._settle()

    def lose_fixed(self, name: str) -> None:
        """Lose a host of a job that cannot do without any: all others are notified, and nobody decides for it."""
        del self.hosts[name]
        self._sent = [(sender, sent) for sender, sent in self._sent if sender != name]
        self._obey([CommandHosts(HostLost(name, "gone"))])
        self._settle()

    def end(self, rank: int, code: int, *, blames: int | None = None, ago: float = 0.0, raised: str = "") -> None:
        """Let the process of a rank end; see ``Host.gone``."""
        host, slot = self.find(rank)
        host.gone(slot, code, self.now, blames=blames, ago=ago, raised=raised)
        self._settle()

    def find(self, rank: int) -> tuple[Host, int]:
        found = [(h, slot) for h in self.hosts.values() for slot in h.running if h.places[slot].rank == rank]
        assert len(found) == 1, found
        return found[0]

    def running(self) -> dict[str, list[int]]:
        """Return the ranks that run, by host."""
        return {name: sorted(h.places[slot].rank for slot in h.running) for name, h in self.hosts.items()}

    def restarts(self) -> set[int]:
        """Return what the running ranks know of the number of restarts."""
        return {h.places[slot].restarts for h in self.hosts.values() for slot in h.running}

    def ends(self) -> list[JobEnd | None]:
        return [host.end for host in self.hosts.values()]

    def _settle(self) -> None:
        while self._sent:
            sender, sent = self._sent.pop(0)
            self._direct(HostReported(sender, sent.event))

    def _direct(self, event: WorldEvent) -> None:
        self._obey(self.leader.handle(event, now=self.now))

    def _obey(self, commands: list[LeaderCommand]) -> None:
        for command in commands:
            match command:
                case CommandHosts(JobWaits(_, text)):
                    for host in self.hosts.values():
                        host.waits.append(text)
                case CommandHosts(given):
                    for host in list(self.hosts.values()):
                        host.feed(given, self.now)
                case ProposeState(state):
                    before, self.state = self.state, state
                    for host in list(self.hosts.values()):
                        if state.closed is not None and state.closed != before.closed:
                            host.feed(state.closed, self.now)
                        if state.world is not None and state.world != before.world:
                            host.feed(state.world, self.now)
                    self._obey(self.leader.handle(StateDecided(state), now=self.now))


STOPPED = f"{CONDITION_WORDS[Condition.STOPPED]}, at x.py:3"


def pair(*, restarts: int = 0, are_launchers: bool = False) -> Cluster:
    """Hosts ``a`` (ranks 0 and 1) and ``b`` (2 and 3) of at most three run."""
    cluster = Cluster(1, 3, restarts=restarts, are_launchers=are_launchers)
    cluster.arrive("a", "b")
    cluster.wait(5.5)
    assert cluster.running() == {"a": [0, 1], "b": [2, 3]}
    return cluster


def test_all_hosts_start_at_once_and_fewer_after_the_last_call() -> None:
    whole = Cluster(2, 3)
    whole.arrive("a", "b", "c")
    whole.wait(0.2)
    assert whole.running() == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    some = Cluster(2, 3)
    some.arrive("a")
    some.wait(20.0)
    some.arrive("b")
    some.wait(4.8)
    assert some.running() == {"a": [], "b": []}
    some.wait(0.4)
    assert some.running() == {"a": [0, 1], "b": [2, 3]}


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    cluster = Cluster(3, 3, slots={"a": 3, "b": 1})
    cluster.arrive("a", "b", "c")
    cluster.wait(0.2)
    assert cluster.running() == {"a": [0, 1, 2], "b": [3], "c": [4, 5]}


def test_hosts_have_the_places_that_they_ask_for_and_others_come_last() -> None:
    cluster = Cluster(4, 4, places={"d": 0, "b": 1})
    cluster.arrive("a", "b", "c", "d")
    cluster.wait(0.2)
    assert cluster.running() == {"d": [0, 1], "b": [2, 3], "a": [4, 5], "c": [6, 7]}


def test_launchers_report_the_hosts_that_they_wait_for_and_end_when_nobody_comes() -> None:
    cluster = Cluster(2, 3)
    cluster.arrive("a")
    cluster.wait(10.0)
    text = "waiting for hosts: 1 of 2 are here (a)"
    assert cluster.hosts["a"].waits == [text]
    cluster.arrive("b")
    cluster.wait(6.0)
    assert cluster.running() == {"a": [0, 1], "b": [2, 3]}
    cluster.lose("b")
    cluster.wait(29.0)
    assert cluster.ends() == [None], "the time counts from the loss"
    assert cluster.hosts["a"].waits == [text, text]
    cluster.wait(2.0)
    [end] = cluster.ends()
    assert end is not None
    assert end.exit_code == 1
    assert end.message.startswith("waited 30 s for 2 hosts (--nnodes); present: a. Start the missing ones with")


def test_hosts_that_come_while_a_job_waits_are_reported_soon() -> None:
    cluster = Cluster(3, 3)
    cluster.arrive("a")
    cluster.wait(3.0)
    cluster.arrive("b")
    cluster.wait(3.0)
    assert cluster.hosts["a"].waits == [
        f"waiting for hosts: {n} of 3 are here ({who})" for n, who in ((1, "a"), (2, "a, b"))
    ]


def test_the_time_for_which_a_job_waits_is_its_own() -> None:
    """The job before it has waited in vain, too."""
    cluster = Cluster(2, 3)
    cluster.arrive("a")
    cluster.wait(31.0)
    assert [end and end.exit_code for end in cluster.ends()] == [1]
    cluster.open_next()
    cluster.wait(29.0)
    assert cluster.ends() == [None]
    cluster.wait(2.0)
    assert [end and end.exit_code for end in cluster.ends()] == [1]


def test_the_rank_that_fails_first_ends_the_job_and_all_hosts_have_its_code_and_name() -> None:
    cluster = pair()
    cluster.end(2, 3)
    assert NotifyRanks(Loss(2, "b", "exited with code 3")) in cluster.hosts["a"].others
    cluster.end(0, 1, blames=2)
    cluster.wait(1.0)
    [end, other] = cluster.ends()
    assert end is not None
    assert end == other
    assert end.exit_code == 3
    assert end.message.startswith("rank 2 failed first: exited with code 3\n  on b (")
    assert "then rank 0 on a: PeerLost: oh" in end.message
    assert "SIGTERM" not in end.message, "what was asked to end is no failure"


def test_a_failure_anywhere_counts_once_as_a_restart_everywhere() -> None:
    cluster = pair(restarts=2)
    for number, rank in enumerate((3, 0)):
        cluster.end(rank, 1)
        cluster.wait(2.0)
        assert cluster.running() == {"a": [0, 1], "b": [2, 3]}
        assert cluster.restarts() == {number + 1}
    cluster.arrive("c")
    cluster.wait(2.0)
    assert cluster.running()["c"] != [], "one that comes later"
    assert cluster.restarts() == {2}, "knows of it, and is no restart"
    cluster.end(2, 5)
    cluster.wait(2.0)
    assert [end and end.exit_code for end in cluster.ends()] == [5, 5, 5]


def test_failures_on_two_hosts_at_once_are_one_restart() -> None:
    cluster = pair(restarts=2)
    cluster.end(0, 1)
    cluster.end(3, 1)
    cluster.wait(2.0)
    assert cluster.restarts() == {1}


def test_ranks_that_lose_each_other_although_all_hosts_are_there_do_not_start_again_for_ever() -> None:
    cluster = pair(restarts=2)
    for number in range(2):
        cluster.end(0, 1, blames=2)
        cluster.end(2, 1, blames=0)
        cluster.wait(2.0)
        assert cluster.restarts() == {number + 1}
    cluster.end(0, 1, blames=2)
    cluster.end(2, 1, blames=0)
    cluster.wait(2.0)
    assert [end and end.exit_code for end in cluster.ends()] == [1, 1]
    assert all(end is not None and "rank 0 failed first: PeerLost: oh" in end.message for end in cluster.ends())


def test_the_loss_of_a_host_is_no_restart_even_if_ranks_notice_it_first() -> None:
    cluster = pair()
    cluster.end(0, 1, blames=2)
    cluster.lose("b")
    cluster.wait(2.0)
    assert cluster.running() == {"a": [0, 1]}
    assert cluster.restarts() == {0}
    cluster.arrive("c")
    cluster.wait(2.0)
    assert cluster.running() == {"a": [0, 1], "c": [2, 3]}
    assert cluster.restarts() == {0}


def test_the_job_is_complete_when_the_ranks_of_all_hosts_have_ended_well() -> None:
    cluster = pair()
    for rank in (0, 1):
        cluster.end(rank, 0)
    cluster.wait(60.0)
    assert cluster.running() == {"a": [], "b": [2, 3]}
    assert cluster.ends() == [None, None]
    cluster.end(2, 0)
    cluster.end(3, 0)
    assert cluster.ends() == [JobEnd(exit_code=0)] * 2


def test_a_failure_after_other_hosts_are_done_is_the_end_of_the_job() -> None:
    cluster = pair()
    for rank in (0, 1):
        cluster.end(rank, 0)
    cluster.end(2, 4)
    cluster.wait(2.0)
    assert [end and end.exit_code for end in cluster.ends()] == [4, 4]


def test_a_rank_that_leaves_others_that_need_it_is_the_one_that_failed() -> None:
    cluster = pair()
    cluster.end(1, 0)
    cluster.end(2, 1, blames=1)
    cluster.wait(2.0)
    [end, _] = cluster.ends()
    assert end is not None
    assert end.message.startswith("rank 1 failed first: exited with code 0 while other ranks still needed it")


def test_a_host_that_is_done_answers_for_its_rank_that_others_still_needed() -> None:
    cluster = pair(restarts=1)
    for number in range(2):
        for rank in (0, 1):
            cluster.end(rank, 0)
        cluster.wait(1.0)
        cluster.end(2, 1, blames=1)
        cluster.wait(2.0)
        if number == 0:
            assert cluster.running() == {"a": [0, 1], "b": [2, 3]}
            assert cluster.restarts() == {1}
    assert all(end is not None and "exited with code 0 while other" in end.message for end in cluster.ends())


@pytest.mark.parametrize("restarts", [0, 1])
def test_launchers_print_a_failure_once_wherever_it_was_and_the_end_of_the_job_has_it_otherwise(restarts: int) -> None:
    cluster = pair(restarts=restarts, are_launchers=True)
    cluster.end(3, 7)
    cluster.wait(4.0)
    described = "rank 3 failed first: exited with code 7"
    again = ["starting all ranks again (restart 1)"] * restarts
    for host in cluster.hosts.values():
        assert [line.splitlines()[0] for line in host.lines if line.startswith("rank 3 failed")] == [
            described
        ] * restarts
        assert [line for line in host.lines if line.startswith("starting")] == again
        assert "rank 3 on b exited with code 7; stopping all ranks" in host.lines
    ends = [end for end in cluster.ends() if end is not None]
    assert [end.message.splitlines()[0] for end in ends] == [described] * 2 * (1 - restarts)


def test_nobody_waits_in_the_rendezvous_for_a_rank_that_is_gone() -> None:
    cluster = pair()
    assert OpenRendezvous(0, 4) in cluster.hosts["a"].others
    cluster.end(3, 0)
    assert AnnounceExit(0, 3, "exited with code 0") in cluster.hosts["a"].others
    assert not [one for one in cluster.hosts["b"].others if isinstance(one, AnnounceExit)]


def test_a_rank_that_is_silent_for_too_long_is_killed_and_said_to_be_the_reason() -> None:
    cluster = pair()
    cluster.feed("b", state(Condition.STOPPED))
    cluster.wait(2.0)
    assert cluster.ends() == [None, None]
    cluster.wait(3.0)
    [end, _] = cluster.ends()
    assert end is not None
    assert end.exit_code == 128 + signal.SIGKILL
    assert end.message.startswith("rank 2 failed first: was stopped for 3.1 s, so the launcher killed it")
    for host in cluster.hosts.values():
        assert "rank 2 was stopped for 3.1 s; killing it" in host.lines
        assert NotifyRanks(Loss(2, "b", "was stopped for 3.1 s")) in host.others


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    cluster = pair()
    cluster.feed("b", state(Condition.STOPPED))
    cluster.wait(2.0)
    cluster.feed("b", state(Condition.WELL))
    cluster.wait(5.0)
    assert cluster.ends() == [None, None]
    assert cluster.running() == {"a": [0, 1], "b": [2, 3]}


def test_the_first_host_names_ranks_that_have_not_joined_and_all_hosts_print_that() -> None:
    cluster = pair()
    cluster.missing = [1, 3]
    waits = WaitNotice(operation="joining the world", seconds=5.0)
    cluster.feed("b", WaitChanged(WaitReport(0, 2, waits)))
    cluster.wait(1.0)
    for host in cluster.hosts.values():
        [line] = [line for line in host.lines if "joining" in line]
        assert line.startswith("rank 2 waits for rank 1 (a), which has not called init() so far (nor has 3)"), line
    cluster.missing = []
    cluster.feed("b", WaitChanged(WaitReport(0, 2)))
    cluster.wait(1.0)
    for host in cluster.hosts.values():
        assert host.lines.count("rank 2 goes on") == 1
        assert len([line for line in host.lines if "joining" in line]) == 1


def test_all_hosts_print_who_waits_for_whom_and_know_of_stopped_ranks() -> None:
    cluster = pair()
    cluster.feed("b", state(Condition.STOPPED, place="x.py:3"))
    waits = WaitNotice(operation="all_reduce", seconds=5.0, culprit=2, host="b")
    cluster.feed("a", WaitChanged(WaitReport(0, 0, waits)))
    cluster.wait(1.0)
    for host in cluster.hosts.values():
        assert NotifyOfCondition(2, STOPPED) in host.others
        [line] = [line for line in host.lines if "all_reduce" in line]
        assert "rank 2" in line
        assert STOPPED in line
    [line] = [line for line in cluster.hosts["b"].lines if line.startswith("rank 2 is stopped")]
    assert line.endswith("; after 3 s of it (--stopped-after) the job ends; it is at x.py:3")
    cluster.feed("b", state(Condition.WELL))
    assert "rank 2 runs again" in cluster.hosts["b"].lines
    cluster.feed("b", state(Condition.STOPPED, place="x.py:3"))
    conditions = [one for one in cluster.hosts["a"].others if isinstance(one, NotifyOfCondition)]
    assert [one.how for one in conditions] == [STOPPED, "", STOPPED]


@pytest.mark.parametrize("seed", range(chosen(20, soak=60)))
def test_whatever_comes_and_goes_worlds_are_never_too_small_and_the_job_goes_on(seed: int) -> None:
    """Joins and losses alone never end a job; ranks that run at the same time are of one world, each there once."""
    chance = random.Random(seed)
    most = chance.randint(2, 5)
    least = chance.randint(1, most - 1)
    cluster = Cluster(least, most, timeout=1e6)
    names = (f"h{number}" for number in count())

    def check() -> None:
        assert set(cluster.ends()) <= {None}
        worlds = {
            (h.places[slot].generation, h.places[slot].world_size) for h in cluster.hosts.values() for slot in h.running
        }
        ranks = sorted(rank for there in cluster.running().values() for rank in there)
        assert len(ranks) == len(set(ranks)) or len(worlds) > 1, "hosts end one world one after another"
        assert all(2 * least <= size <= 2 * most for _, size in worlds)

    for _ in range(40):
        if chance.random() < 0.4 and len(cluster.hosts) < most:
            cluster.arrive(next(names))
        elif chance.random() < 0.3 and cluster.hosts:
            cluster.lose(chance.choice(sorted(cluster.hosts)))
        else:
            cluster.wait(chance.choice((0.2, 1.0, 6.0)))
        check()
    while len(cluster.hosts) < least:
        cluster.arrive(next(names))
    cluster.wait(120.0)  # a host that was lost often waits a while
    check()
    assert sorted(rank for there in cluster.running().values() for rank in there) == list(range(2 * len(cluster.hosts)))
    assert cluster.restarts() == {0}
