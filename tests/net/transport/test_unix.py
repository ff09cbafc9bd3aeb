"""The lane over Unix sockets: the kernel names its peer, and its own name goes with it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from asyncpar.errors import AuthenticationError, PeerLost
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import UNIX, UnixListener, dial_unix
from asyncpar.net.transport.handshaking import Porter
from asyncpar.net.transport.stream import StreamLane
from asyncpar.testing.lanes import RecordingEvents, frame, pattern
from tests.net.transport.pairs import SECRET, TERMS, open_unix_pair

CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(b"\\0" + sys.argv[1].encode())
    print("connected", flush=True)
    print("got", sock.recv(1))
"""


class Door:
    """A listener, the lanes that came in, and the reasons why others did not."""

    def __init__(self) -> None:
        self.lanes: list[StreamLane] = []
        self.refused: list[Exception] = []
        self.porter = Porter(
            UNIX,
            secret=SECRET,
            busy_poll=BusyPoll(),
            find_terms=lambda token: TERMS if token == TERMS.token else None,
            on_lane=lambda _, lane: self.lanes.append(lane),
            on_refused=self.refused.append,
        )
        self.listener = UnixListener(self.porter)

    async def __aenter__(self) -> Door:
        await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.stop()
        await asyncio.sleep(0)  # transports close in a callback


async def run(*command: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=20)


async def test_a_process_of_another_user_gets_no_byte_and_the_reason_is_reported() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    async with Door() as door:
        outcome = await run(sys.executable, "-c", CONNECT, door.listener.name, "65534")
        assert outcome.stdout == "connected\ngot b''\n"
        assert [type(error) for error in door.refused] == [PermissionError]
        assert str(door.refused[0]) == "the process at the other end runs as user 65534, this one as 0"
        assert door.lanes == []
        assert door.porter.strangers == 0


async def test_a_listener_of_another_user_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Door() as door:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(PermissionError, match="the process at the other end runs as user"):
            await dial_unix(door.listener.name, TERMS, secret=SECRET, busy_poll=BusyPoll())
        while not door.refused:  # noqa: ASYNC110 - the listener, which sees the same, tells of it in a callback
            await asyncio.sleep(0)
        assert door.lanes == []


async def test_without_the_secret_nobody_gets_in() -> None:
    async with Door() as door:
        with pytest.raises(ConnectionResetError):
            await dial_unix(door.listener.name, TERMS, secret=b"wrong" * 8, busy_poll=BusyPoll())
        assert [type(error) for error in door.refused] == [AuthenticationError]
        assert door.lanes == []


async def test_a_name_is_gone_as_soon_as_nobody_listens() -> None:
    async with Door() as door:
        name = door.listener.name
    with pytest.raises(ConnectionRefusedError):
        await dial_unix(name, TERMS, secret=SECRET, busy_poll=BusyPoll())


async def test_a_name_does_not_exist_in_another_network_namespace() -> None:
    async with Door() as door:
        try:
            outcome = await run("unshare", "--net", sys.executable, "-c", CONNECT, door.listener.name, str(os.getuid()))
        except FileNotFoundError:
            pytest.skip("there is no unshare command here")
        if "unshare failed" in outcome.stderr:
            pytest.skip("network namespaces cannot be made here")
        assert "ConnectionRefusedError" in outcome.stderr
        assert door.refused == []


async def test_a_full_backlog_is_waited_for() -> None:
    async with Door() as door:
        assert door.listener._server is not None  # noqa: SLF001  # makes the backlog of the listener's own socket smaller: no setting does
        with socket.socket(fileno=os.dup(door.listener._server.sockets[0].fileno())) as listening:  # noqa: SLF001  # makes the backlog of the listener's own socket smaller: no setting does
            listening.listen(0)
        dials = [
            asyncio.create_task(dial_unix(door.listener.name, TERMS, secret=SECRET, busy_poll=BusyPoll()))
            for _ in range(6)
        ]
        async with asyncio.timeout(30):
            lanes = await asyncio.gather(*dials)
            while len(door.lanes) < len(lanes):  # noqa: ASYNC110 - the listener adopts them in callbacks
                await asyncio.sleep(0)
        for lane in [*lanes, *door.lanes]:
            lane.abort(PeerLost("the test is over"))


async def test_frames_right_behind_the_handshake_are_frames() -> None:
    async with Door() as door:
        lane = await dial_unix(door.listener.name, TERMS, secret=SECRET, busy_poll=BusyPoll())
        for tag in range(3):
            lane.send(*frame(tag, pattern(1000, tag)))
        while not door.lanes:  # noqa: ASYNC110 - the listener adopts it in a callback
            await asyncio.sleep(0)
        events = RecordingEvents()
        door.lanes[0].start(events)
        await events.until_tag(2)
        assert events.tags == [0, 1, 2]
        lane.abort(PeerLost("the test is over"))
        door.lanes[0].abort(PeerLost("the test is over"))


async def test_a_lane_says_what_it_is() -> None:
    async with open_unix_pair() as (one, other):
        assert one.kind == other.kind == "shm"


async def test_a_unix_socket_holds_more_than_it_does_by_itself() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as untouched:
        default = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    async with open_unix_pair() as (one, other):
        assert all(lane._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= default for lane in (one, other))  # noqa: SLF001  # options of the socket are asked of the system
        one.start(RecordingEvents())
        sending = one.send(*frame(0, bytes(default + 100_000)))
        assert (sending is None) == (one._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 4 * default)  # noqa: SLF001  # options of the socket are asked of the system
