"""Links between real servers of this machine: negotiation, fallback, and peers that are not there."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from asyncpar._proto.asyncpar.v1 import link_pb2, link_pb2_grpc
from asyncpar.core.addresses import split_address
from asyncpar.core.config.world import Member
from asyncpar.errors import AuthenticationError, PeerLost, StaleGeneration, UsageError
from asyncpar.net.transport import acceptor, lane_kinds, negotiation
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import UnixListener, dial_tcp
from asyncpar.net.transport.connection import Connection, as_connection
from asyncpar.net.transport.flow_control import EAGER_LIMIT, EAGER_WINDOW
from asyncpar.net.transport.grpc_stream import StreamEnded, call_frames, shake_hands
from asyncpar.net.transport.handshaking import Medium
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.links import Links
from asyncpar.net.transport.machine import Accept, Answer, Negotiator, Proposal
from asyncpar.net.transport.negotiation import GrpcConnector
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.wire.frame import HEADER_BYTES, Key
from asyncpar.net.wire.handshake import TOKEN_BYTES, Handshake, LinkTerms
from tests.net.transport.worlds import CREDENTIALS, Rank, exchange, loss, open_world, serving
from tests.soak import chosen


@pytest.mark.parametrize(
    ("pins", "kind"),
    [
        ((None, None), "shm"),
        (("shm", None), "shm"),
        ((None, "tcp"), "tcp"),
        (("tcp", "tcp"), "tcp"),
        ((None, "grpc"), "grpc"),
        (("grpc", "grpc"), "grpc"),
    ],
)
async def test_the_lane_is_the_best_that_both_sides_allow(pins: tuple[str | None, ...], kind: str) -> None:
    async with open_world(*pins) as ranks:
        for rank in ranks:
            rank.join()
        one, other = ranks[0].links, ranks[1].links
        await exchange(one, other)
        await exchange(one, other, sequence=1, length=3_000_000)
        assert one.lane_kind(1) == other.lane_kind(0) == kind


@pytest.mark.parametrize("dialer", [0, 1])
async def test_either_side_may_dial(dialer: int) -> None:
    async with open_world(None, None) as ranks:
        for rank in ranks:
            rank.join()
        sender, receiver = ranks[dialer].links, ranks[1 - dialer].links
        sending = sender.link(1 - dialer).send(Key(1, 0, 0), 0, memoryview(b"hello"))
        assert sending is not None
        async with asyncio.timeout(30):
            await sending.done
        buffer = bytearray(5)
        waiter = receiver.link(dialer).post(Key(1, 0, 0), 0, memoryview(buffer))
        if waiter is not None:
            await waiter
        assert buffer == b"hello"


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_dials_from_both_sides_at_once_always_make_one_link(transport: str) -> None:
    for _ in range(chosen(2, soak=15)):
        async with open_world(*[transport] * 4) as ranks:
            for rank in ranks:
                rank.join()
            pairs = [(one, other) for one in ranks for other in ranks if one.links.rank < other.links.rank]
            async with asyncio.TaskGroup() as tasks:
                for one, other in pairs:
                    tasks.create_task(exchange(one.links, other.links, length=50_000))
            assert all(rank.links.lost == {} for rank in ranks)


async def test_calls_that_come_before_the_world_is_known_are_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "JOIN_SECONDS", 0.05)
    async with open_world(None, None) as (one, other):
        one.join()
        sending = one.links.link(1).send(Key(1, 0, 0), 0, memoryview(b"early"))
        assert sending is not None
        await asyncio.wait({sending.done}, timeout=0.3)
        assert not sending.done.done()
        other.join()
        async with asyncio.timeout(30):
            await sending.done


async def test_a_server_that_is_gone_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "REACH_SECONDS", 3600.0)
    async with open_world(None, None) as (one, other):
        one.join()
        await other.stop()
        error = await loss(one.links, 1)
        assert (error.rank, error.cause) == (1, f"no connection to {other.server.address} (Connection refused)")


async def test_a_host_that_does_not_answer_is_lost_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "REACH_SECONDS", 0.2)
    with socket.socket() as deaf:  # a full backlog: connections are neither accepted nor refused
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        async with open_world(None, None) as (one, _):
            world = replace(one.links.world, members=(one.links.world.members[0], Member(rank=1, address=address)))
            async with Links(world=world, rank=0, connector=one.connector) as links:
                one.connector.join(links)
                error = await loss(links, 1)
        for filler in fillers:
            filler.close()
    assert error.cause == f"no connection to {address} (no answer)"


async def test_something_else_that_listens_at_the_address_is_not_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "CROWDED_SECONDS", 0.3)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, open_world(None, None) as (one, _):
        world = replace(one.links.world, members=(one.links.world.members[0], Member(rank=1, address=address)))
        async with Links(world=world, rank=0, connector=one.connector) as links:
            one.connector.join(links)
            error = await loss(links, 1)
    assert f"it answers UNAVAILABLE at {address}" in str(error)


async def test_a_peer_whose_server_turns_connections_away_for_a_while_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers hold all connections that a server allows: it accepts ours and closes it."""
    monkeypatch.setattr(negotiation, "REACH_SECONDS", 0.2)
    turned_away: list[int] = []
    async with open_world(None, None) as ranks:
        one, other = ranks
        host, port = split_address(other.server.address)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while part := await reader.read(1 << 16):
                writer.write(part)
            writer.close()

        async def crowd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            turned_away.append(1)
            if asyncio.get_running_loop().time() < crowded_until:
                writer.close()
                return
            inner_reader, inner_writer = await asyncio.open_connection(host, port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(carry(reader, inner_writer))
                tasks.create_task(carry(inner_reader, writer))

        crowded_until = asyncio.get_running_loop().time() + 0.6
        front = await asyncio.start_server(crowd, "127.0.0.1", 0)
        address = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
        async with front:
            members = (one.links.world.members[0], replace(one.links.world.members[1], address=address))
            async with Links(world=replace(one.links.world, members=members), rank=0, connector=one.connector) as links:
                one.connector.join(links)
                other.join()
                sending = links.link(1).send(Key(1, 0, 0), 0, memoryview(b"hello"))
                assert sending is not None
                async with asyncio.timeout(30):
                    await sending.done
                assert links.is_up(1)
    assert len(turned_away) > 2


async def test_pins_that_do_not_fit_fail_on_both_sides_and_name_both() -> None:
    async with open_world("tcp", "grpc") as ranks:
        for rank in ranks:
            rank.join()
        errors = await asyncio.gather(loss(ranks[0].links, 1), loss(ranks[1].links, 0))
    for error in errors:
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)
        assert "give both the same" in str(error)
    assert any(isinstance(error.__cause__, UsageError) for error in errors)


