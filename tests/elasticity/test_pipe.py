"""A process of an elastic job hears of every end of its director, and of messages that cannot be meant."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.pipe_socket import SocketPipe
from asyncpar.errors import AsyncparError, LaunchError, PeerLost, ProtocolError, StaleGeneration, UsageError
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.membership.lineage import Lineage, MemberReport, first_lineage
from asyncpar.net.membership.pipe_messages import decode_lineage, encode_lineage

START = first_lineage(b"state")

WORLD: dict[str, Any] = {
    "kind": "world",
    "generation": 0,
    "rank": 0,
    "hosts": ["here"],
    "lineage": [0, START.digest.hex()],
    "decision": "abort",
    "job": "job",
    "joined": [],
    "left": [],
    "why": "",
    "is_by_loss": False,
}
MEMBERS = {"kind": "members", "generation": 0, "members": ["127.0.0.1:1"]}

CANNOT_BE_MEANT: list[list[Any]] = [
    ["text"],
    [{}],
    [{"kind": "else"}],
    [{"kind": "donors"}],
    [MEMBERS],
    [{"kind": "revoked", "generation": "none", "why": "", "planned": False}],
    [{"kind": "revoked", "generation": 0, "why": ""}],
    *[[{**WORLD, key: wrong}] for key, wrong in [("lineage", None), ("lineage", [0, "?"]), ("lineage", 1)]],
    *[[{**WORLD, key: wrong}] for key, wrong in [("decision", "perhaps"), ("joined", 1), ("hosts", 1)]],
    *[[{name: value for name, value in WORLD.items() if name != key}] for key in WORLD],
]


class Director:
    """The other end of the socket of ``worlds``, and what ``worlds`` told of the end of its world."""

    def __init__(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"s" * 32)
        secret.chmod(0o600)
        here, self.socket = socket.socketpair()
        with here:
            environment = {ELASTIC_PIPE: str(here.fileno()), "ASYNCPAR_SECRET_FILE": os.fspath(secret)}
            self.worlds = PipeWorlds(SocketPipe(environment))
        self.heard: list[BaseException | None] = []
        self.worlds.on_revoked(self._hear)

    def _hear(self, generation: int, why: BaseException | None) -> None:
        assert generation >= 0
        self.heard.append(why)

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
    assert director.heard[-1] is error


@pytest.mark.parametrize(
    "line", [b"", b"\xff", b"{", b"[" * 100_000, b"x" * (2 << 20)], ids=lambda line: line[:2].hex()
)
async def test_a_line_that_is_no_message_ends_what_waits_for_the_director(line: bytes, tmp_path: Path) -> None:
    director = Director(tmp_path)
    error = await director.answer(line + b"\n")
    assert isinstance(error, ProtocolError)
    assert director.heard[-1] is error


async def test_a_world_that_ends_by_plan_is_told_from_one_with_a_loss(tmp_path: Path) -> None:
    director = Director(tmp_path)
    told = [{"kind": "revoked", "generation": 0, "why": "m1 is gone", "planned": planned} for planned in (True, False)]
    await director.answer(b"".join(json.dumps(one).encode() + b"\n" for one in [*told, {"kind": "else"}]))
    planned, lost, _ = director.heard
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
    """See ``RankPipe``: keeps what is written, and lets a test say what the agent says."""

    def __init__(self) -> None:
        self.take: Callable[[dict[str, Any]], None] = lambda _: None
        self.written: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        return True

    async def open(self, take: Callable[[dict[str, Any]], None], end: Callable[[Exception], None]) -> None:
        self.take = take

    def write(self, message: dict[str, Any]) -> None:
        self.written.append(message)

    async def serve_snapshots(self, shelf: object) -> str:
        return "here:1"

    def donor(self, name: str, address: str) -> Any:
        raise AssertionError("nobody is healed")

    async def serve_links(self, stack: AsyncExitStack, certified: list[int] | None) -> Any:
        return "here:2", lambda world, rank: (world, rank)

    async def close(self) -> None:
        pass


def of_generation(generation: int) -> list[dict[str, Any]]:
    """Return what an agent says of a world, in the order in which it happens."""
    return [
        {**WORLD, "generation": generation},
        {"kind": "members", "generation": generation, "members": [f"127.0.0.1:{generation}"]},
        {"kind": "pending", "generation": generation},
        {"kind": "revoked", "generation": generation, "why": "so", "planned": False},
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


def test_lineages_travel_as_they_are() -> None:
    lineage = Lineage(7, b"\0\xff")
    assert decode_lineage(json.loads(json.dumps(encode_lineage(lineage)))) == lineage
    assert decode_lineage(encode_lineage(None)) is None
    for damaged in ([1], ["x", ""], [1, "zz"], 3):
        with pytest.raises(ProtocolError, match="lineage"):
            decode_lineage(damaged)


PACKAGE = Path(ap.__file__).parent
AGENT = ("launch/agents/elastic_ranks.py", "launch/agents/host_agent.py", "launch/agents/rank_dialogue.py")
RANK = ("elasticity/pipe.py",)


def kinds(files: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Return the kinds of messages that are written in ``files``, and those that are looked for."""
    written, understood = set[str](), set[str]()
    for name in files:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                found = [value for key, value in zip(node.keys, node.values, strict=True) if is_text(key, "kind")]
                written |= {str(value.value) for value in found if isinstance(value, ast.Constant)}
            elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
                understood.add(str(node.value.value))
            elif isinstance(node, ast.Compare) and "message.get('kind')" in ast.unparse(node.left):
                understood |= {str(one.value) for one in node.comparators if isinstance(one, ast.Constant)}
    return written, understood


def is_text(node: ast.expr | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def test_ranks_and_agents_understand_whatever_the_other_one_says_and_nothing_else() -> None:
    by_agent, for_agent = kinds(AGENT)
    by_rank, for_rank = kinds(RANK)
    assert len(by_agent) > 8
    assert by_agent == for_rank
    assert by_rank == for_agent


async def test_a_job_that_is_over_ends_whatever_a_rank_waits_for() -> None:
    pipe = StrawPipe()
    worlds = PipeWorlds(pipe)
    waiting = asyncio.ensure_future(worlds.donors())
    await asyncio.sleep(0)
    pipe.take({"kind": "over", "why": "step 3: it failed in every place"})
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
        pipe.take({"kind": "drained"})
    pipe.take({"kind": "withdrawn"})
    await opening
    ways: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "donors": worlds.donors,
        "join": lambda: worlds.join(START, SnapshotShelf(), is_healed=True),
        "next world": lambda: worlds.next_world(MemberReport(generation=0, lineage=START)),
    }
    asking = asyncio.ensure_future(ways[asked]())
    await asyncio.sleep(0)
    if not is_before:
        pipe.take({"kind": "drained"})
    async with asyncio.timeout(60):
        if asked == "join":
            with pytest.raises(PeerLost, match="the job is complete"):
                await asking
        else:
            assert await asking is None
