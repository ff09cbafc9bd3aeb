"""PowerSGD keeps the promises of codecs in rounds, and those of its paper."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from asyncpar.codecs import PowerSgd, RoundCodec, Values
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.testing.round_codecs import Ranks, RoundCodecConformance

TAKE_A_STEP = """
import hashlib
import numpy as np
from asyncpar.codecs import PowerSgd
rng = np.random.default_rng(0)
encoder = PowerSgd(4).encoder(((300, 200), (7,)))
values = rng.normal(size=60_007).astype(np.float32)
encoder.start(values)
for index, message in enumerate(encoder.messages):
    message[:] = rng.normal(size=message.size)  # the mean, as all ranks receive it
    encoder.advance(index)
encoder.finish(values)
encoder.commit()
print(hashlib.sha256(values.tobytes() + encoder.state()[0].tobytes()).hexdigest())
"""


class TestPowerSgdOfRankOne(RoundCodecConformance):
    def make(self) -> RoundCodec:
        return PowerSgd(1)


class TestPowerSgdOfRankFour(RoundCodecConformance):
    def make(self) -> RoundCodec:
        return PowerSgd(4, seed=3)


class TestPowerSgdThatCompressesNothing(RoundCodecConformance):
    def make(self) -> RoundCodec:
        return PowerSgd(1000)


def draw(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def of_rank(rank: int, height: int, width: int, seed: int = 0) -> Values:
    return draw(height, rank, seed=seed) @ draw(rank, width, seed=seed + 1)


def missing(got: Values, expected: Values) -> float:
    return float(np.linalg.norm(got.ravel() - expected.ravel()) / np.linalg.norm(expected))


def test_messages_are_factors_and_arrays_that_are_too_small_to_gain() -> None:
    shapes = ((100, 50), (10,), (3, 3), (20, 4, 5), ())
    first, second = PowerSgd(2).encoder(shapes).messages
    assert first.size == 2 * 100 + 10 + 9 + 2 * 20 + 1
    assert second.size == 2 * 50 + 2 * 20


def test_without_matrices_there_is_one_message_and_means_are_exact() -> None:
    ranks = Ranks(PowerSgd(4), ((5,), (2, 2)), count=2)
    assert len(ranks.encoders[0].messages) == 1
    values, residuals = [draw(9, seed=1), draw(9, seed=2)], list(np.zeros((2, 9), np.float32))
    out, _ = ranks.step(values, residuals)
    np.testing.assert_allclose(out, (values[0] + values[1]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(residuals, 0.0)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_mean_of_that_rank_comes_through_at_once(rank: int) -> None:
    one = of_rank(rank, 60, 40)
    shared = [one, 3 * one]
    (out, _) = Ranks(PowerSgd(rank), ((60, 40),), count=2).step([mine.ravel() for mine in shared])
    assert missing(out, np.float32(0.5) * (shared[0] + shared[1])) < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_gradients_may_be_tiny_or_huge(scale: float) -> None:
    matrix = of_rank(2, 60, 40) * np.float32(scale)
    for _ in range(2):
        (out,) = Ranks(PowerSgd(2), ((60, 40),), count=1).step([matrix.ravel()])
        assert missing(out / np.float32(scale), matrix / np.float32(scale)) < 1e-5


def test_warm_starts_find_the_best_subspace() -> None:
    """Steps are a power iteration: they come near the best approximation at that rank, which the SVD tells."""
    left, right = np.linalg.qr(draw(60, 40))[0], np.linalg.qr(draw(40, 40, seed=1))[0]
    matrix: Values = ((left * 0.7 ** np.arange(40)) @ right.T).astype(np.float32)
    best = float(np.linalg.norm(np.linalg.svd(matrix)[1][4:]) / np.linalg.norm(matrix))
    ranks = Ranks(PowerSgd(4), ((60, 40),), count=1)
    errors = [missing(ranks.step([matrix.ravel()])[0], matrix) for _ in range(15)]
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.01 * best


def test_a_direction_that_came_to_nothing_is_drawn_anew() -> None:
    ranks = Ranks(PowerSgd(3), ((60, 40),), count=1)
    ranks.step([of_rank(1, 60, 40).ravel()])
    ranks.step([np.zeros(2400, np.float32)])
    matrix = of_rank(3, 60, 40, seed=5)
    assert missing(ranks.step([matrix.ravel()])[0], matrix) < 1e-5


def test_a_rank_keeps_as_residual_what_the_projection_took_from_its_own_matrix() -> None:
    ranks = Ranks(PowerSgd(2), ((60, 40),), count=2)
    values, residuals = [draw(2400, seed=1), draw(2400, seed=2)], list(np.zeros((2, 2400), np.float32))
    out, _ = ranks.step(values, residuals)
    basis = np.linalg.svd(out.reshape(60, 40).astype(np.float64))[0][:, :2]
    for mine, lost in zip(values, residuals, strict=True):
        matrix = mine.reshape(60, 40)
        np.testing.assert_allclose(lost.reshape(60, 40), matrix - basis @ (basis.T @ matrix), atol=1e-4)


def test_what_ranks_do_not_have_in_common_does_not_pile_up_in_residuals() -> None:
    """Its mean is nothing that is ever sent, but it wears off as the projections turn."""
    ranks, residuals = Ranks(PowerSgd(2), ((30, 20), (7,)), count=2), list(np.zeros((2, 607), np.float32))
    norms = []
    for step in range(400):
        ranks.step([draw(607) + draw(607, seed=2 * step + rank) for rank in (1, 2)], residuals)
        norms.append(np.linalg.norm(residuals))
    assert max(norms[200:]) < 1.2 * max(norms[:200])
    np.testing.assert_array_equal(residuals[0][600:], 0.0)


def test_the_copy_of_values_is_made_with_residuals_only() -> None:
    encoder = PowerSgd(2).encoder(((60, 40),))
    values = draw(2400)
    encoder.start(values)
    values[:] = np.nan  # read until finish
    with pytest.raises(NonFiniteValue, match="expected finite numbers"):
        encoder.advance(0)


def test_means_that_are_not_finite_are_refused() -> None:
    encoder = PowerSgd(2).encoder(((60, 40),))
    encoder.start(draw(2400))
    encoder.messages[0][5] = np.inf
    with pytest.raises(NonFiniteValue, match="mean of message 0: expected finite numbers"):
        encoder.advance(0)


def test_finishing_what_was_not_begun_is_refused() -> None:
    with pytest.raises(UsageError, match="start: expected to be called before"):
        PowerSgd(2).encoder(((60, 40),)).finish(draw(2400))


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_a_rank_is_a_positive_integer(rank: object) -> None:
    with pytest.raises(UsageError, match="rank: expected an integer of 1 or more, got"):
        PowerSgd(rank)  # type: ignore[arg-type]


def test_bases_differ_between_arrays_and_seeds() -> None:
    one, other = PowerSgd(2).encoder(((60, 40), (60, 40))).state()
    (seeded, _) = PowerSgd(2, seed=1).encoder(((60, 40), (60, 40))).state()
    assert one is not None
    assert other is not None
    assert seeded is not None
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, seeded)


@pytest.mark.process
def test_ranks_on_other_processors_come_to_the_same_bits() -> None:
    """The other processor is this one, without whatever numpy and its BLAS would use beyond the least."""
    extensions = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    poor = {"NPY_DISABLE_CPU_FEATURES": " ".join(extensions), "OPENBLAS_CORETYPE": "Nehalem"}
    digests = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", TAKE_A_STEP],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for environment in ({}, poor)
    }
    assert len(digests) == 1