@pytest.mark.parametrize("dialer", [0, 1])
async def test_ranks_of_two_versions_both_fail_and_name_both(monkeypatch: pytest.MonkeyPatch, dialer: int) -> None:
    """Rank 0 is of before version 4: it neither sends its version nor looks at that of the other."""
    propose, encode = Negotiator.propose, acceptor.Acceptor._encode  # noqa: SLF001

    def propose_silently(negotiator: Negotiator, rank: int) -> Proposal:
        proposal = propose(negotiator, rank)
        return proposal if rank == 0 else replace(proposal, wire_version=0)

    def encode_silently(own: acceptor.Acceptor, answer: Answer) -> link_pb2.OpenReply:
        reply = encode(own, answer)
        if isinstance(answer, Accept) and answer.terms.listener == 0:
            reply.accepted.wire_version = 0
        return reply

    monkeypatch.setattr(Negotiator, "propose", propose_silently)
    monkeypatch.setattr(acceptor.Acceptor, "_encode", encode_silently)
    async with open_world("tcp", "tcp") as ranks:
        for rank in ranks:
            rank.join()
        errors = [await loss(ranks[rank].links, 1 - rank) for rank in (dialer, 1 - dialer)]
    for error in errors:
        assert "rank 1 speaks version 4 of the wire, rank 0 an earlier one; install the same version" in str(error)
    assert isinstance(errors[0].__cause__, UsageError)


