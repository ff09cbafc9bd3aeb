"""The driver acts on the doorbell's messages."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.channel import Channel
from asyncpar.net.arena.driver import Driver
from asyncpar.net.arena.order_log import Counts
from asyncpar.net.arena.run_queue import RunQueue


def make_driver(*, polls: bool = False) -> Driver:
    segment = SimpleNamespace(words=lambda _offset, count: memoryview(bytearray(8 * count)).cast("Q"))
    arena = SimpleNamespace(rank=0, polls=polls, may_spin=False, has_own_process=True, segments={0: segment})
    return Driver(cast(Arena, arena), asyncio.get_running_loop(), {})


def make_channel(number: int, *ranks: int) -> Any:
    return SimpleNamespace(number=number, ranks=ranks, progress=[[0] for _ in ranks])


async def test_without_polling_progress_is_what_was_received_and_never_falls() -> None:
    driver, channel = make_driver(), make_channel(7, 0, 2, 1)
    driver.open(RunQueue(), cast(Channel, channel))
    driver.receive([(1, 7, 5), (2, 7, 3), (1, 7, 4), (3, 7, 9)])
    assert channel.progress == [[0], [3], [5]]


async def test_what_a_rank_sends_before_this_one_has_opened_the_group_is_kept() -> None:
    driver, channel = make_driver(), make_channel(7, 0, 1, 2)
    counts = Counts(8, (1, 2), [[0], [0]])
    driver.receive([(1, 7, 5), (2, 8, 6), (1, 7, 4), (1, 9, 1)])
    driver.open(RunQueue(), cast(Channel, channel), counts)
    assert channel.progress == [[0], [5], [0]]
    assert counts.progress == [[0], [6]]


@pytest.mark.parametrize("number", [7, 8])
async def test_a_group_receives_progress_of_all_that_it_was_opened_with(number: int) -> None:
    driver, channel, counts = make_driver(), make_channel(7, 0, 1), Counts(8, (1,), [[0]])
    driver.open(RunQueue(), cast(Channel, channel), counts)
    driver.receive([(1, number, 3)])
    assert (channel.progress[1], counts.progress[0]) == (([3], [0]) if number == 7 else ([0], [3]))


async def test_where_memory_is_polled_messages_only_wake() -> None:
    driver, channel = make_driver(polls=True), make_channel(7, 0, 1)
    driver.receive([(1, 7, 3)])
    driver.open(RunQueue(), cast(Channel, channel))
    driver.receive([(1, 7, 4)])
    assert channel.progress == [[0], [0]]
