"""The round trip of a TCP connection is what the kernel has measured."""

from __future__ import annotations

import socket

from asyncpar.net.transport.sockets import read_delivery_rate, read_round_trip


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
            found = read_delivery_rate(client)
            assert found is not None
            rate, is_full = found
            assert rate > 1e5
            assert isinstance(is_full, bool)
    one, other = socket.socketpair()
    with one, other:
        assert read_delivery_rate(one) is None
    with socket.socket() as unconnected:
        assert read_delivery_rate(unconnected) is None