async def test_another_generation_is_refused_as_stale() -> None:
    async with open_world(None, None, generations=[1, 2]) as ranks:
        for rank in ranks:
            rank.join()
        error = await loss(ranks[0].links, 1)
    assert isinstance(error.__cause__, StaleGeneration)
    assert "rank 1 is in generation 2, rank 0 in 1" in str(error)


async def test_another_secret_is_refused() -> None:
    async with open_world(None, None, credentials=[CREDENTIALS, Credentials(b"x" * 32)]) as ranks:
        for rank in ranks:
            rank.join()
        error = await loss(ranks[0].links, 1)
    assert "UNAUTHENTICATED" in str(error)


async def test_the_grpc_stream_stands_in_when_tcp_does_not_get_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def blocked(
        host: str, port: int, terms: object, *, secret: bytes, busy_poll: object, medium: object
    ) -> StreamLane:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(lane_kinds, "dial_tcp", blocked)
    with caplog.at_level(logging.WARNING):
        async with open_world(None, None, None, hosts="abc") as ranks:
            for rank in ranks:
                rank.join()
            await exchange(ranks[0].links, ranks[1].links)
            await exchange(ranks[0].links, ranks[2].links)
            assert ranks[0].links.lane_kind(1) == ranks[2].links.lane_kind(0) == "grpc"
    logged = [record.message for record in caplog.records if "gRPC stream is used instead" in record.message]
    assert 1 <= len(logged) <= 2
    assert "no TCP connection to 127.0.0.1" in logged[0]


async def test_ranks_of_other_hosts_take_tcp_and_those_of_one_host_its_unix_socket() -> None:
    async with open_world(None, None, None, hosts="aba") as ranks:
        for rank in ranks:
            rank.join()
        kinds = [ranks[0].links.lane_kind(rank) for rank in (1, 2)]
        await exchange(ranks[0].links, ranks[1].links)
        await exchange(ranks[2].links, ranks[0].links)
        await exchange(ranks[2].links, ranks[1].links)
        assert [ranks[0].links.lane_kind(rank) for rank in (1, 2)] == kinds == ["tcp", "shm"]
        assert ranks[2].links.lane_kind(1) == "tcp"


def hide_unix_socket(rank: Rank) -> None:
    """Let ``rank`` tell a name that does not exist here, as if it were in another network namespace."""
    listener = rank.connector._acceptor._listeners["shm"]  # noqa: SLF001  # the name that the listener tells peers is no setting
    assert isinstance(listener, UnixListener)
    listener.name = "asyncpar-elsewhere"


async def test_tcp_stands_in_when_a_rank_of_the_host_has_no_unix_socket_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with open_world(None, None, None) as ranks:
            for rank in ranks:
                rank.join()
                hide_unix_socket(rank)
            await exchange(ranks[0].links, ranks[1].links)
            await exchange(ranks[0].links, ranks[2].links)
            assert ranks[0].links.lane_kind(1) == ranks[2].links.lane_kind(0) == "tcp"
    logged = [record.message for record in caplog.records if "TCP is used instead (reported once)" in record.message]
    assert 1 <= len(logged) <= 2
    assert (
        "no Unix-socket connection, although it is on the same host (Connection refused: it has ended, or" in logged[0]
    )


async def test_a_rank_that_has_ended_is_lost_without_a_word_about_what_is_used_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refused(*_: object, **__: object) -> StreamLane:
        raise ConnectionRefusedError(111, "Connection refused")

    async def ended(*_: object) -> None:
        raise StreamEnded("the stream was reset")

    monkeypatch.setattr(lane_kinds, "dial_tcp", refused)
    monkeypatch.setattr(lane_kinds, "shake_hands", ended)
    with caplog.at_level(logging.WARNING):
        async with open_world(None, None) as ranks:
            for rank in ranks:
                rank.join()
                hide_unix_socket(rank)
            error = await loss(ranks[0].links, 1)
    assert error.rank == 1
    assert [record.message for record in caplog.records if "is used instead" in record.message] == []


