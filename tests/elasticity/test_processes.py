"""Ranks that are processes: killed, stopped, drained and added, and no bit is different."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from asyncpar.elasticity.pipe_socket import SocketPipe
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.membership.lineage import Lineage
from asyncpar.net.membership.pipe_messages import decode_lineage, encode_lineage
from asyncpar.net.membership.world_director import DirectorCommand
from asyncpar.testing.elastic_processes import ProcessWorlds
from tests.elasticity.rank import HURRY, encode
from tests.elasticity.training import train

UNTIL = 300
PATIENCE = 40.0


class Job:
    """Starts ranks, and knows how far they are."""

    def __init__(self, worlds: ProcessWorlds, folder: Path) -> None:
        self._worlds = worlds
        self._folder = folder

    async def start(self, *names: str) -> None:
        for name in names:
            path = str(self._folder / name)
            await self._worlds.start(name, ["-m", "tests.elasticity.rank", name, str(UNTIL), path])

    def hurry(self) -> None:
        (self._folder / HURRY).touch()

    def step(self, name: str) -> int:
        path = self._folder / f"{name}.progress"
        text = path.read_text() if path.exists() else ""
        return int(text or -1)

    async def reaches(self, name: str, step: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.step(name) < step:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def asks(self, name: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while name not in self._worlds.spares:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def is_in_world(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while set(self._worlds.present) != set(names):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def result(self, name: str) -> str:
        async with asyncio.timeout(PATIENCE):
            assert await self._worlds.wait(name) == 0
        return (self._folder / name).read_text()


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_spares_wait_and_take_the_places_of_a_killed_and_of_a_stopped_rank(tmp_path: Path) -> None:
    wanted = encode(await train(None, until=UNTIL, pause=0.0))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    async with ProcessWorlds(2, environment=environment, spares=True) as worlds:
        job = Job(worlds, tmp_path)
        await job.start("m0", "m1")
        await job.reaches("m0", 2)
        for spare in ("m2", "m3", "m4"):
            await job.start(spare)
            await job.asks(spare)
        assert worlds.present == ["m0", "m1"]
        worlds.signal("m1", signal.SIGKILL)
        await job.is_in_world("m0", "m2")
        await job.reaches("m0", job.step("m0") + 3)
        worlds.signal("m0", signal.SIGSTOP)
        await job.is_in_world("m2", "m3")
        worlds.signal("m0", signal.SIGCONT)
        job.hurry()
        assert (await job.result("m2"), await job.result("m3")) == (wanted, wanted)
        assert json.loads(await job.result("m4"))[-1] is True


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_a_drained_rank_waits_for_the_spare_that_takes_its_place_unless_that_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = encode(await train(None, until=UNTIL, pause=0.0))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    async with ProcessWorlds(2, environment=environment, spares=True) as worlds:
        job = Job(worlds, tmp_path)
        await job.start("m0", "m1")
        await job.reaches("m0", 2)
        await job.start("m2")
        await job.asks("m2")
        arrived = worlds.director.arrive
        present: list[tuple[str, ...]] = []

        def arrive(name: str, *rest: Any) -> list[DirectorCommand]:
            present.append(worlds.director.members)
            return arrived(name, *rest)

        monkeypatch.setattr(worlds.director, "arrive", arrive)
        worlds.drain("m1")
        await job.is_in_world("m0", "m2")
        assert present[0] == ("m0", "m1")  # it may fall behind quick steps, and come again
        await job.start("m3")
        await job.asks("m3")
        worlds.drain("m0")
        worlds.signal("m3", signal.SIGKILL)
        await job.is_in_world("m2")
        job.hurry()
        assert await job.result("m2") == wanted


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_kill_stop_drain_and_join_of_real_processes_change_no_bit(tmp_path: Path) -> None:
    wanted = encode(await train(None, until=UNTIL, pause=0.0))
    async with ProcessWorlds(4, environment={**os.environ, "PYTHONPATH": str(Path.cwd())}) as worlds:
        job = Job(worlds, tmp_path)
        await job.start("m0", "m1", "m2", "m3")
        await job.reaches("m0", 5)
        worlds.signal("m1", signal.SIGKILL)
        await job.start("m4")
        await job.reaches("m0", 12)
        worlds.signal("m2", signal.SIGSTOP)
        await job.reaches("m0", 16)
        assert sorted(worlds.present) in (["m0", "m3"], ["m0", "m3", "m4"])
        worlds.signal("m2", signal.SIGCONT)
        await job.reaches("m4", 20)
        job.hurry()
        worlds.drain("m3")
        assert json.loads(await job.result("m3"))[-1] is True
        assert await job.result("m0") == wanted
        assert await job.result("m4") == wanted
        await worlds.wait("m2")
    assert worlds.exits["m1"] == -signal.SIGKILL
    assert worlds.exits["m2"] == 1  # it woke, and was told that the others have gone on
    causes = " ".join(formed.change.why for _, formed in worlds.worlds)
    for cause in ("m1 was killed by SIGKILL", "m2 is stopped"):
        assert cause in causes
    assert [name for _, formed in worlds.worlds[1:] for name in formed.change.joined] == ["m4"]


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_a_rank_that_gets_sigterm_ends_its_step_and_leaves(tmp_path: Path) -> None:
    wanted = encode(await train(None, until=UNTIL, pause=0.0))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    async with ProcessWorlds(3, environment=environment) as worlds:
        job = Job(worlds, tmp_path)
        await job.start("m0", "m1", "m2")
        for name in ("m0", "m1", "m2"):
            await job.reaches(name, 2)
        worlds.signal("m1", signal.SIGTERM)
        assert json.loads(await job.result("m1"))[-1] is True, "it was drained"
        await job.is_in_world("m0", "m2")
        job.hurry()
        results = [await job.result(name) for name in ("m0", "m2")]
        assert {result.rsplit(",", 1)[0] for result in results} == {wanted.rsplit(",", 1)[0]}
        changes = {name: formed.change for _, formed in worlds.worlds for name in formed.change.left}
        assert not changes["m1"].is_by_loss


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_the_only_rank_ends_at_once_when_it_gets_sigterm(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    async with ProcessWorlds(2, environment=environment) as worlds:
        job = Job(worlds, tmp_path)
        await job.start("m0", "m1")
        await job.reaches("m0", 2)
        for name in ("m0", "m1"):
            worlds.signal(name, signal.SIGTERM)
        codes = [await asyncio.wait_for(worlds.wait(name), PATIENCE) for name in ("m0", "m1")]
        assert sorted(codes) == [0, 128 + signal.SIGTERM], "one leaves, and nobody would go on without the other"


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_when_all_but_a_newcomer_are_killed_it_ends_with_an_error(tmp_path: Path) -> None:
    async with ProcessWorlds(1, environment={**os.environ, "PYTHONPATH": str(Path.cwd())}) as worlds:
        job = Job(worlds, tmp_path)
        await job.start("m0")
        await job.reaches("m0", 2)
        worlds.signal("m0", signal.SIGKILL)
        await worlds.wait("m0")
        await job.start("m1")
        async with asyncio.timeout(PATIENCE):
            assert await worlds.wait("m1") == 1


WAITS = """
import json, os, signal, socket, sys

