"""Commands on one host see the ranks that agents of all hosts run; hosts that do not answer are named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncpar.hosts.messages import GroupHost, JobOpened, PlacedMember, WorldStatus
from asyncpar.launch.agents.group_watch import (
    GroupNow,
    GroupWatch,
    ask_with,
    group_of_status,
    group_of_view,
    latest_ranks,
)
from asyncpar.launch.agents.job_record import ElasticMode, encode_record
from asyncpar.launch.agents.requests import HostObserved, ObserveRequest
from asyncpar.launch.agents.restarted_world import HostRanks
from asyncpar.launch.agents.views import GroupView, HostView, JobView, RankView
from asyncpar.launch.host_watch import HostWatch
from asyncpar.net.transport.rpc import Credentials
from asyncpar.observe.summary import HostSummary, JobSummary, RankAnswer, RankReport, RankSummary, pack, unpack
from tests.launch.agents.agent_groups import TRAINING, AgentGroup, eventually
from tests.launch.agents.test_slot_machines import record as made
from tests.launch.test_post_mortem import place as launched


def report(rank: int, host: str, generation: int | None, condition: str = "well") -> RankReport:
    told = None if generation is None else RankSummary(rank=rank, pid=1, time=0.0, generation=generation)
    return RankReport(rank=rank, host=host, pid=1, condition=condition, summary=told)


def test_of_processes_with_one_rank_that_of_the_latest_world_counts() -> None:
    hosts = [
        HostSummary(host="a", ranks=(report(0, "a", 3), report(1, "a", 2, "ended"))),
        HostSummary(host="b", ranks=(report(0, "b", None), report(1, "b", 3), report(2, "b", 3, "ended"))),
        HostSummary(host="c", ranks=(report(2, "c", 3),)),
    ]
    found = latest_ranks(hosts)
    assert [(host.host, [one.rank for one in host.ranks]) for host in found] == [("a", [0]), ("b", [1]), ("c", [2])]


def test_ranks_that_ended_before_the_last_world_are_not_of_the_job_any_more() -> None:
    hosts = [HostSummary(host="a", ranks=(report(0, "a", 3), report(1, "a", 2, "ended"), report(2, "a", 3, "ended")))]
    assert [one.rank for one in latest_ranks(hosts, generation=3)[0].ranks] == [0, 2]


def test_a_rank_that_has_ended_before_its_first_report_is_shown() -> None:
    [host] = latest_ranks([HostSummary(host="a", ranks=(report(0, "a", 0), report(1, "a", None, "ended")))])
    assert [one.rank for one in host.ranks] == [0, 1]


class Group:
    """A group of two hosts, of which the other one cannot be reached."""

    async def know(self) -> GroupNow:
        return group_of_status(await self.status())

    async def status(self) -> WorldStatus:
        members = tuple(
            PlacedMember(name=f"{host}/{slot}", host=host) for host, slot in (("one", 0), ("two", 0), ("two", 1))
        )
        world: Any = SimpleNamespace(members=members, generation=4)
        hosts = (
            GroupHost(name="one", address="127.0.0.1:2"),
            GroupHost(name="two", address="127.0.0.1:1"),
            GroupHost(name="three", address="127.0.0.1:1", is_witness=True),
        )
        return WorldStatus(leader="one", hosts=hosts, world=world)


@pytest.fixture
def watch() -> GroupWatch:
    base = JobSummary(job="train", pid=1, time=0.0)
    return GroupWatch(base, Group().know, ask_with(Credentials(bytes(32))), "one", HostWatch("one"))


async def test_a_host_whose_agent_does_not_answer_is_named_with_its_ranks(watch: GroupWatch) -> None:
    job = await watch.status()
    assert (job.job, job.world_size, job.generation, job.ranks) == ("train", 3, 4, [])
    assert job.alarms == ("the agent of ranks 1, 2 on two (127.0.0.1:1) does not answer; look on that host",)
    answers = await watch.collect("stacks", None)
    assert [(one.rank, one.host, one.error) for one in answers] == [
        (1, "two", "the agent of its host does not answer"),
        (2, "two", "the agent of its host does not answer"),
    ]
    assert [one.rank for one in await watch.collect("stacks", [2, 0])] == [2]


async def test_the_last_report_of_a_silent_host_is_shown_with_its_age_until_the_group_goes_on_without_it(
    watch: GroupWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = HostObserved(summary=pack(HostSummary(host="two", ranks=(report(1, "two", 4), report(2, "two", 4)))))
    answers: list[HostObserved | None] = [told, None, None]

    async def ask(self: GroupWatch, host: str, address: str, request: ObserveRequest) -> HostObserved | None:
        return await request.answer(HostWatch("one")) if host == "one" else answers.pop(0)

    monkeypatch.setattr(GroupWatch, "_ask_host", ask)
    first = await watch.status()
    assert ([one.rank for one in first.ranks], first.alarms) == ([1, 2], ())
    second = await watch.status()
    assert [one.rank for one in second.ranks] == [1, 2]
    assert all(one.age > 0.0 for one in second.ranks)
    assert second.alarms == ("the agent of ranks 1, 2 on two (127.0.0.1:1) does not answer; look on that host",)

    async def know() -> GroupNow:
        return GroupNow(hosts={"one": "127.0.0.1:2"}, ranks={"one": (0,)}, world_size=1, generation=5)

    watch.know = know
    third = await watch.status()
    assert (third.ranks, third.alarms, third.world_size) == ([], (), 1)


async def test_failures_of_processes_that_others_have_replaced_are_listed_with_their_reasons() -> None:
    own = HostWatch("one")
    group = GroupWatch(
        JobSummary(job="train", pid=1, time=0.0), Group().know, ask_with(Credentials(bytes(32))), "one", own
    )
    place, others = launched(0), ExitStack()

    def start() -> None:
        here, there = socket.socketpair()
        others.enter_context(there)
        own.add(place, os.getpid(), here)

    start()
    own.ended(place, "was killed by SIGKILL", "rank 0 on one was killed by SIGKILL")
    assert (await group.status()).restarts == 0  # nothing has taken its place so far
    start()
    own.ended(place, "was killed by SIGTERM")  # because it was told to
    start()
    job = await group.status()
    assert (job.restarts, [past.reason for past in job.past]) == (1, ["rank 0 on one was killed by SIGKILL"])
    own.begin_job()
    job = await group.status()
    assert (job.restarts, job.past) == (0, ())
    await own.close()
    others.close()


@pytest.mark.parametrize(
    ("mode", "ranks"), [("ranks", {"a": (0, 1), "b": (2,)}), ("restart", {"a": (0, 1), "b": (2, 3)})]
)
def test_a_launcher_and_a_member_of_the_group_know_the_same_of_it(mode: str, ranks: dict[str, tuple[int, ...]]) -> None:
    record = msgspec.structs.replace(made(ElasticMode(mode), slots=2), program="/train.py", arguments=("3",))
    is_elastic = mode == "ranks"
    names = ("a/0", "a/1", "b/0") if is_elastic else ("a/all", "b/all")
    address = "" if is_elastic else msgspec.json.encode(HostRanks(slots=2, rendezvous="")).decode()
    members = [PlacedMember(name=name, host=name[0], address=address) for name in names]
    world: Any = SimpleNamespace(members=members, generation=7)
    hosts = tuple(GroupHost(name=name, address=f"{name}:1") for name in "ab")
    opened = JobOpened(number=3, terms=record.terms, record=encode_record(record))
    inside = group_of_status(WorldStatus(leader="a", hosts=hosts, world=world, job=opened))
    views = tuple(
        HostView(
            name=host.name,
            address=host.address,
            state="up",
            is_leader=False,
            is_voter=True,
            ranks=tuple(RankView(slot=n, rank=rank, pid=1, restarts=0) for n, rank in enumerate(ranks[host.name])),
        )
        for host in hosts
    )
    job = JobView(number=3, name=record.name, mode=mode, nnodes="1:2", state="running")
    view = GroupView(leader="a", hosts=views, job=job, generation=7, world_size=len(names))
    outside = group_of_view(view)
    assert inside.command == ("/train.py", "3")
    assert replace(inside, command=()) == outside
    assert (outside.ranks, outside.world_size) == (ranks, sum(map(len, ranks.values())))


async def test_of_processes_with_one_rank_the_one_in_the_world_answers(
    watch: GroupWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(self: GroupWatch, host: str, address: str, request: ObserveRequest) -> HostObserved:
        return HostObserved(ranks=tuple(RankAnswer(rank=rank, host=host, content=host.encode()) for rank in (0, 1, 7)))

    monkeypatch.setattr(GroupWatch, "_ask_host", ask)
    found = [(answer.rank, answer.host) for answer in await watch.collect("image", None)]
    assert found == [(0, "one"), (1, "two"), (7, "one"), (7, "two")]


def test_answers_that_do_not_fit_into_a_message_are_asked_for_again() -> None:
    large = HostObserved(ranks=tuple(RankAnswer(rank=rank, host="a", content=bytes(3 << 20)) for rank in range(3)))
    assert ([one.rank for one in large.bounded.ranks], large.bounded.rest) == ([0], (1, 2))
    small = HostObserved(ranks=tuple(RankAnswer(rank=rank, host="a", content=bytes(1 << 20)) for rank in range(3)))
    assert small.bounded == small


async def test_a_hosts_report_travels() -> None:
    observed = await ObserveRequest().answer(HostWatch("one"))
    assert unpack(observed.summary, HostSummary) == HostSummary(host="one")
    assert (await ObserveRequest(kind="stacks", ranks=(0,)).answer(HostWatch("one"))).ranks == ()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


def ask(group: AgentGroup, command: str, agent: str, *options: str) -> Any:
    """Return what a command prints of the job of ``agent``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "XDG_RUNTIME"))}
    done = subprocess.run(
        [sys.executable, "-m", "asyncpar", command, "--json", *options, str(group.agents[agent].pid)],
        env=clean | {"TMPDIR": str(group.folder / "tmp"), "ASYNCPAR_SECRET_FILE": str(group.secret)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(180)
def test_ranks_of_all_hosts_are_seen_from_each(group: AgentGroup) -> None:
    group.start_all("one", "two")
    launcher = group.launch(TRAINING, "1000000", options=("--nnodes", "2:2", "--elastic", "ranks", "--last-call", "60"))
    eventually(lambda: group.trains(2), "training on two hosts")

    def sees_both(agent: str) -> bool:
        told = ask(group, "status", agent)
        reports = [one for host in (told or {"hosts": ()})["hosts"] for one in host.get("ranks", ())]
        in_world = [(one["rank"], one["host"]) for one in reports if one.get("summary", {}).get("world_size") == 2]
        return sorted(rank for rank, _ in in_world) == [0, 1] and {host for _, host in in_world} == {"one", "two"}

    for agent in ("one", "two"):
        eventually(lambda agent=agent: sees_both(agent), f"the ranks of both hosts at {agent}")  # type: ignore[misc]
    eventually(lambda: sorted((ask(group, "stacks", "one") or {"ranks": ()})["ranks"]) == ["0", "1"], "stacks of both")
    assert sorted(ask(group, "logs", "two", "-r", "0,1")) == ["0", "1"]
    launcher.terminate()
    launcher.wait(timeout=60)