async def test_a_pinned_unix_socket_that_does_not_exist_here_is_an_error() -> None:
    async with open_world("shm", "shm") as ranks:
        for rank in ranks:
            rank.join()
            hide_unix_socket(rank)
        error = await loss(ranks[0].links, 1)
    assert error.rank == 1
    assert "no Unix-socket connection, although it is on the same host" in str(error)


async def test_a_pinned_unix_socket_is_refused_in_a_world_of_several_hosts() -> None:
    async with open_world("shm", "shm", "shm", hosts="aab") as ranks:
        for rank in ranks:
            with pytest.raises(UsageError, match=r"shm is pinned, which .* rank 0 is on host-a and rank 2 on host-b"):
                rank.join()


async def test_there_is_no_unix_socket_lane_where_the_system_has_no_abstract_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_kinds, "has_abstract_sockets", lambda: False)
    async with open_world(None, None) as ranks:
        for rank in ranks:
            rank.join()
        await exchange(ranks[0].links, ranks[1].links)
        assert ranks[0].links.lane_kind(1) == "tcp"
    with pytest.raises(UsageError, match="transport: shm is pinned, but it exists on Linux only"):
        GrpcConnector(credentials=None, transport="shm")


async def test_where_unix_sockets_cannot_be_opened_tcp_is_used_unless_they_are_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def forbidden(listener: UnixListener) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(UnixListener, "start", forbidden)
    with caplog.at_level(logging.WARNING):
        async with open_world(None, None) as (one, other):
            one.join()
            other.join()
            await exchange(one.links, other.links)
            assert one.links.lane_kind(1) == other.links.lane_kind(0) == "tcp"
    logged = {record.message for record in caplog.records if record.name.startswith("asyncpar")}
    assert logged == {
        "Unix sockets do not work here ([Errno 1] Operation not permitted); TCP is used between ranks of this host"
    }
    with pytest.raises(UsageError, match="shm is pinned, but Unix sockets do not work here"):
        async with serving("shm"):
            pytest.fail("it was started")


async def test_a_pinned_tcp_lane_that_does_not_get_through_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def blocked(
        host: str, port: int, terms: object, *, secret: bytes, busy_poll: object, medium: object
    ) -> StreamLane:
        raise TimeoutError

    monkeypatch.setattr(lane_kinds, "dial_tcp", blocked)
    async with open_world("tcp", "tcp") as ranks:
        for rank in ranks:
            rank.join()
        error = await loss(ranks[0].links, 1)
    assert "no TCP connection to 127.0.0.1" in str(error)


@pytest.mark.parametrize(
    ("transport", "failure"),
    [
        ("shm", ConnectionRefusedError(111, "Connection refused")),
        ("tcp", TimeoutError()),
        ("grpc", StreamEnded("the stream was reset")),
    ],
)
@pytest.mark.parametrize("dialer", [0, 1])
async def test_a_rank_that_waits_for_a_pinned_lane_learns_at_once_that_it_does_not_get_through(
    monkeypatch: pytest.MonkeyPatch, transport: str, failure: Exception, dialer: int
) -> None:
    is_dialed, is_awaited = asyncio.Event(), asyncio.Event()

    async def blocked(*_args: object, **_keywords: object) -> StreamLane:
        is_dialed.set()
        await is_awaited.wait()
        raise failure

    for dial in ("dial_unix", "dial_tcp", "shake_hands"):
        monkeypatch.setattr(lane_kinds, dial, blocked)
    monkeypatch.setattr(acceptor, "JOIN_SECONDS", 3600.0)
    async with open_world(transport, transport) as ranks, asyncio.TaskGroup() as tasks:
        for rank in ranks:
            rank.join()
        listener, loop = 1 - dialer, asyncio.get_running_loop()
        dialing = tasks.create_task(loss(ranks[dialer].links, listener))
        await is_dialed.wait()
        waiting = tasks.create_task(loss(ranks[listener].links, dialer))
        loop.call_later(0.05, is_awaited.set)
        error, other = await waiting, await dialing
    assert (error.rank, other.rank) == (dialer, listener)
    assert f"it cannot connect to rank {listener}: {other.cause}" in str(error)


