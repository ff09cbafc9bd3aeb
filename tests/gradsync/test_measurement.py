"""Measurements between hosts, and of codecs, by a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from asyncpar.errors import UsageError
from asyncpar.gradsync.choice import measure, measure_codec, measure_link
from asyncpar.gradsync.prediction import LinkSpeed
from asyncpar.testing.world import local_world


def clock_of(durations: Iterable[float]) -> Callable[[], float]:
    """Return a clock that lets each of ``durations`` pass between two readings, and nothing otherwise."""
    remaining, now, is_running = iter(durations), 0.0, False

    def read() -> float:
        nonlocal now, is_running
        now += next(remaining) if is_running else 0.0
        is_running = not is_running
        return now

    return read


async def test_the_first_trips_do_not_count_and_small_ones_only_at_their_best() -> None:
    small, large = [1.0, 1.0, 1.0, 0.004, 0.001, 0.002], [1.0, 1.0, 1.0, 0.010, 0.011, 0.012]

    async with local_world(2) as nodes:
        links = await asyncio.gather(
            *(measure_link(node.world, key="test", clock=clock_of([*small, *large])) for node in nodes)
        )
    for link in links:
        assert link.latency == pytest.approx(0.001)
        assert link.bandwidth == pytest.approx((1 << 18) / 0.010)


async def test_a_ring_of_three_takes_two_messages_for_a_trip() -> None:
    async with local_world(3) as nodes:
        links: list[LinkSpeed] = await asyncio.gather(
            *(measure_link(node.world, key="test", clock=clock_of([0.002] * 6 + [0.022] * 6)) for node in nodes)
        )
    assert links[0].latency == pytest.approx(0.001)
    assert links[0].bandwidth == pytest.approx((1 << 18) / 0.010)


async def test_all_ranks_go_by_what_rank_0_measured() -> None:
    async with local_world(4, hosts=["a", "b", "b", "a"]) as nodes:
        every = await asyncio.gather(
            *(measure(node.world, key="test", clock=clock_of([1e-3 * (1 + node.rank)] * 60)) for node in nodes)
        )
    assert every[0].ranks == 2
    assert [codec.name for codec in every[0].codecs] == ["none", "bf16", "int8", "int4"]
    assert every == [every[0]] * 4


def test_codecs_are_as_fast_as_at_their_best() -> None:
    speed = measure_codec("int8", clock=clock_of([3.0, 0.5, 2.0, 4.0, 0.25, 1.0]))
    assert speed.value_bytes == pytest.approx(1.004, abs=1e-3)
    assert (speed.encode, speed.decode) == ((1 << 20) / 0.5, (1 << 20) / 0.25)


def test_codecs_in_rounds_are_not_measured() -> None:
    with pytest.raises(UsageError, match="powersgd"):
        measure_codec("powersgd:2", clock=lambda: 0.0)
