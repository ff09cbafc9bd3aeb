"""``codec="auto"`` on pretended hosts: nothing is lost inside one, and between them only where the link is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.codecs import Identity, Int4
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import choice
from asyncpar.gradsync.prediction import LinkSpeed
from asyncpar.gradsync.schemes import Hosted
from tests.gradsync.worlds import (
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all_failing,
    parallel_world,
)

SLOW = LinkSpeed(latency=1e-6, bandwidth=1e3)
FAST = LinkSpeed(latency=1e-6, bandwidth=1e12)


def pretend(monkeypatch: pytest.MonkeyPatch, link: LinkSpeed) -> list[int]:
    """Let every measured link be ``link``; return a list that grows by the size of each group that measures."""
    measured = []

    async def measure_link(between: Any, **_: Any) -> LinkSpeed:
        measured.append(between.size)
        return link

    monkeypatch.setattr(choice, "measure_link", measure_link)
    return measured


def codecs_of(ranks: Sequence[Rank]) -> set[object]:
    resolved = [rank.synchronizer._layouts._resolved for rank in ranks]  # noqa: SLF001  # codec_table() is empty where nothing was measured; the codec in use is asked instead
    return {None if one is None else one.codec for one in resolved}


async def test_inside_one_host_nothing_is_measured_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend(monkeypatch, SLOW)
    async with parallel_world(3, compression=compressed("auto")) as ranks:
        await draw_and_synchronize(ranks)
        assert codecs_of(ranks) == {Identity()}
        for rank in ranks:
            assert_right(rank)
            assert rank.synchronizer.codec_table() == ""
    assert measured == []


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "c"], ["a", "a", "b"], ["a", "b", "b", "a"]])
async def test_over_a_slow_link_few_bits_travel(monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> None:
    measured = pretend(monkeypatch, SLOW)
    async with parallel_world(len(hosts), hosts=hosts, compression=compressed("auto")) as ranks:
        for step in range(3):  # the second step has new buckets, in the order of the first
            await draw_and_synchronize(ranks, step)
            assert_copies_equal(ranks)
            for rank in ranks:
                assert_right(rank, step=step, tolerance=0.6)
        assert codecs_of(ranks) == {Int4()}
        layered = len(set(hosts)) < len(hosts)
        for rank in ranks:
            layout = rank.synchronizer._layouts.layout  # noqa: SLF001  # whether the layout has layers shows in no statistic
            assert layout is not None
            assert {isinstance(scheme, Hosted) for scheme in layout.schemes} == {layered}
        assert "int4*" in ranks[-1].synchronizer.codec_table()
        assert len({rank.synchronizer.codec_table() for rank in ranks}) == 1
    assert measured == [len(set(hosts))] * len(set(hosts)), "each first rank of a host measures once"


async def test_over_a_fast_link_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FAST)
    async with parallel_world(3, hosts=["a", "a", "b"], compression=compressed("auto")) as ranks:
        await draw_and_synchronize(ranks)
        assert codecs_of(ranks) == {Identity()}
        assert "none*" in ranks[0].synchronizer.codec_table()
        for rank in ranks:
            assert_right(rank)


async def test_stages_and_slices_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SLOW)
    hosts = ["a"] * 4 + ["b"] * 4
    async with parallel_world(2, 2, 2, hosts=hosts, compression=compressed("auto")) as ranks:
        await draw_and_synchronize(ranks)
        assert_copies_equal(ranks)
        assert codecs_of(ranks) == {Int4()}


async def test_a_rank_that_cannot_measure_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SLOW)

    def fail(*_: Any, **__: Any) -> None:
        raise UsageError("there is no clock")

    monkeypatch.setattr(choice, "measure_codec", fail)
    async with parallel_world(3, hosts=["a", "a", "b"], compression=compressed("auto")) as ranks:
        errors = await on_all_failing(ranks, lambda rank: rank.synchronize())
    assert "there is no clock" in str(errors[0])
    assert all(isinstance(error, AsyncparError) for error in errors), errors


async def test_the_real_link_is_measured_once_and_anew_after_a_change() -> None:
    async with parallel_world(2, hosts=["a", "b"], compression=compressed("auto")) as ranks:
        await draw_and_synchronize(ranks)
        first = ranks[0].synchronizer.codec_table()
        await draw_and_synchronize(ranks)
        assert ranks[0].synchronizer.codec_table() == first != ""
        for rank in ranks:
            rank.synchronizer.update_compression_config(compressed("int8"))
        await draw_and_synchronize(ranks)
        assert ranks[0].synchronizer.codec_table() == ""
        for rank in ranks:
            rank.synchronizer.update_compression_config(compressed("auto"))
        await draw_and_synchronize(ranks)
        assert ranks[0].synchronizer.codec_table() == ranks[1].synchronizer.codec_table() != ""


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b"]])
async def test_a_run_that_is_resumed_goes_on_with_the_choice_whatever_the_link_is_like_now(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str]
) -> None:
    pretend(monkeypatch, SLOW)
    async with parallel_world(len(hosts), hosts=hosts, compression=compressed("auto")) as ranks:
        for step in range(2):
            await draw_and_synchronize(ranks, step)
        chosen = codecs_of(ranks)
        kept = [(rank.synchronizer.state(), rank.synchronizer.steps) for rank in ranks]
        await draw_and_synchronize(ranks, 2)
        expected = [rank.model.gradients() for rank in ranks]
    measured = pretend(monkeypatch, FAST)
    async with parallel_world(len(hosts), hosts=hosts, compression=compressed("auto")) as ranks:
        for rank, (state, steps) in zip(ranks, kept, strict=True):
            rank.synchronizer.restore(state, steps=steps)
            again = rank.synchronizer.state()  # before a step, too, nothing is lost
            assert {key: value.tobytes() for key, value in again.items()} == {
                key: value.tobytes() for key, value in state.items()
            }
        await draw_and_synchronize(ranks, 2)
        assert codecs_of(ranks) == chosen != {Identity()}
        for rank, gradients in zip(ranks, expected, strict=True):
            for name, gradient in rank.model.gradients().items():
                np.testing.assert_array_equal(gradient, gradients[name])
    assert measured == []


async def test_a_choice_for_several_hosts_is_none_inside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SLOW)
    async with parallel_world(2, hosts=["a", "b"], compression=compressed("auto")) as ranks:
        await draw_and_synchronize(ranks)
        kept = [rank.synchronizer.state() for rank in ranks]
    async with parallel_world(2, compression=compressed("auto")) as ranks:
        for rank, state in zip(ranks, kept, strict=True):
            rank.synchronizer.restore(state)
        await draw_and_synchronize(ranks)
        assert codecs_of(ranks) == {Identity()}


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "c"], ["a", "a", "b", "c"]])
async def test_a_group_that_was_calibrated_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str]
) -> None:
    measured = pretend(monkeypatch, SLOW)
    async with parallel_world(len(hosts), hosts=hosts, compression=compressed("auto")) as ranks:
        async with asyncio.timeout(30.0):
            await asyncio.gather(*(rank.node.world.calibrate() for rank in ranks))
        await draw_and_synchronize(ranks)
        assert codecs_of(ranks) == {Identity()}, "lanes of one process are quick"
        assert len({rank.synchronizer.codec_table() for rank in ranks}) == 1
    assert measured == []


async def test_a_group_of_more_hosts_than_calibration_measures_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend(monkeypatch, SLOW)
    monkeypatch.setattr(choice, "MOST_HOSTS", 1)
    async with parallel_world(3, hosts=["a", "b", "c"], compression=compressed("auto")) as ranks:
        async with asyncio.timeout(30.0):
            await asyncio.gather(*(rank.node.world.calibrate() for rank in ranks))
        await draw_and_synchronize(ranks)
    assert measured == [3, 3, 3]