async def test_a_rank_that_waits_for_a_pinned_lane_learns_of_any_error_of_its_dialer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_args: object, **_keywords: object) -> StreamLane:
        raise AuthenticationError("the peer could not prove that it holds the secret of this job")

    monkeypatch.setattr(lane_kinds, "dial_tcp", broken)
    monkeypatch.setattr(acceptor, "JOIN_SECONDS", 3600.0)
    async with open_world("tcp", "tcp", connections=(3, 3)) as ranks:
        for rank in ranks:
            rank.join()
        errors = await asyncio.gather(loss(ranks[0].links, 1), loss(ranks[1].links, 0))
    assert [error.rank for error in errors] == [1, 0]
    assert all("AuthenticationError: the peer could not prove" in str(error) for error in errors)


async def test_a_rank_that_learnt_that_its_dialer_gave_up_waits_and_keeps_connections_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dial = dial_tcp
    dialed: list[StreamLane] = []
    kept: list[Connection] = []
    is_kept, is_awaited = asyncio.Event(), asyncio.Event()

    async def the_third_fails(host: str, port: int, terms: LinkTerms, **rest: Any) -> StreamLane:
        if terms.connection < 2:
            dialed.append(await dial(host, port, terms, **rest))
            return dialed[-1]
        await is_awaited.wait()
        raise ConnectionRefusedError(111, "Connection refused")

    def note(lane: Lane) -> Connection:
        kept.append(as_connection(lane))
        if len(kept) == 2:
            is_kept.set()
        return kept[-1]

    monkeypatch.setattr(lane_kinds, "dial_tcp", the_third_fails)
    monkeypatch.setattr(acceptor, "as_connection", note)
    async with open_world("tcp", "tcp", connections=(3, 3)) as ranks:
        for rank in ranks:
            rank.join()
        aborted: list[PeerLost] = []
        dialing = asyncio.create_task(loss(ranks[0].links, 1))
        await is_kept.wait()

        def abort(error: PeerLost, *, really: Callable[[PeerLost], None]) -> None:
            aborted.append(error)
            really(error)

        for connection in kept:
            monkeypatch.setattr(connection, "abort", partial(abort, really=connection.abort))
        waiting = asyncio.create_task(loss(ranks[1].links, 0))
        asyncio.get_running_loop().call_later(0.05, is_awaited.set)
        await asyncio.gather(dialing, waiting)
        assert [error.cause for error in aborted] == ["the other connections of its lane did not come"] * 2
        await asyncio.sleep(0.1)
        opening = [task for task in asyncio.all_tasks() if task.get_name() == "open link 1-0"]
        assert not opening, "it waits for a lane that will not come"


