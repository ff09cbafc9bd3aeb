"""The hosts of a job whose number is fixed: who gets a place and which, what is commanded, and who is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.errors import AuthenticationError, LaunchError, ProtocolError, UsageError
from asyncpar.hosts import further_host as further_host_module
from asyncpar.hosts import pauses
from asyncpar.hosts.first_host import FirstHost, Introduction, NumberedStream
from asyncpar.hosts.host_arrivals import AGAIN_SECONDS, FIRST_SECONDS, HostArrivals
from asyncpar.hosts.messages import (
    HostLost,
    JobClosed,
    JobOpened,
    JobStopped,
    JobWaits,
    WorldAnnounced,
    WorldNotice,
    WorldStarted,
    shown_host,
)
from asyncpar.net.membership.credentials import load_certificates
from asyncpar.net.security.identity import COORDINATOR, Role, agent_role, rank_role
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.testing import run_virtual
from tests.hosts.fixed_hosts import (
    Commanded,
    arrived,
    first_host,
    further_host,
    introduction,
    notice,
    opened,
    until,
)
from tests.launch.proxies import ResettingProxy
from tests.net.security.parties import JOB, authority_now, certify
from tests.soak import chosen


def hosts_of(world: WorldAnnounced) -> list[str]:
    return [shown_host(member.host) for member in world.members]


def number_of_hosts(first: Commanded) -> int:
    """Return how many hosts are here; nothing is reported of those that come at once."""
    return len(first.group._hosts)  # type: ignore[union-attr]  # noqa: SLF001


def number_received(first: Commanded, host: str) -> int:
    """Return the number of the last message that has come from ``host``, 0 if it is not here."""
    attending = first.group._hosts.get(host)  # type: ignore[union-attr]  # noqa: SLF001
    return 0 if attending is None else attending.stream.received


async def begin(first: Commanded, *others: Commanded) -> None:
    """Open the job, and return when its world has started everywhere."""
    first.group.report(opened(1 + len(others)))
    for host in (first, *others):
        host.group.report(arrived(shown_host(host.group.name)))
    await until(lambda: all(host.of(WorldStarted) for host in (first, *others)))


# -- places ------------------------------------------------------------------------------------------------------------


async def test_a_host_alone_is_first_and_begins_at_once() -> None:
    async with first_host(introduction("a", 0, nnodes=1)) as (first, _):
        await begin(first)
        assert [type(command) for command in first.commands] == [JobOpened, WorldAnnounced, WorldStarted]
        status = await first.group.status()
        assert (status.leader, status.job, status.world) == ("a#0", opened(1), first.of(WorldAnnounced)[0])


async def test_ranks_are_in_the_order_of_places_and_who_asks_for_none_fills_the_gaps() -> None:
    async with (
        first_host(introduction("a", 0, nnodes=4)) as (first, address),
        further_host(introduction("b", nnodes=4), address) as b,
    ):
        await until(lambda: number_of_hosts(first) == 2)
        async with (
            further_host(introduction("c", 1, nnodes=4), address) as c,
            further_host(introduction("d", 3, nnodes=4), address) as d,
        ):
            await begin(first, b, c, d)
            assert [hosts_of(host.of(WorldAnnounced)[0]) for host in (first, b, c, d)] == [["a", "c", "b", "d"]] * 4


async def test_launchers_on_one_host_are_hosts_of_their_own() -> None:
    async with (
        first_host(introduction("a", 0)) as (first, address),
        further_host(introduction("a", 1), address) as other,
    ):
        first.group.report(opened())
        first.group.report(arrived("a"))
        other.group.report(arrived("a").__class__(member="a/other", host="a", lineage=arrived("a").lineage))
        await until(lambda: other.of(WorldAnnounced))
        assert hosts_of(other.of(WorldAnnounced)[0]) == ["a", "a"]


@pytest.mark.parametrize(
    ("stranger", "why"),
    [
        (introduction("c", 1, version="2"), "the coordinator has asyncpar 1, this agent 2; install the same"),
        (introduction("c", 1, job="k"), "--rdzv-id: the coordinator runs job 'j', this agent came for 'k'"),
        (introduction("c", 1, nnodes=3), "--nnodes: the coordinator expects 2, this agent says 3"),
        (introduction("c", 0), "--node-rank: 0 is taken by an agent on a"),
    ],
)
async def test_hosts_that_do_not_fit_are_refused_alone(stranger: Introduction, why: str) -> None:
    async with first_host(introduction("a", 0)) as (first, address):
        first.group.report(opened())
        async with further_host(stranger, address) as refused:
            await until(lambda: refused.error)
        assert isinstance(refused.error, UsageError)
        assert str(refused.error) == why
        await until(lambda: first.of(JobWaits))
        assert [one.text for one in first.of(JobWaits)] == [f"refused the agent on c: {why}"]
        async with further_host(introduction("b"), address) as b:
            await begin(first, b)


async def test_one_host_too_many_and_one_that_comes_after_the_end_are_refused() -> None:
    async with first_host(introduction("a", 0)) as (first, address), further_host(introduction("b"), address) as b:
        await begin(first, b)
        async with further_host(introduction("c"), address) as late:
            await until(lambda: late.error)
        assert str(late.error) == "--nnodes: all 2 agents of the job are there already"
        b.group.report(JobClosed(number=1, record=b"over"))
        await until(lambda: first.of(JobClosed) and b.of(JobClosed))
        async with further_host(introduction("c"), address) as late:
            await until(lambda: late.error)
        assert isinstance(late.error, LaunchError)
        assert str(late.error) == "the job has ended already"


async def test_a_host_that_leaves_while_others_are_awaited_may_come_back() -> None:
    async with first_host(introduction("a", 0)) as (first, address):
        first.group.report(opened())
        first.group.report(arrived("a"))
        async with further_host(introduction("b", 1), address) as b:
            b.group.report(arrived("b"))
            await until(lambda: b.of(WorldAnnounced) or b.of(JobOpened))
    async with first_host(introduction("a", 0, nnodes=3)) as (first, address):
        async with further_host(introduction("b", 1, nnodes=3), address):
            await until(lambda: number_of_hosts(first) == 2)
        await until(lambda: number_of_hosts(first) == 1)
        async with (
            further_host(introduction("b", 1, nnodes=3), address) as b,
            further_host(introduction("c", 2, nnodes=3), address) as c,
        ):
            await begin(first, b, c)


def test_missing_hosts_are_named_and_the_job_stops_when_time_is_up() -> None:
    async def wait() -> list[object]:
        first = Commanded(FirstHost(introduction("a", 0, nnodes=3), reconnect=5.0)).read()
        first.group.report(opened(3, wait_within=9.0))
        first.group.report(arrived("a"))
        await asyncio.sleep(11.0)
        await first.close()
        return [*first.of(JobWaits), *first.of(JobStopped)]

    waits, stopped = run_virtual(wait())
    assert isinstance(waits, JobWaits)
    assert isinstance(stopped, JobStopped)
    assert waits.text == "waiting for hosts: 1 of 3 are here (a); missing: --node-rank 1, 2"
    assert stopped.why == (
        "waited 9 s for 3 hosts (--nnodes); missing: --node-rank 1, 2; present: a. Start the missing ones with the "
        "same --rdzv-endpoint and --rdzv-id"
    )


def test_hosts_that_are_there_and_missing_are_reported_and_again_after_a_while() -> None:
    gathering = HostArrivals()
    gathering.change(0.0)
    assert gathering.next_deadline == FIRST_SECONDS
    assert gathering.report(["a"], 3, 1.0, absent=[1, 2]) == ""
    text = "waiting for hosts: 1 of 3 are here (a); missing: --node-rank 1, 2"
    assert gathering.report(["a"], 3, 2.0, absent=[1, 2]) == text
    assert gathering.next_deadline == 2.0 + AGAIN_SECONDS
    gathering.change(3.0)
    assert gathering.report(["a", "b"], 3, 5.0) == "waiting for hosts: 2 of 3 are here (a, b)"
    gathering.end()
    assert gathering.next_deadline is None


def test_a_refusal_is_reported_once_and_not_for_ever() -> None:
    gathering = HostArrivals()
    assert gathering.refuse("an agent at 10.0.0.9", "it has another secret").startswith("refused an agent at 10.0.0.9")
    assert gathering.refuse("an agent at 10.0.0.9", "it has another secret") == ""
    assert sum(bool(gathering.refuse(f"an agent at {number}", "x")) for number in range(1000)) == 19


# -- views -------------------------------------------------------------------------------------------------------------


async def test_the_first_host_asks_the_others_and_does_not_wait_for_one_that_is_lost() -> None:
    async with first_host(introduction("a", 0), reconnect=0.0) as (first, address):
        group = first.group
        assert isinstance(group, FirstHost)
        async with ResettingProxy(address) as proxy, further_host(introduction("b", 1), proxy.address) as b:
            await begin(first, b)
            assert await group.view("b#1", b" answers") == b"b answers"
            assert await group.view("c#9", b"nobody") is None
            proxy.refuses = True
            proxy.reset()
            began = asyncio.get_running_loop().time()
            asked = asyncio.ensure_future(group.view("b#1", b"?"))
            assert await asked is None
            await until(lambda: first.of(HostLost))
            assert asyncio.get_running_loop().time() - began < 30.0


# -- connections -------------------------------------------------------------------------------------------------------


def test_messages_are_kept_until_they_are_acknowledged_and_taken_once() -> None:
    stream = NumberedStream()
    first, second = stream.number(notice("a", 1)), stream.number(notice("a", 2))
    assert [first.number, second.number] == [1, 2]
    assert stream.take(pb.HostFrame(number=1, received=1))
    assert list(stream.unacknowledged) == [second]
    assert not stream.take(pb.HostFrame(number=1))
    assert not stream.take(pb.HostFrame(received=2))
    assert not stream.unacknowledged
    assert stream.received == 1


async def test_a_connection_that_breaks_before_the_welcome_is_made_again() -> None:
    async with (
        first_host(introduction("a", 0)) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1), proxy.address) as b,
    ):
        for _ in range(3):
            await until(lambda: proxy.connections)
            proxy.reset()
        await begin(first, b)


async def test_a_connection_that_breaks_while_hosts_are_awaited_or_the_world_forms_is_made_again() -> None:
    async with (
        first_host(introduction("a", 0, nnodes=3)) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1, nnodes=3), proxy.address) as b,
    ):
        first.group.report(opened(3))
        first.group.report(arrived("a"))
        b.group.report(arrived("b"))

        async def break_and_report(number: int) -> None:
            proxy.reset()
            b.group.report(notice("b", number))
            await until(lambda: b.error or number_received(first, "b#1") == number)

        await until(lambda: b.of(JobOpened) and number_received(first, "b#1") == 1)
        for number in (2, 3, 4):
            await break_and_report(number)
        assert number_of_hosts(first) == 2
        async with further_host(introduction("c", 2, nnodes=3), address) as c:
            await until(lambda: number_of_hosts(first) == 3)
            await break_and_report(5)
            c.group.report(arrived("c"))
            await until(lambda: all(host.of(WorldStarted) for host in (first, b, c)))
        assert [len(host.of(JobOpened)) for host in (first, b, c)] == [1, 1, 1]
        assert (proxy.resets, b.error) == (4, None)


@pytest.mark.parametrize(("gone", "place"), [(1, 1), (1, None), (None, 1), (None, None)])
async def test_a_host_that_has_gone_without_a_word_keeps_no_place_from_another_one_while_the_world_forms(
    gone: int | None, place: int | None
) -> None:
    async with (
        first_host(introduction("a", 0), reconnect=30.0) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", gone), proxy.address, reconnect=30.0) as b,
    ):
        await until(lambda: number_of_hosts(first) == 2)
        proxy.refuses = True
        proxy.reset()
        await until(lambda: not proxy.connections)
        async with further_host(introduction("c", place), address) as c:
            await begin(first, c)
            assert hosts_of(first.of(WorldAnnounced)[0]) == ["a", "c"]
            assert not b.of(WorldAnnounced)


@pytest.mark.parametrize("seed", chosen((0,), soak=range(3)))
async def test_messages_of_both_sides_come_once_and_in_order_however_often_the_connection_breaks(seed: int) -> None:
    chance = random.Random(seed)
    async with (
        first_host(introduction("a", 0)) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1), proxy.address) as b,
    ):
        await begin(first, b)
        seen = 0
        for number in range(60):
            b.group.report(notice("b", number))
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.01)))
            if number % 10 == seed:
                await until(lambda: len(first.of(WorldNotice)) > seen)  # noqa: B023
                await asyncio.sleep(chance.uniform(0.0, 0.03))
                seen = len(first.of(WorldNotice))
                proxy.reset()
        await until(lambda: len(b.of(WorldNotice)) == 60)
        b.group.report(JobClosed(number=1, record=b"the end"))
        await until(lambda: b.of(JobClosed))
        proxy.reset()  # with the end on its way to be acknowledged
    assert proxy.resets >= 4
    for host in (first, b):
        assert [given.notice.number for given in host.of(WorldNotice)] == list(range(60))
        assert host.of(JobClosed) == [JobClosed(number=1, record=b"the end")]
        assert (host.of(HostLost), host.error) == ([], None)


async def test_a_first_host_that_does_not_come_back_ends_the_job_within_the_grace_and_is_named() -> None:
    async with first_host(introduction("a", 0), reconnect=0.5) as (first, address):
        async with (
            ResettingProxy(address) as proxy,
            further_host(introduction("b", 1), proxy.address, reconnect=0.5) as b,
        ):
            await begin(first, b)
            proxy.refuses = True
            proxy.reset()
            await until(lambda: b.of(JobClosed) and first.of(HostLost))
            cause = b.of(JobClosed)[0].record.decode()
            assert cause.startswith(f"lost the coordinator at {proxy.address} (")
            assert cause.endswith("; it did not come back within 0.5 s (--reconnect-within)")
        [lost] = first.of(HostLost)
        assert shown_host(lost.host) == "b"
        assert lost.why.startswith("its connection ")
        assert lost.why.endswith(", and it did not come back within 0.5 s")


async def test_a_first_host_that_is_stopped_is_waited_for_however_long_it_takes() -> None:
    async with (
        first_host(introduction("a", 0), reconnect=30.0) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1), proxy.address, reconnect=0.3) as b,
    ):
        await begin(first, b)
        proxy.hangs = True
        proxy.reset()
        await until(lambda: len(b.printed) == 1)
        await asyncio.sleep(1.5)
        b.group.report(notice("b", 1))
        proxy.hangs = False
        proxy.reset()
        await until(lambda: first.of(WorldNotice) and b.of(WorldNotice))
        assert b.printed == [
            f"the coordinator at {proxy.address} does not answer, as if it were stopped; waiting for it",
            f"the coordinator at {proxy.address} answers again",
        ]
        assert (b.of(JobClosed), first.of(HostLost)) == ([], [])


async def test_another_host_that_is_stopped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = asyncio.Event()

    async def close_when_it_runs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await runs.wait()
        writer.close()

    monkeypatch.setattr(pauses, "_close", close_when_it_runs)
    monkeypatch.setattr(pauses, "REACH_SECONDS", 30.0)  # a loop that stands still for a second must not decide this
    async with (
        first_host(introduction("a", 0), reconnect=0.2) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1), proxy.address, reconnect=30.0) as b,
    ):
        await begin(first, b)
        proxy.refuses = True
        proxy.reset()
        await until(lambda: first.of(JobWaits))
        await asyncio.sleep(2.0)
        assert first.of(HostLost) == []
        b.group.report(notice("b", 1))
        proxy.refuses = False
        await until(lambda: first.of(WorldNotice) and len(first.of(JobWaits)) == 2)
        runs.set()
        assert [waits.text for waits in first.of(JobWaits)] == [
            "the agent on b does not answer, as if it were stopped; waiting for it",
            "the agent on b answers again",
        ]
        await until(lambda: b.of(JobWaits) == first.of(JobWaits))
        assert (b.of(JobClosed), first.of(HostLost)) == ([], [])


async def test_another_host_that_cannot_be_looked_at_is_lost_as_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_way(*_: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr(pauses, "route_to", no_way)
    async with (
        first_host(introduction("a", 0), reconnect=0.2) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1), proxy.address, reconnect=0.2) as b,
    ):
        await begin(first, b)
        proxy.refuses = True
        proxy.reset()
        await until(lambda: first.of(HostLost))
        assert first.of(JobWaits) == []


async def test_another_first_host_at_the_same_place_is_not_taken_for_the_one_before() -> None:
    async with (
        first_host(introduction("a", 0)) as (first, address),
        ResettingProxy(address) as proxy,
        further_host(introduction("b", 1), proxy.address) as b,
    ):
        await begin(first, b)
        group = first.group
        assert isinstance(group, FirstHost)
        group._sessions.clear()  # noqa: SLF001  # as a restart would
        del group._hosts["b#1"], group._places["b#1"]  # noqa: SLF001
        proxy.reset()
        await until(lambda: b.of(JobClosed))
        assert "another one than before" in b.of(JobClosed)[0].record.decode()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        pytest.param(ProtocolError("a message cannot be read"), "a message cannot be read", id="another language"),
        pytest.param(
            RuntimeError("a defect"), "the connection to the coordinator failed: RuntimeError: a defect", id="a defect"
        ),
    ],
)
async def test_what_cannot_be_handled_ends_the_job_at_once_and_does_not_hang_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    async with (
        first_host(introduction("a", 0)) as (first, address),
        further_host(introduction("b", 1), address) as b,
    ):
        await begin(first, b)

        def damaged(_: bytes) -> object:
            raise error

        monkeypatch.setattr(further_host_module, "decode_message", damaged)
        first.group.report(notice("a", 1))
        await until(lambda: b.of(JobClosed))
        assert b.of(JobClosed)[0].record == why.encode()


async def test_one_that_never_comes_is_waited_for_and_no_longer() -> None:
    async with further_host(introduction("b", 1), "127.0.0.1:9", timeout=0.2) as b:
        await until(lambda: b.error)
    assert isinstance(b.error, LaunchError)
    assert "no coordinator answered at 127.0.0.1:9 for 0.2 s" in str(b.error)


async def test_one_that_ends_before_it_answers_is_tried_again_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    async def attend(*_: object) -> None:
        calls.append(1)

    monkeypatch.setattr(FirstHost, "Attend", attend)
    async with (
        first_host(introduction("a", 0)) as (_, address),
        further_host(introduction("b", 1), address, reconnect=0.5) as b,
    ):
        await until(lambda: b.error)
    assert isinstance(b.error, LaunchError)
    assert str(b.error).startswith(f"the coordinator at {address} ended without a word")
    assert len(calls) > 1


# -- access ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "claimed", "node_rank"),
    [
        (agent_role(1), "the agent of host 0", 0),
        (rank_role(0), "the agent of host 0", 0),
        (agent_role(0), "the agent of host 1", 1),
    ],
)
async def test_a_host_has_to_show_its_certificate(tmp_path: Path, shown: Role, claimed: str, node_rank: int) -> None:
    authority = authority_now()
    for role in (COORDINATOR, shown):
        certify(authority, role, tmp_path)
    serving = Credentials(SECRET_BYTES, load_certificates(tmp_path, COORDINATOR))
    async with first_host(introduction("a", 2, job=JOB, nnodes=3), credentials=serving) as (_, address):
        calling = Credentials(SECRET_BYTES, load_certificates(tmp_path, shown))
        async with further_host(introduction("h", node_rank, job=JOB, nnodes=3), address, credentials=calling) as other:
            await until(lambda: other.error)
    assert str(other.error) == (
        f"the coordinator refused this agent: it calls as {claimed} of job 'demo', but its certificate is for {shown} "
        "of job 'demo'"
    )


SECRET_BYTES = b"s" * 32


async def test_trouble_with_certificates_is_reported_at_once(tmp_path: Path) -> None:
    certify(authority_now(), COORDINATOR, tmp_path / "one")
    other = certify(authority_now(), agent_role(0), tmp_path / "other")
    serving = Credentials(SECRET_BYTES, load_certificates(tmp_path / "one", COORDINATOR))
    async with first_host(introduction("a", 0, job=JOB), credentials=serving) as (_, address):
        for credentials in (Credentials(SECRET_BYTES, other), Credentials(SECRET_BYTES)):
            async with further_host(introduction("h", 1, job=JOB), address, credentials=credentials) as host:
                await until(lambda: host.error)
            assert isinstance(host.error, AuthenticationError)
            assert "certificates" in str(host.error)


async def test_another_secret_is_distinguished_from_a_host_that_is_lost() -> None:
    server = RpcServer(Credentials(SECRET_BYTES))
    await server.start()
    for _ in range(20):
        async with further_host(introduction("h", 1), server.address, credentials=Credentials(b"x" * 32)) as stranger:
            await until(lambda: stranger.error)
        assert isinstance(stranger.error, AuthenticationError)
        assert "did not accept our secret" in str(stranger.error)
    await server.stop(grace=0)
