"""Packets with descriptors: whole or refused, and no descriptor is left open."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from asyncpar.errors import AuthenticationError, ProtocolError
from asyncpar.net.arena.formation_machine import ArenaVerdict, Ready, Roster, Unable, encode_message
from asyncpar.net.arena.packet_socket import MAX_DESCRIPTORS, PacketSocket, check_user, close_all
from asyncpar.net.wire.handshake import Handshake, LinkTerms
from tests.descriptors import open_descriptors

TERMS = LinkTerms(job="job", generation=1, dialer=1, listener=0, token=b"t" * 16)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    before = open_descriptors()
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    yield pair
    for end in pair:
        end.close()
    assert open_descriptors() - before == Counter(), "descriptors were left open"


async def test_messages_keep_their_bounds_and_order(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = PacketSocket(ends[0]), PacketSocket(ends[1])
    await one.send(Ready())
    await one.send(Unable("no"))
    assert await other.receive() == (Ready(), [])
    assert await other.receive() == (Unable("no"), [])


async def test_receiving_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = PacketSocket(ends[0]), PacketSocket(ends[1])
    receiving = asyncio.ensure_future(other.receive())
    await asyncio.sleep(0)
    assert not receiving.done()
    await one.send(Ready())
    assert await receiving == (Ready(), [])


async def test_descriptors_travel_and_are_closed_on_exec(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = PacketSocket(ends[0]), PacketSocket(ends[1])
    read_end, write_end = os.pipe()
    await one.send(Roster([]), [write_end])
    os.close(write_end)
    _, (received,) = await other.receive()
    os.write(received, b"hello")
    assert os.read(read_end, 5) == b"hello"
    assert not os.get_inheritable(received)
    close_all([received, read_end])


async def test_as_many_descriptors_as_the_kernel_allows_travel_at_once(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = PacketSocket(ends[0]), PacketSocket(ends[1])
    await one.send(Ready(), [0] * MAX_DESCRIPTORS)
    _, received = await other.receive()
    assert len(received) == MAX_DESCRIPTORS
    close_all(received)


async def test_descriptors_of_what_is_no_message_are_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    other = PacketSocket(ends[1])
    ends[0].sendmsg([b"nonsense"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0]))])
    with pytest.raises(ProtocolError, match="cannot be read"):
        await other.receive()


async def test_a_message_that_is_too_long_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].send(bytes(70_000))
    with pytest.raises(ProtocolError, match="did not arrive whole"):
        await PacketSocket(ends[1]).receive()


async def test_the_end_of_the_connection_is_reported(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].close()
    with pytest.raises(ConnectionResetError, match="was closed"):
        await PacketSocket(ends[1]).receive()


async def test_what_was_sent_before_a_hasty_end_is_still_received(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].send(b"never read")
    PacketSocket(ends[0]).send_now(ArenaVerdict("no"))
    ends[0].close()
    other = PacketSocket(ends[1])
    assert await other.receive() == (ArenaVerdict("no"), [])
    with pytest.raises(ConnectionResetError):
        await other.receive()


async def test_sending_waits_for_a_slow_reader(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = PacketSocket(ends[0]), PacketSocket(ends[1])
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def send_many() -> None:
        for _ in range(100):
            await one.send(Unable("x" * 400))

    sending = asyncio.ensure_future(send_many())
    await asyncio.sleep(0)
    assert not sending.done()
    for _ in range(100):
        assert await other.receive() == (Unable("x" * 400), [])
    await sending


async def test_sending_at_once_gives_up_on_a_full_or_closed_connection(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one = PacketSocket(ends[0])
    for _ in range(10_000):
        one.send_now(Unable("x" * 400))
    assert ends[1].recv(1000) == encode_message(Unable("x" * 400))
    ends[1].close()
    one.send_now(Ready())


@pytest.mark.parametrize("secret", [b"s" * 32, b"t" * 32])
async def test_both_ends_prove_that_they_hold_the_secret(
    ends: tuple[socket.socket, socket.socket], secret: bytes
) -> None:
    one, other = PacketSocket(ends[0]), PacketSocket(ends[1])
    dialing = Handshake.dial(TERMS, secret=b"s" * 32, nonce=os.urandom(32))
    listening = Handshake.listen(lambda _: TERMS, secret=secret, nonce=os.urandom(32))

    async def listen() -> None:
        try:
            await other.shake_hands(listening)
        finally:
            if not listening.is_complete:
                other.close()

    results = await asyncio.gather(one.shake_hands(dialing), listen(), return_exceptions=True)
    if secret == b"s" * 32:
        assert not any(results)
        assert listening.terms == TERMS
    else:
        assert [type(result) for result in results] == [ConnectionResetError, AuthenticationError]


async def test_descriptors_of_strangers_are_dropped(ends: tuple[socket.socket, socket.socket]) -> None:
    listening = Handshake.listen(lambda _: TERMS, secret=b"s" * 32, nonce=os.urandom(32))
    ends[0].sendmsg([b"x" * 200], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 10))])
    with pytest.raises(AuthenticationError):
        await PacketSocket(ends[1]).shake_hands(listening)


def test_only_the_same_user_is_let_in(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_user(ends[0])
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(AuthenticationError, match=f"expected a process of user {user + 1}, got one of user {user}"):
        check_user(ends[0])


class Crowded(socket.socket):
    """Fails as long as too many descriptors are in flight."""

    refusals = 2

    def sendmsg(self, *arguments: Any) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return super().sendmsg(*arguments)


async def test_sending_waits_while_too_many_descriptors_are_in_flight(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    with Crowded(fileno=os.dup(ends[0].fileno())) as crowded:
        await PacketSocket(crowded).send(Ready(), [0])
        assert crowded.refusals == 0
    message, descriptors = await PacketSocket(ends[1]).receive()
    assert message == Ready()
    close_all(descriptors)