@pytest.mark.parametrize("token", [b"", b"x", b"x" * TOKEN_BYTES])
async def test_an_unknown_agreement_cannot_be_withdrawn(token: bytes) -> None:
    async with open_world("tcp", "tcp") as ranks:
        async with open_channel(ranks[0].server.address, CREDENTIALS) as channel:
            stub = link_pb2_grpc.LinkStub(channel)  # type: ignore[no-untyped-call]
            await stub.Withdraw(link_pb2.WithdrawRequest(token=token, cause="of malice"))
            for rank in ranks:
                rank.join()
            await stub.Withdraw(link_pb2.WithdrawRequest(token=token, cause="of malice"))
        await exchange(ranks[0].links, ranks[1].links)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_peer_that_dies_in_mid_transfer_is_lost_and_memory_comes_back(transport: str) -> None:
    async with open_world(transport, transport) as (one, other):
        one.join()
        other.join()
        await exchange(one.links, other.links)
        payload, buffer = bytearray(40_000_000), bytearray(40_000_000)
        waiter = other.links.link(0).post(Key(2, 0, 0), 0, memoryview(buffer))
        sending = one.links.link(1).send(Key(2, 0, 0), 0, memoryview(payload))
        assert sending is not None
        assert waiter is not None
        while not other.links.bytes_received > 1_000_000:  # noqa: ASYNC110 - no event tells of bytes
            await asyncio.sleep(0)
        lane = other.links.link(0).lane
        assert lane is not None
        lane.abort(PeerLost("the process was killed"))
        async with asyncio.timeout(30):
            with pytest.raises(PeerLost, match="rank 1 on host-a is lost"):
                await sending.done
        del sending
        payload.clear()  # resizing raises BufferError while anybody holds the memory


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("connections", [1, 3])
async def test_ranks_that_do_not_receive_hold_each_other_back_until_they_do(transport: str, connections: int) -> None:
    """Both ways at once: eager payloads up to their window, and large ones not at all."""
    async with open_world(transport, transport, connections=(connections,) * 2) as (one, other):
        one.join()
        other.join()
        await exchange(one.links, other.links)
        lengths = [EAGER_LIMIT] * (2 * EAGER_WINDOW // EAGER_LIMIT) + [4_000_000] * 4
        ways = ((one.links, other.links), (other.links, one.links))
        sendings = [
            sender.link(receiver.rank).send(Key(2, 0, tag), 0, memoryview(bytes([tag % 251]) * length))
            for tag, length in enumerate(lengths)
            for sender, receiver in ways
        ]
        pending = [sending.done for sending in sendings if sending is not None]
        inboxes = [receiver.link(sender.rank)._inbox for sender, receiver in ways]  # noqa: SLF001  # a link tells nobody how much it keeps early; the bound of that is what is tested
        async with asyncio.timeout(30):
            while any(EAGER_WINDOW - inbox.early_bytes >= EAGER_LIMIT + HEADER_BYTES for inbox in inboxes):  # noqa: ASYNC110
                await asyncio.sleep(0)  # no event tells that there is no room for one more
        assert max(inbox.early_bytes for inbox in inboxes) <= EAGER_WINDOW
        assert sum(not done.done() for done in pending) > len(lengths)
        async with asyncio.timeout(30):
            for tag, length in enumerate(lengths):
                for sender, receiver in ways:
                    buffer = bytearray(length)
                    waiter = receiver.link(sender.rank).post(Key(2, 0, tag), 0, memoryview(buffer))
                    if waiter is not None:
                        await waiter
                    assert buffer == bytes([tag % 251]) * length
            await asyncio.wait(pending)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_rank_that_leaves_is_missed_at_once_and_its_last_words_are_kept(transport: str) -> None:
    async with open_world(transport, transport) as (one, other):
        one.join()
        other.join()
        await exchange(one.links, other.links)
        waiter = other.links.link(0).post(Key(2, 0, 0), 0, memoryview(bytearray(1)))
        assert one.links.link(1).send(Key(2, 1, 0), 0, memoryview(b"last")) is None
        await one.stop()
        assert waiter is not None
        async with asyncio.timeout(30):
            with pytest.raises(PeerLost, match="it left the world"):
                await waiter
        buffer = bytearray(4)
        assert other.links.link(0).post(Key(2, 1, 0), 0, memoryview(buffer)) is None
        assert buffer == b"last"


async def test_closing_in_the_middle_of_link_up_leaves_nothing_behind() -> None:
    async with open_world(None, None) as (one, other):
        one.join()
        sending = one.links.link(1).send(Key(1, 0, 0), 0, memoryview(b"x"))
        await asyncio.wait({asyncio.create_task(one.links.close())}, timeout=5)
        assert sending is not None
        with pytest.raises(PeerLost, match="this node is closed"):
            await sending.done
        other.join()
        error = await loss(other.links, 0)
        assert "it left the world" in str(error)


async def test_a_node_that_stops_while_it_is_dialed_is_lost_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_world(None, None) as (one, other):
        one.join()
        other.join()

        async def dial(*_: object, **__: object) -> StreamLane:
            await other.stop()
            raise ConnectionResetError("the peer closed the connection during the handshake")

        monkeypatch.setattr(lane_kinds, "dial_unix", dial)
        async with asyncio.timeout(30):
            await loss(one.links, 1)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
@pytest.mark.parametrize(("wanted", "made"), [((3, 3), 3), ((3, 2), 2), ((1, 16), 1), ((4, 1), 1)])
async def test_a_lane_between_hosts_takes_as_many_connections_as_both_sides_want(
    wanted: tuple[int, int], made: int, transport: str
) -> None:
    async with open_world(transport, transport, connections=wanted) as (one, other):
        one.join()
        other.join()
        await exchange(one.links, other.links, length=3_000_000)
        for links, peer in ((one.links, 1), (other.links, 0)):
            lane = links.link(peer).lane
            assert lane is not None
            assert lane.kind == transport
            assert (len(lane.connections) if isinstance(lane, StripedLane) else 1) == made


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_dials_of_several_connections_from_both_sides_at_once_always_make_one_link(transport: str) -> None:
    for _ in range(chosen(2, soak=10)):
        async with open_world(*[transport] * 3, connections=(4, 4, 4)) as ranks:
            for rank in ranks:
                rank.join()
            pairs = [(one, other) for one in ranks for other in ranks if one.links.rank < other.links.rank]
            async with asyncio.TaskGroup() as tasks:
                for one, other in pairs:
                    tasks.create_task(exchange(one.links, other.links, length=600_000))
            assert all(rank.links.lost == {} for rank in ranks)


async def test_the_grpc_stream_stands_in_when_not_all_connections_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_but_one(
        host: str, port: int, terms: LinkTerms, *, secret: bytes, busy_poll: BusyPoll, medium: Medium
    ) -> StreamLane:
        if terms.connection == 2:
            raise ConnectionRefusedError(111, "Connection refused")
        return await dial_tcp(host, port, terms, secret=secret, busy_poll=busy_poll, medium=medium)

    monkeypatch.setattr(lane_kinds, "dial_tcp", all_but_one)
    async with open_world(None, None, hosts="ab", connections=(3, 3)) as (one, other):
        one.join()
        other.join()
        await exchange(one.links, other.links)
        assert one.links.lane_kind(1) == other.links.lane_kind(0) == "grpc"
        assert one.connector._acceptor._gathering._waiting == {}  # noqa: SLF001  # connections left waiting for their lane show nowhere else
        assert other.connector._acceptor._gathering._waiting == {}  # noqa: SLF001  # connections left waiting for their lane show nowhere else


def test_unknown_transports_are_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"expected one of shm, tcp, grpc, got 'carrier-pigeon'"):
        GrpcConnector(credentials=None, transport="carrier-pigeon")


async def test_frames_without_an_agreement_are_refused_on_the_stream() -> None:
    async with open_world(None) as (one,):
        one.join()
        channel = open_channel(one.server.address, None)
        terms = LinkTerms(job="local", generation=0, dialer=1, listener=0, token=b"?" * 16)
        handshake = Handshake.dial(terms, secret=CREDENTIALS.secret, nonce=b"n" * 32)
        for metadata, code in ((CREDENTIALS.metadata(), "PERMISSION_DENIED"), ((), "UNAUTHENTICATED")):
            stream = call_frames(channel, metadata)
            with pytest.raises(StreamEnded, match=code):
                await shake_hands(stream, handshake)
        await channel.close(None)
