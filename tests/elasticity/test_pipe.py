"""A process of an elastic job is notified of every end of its director, and of impossible messages."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace

from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.pipe_socket import SocketPipe
from asyncpar.errors import AsyncparError, LaunchError, PeerLost, ProtocolError, StaleGeneration, UsageError
from asyncpar.hosts.lineage import Decision, Lineage, MemberReport, first_lineage
from asyncpar.hosts.messages import WorldChange
from asyncpar.hosts.pipe_messages import (
    AgentMessage,
    AllServed,
    ChangeWaits,
    DonorsFound,
    DonorsWanted,
    Drained,
    JobOver,
    JoinWorld,
    LeaseGranted,
    LeaseWanted,
    LeaveJob,
    LeaveRefused,
    LeaveWanted,
    LinksServed,
    NotAdmitted,
    PipeMessage,
    RankMessage,
    StateReached,
    Withdraw,
    Withdrawn,
    WorldFormed,
    WorldOver,
    WorldReport,
    decode_agent_line,
    decode_rank_line,
    encode_line,
)
from asyncpar.net.membership.credentials import create_secret

START = first_lineage(b"state")

WORLD = WorldFormed(
    generation=0,
    rank=0,
    hosts=("here",),
    job="job",
    lineage=START,
    decision=Decision.ABORT,
    change=WorldChange(generation=0),
)
SERVED = AllServed(0, ("127.0.0.1:1",))
CHANGE = WorldChange(generation=3, joined=("a",), left=("b", "c"), why="so", is_by_loss=True)
REPORT = MemberReport(generation=2, lineage=START, prepared=Lineage(1, b"\0\xff"), suspects=((1, "it is silent"),))

MESSAGES: list[PipeMessage] = [
    DonorsWanted(),
    JoinWorld(Lineage(7, b"\0\xff"), "here:1", (("portions", "8"),)),
    StateReached(START),
    Withdraw(),
    NotAdmitted("its step 4 differs"),
    WorldReport(REPORT),
    LinksServed(3, "here:2"),
    LeaseWanted(4),
    LeaveWanted(),
    LeaveJob(4, "ValueError: \n"),
    DonorsFound((("one/0/0", "here:1"),)),
    replace(WORLD, rank=1, hosts=("here", "there"), change=CHANGE, certified=(4, 2)),
    Withdrawn(),
    LeaseGranted(0.5),
    Drained(),
    SERVED,
    WorldOver(0, "m1 is gone", is_planned=True),
    ChangeWaits(5),
    LeaveRefused(),
    JobOver("it is over"),
]

AS_JSON: dict[str, Any] = msgspec.to_builtins(WORLD)
CANNOT_BE_MEANT: list[list[Any]] = [
    ["text"],
    [{}],
    [{"kind": "else"}],
    [{"kind": "AllServed"}],
    [msgspec.to_builtins(SERVED)],  # before its world
    [{"kind": "WorldOver", "generation": "none", "why": "", "is_planned": False}],
    [{"kind": "WorldOver", "generation": 0, "why": ""}],
    *[[{**AS_JSON, key: wrong}] for key, wrong in [("lineage", None), ("lineage", [0, "?"]), ("lineage", 1)]],
    *[[{**AS_JSON, key: wrong}] for key, wrong in [("decision", "perhaps"), ("change", 1), ("hosts", 1)]],
    *[[{**AS_JSON, key: wrong}] for key, wrong in [("rank", 1), ("rank", -1), ("certified", []), ("certified", [-1])]],
    *[[{name: value for name, value in AS_JSON.items() if name != key}] for key in AS_JSON if key != "certified"],
]


class Director:
    """The other end of the socket of ``worlds``, and the reports of ``worlds`` of the end of its world."""

    def __init__(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"s" * 32)
        secret.chmod(0o600)
        here, self.socket = socket.socketpair()
        with here:
            environment = {ELASTIC_PIPE: str(here.fileno()), "ASYNCPAR_SECRET_FILE": os.fspath(secret)}
            self.worlds = PipeWorlds(SocketPipe(environment))
        self.revocations: list[BaseException | None] = []
        self.worlds.on_revoked(self._on_revoked)

    def _on_revoked(self, generation: int, why: BaseException | None) -> None:
        assert generation >= 0
        self.revocations.append(why)

    async def answer(self, content: bytes) -> BaseException:
        """Answer with ``content`` when the process asks for a world; return what it raises."""
        self.socket.setblocking(False)
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(self.socket, content))
        try:
            async with asyncio.timeout(20):
                with pytest.raises(AsyncparError) as caught:
                    await self.worlds.next_world(MemberReport(generation=0, lineage=START))
            return caught.value
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            await self.worlds.leave()
            self.socket.close()


@pytest.mark.parametrize("messages", CANNOT_BE_MEANT, ids=lambda messages: json.dumps(messages)[:60])
async def test_a_message_that_cannot_be_meant_ends_what_waits_for_the_director(
    messages: list[Any], tmp_path: Path
) -> None:
    director = Director(tmp_path)
    error = await director.answer(b"".join(json.dumps(one).encode() + b"\n" for one in messages))
    assert isinstance(error, ProtocolError)
    assert director.revocations[-1] is error


@pytest.mark.parametrize(
    "line", [b"", b"\xff", b"{", b"[" * 100_000, b"x" * (2 << 20)], ids=lambda line: line[:2].hex()
)
async def test_a_line_that_is_no_message_ends_what_waits_for_the_director(line: bytes, tmp_path: Path) -> None:
    director = Director(tmp_path)
    error = await director.answer(line + b"\n")
    assert isinstance(error, ProtocolError)
    assert director.revocations[-1] is error


async def test_a_world_that_ends_by_plan_is_told_from_one_with_a_loss(tmp_path: Path) -> None:
    director = Director(tmp_path)
    lines = b"".join(encode_line(WorldOver(0, "m1 is gone", is_planned)) for is_planned in (True, False))
    await director.answer(lines + b'{"kind": "else"}\n')
    planned, lost, _ = director.revocations
    assert planned is None
    assert isinstance(lost, PeerLost)
    assert lost.cause == "m1 is gone"


async def test_a_director_that_is_gone_ends_what_waits_for_it(tmp_path: Path) -> None:
    director = Director(tmp_path)
    asking = asyncio.create_task(director.worlds.donors())
    await asyncio.sleep(0)
    director.socket.close()
    async with asyncio.timeout(20):
        with pytest.raises(LaunchError, match="director of this job is gone"):
            await asking
    await director.worlds.leave()


class StrawPipe:
    """See ``RankPipe``: keeps what is written, and lets a test send the messages of the agent."""

    def __init__(self) -> None:
        self.take: Callable[[AgentMessage], None] = lambda _: None
        self.written: list[RankMessage] = []

    @property
    def is_open(self) -> bool:
        return True

    async def open(self, take: Callable[[AgentMessage], None], end: Callable[[Exception], None]) -> None:
        self.take = take

    def write(self, message: RankMessage) -> None:
        self.written.append(message)

    async def serve_snapshots(self, shelf: object) -> str:
        return "here:1"

    def donor(self, name: str, address: str) -> Any:
        raise AssertionError("nobody is healed")

    async def serve_links(self, stack: AsyncExitStack, certified: Sequence[int] | None) -> Any:
        return "here:2", lambda world, rank: (world, rank)

    async def close(self) -> None:
        pass


def of_generation(generation: int) -> list[AgentMessage]:
    """Return the messages of an agent about a world, in their order."""
    return [
        replace(WORLD, generation=generation),
        AllServed(generation, (f"127.0.0.1:{generation}",)),
        ChangeWaits(generation),
        WorldOver(generation, "so", is_planned=False),
    ]


REPEATED = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", REPEATED, ids=str)
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["waits", "is cancelled"])
async def test_what_is_repeated_or_comes_late_is_harmless(order: tuple[int, ...], is_cancelled: bool) -> None:
    pipe = StrawPipe()
    worlds = PipeWorlds(pipe)
    before, after = of_generation(0), of_generation(1)
    coming = asyncio.ensure_future(worlds.next_world(MemberReport(generation=-1, lineage=START)))
    await asyncio.sleep(0)
    pipe.take(before[0])
    first = await coming
    assert first is not None
    async with AsyncExitStack() as stack:
        attaching = asyncio.ensure_future(first.attach(stack))
        await asyncio.sleep(0)
        if is_cancelled:  # as a revoke does
            attaching.cancel()
            await asyncio.wait({attaching})
        for message in [before[place] for place in order] * 2:
            pipe.take(message)
        if not is_cancelled:
            await attaching
        coming = asyncio.ensure_future(worlds.next_world(MemberReport(generation=0, lineage=START)))
        await asyncio.sleep(0)
        for message in (after[0], *(before[place] for place in order), after[0], after[1]):
            pipe.take(message)
        second = await coming
        assert second is not None
        assert second.generation == 1
        attached: Any = await second.attach(stack)
        world, _ = attached
        assert [member.address for member in world.members] == ["127.0.0.1:1"]
        pipe.take(after[2])
        pipe.take(before[2])
        assert worlds.has_pending(1), "what is old changes nothing"


async def test_a_world_that_was_replaced_is_not_waited_for() -> None:
    pipe = StrawPipe()
    worlds = PipeWorlds(pipe)
    coming = asyncio.ensure_future(worlds.next_world(MemberReport(generation=-1, lineage=START)))
    await asyncio.sleep(0)
    pipe.take(of_generation(0)[0])
    first = await coming
    assert first is not None
    pipe.take(of_generation(1)[0])
    async with AsyncExitStack() as stack:
        with pytest.raises(StaleGeneration, match="generation 0 is over"):
            await first.attach(stack)


@pytest.mark.parametrize("number", ["", "x", "-1", "999"])
def test_a_socket_that_is_none_is_named(number: str, tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    with pytest.raises(UsageError, match=ELASTIC_PIPE):
        SocketPipe({ELASTIC_PIPE: number, "ASYNCPAR_SECRET_FILE": str(tmp_path / "secret")})


RANK_MESSAGES: tuple[type[PipeMessage], ...] = get_args(RankMessage)
AGENT_MESSAGES: tuple[type[PipeMessage], ...] = get_args(AgentMessage)


def test_every_message_is_of_one_side() -> None:
    assert sorted(kind.__name__ for kind in PipeMessage.__subclasses__()) == sorted(
        kind.__name__ for kind in (*RANK_MESSAGES, *AGENT_MESSAGES)
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_travel_as_they_are_and_only_in_their_direction(message: PipeMessage) -> None:
    line = encode_line(message)
    assert line.count(b"\n") == 1
    ways: list[Callable[[bytes], PipeMessage]] = [decode_rank_line, decode_agent_line]
    there, back = reversed(ways) if isinstance(message, AGENT_MESSAGES) else ways
    assert there(line) == message
    with pytest.raises(ProtocolError, match="expected a message that"):
        back(line)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_with_a_field_of_another_type_is_refused(message: PipeMessage) -> None:
    content = msgspec.to_builtins(message)
    decode = decode_agent_line if isinstance(message, AGENT_MESSAGES) else decode_rank_line
    for name in content:
        with pytest.raises(ProtocolError):
            decode(json.dumps({**content, name: {"of": ["another", "type"]}}).encode())


def test_all_messages_are_tried() -> None:
    assert {type(message) for message in MESSAGES} == {*RANK_MESSAGES, *AGENT_MESSAGES}


async def test_a_job_that_is_over_ends_whatever_a_rank_waits_for() -> None:
    pipe = StrawPipe()
    worlds = PipeWorlds(pipe)
    waiting = asyncio.ensure_future(worlds.donors())
    await asyncio.sleep(0)
    pipe.take(JobOver("step 3: it failed in every place"))
    with pytest.raises(LaunchError, match="step 3: it failed in every place"):
        await waiting


@pytest.mark.parametrize("is_before", [True, False], ids=["before it asks", "while it waits"])
@pytest.mark.parametrize("asked", ["donors", "join", "next world"])
async def test_a_rank_that_is_dismissed_at_any_moment_is_answered(asked: str, is_before: bool) -> None:
    pipe = StrawPipe()
    worlds = PipeWorlds(pipe)
    opening = asyncio.ensure_future(worlds.withdraw())
    await asyncio.sleep(0)
    if is_before:  # as a job that is complete while a rank withdraws to have the state anew
        pipe.take(Drained())
    pipe.take(Withdrawn())
    await opening
    ways: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "donors": worlds.donors,
        "join": lambda: worlds.join(START, SnapshotShelf(), is_healed=True),
        "next world": lambda: worlds.next_world(MemberReport(generation=0, lineage=START)),
    }
    asking = asyncio.ensure_future(ways[asked]())
    await asyncio.sleep(0)
    if not is_before:
        pipe.take(Drained())
    async with asyncio.timeout(60):
        if asked == "join":
            with pytest.raises(PeerLost, match="the job is complete"):
                await asking
        else:
            assert await asking is None
