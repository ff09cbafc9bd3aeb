"""Codecs on whole worlds: copies stay equal, residuals belong to names, and settings may change on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.nn import Array
from tests.gradsync.worlds import (
    CODECS,
    Rank,
    assert_copies_equal,
    assert_right,
    compressed,
    draw_and_synchronize,
    on_all,
    on_all_failing,
    parallel_world,
    synchronize_all,
)
from tests.products import in_turn
from tests.soak import chosen

LOSSY = [codec for codec in CODECS if codec != "none"]
SIZES = chosen([(1, 2, 2), (2, 1, 2), (2, 2, 1)], soak=[(2, 2, 2), (3, 1, 3)])
OTHER_BUCKETS = GradientBucketingConfig(bucket_size_mb=0.0002, max_buckets=64)


@pytest.mark.parametrize(("codec", "dp", "tp", "pp"), [(codec, *sizes) for codec, sizes in in_turn(LOSSY, SIZES)])
async def test_copies_and_both_ends_of_ties_stay_equal_over_steps(codec: str, dp: int, tp: int, pp: int) -> None:
    async with parallel_world(dp, tp, pp, compression=compressed(codec)) as ranks:
        for step in range(chosen(2, soak=4)):
            await draw_and_synchronize(ranks, step)
            assert_copies_equal(ranks)


@pytest.mark.parametrize("codec", LOSSY)
async def test_with_feedback_the_mean_is_right_over_time(codec: str) -> None:
    """The same gradients again and again: what is lost stays bounded, so its share vanishes."""
    # signs are slow where one value is much larger than others, and each random place has to be drawn
    least = {"sign": 100, "randomk:0.25": 30, "topk:0.1": 20, "topk:0.1+int8": 20, "powersgd:2": 20}.get(codec, 10)
    steps = chosen(least, soak=150 if codec == "sign" else 60)
    async with parallel_world(2, compression=compressed(codec)) as ranks:
        totals: list[dict[str, Array]] = [{} for _ in ranks]
        for _ in range(steps):
            await draw_and_synchronize(ranks)
            for total, rank in zip(totals, ranks, strict=True):
                for name, gradient in rank.model.gradients().items():
                    total[name] = total.get(name, 0.0) + gradient / steps
        for total, rank in zip(totals, ranks, strict=True):
            for name, expected in rank.expected().items():
                np.testing.assert_allclose(total[name], expected, atol=0.5, err_msg=name)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1+int8", "sign"])
async def test_residuals_survive_other_buckets_and_a_restart(codec: str) -> None:
    """Two steps in one run, or one in each of two with other buckets: the same gradients, but for rounding."""
    kept: dict[int, dict[str, Array]] = {}
    async with parallel_world(2, 1, 2, compression=compressed(codec)) as ranks:
        await draw_and_synchronize(ranks)
        for rank in ranks:
            kept[rank.node.rank] = rank.synchronizer.residuals()
            assert set(kept[rank.node.rank]) == {parameter.name for parameter in rank.model.parameters()}
    async with parallel_world(2, 1, 2, compression=compressed(codec), bucketing=OTHER_BUCKETS) as ranks:
        for rank in ranks:
            rank.synchronizer.restore_residuals(kept[rank.node.rank])
            for name, residual in rank.synchronizer.residuals().items():
                np.testing.assert_array_equal(residual, kept[rank.node.rank][name])
        for rank in ranks:
            rank.model.fill(lambda parameter: 0.0)
        await synchronize_all(ranks)
        assert_copies_equal(ranks)
        assert any(gradient.any() for rank in ranks for gradient in rank.model.gradients().values())


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2"])
async def test_nothing_is_lost_between_what_is_sent_and_what_is_kept(codec: str) -> None:
    """Over replicas, the mean that came plus the mean of the residuals is the mean of the gradients."""
    async with parallel_world(3, compression=compressed(codec)) as ranks:
        sent: dict[str, Array] = {}
        wanted: dict[str, Array] = {}
        for step in range(5):
            await draw_and_synchronize(ranks, step)
            for name, gradient in ranks[0].model.gradients().items():
                sent[name] = sent.get(name, 0.0) + gradient
                wanted[name] = wanted.get(name, 0.0) + ranks[0].expected(step)[name]
        residuals = [rank.synchronizer.residuals() for rank in ranks]
        for name in sent:
            left = np.mean([each[name] for each in residuals], axis=0).reshape(sent[name].shape)
            np.testing.assert_allclose(sent[name] + left, wanted[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("before", "after"),
    in_turn(["int8", "powersgd:2", "bf16", "randomk:0.25"], ["none", "topk:0.1+int8", "powersgd:1", "int4"]),
)
async def test_the_codec_may_change_in_mid_run(before: str, after: str) -> None:
    async with parallel_world(2, 2, 2, compression=compressed(before)) as ranks:
        await draw_and_synchronize(ranks, 0)
        for rank in ranks:
            rank.synchronizer.update_compression_config(compressed(after, error_feedback=False))
        await draw_and_synchronize(ranks, 1)
        assert_copies_equal(ranks)
        for rank in ranks:
            if after == "none":
                assert_right(rank, step=1)
            assert rank.synchronizer.residuals() == {}


async def test_residuals_are_kept_when_the_codec_changes() -> None:
    async with parallel_world(2, compression=compressed("int8")) as ranks:
        await draw_and_synchronize(ranks)

        async def change(rank: Rank) -> None:
            before = rank.synchronizer.residuals()
            rank.synchronizer.update_compression_config(compressed("int4"))
            after = rank.synchronizer.residuals()
            assert before.keys() == after.keys()
            for name in before:
                np.testing.assert_array_equal(before[name], after[name])
            rank.model.fill(lambda parameter: 0.0)
            await rank.synchronize()

        await on_all(ranks, change)
        assert any(gradient.any() for gradient in ranks[0].model.gradients().values())


async def test_a_codec_that_only_one_rank_changes_to_is_an_error_on_all() -> None:
    async with parallel_world(3, compression=compressed("int8")) as ranks:
        await draw_and_synchronize(ranks)
        ranks[1].synchronizer.update_compression_config(compressed("int4"))
        for error in await on_all_failing(ranks, lambda rank: rank.synchronize()):
            assert isinstance(error, UsageError)
            assert "rank 1 has codec int4" in str(error)


@pytest.mark.parametrize("codec", ["int8", "bf16", "topk:0.1", "powersgd:2"])
async def test_a_codec_between_hosts_leaves_all_ranks_with_the_same_bits(codec: str) -> None:
    parallelism = {"comm_strategy": CommunicationStrategy.HIERARCHICAL_ALL_REDUCE}
    hosts = ["a", "a", "a", "b", "b"]
    async with parallel_world(5, parallelism=parallelism, hosts=hosts, compression=compressed(codec)) as ranks:
        for step in range(3):
            await draw_and_synchronize(ranks, step)
            assert_copies_equal(ranks)


@pytest.mark.parametrize(
    ("codec", "tolerance", "hosts"),
    [
        (*codec, hosts)
        for codec, hosts in in_turn(
            [("none", 1e-6), ("bf16", 0.05), ("int8", 0.05), ("topk:1", 1e-6)], ["aabb", "aaab", "aabbc"]
        )
    ],
)
async def test_a_codec_between_hosts_gives_the_mean_over_ranks(codec: str, tolerance: float, hosts: str) -> None:
    parallelism = {"comm_strategy": CommunicationStrategy.HIERARCHICAL_ALL_REDUCE}
    async with parallel_world(
        len(hosts), parallelism=parallelism, hosts=list(hosts), compression=compressed(codec)
    ) as ranks:
        await draw_and_synchronize(ranks)
        for rank in ranks:
            assert_right(rank, tolerance=tolerance)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"quantization_bits": 0}, "quantization_bits: expected one of 1, 4, 8, 16, 32, got 0"),
        ({"quantization_bits": 7}, "quantization_bits: expected one of"),
        ({"compression_ratio": 1.5}, r"compression_ratio: expected 0 < ratio <= 1, got 1\.5"),
        ({"compression_ratio": 0.0}, "compression_ratio: expected"),
        ({"compression_ratio": -0.1}, "compression_ratio: expected"),
        ({"compression_ratio": float("nan")}, "compression_ratio: expected"),
        ({"codec": "int9"}, "codec: expected one of .* got 'int9'"),
        ({"codec": "topk:2"}, "codec: expected topk:RATIO"),
        ({"codec": "topk:0.1+"}, "codec"),
        ({"codec": "powersgd:0"}, "powersgd|rank"),
        ({"codec": ""}, "codec"),
        ({"codec": 8}, "codec"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GradientCompressionConfig(enable_compression=True, **setting)


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_bucket_sizes_out_of_range_are_refused(size: float) -> None:
    with pytest.raises(UsageError, match="bucket_size_mb: expected a positive number of MiB"):
        GradientBucketingConfig(bucket_size_mb=size)


@pytest.mark.parametrize(
    ("ratio", "bits", "name"),
    [
        (1.0, 32, "none"),
        (1.0, 16, "bf16"),
        (1.0, 8, "int8"),
        (1.0, 4, "int4"),
        (1.0, 1, "sign"),
        (0.01, 32, "topk:0.01"),
        (0.01, 8, "topk:0.01+int8"),
    ],
)
def test_ratio_and_bits_name_a_codec(ratio: float, bits: int, name: str) -> None:
    config = GradientCompressionConfig(enable_compression=True, compression_ratio=ratio, quantization_bits=bits)
    assert config.codec_name == config.make_codec().name == name


HIERARCHICAL = {"comm_strategy": CommunicationStrategy.HIERARCHICAL_ALL_REDUCE}


PLACES: dict[str, tuple[int, list[str] | None, dict[str, Any] | None]] = {
    "pair": (2, None, None),
    "shards": (3, None, None),
    "two hosts": (4, ["a", "a", "b", "b"], HIERARCHICAL),
    "three hosts": (3, ["a", "b", "c"], HIERARCHICAL),
}


@pytest.mark.parametrize(
    ("place", "codec"),
    in_turn(PLACES, ["randomk:0.5", "randomk:0.5+int8", "randomk:0.5+fp16", "randomk:0.7+randomk:0.7"]),
)
async def test_without_feedback_random_places_come_to_the_mean_over_time(place: str, codec: str) -> None:
    """Each value is sent in half of the steps, and twice as large then."""
    replicas, hosts, parallelism = PLACES[place]
    steps, compression = chosen(40, soak=150), compressed(codec, error_feedback=False)
    async with parallel_world(replicas, compression=compression, hosts=hosts, parallelism=parallelism) as ranks:
        total: dict[str, Array] = {}
        for _ in range(steps):
            await draw_and_synchronize(ranks)
            assert_copies_equal(ranks)
            for name, gradient in ranks[0].model.gradients().items():
                total[name] = total.get(name, 0.0) + gradient / steps
        expected = ranks[0].expected()
        found, wanted = (np.concatenate([one[name].reshape(-1) for name in expected]) for one in (total, expected))
    assert np.linalg.norm(found - wanted) < 0.2 * np.linalg.norm(wanted)
    assert 0.9 < np.vdot(found, wanted) / np.vdot(wanted, wanted) < 1.1
