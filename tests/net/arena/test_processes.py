"""Arenas between processes: they meet, see each other die, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncpar.net.arena.limits import core_quota, usable_cores
from tests.shared_files import left_behind, shared_files
from tests.soak import first
from tests.world.processes import Rank, start_program

RANKS = Path(__file__).with_name("ranks.py")
pytestmark = pytest.mark.process


@asynccontextmanager
async def processes(
    size: int, what: str = "obey", *, seconds: float = 10.0, prefixes: dict[int, Sequence[str]] | None = None
) -> AsyncIterator[list[Rank]]:
    """Yield the ranks of an arena as processes; what is left of them is killed at the end."""
    job = secrets.token_hex(4)
    ranks: list[Rank] = []
    try:
        for rank in range(size):
            command = [str(RANKS), str(rank), str(size), str(seconds), job, what]
            process = await start_program(command, os.environ, prefix=(prefixes or {}).get(rank, ()))
            ranks.append(Rank(rank, process))
        yield list(ranks)
    finally:
        for left in ranks:
            if left.process.returncode is None:
                left.process.kill()
            await left.process.communicate()


def command(rank: Rank, line: str) -> None:
    assert rank.process.stdin is not None
    rank.process.stdin.write(line.encode() + b"\n")


def memory_files(pid: int | None = None) -> set[int]:
    """Return the inodes of the segments that a process (None: any) has mapped or open."""
    found: set[int] = set()
    for process in [str(pid)] if pid is not None else filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/maps") as maps:
                found |= {int(line.split()[4]) for line in maps if "memfd:asyncpar-arena" in line}
            for name in os.listdir(f"/proc/{process}/fd"):
                path = f"/proc/{process}/fd/{name}"
                if "memfd:asyncpar-arena" in os.readlink(path):
                    found.add(os.stat(path).st_ino)
        except OSError:
            continue  # it ended while we looked
    return found


async def test_three_processes_meet_and_share_memory() -> None:
    async with processes(3) as ranks:
        for rank in ranks:
            report = await rank.next()
            assert (report["formed"], report["members"]) == (True, [0, 1, 2])
            assert report["may_spin"] is (min(len(usable_cores()), core_quota()) >= 3)
        command(ranks[0], "write 41")
        command(ranks[0], "ring 1")
        assert await ranks[1].next() == {"rang": [[0, 7, 8]], "words": [41, 0, 0]}
        command(ranks[1], "write 42")
        command(ranks[1], "ring 2")
        assert (await ranks[2].next())["words"] == [41, 42, 0]


async def test_a_process_that_closes_has_left_and_its_end_is_no_loss() -> None:
    async with processes(3) as ranks:
        for rank in ranks:
            await rank.next()
        command(ranks[1], "close")
        assert [await ranks[0].next(), await ranks[2].next()] == [{"left": 1}, {"left": 1}]
        ranks[1].kill()
        await ranks[1].process.wait()
        command(ranks[0], "ring 2")
        assert "rang" in await ranks[2].next()


@pytest.mark.parametrize("victim", first(1, [0, 2]))
async def test_a_killed_rank_is_lost_for_all_others(victim: int) -> None:
    async with processes(3) as ranks:
        for rank in ranks:
            await rank.next()
        ranks[victim].kill()
        for rank in ranks:
            if rank.rank != victim:
                assert await rank.next() == {"lost": victim, "cause": "its process ended"}


async def test_the_memory_of_killed_processes_is_gone() -> None:
    before = shared_files()
    async with processes(3) as ranks:
        for rank in ranks:
            await rank.next()
        segments = [memory_files(rank.process.pid) for rank in ranks]
        assert len(segments[0]) == 3
        assert segments[0] == segments[1] == segments[2]
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            await rank.process.wait()
        assert not memory_files() & segments[0]
    assert not left_behind(before)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("lives", first(1, [1, 5, 12]))
async def test_a_rank_killed_while_it_forms_keeps_nobody_waiting(victim: int, lives: int) -> None:
    async with processes(3, "repeat", seconds=1.0) as ranks:
        for _ in range(lives):
            await ranks[victim].next()
        ranks[victim].kill()
        for rank in ranks:
            report: dict[str, object] = {}
            while rank.rank != victim and "ended" not in report:
                report = await rank.next()
        await asyncio.gather(*(rank.process.wait() for rank in ranks))


@pytest.fixture
def apart() -> Sequence[str]:
    """What to write before a command to run it in a network namespace of its own."""
    prefix = ("unshare", "--net")
    try:
        subprocess.run([*prefix, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not allowed here")
    return prefix


async def test_ranks_in_different_network_namespaces_have_none(apart: Sequence[str]) -> None:
    async with processes(2, seconds=2.0, prefixes={1: apart}) as ranks:
        problem = "no arena on host localhost, lanes will do: rank 1 did not come in time"
        assert [await ranks[0].next(), await ranks[0].next()] == [{"log": problem}, {"formed": False}]
        assert await ranks[1].next() == {"formed": False}
