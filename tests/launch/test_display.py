"""Output for people, without a terminal: into a buffer, or into a pipe (80 columns)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.launch.display import OutputStream, PlainDisplay, TerminalDisplay
from asyncpar.testing import run_virtual

T = TypeVar("T")


class Collected(OutputStream):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    async def write(self, chunk: bytes) -> None:
        self.written += chunk

    async def run(self, function: Callable[[], T]) -> T:
        return function()


def record(step: int, description: str = "train") -> ProgressRecord:
    return ProgressRecord(description=description, completed=float(step), total=10.0)


async def test_progress_is_coalesced_and_the_last_is_always_shown() -> None:
    stdout, stderr = Collected(), Collected()
    display = PlainDisplay(stdout, stderr, every=3600.0)
    running = asyncio.ensure_future(display.run())
    for step in range(1, 9):
        display.progress(0, "[h:0] ", record(step))
        await asyncio.sleep(0)
    await display.finish()
    running.cancel()
    assert stderr.written == b"[h:0] train 1/10 (10%)\n[h:0] train 8/10 (80%)\n"
    assert stdout.written == b""


async def test_the_lowest_rank_is_shown_until_all_begin_anew() -> None:
    stderr = Collected()
    display = PlainDisplay(Collected(), stderr)
    display.progress(2, "[h:2] ", record(1))
    display.progress(1, "[h:1] ", record(2))
    display.progress(2, "[h:2] ", record(3))
    await display.finish()
    display.progress(2, "[h:2] ", record(4))
    await display.finish()
    assert stderr.written == b"[h:1] train 2/10 (20%)\n[h:2] train 4/10 (40%)\n"


@pytest.mark.parametrize(
    ("columns", "line"), [("34", b"[h:0] train 1/10 (10%) loss=0.1234\n"), ("33", b"[h:0] train 1/10 (10%)\n")]
)
async def test_a_plain_line_is_no_longer_than_the_user_asks_for(
    monkeypatch: pytest.MonkeyPatch, columns: str, line: bytes
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stderr = Collected()
    display = PlainDisplay(Collected(), stderr)
    display.progress(0, "[h:0] ", ProgressRecord("train", 1.0, 10.0, {"loss": "0.1234"}))
    await display.finish()
    assert stderr.written == line


async def test_nothing_reported_shows_nothing() -> None:
    stderr = Collected()
    await PlainDisplay(Collected(), stderr).finish()
    assert stderr.written == b""


class Shared(Collected):
    """Two streams that go to one place."""

    def __init__(self, place: list[bytes]) -> None:
        super().__init__()
        self._place = place

    async def write(self, chunk: bytes) -> None:
        self._place.append(chunk)


def shared_display(*, is_shared: bool = True) -> tuple[PlainDisplay, list[bytes]]:
    place: list[bytes] = []
    return PlainDisplay(Shared(place), Shared(place), is_stdout_shared=is_shared), place


def test_a_line_of_the_job_that_comes_in_pieces_stays_one_where_both_streams_go_to_one_place() -> None:
    async def scene(*, is_shared: bool) -> bytes:
        display, place = shared_display(is_shared=is_shared)
        await display.raw(b"a line ")
        other = asyncio.ensure_future(display.lines(b"[h:1] hello\n"))
        await asyncio.sleep(0.01)
        await display.raw(b"in pieces\n")
        await other
        return b"".join(place)

    assert run_virtual(scene(is_shared=True)) == b"a line in pieces\n[h:1] hello\n"
    assert run_virtual(scene(is_shared=False)) == b"a line [h:1] hello\nin pieces\n"


def test_what_does_not_end_its_line_holds_others_up_once_for_a_moment_only() -> None:
    async def scene() -> tuple[bytes, float]:
        display, place = shared_display()
        await display.raw(b"name? ")
        for _ in range(100):
            await display.lines(b"x\n")
        return b"".join(place), asyncio.get_running_loop().time()

    begin = run_virtual(now())
    text, end = run_virtual(scene())
    assert text == b"name? " + b"x\n" * 100
    assert end - begin < 0.3


def test_what_has_ended_without_a_line_end_holds_nothing_up() -> None:
    async def scene() -> float:
        display, _ = shared_display()
        await display.raw(b"the end")
        await display.raw(b"")
        await display.lines(b"x\n")
        return asyncio.get_running_loop().time()

    assert run_virtual(scene()) == run_virtual(now())


async def now() -> float:
    return asyncio.get_running_loop().time()


async def test_the_bar_stays_below_what_is_printed() -> None:
    reader, writer = os.pipe()
    try:
        display = TerminalDisplay(Collected(), Collected(), descriptor=writer, is_stdout_shared=True)
        await display.show("", record(5))
        await display.lines(b"[h:1] hello\n")
        await display.raw(b"half a ")
        await display.raw(b"line\n")
        seen = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
        os.close(writer)
    frames = seen.split(b"\r\x1b[2K")
    assert b"train" in frames[1]
    assert frames[2].startswith(b"[h:1] hello\n")
    assert b"train" in frames[2]
    assert frames[3].startswith(b"half a line\n")
    assert len(frames) == 4


async def test_without_progress_a_terminal_gets_the_plain_lines() -> None:
    reader, writer = os.pipe()
    try:
        stdout = Collected()
        display = TerminalDisplay(stdout, Collected(), descriptor=writer, is_stdout_shared=False)
        await display.lines(b"hello\n")
        await display.raw(b"to the pipe")
        await display.finish()
        assert os.read(reader, 1 << 16) == b"hello\n"
        assert stdout.written == b"to the pipe"
    finally:
        os.close(reader)
        os.close(writer)