pipe = socket.socket(fileno=int(os.environ["ASYNCPAR_ELASTIC_FD"])).makefile("rw")


def say(**message):
    print(json.dumps(message), file=pipe, flush=True)


def hear(kind):
    for line in pipe:
        if (message := json.loads(line))["kind"] == kind:
            return message


say(kind="donors")
if sys.argv[1] != "a place":
    hear("donors")
    say(kind="join", lineage=[0, ""], address="nowhere")
if sys.argv[1] == "the next world":
    world = hear("world")
    say(kind="report", generation=world["generation"], lineage=[0, ""], prepared=None, suspects=[])
os.kill(os.getpid(), signal.SIGSTOP)
print(hear("evicted")["why"], file=open(sys.argv[2], "w"))
"""
"""A member that is stopped while it waits for what is named."""


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("what", "size"), [("a place", 1), ("its first world", 3), ("the next world", 2)])
async def test_a_rank_that_was_stopped_while_it_waited_hears_that_it_is_lost(
    what: str, size: int, tmp_path: Path
) -> None:
    async with ProcessWorlds(size, spares=True) as worlds, asyncio.timeout(PATIENCE):
        names = ["m0", "m1"]
        for name in names:
            await worlds.start(name, ["-c", WAITS, what, str(tmp_path / name)])
        while worlds.lost != names:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for name in names:
            worlds.signal(name, signal.SIGCONT)
        assert [await worlds.wait(name) for name in names] == [0, 0]
        assert [(tmp_path / name).read_text() for name in names] == ["it was stopped\n"] * 2


@pytest.mark.parametrize("number", ["", "x", "-1", "999"])
def test_a_socket_that_is_none_is_named(number: str, tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    with pytest.raises(UsageError, match="ASYNCPAR_ELASTIC_FD"):
        SocketPipe({"ASYNCPAR_ELASTIC_FD": number, "ASYNCPAR_SECRET_FILE": str(tmp_path / "secret")})


def test_lineages_travel_as_they_are() -> None:
    lineage = Lineage(7, b"\0\xff")
    assert decode_lineage(json.loads(json.dumps(encode_lineage(lineage)))) == lineage
    assert decode_lineage(encode_lineage(None)) is None
    for damaged in ([1], ["x", ""], [1, "zz"], 3):
        with pytest.raises(ProtocolError, match="lineage"):
            decode_lineage(damaged)
