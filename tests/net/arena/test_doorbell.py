"""Doorbells: messages arrive whole and in order, nobody blocks, and nothing that matters is lost."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator

import pytest

from asyncpar.net.arena.arena import FULL_BATCH, LEAVING, Bell, Doorbell, DoorbellMessage

ME = 3


@pytest.fixture
def doorbell() -> Iterator[Doorbell]:
    made = Doorbell()
    yield made
    made.close()


def bell_of(doorbell: Doorbell, *, keeps: bool, on_broken: Callable[[], None] = lambda: None) -> Bell:
    return Bell(os.dup(doorbell.write_end), keeps=keeps, on_broken=on_broken)


def shrink(doorbell: Doorbell) -> None:
    """Give the pipe one page."""
    fcntl.fcntl(doorbell.write_end, fcntl.F_SETPIPE_SZ, 4096)


def read_all(doorbell: Doorbell) -> list[DoorbellMessage]:
    messages: list[DoorbellMessage] = []
    while batch := doorbell.read():
        messages += batch
    return messages


async def test_messages_arrive_in_order_all_at_once(doorbell: Doorbell) -> None:
    bell = bell_of(doorbell, keeps=False)
    for word in range(5):
        bell.ring(ME, 2**63, 2**64 - 1 - word)
    assert doorbell.read() == [(ME, 2**63, 2**64 - 1 - word) for word in range(5)]
    assert doorbell.read() == []
    bell.close()


async def test_one_read_empties_a_full_pipe(doorbell: Doorbell) -> None:
    bell = bell_of(doorbell, keeps=False)
    for word in range(10_000):
        bell.ring(ME, 0, word)
    messages = doorbell.read()
    assert len(messages) >= FULL_BATCH
    assert messages == [(ME, 0, word) for word in range(len(messages))]
    assert doorbell.read() == []
    bell.close()


async def test_even_the_smallest_pipe_holds_a_full_batch(doorbell: Doorbell) -> None:
    shrink(doorbell)
    bell = bell_of(doorbell, keeps=False)
    for word in range(FULL_BATCH + 1000):
        bell.ring(ME, 0, word)
    assert len(doorbell.read()) >= FULL_BATCH
    bell.close()


async def test_when_progress_is_in_memory_what_does_not_fit_is_dropped(doorbell: Doorbell) -> None:
    shrink(doorbell)
    bell = bell_of(doorbell, keeps=False)
    for word in range(1000):
        bell.ring(ME, 0, word)
    first = read_all(doorbell)
    bell.ring(ME, 0, 1000)
    assert len(first) < 1000
    assert read_all(doorbell) == [(ME, 0, 1000)]
    bell.close()


async def test_when_progress_is_in_the_messages_none_is_lost_and_order_is_kept(doorbell: Doorbell) -> None:
    shrink(doorbell)
    bell = bell_of(doorbell, keeps=True)
    for word in range(1000):
        bell.ring(ME, 0, word)
    received = read_all(doorbell)
    bell.ring(ME, 0, 1000)
    while len(received) < 1001:
        await asyncio.sleep(0)
        received += read_all(doorbell)
    assert received == [(ME, 0, word) for word in range(1001)]
    bell.close()


async def test_a_farewell_comes_after_as_much_of_what_waits_as_fits_or_finds_the_pipe_full(doorbell: Doorbell) -> None:
    shrink(doorbell)
    bell = bell_of(doorbell, keeps=True)
    for word in range(1000):
        bell.ring(ME, 0, word)
    first = doorbell.read()
    bell.ring_last(ME)
    messages = read_all(doorbell)
    assert len(messages) >= FULL_BATCH
    assert messages == [(ME, 0, len(first) + place) for place in range(len(messages))]


async def test_a_farewell_comes_after_all_that_was_sent(doorbell: Doorbell) -> None:
    bell = bell_of(doorbell, keeps=True)
    bell.ring(ME, 1, 2)
    bell.ring_last(ME)
    assert read_all(doorbell) == [(ME, 1, 2), (ME, LEAVING, 0)]
    bell.ring(ME, 1, 3)
    bell.close()
    assert read_all(doorbell) == []


@pytest.mark.parametrize("keeps", [False, True])
async def test_that_nobody_reads_any_more_is_reported_once(keeps: bool) -> None:
    doorbell = Doorbell()
    reports: list[str] = []
    bell = bell_of(doorbell, keeps=keeps, on_broken=lambda: reports.append("broken"))
    doorbell.close()
    bell.ring(ME, 0, 0)
    bell.ring(ME, 0, 1)
    assert reports == ["broken"]


async def test_that_nobody_reads_any_more_is_reported_of_a_bell_that_waits() -> None:
    doorbell = Doorbell()
    shrink(doorbell)
    broken = asyncio.Event()
    bell = bell_of(doorbell, keeps=True, on_broken=broken.set)
    for word in range(1000):
        bell.ring(ME, 0, word)
    doorbell.close()
    await broken.wait()
    bell.ring(ME, 0, 0)


async def test_a_closed_bell_forgets_what_waits_and_rings_no_more(doorbell: Doorbell) -> None:
    shrink(doorbell)
    bell = bell_of(doorbell, keeps=True)
    for word in range(1000):
        bell.ring(ME, 0, word)
    bell.close()
    bell.close()
    first = len(read_all(doorbell))
    bell.ring(ME, 0, 5)
    await asyncio.sleep(0)
    assert first < 1000
    assert read_all(doorbell) == []


def test_its_ends_are_closed_on_exec(doorbell: Doorbell) -> None:
    assert not os.get_inheritable(doorbell.read_end)
    assert not os.get_inheritable(doorbell.write_end)
