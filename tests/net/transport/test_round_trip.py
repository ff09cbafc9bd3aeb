"""The round trip of a TCP connection is what the kernel has measured."""

from __future__ import annotations

import select
import socket
import time

from asyncpar.net.transport.lane import CarriedBytes
from asyncpar.net.transport.sockets import read_delivery, read_round_trip


def test_tcp_connections_know_their_round_trip_and_others_do_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x" * 100)
            assert accepted.recv(100)
            accepted.sendall(b"y")
            assert client.recv(1) == b"y"
            found = read_round_trip(client)
            assert found is not None
            assert 0.0 < found < 1.0
    one, other = socket.socketpair()
    with one, other:
        assert read_round_trip(one) is None
    with socket.socket() as unconnected:
        assert read_round_trip(unconnected) is None
    assert read_round_trip(unconnected) is None, "it is closed"


def test_tcp_connections_know_what_arrives_and_others_do_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            for _ in range(20):
                client.sendall(bytes(100_000))
                left = 100_000
                while left:
                    left -= len(peer.recv(left))
            deadline = time.monotonic() + 30.0
            while (found := read_delivery(client)) is None or found.nbytes < 2_000_000:  # until all is acknowledged
                assert time.monotonic() < deadline
                client.sendall(bytes(1000))
                assert peer.recv(1000)
            assert found.seconds >= 0.0
            assert read_delivery(peer) is None, "it has sent nothing"


def test_time_in_which_the_peer_takes_no_more_is_not_time_of_the_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            client.setblocking(False)
            deadline = time.monotonic() + 30.0
            while select.select([], [client], [], 0.2)[1]:  # until it takes no more
                assert time.monotonic() < deadline
                client.send(bytes(1 << 20))
            before = _delivered(client)
            select.select([client], [], [], 1.0)  # a second of waiting, or more
            assert _delivered(client).seconds - before.seconds < 0.5
            assert _delivered(client).nbytes == before.nbytes


def _delivered(sock: socket.socket) -> CarriedBytes:
    found = read_delivery(sock)
    assert found is not None
    return found


def test_other_sockets_do_not_know_what_arrives() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert read_delivery(one) is None
    with socket.socket() as unconnected:
        assert read_delivery(unconnected) is None
