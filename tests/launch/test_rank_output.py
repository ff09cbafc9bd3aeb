"""Output of a rank's pipes is passed on, and the pipes are closed."""

from __future__ import annotations

import asyncio
import os

import pytest

from asyncpar.launch.display import Display
from asyncpar.launch.options import StreamChoice, Streams
from asyncpar.launch.rank_output import RankLogs, RankOutput, Relay
from asyncpar.launch.tracebacks import HOLD_SECONDS, REPORTED_HOLD_SECONDS
from asyncpar.launch.wait_board import WaitReport
from asyncpar.testing.loop import run_virtual
from tests.core.config.test_environment import PLACE


class Taken:
    def __init__(self, error: Exception | None = None) -> None:
        self.chunks: list[bytes] = []
        self._error = error

    async def take(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        if self._error is not None:
            raise self._error


async def is_closed(descriptor: int) -> bool:
    await asyncio.sleep(0)  # a transport closes its pipe in the next round of the loop
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


async def test_all_that_comes_is_taken_then_the_end_once_and_the_pipe_is_closed() -> None:
    read_end, write_end = os.pipe()
    taken = Taken()
    os.write(write_end, b"hello")
    os.close(write_end)
    await Relay(read_end, taken.take).run()
    assert taken.chunks == [b"hello", b""]
    assert await is_closed(read_end)


async def test_a_taker_that_fails_ends_it_and_the_pipe_is_closed() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"hello")
    with pytest.raises(RuntimeError, match="no room"):
        await Relay(read_end, Taken(RuntimeError("no room")).take).run()
    assert await is_closed(read_end)
    os.close(write_end)


async def test_a_pipe_that_stays_open_ends_when_it_is_closed_here() -> None:
    read_end, write_end = os.pipe()
    taken = Taken()
    relay = Relay(read_end, taken.take)
    running = asyncio.ensure_future(relay.run())
    while not relay.is_starved:  # noqa: ASYNC110  # no event tells of it
        await asyncio.sleep(0)
    relay.close()
    await running
    assert taken.chunks == [b""]
    assert await is_closed(read_end)
    os.close(write_end)


async def test_one_that_is_closed_before_it_runs_reads_nothing() -> None:
    read_end, write_end = os.pipe()
    taken = Taken()
    relay = Relay(read_end, taken.take)
    relay.close()
    relay.close()
    assert await is_closed(read_end)
    await relay.run()
    assert taken.chunks == []
    os.close(write_end)


class Shown(Display):
    """Keeps what is shown of ranks."""

    def __init__(self) -> None:
        super().__init__(every=1.0)
        self.text = b""

    async def lines(self, text: bytes, *, is_output: bool = False) -> None:
        assert is_output
        self.text += text

    async def raw(self, chunk: bytes) -> None:
        self.text += chunk

    async def show(self, prefix: str, record: object) -> None:
        raise AssertionError("no rank has reported progress")


FAILURE = b'{"kind": "failure", "type": "ValueError", "message": "no more data", "traceback": "..."}\n'
PREFIX = f"[{PLACE.host}:{PLACE.rank}] "
TRACEBACK = b"Traceback (most recent call last):\nValueError: no more data\n"


def test_a_rank_that_blocks_and_answers_no_more_is_where_its_memory_says() -> None:
    async def look() -> None:
        pipes = [os.pipe() for _ in range(3)]
        reports: list[WaitReport] = []
        output = RankOutput(
            PLACE,
            [read_end for read_end, _ in pipes],
            {},
            display=Shown(),
            logs=RankLogs(None, redirects=StreamChoice(), tee=StreamChoice()),
            on_broken=lambda _: None,
            on_phase=lambda: None,
            on_report=reports.append,
        )
        output.relocate("train.py:1")
        assert reports == [], "it may only be slow to answer"
        await output._take_reports(b'{"kind": "blocked", "where": "train.py:2"}\n')  # noqa: SLF001
        for place in ("train.py:3", "train.py:3"):
            output.relocate(place)
        assert [each.blocked for each in reports] == ["train.py:2", "train.py:3"]
        for descriptors in pipes:
            for descriptor in descriptors:
                os.close(descriptor)

    run_virtual(look())


@pytest.mark.parametrize(("reported", "seconds"), [(FAILURE, REPORTED_HOLD_SECONDS), (b"", HOLD_SECONDS)])
def test_a_traceback_that_a_rank_has_reported_waits_for_its_end_on_a_busy_host(reported: bytes, seconds: float) -> None:
    async def look() -> None:
        pipes = [os.pipe() for _ in range(3)]
        shown = Shown()
        output = RankOutput(
            PLACE,
            [read_end for read_end, _ in pipes],
            {},
            display=shown,
            logs=RankLogs(None, redirects=StreamChoice(), tee=StreamChoice()),
            on_broken=lambda _: None,
            on_phase=lambda: None,
            holds_tracebacks=True,
        )
        await output._take_reports(reported)  # noqa: SLF001 - what its pipes bring, without the pipes
        await output._take(Streams.STDERR, b"at work\n" + TRACEBACK)  # noqa: SLF001
        assert shown.text == f"{PREFIX}at work\n".encode()
        await asyncio.sleep(seconds - 0.1)
        assert shown.text == f"{PREFIX}at work\n".encode()
        await asyncio.sleep(0.2)
        assert shown.text.count(PREFIX.encode()) == 3, "it goes on, and its traceback is shown"
        await output.end(has_failed=True)
        for descriptors in pipes:
            for descriptor in descriptors:
                os.close(descriptor)

    run_virtual(look())
