"""Cross-entropy over cut logits is that over whole ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Array, softmax_cross_entropy
from asyncpar.nn.tensor import vocab_parallel_cross_entropy
from asyncpar.shards.plan import split_bounds
from tests.nn.tensor.crew import Call, errors_of, run_ranks

VOCABULARY = 11
LOGITS = np.random.default_rng(3).normal(0.0, 2.0, (2, 5, VOCABULARY))
TARGETS = np.array([[0, 10, 4, 5, 6], [1, 1, 7, 9, 3]])
PADDED = np.where(np.arange(5) < [[3], [5]], TARGETS, -100)


def run_cut(
    size: int, logits: Array, targets: Any, *, scale: float = 0.1, ignore_index: int | None = None
) -> tuple[list[float], Array]:
    """Return the loss of each rank, and the whole gradient."""

    def run(group: Any) -> tuple[float, Array]:
        own = logits[..., slice(*group.bounds(VOCABULARY))].copy()
        before = own.copy()
        result = vocab_parallel_cross_entropy(
            own, targets, vocabulary=VOCABULARY, group=group, scale=scale, ignore_index=ignore_index
        )
        np.testing.assert_array_equal(own, before)
        return result

    results = run_ranks(size, run)
    return [loss for loss, _ in results], np.concatenate([gradient for _, gradient in results], axis=-1)


@pytest.mark.parametrize("ignore_index", [None, -100, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 11])
def test_loss_and_gradient_are_those_of_whole_logits(size: int, ignore_index: int | None) -> None:
    targets = PADDED if ignore_index == -100 else TARGETS
    expected, gradient = softmax_cross_entropy(LOGITS, targets, scale=0.1, ignore_index=ignore_index)
    losses, cut = run_cut(size, LOGITS, targets, ignore_index=ignore_index)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(expected, rel=1e-14)
    np.testing.assert_allclose(cut, gradient, rtol=1e-13, atol=1e-16)


def test_single_precision_stays_single_precision() -> None:
    logits = LOGITS.astype(np.float32)
    losses, gradient = run_cut(3, logits, TARGETS)
    assert gradient.dtype == np.float32
    assert losses[0] == pytest.approx(softmax_cross_entropy(logits, TARGETS, scale=0.1)[0], rel=1e-6)


def test_ignored_positions_count_for_nothing() -> None:
    whole, gradient = softmax_cross_entropy(LOGITS, PADDED, scale=1.0, ignore_index=-100)
    first, _ = softmax_cross_entropy(LOGITS[0, :3], TARGETS[0, :3], scale=1.0)
    second, _ = softmax_cross_entropy(LOGITS[1], TARGETS[1], scale=1.0)
    assert whole == pytest.approx(first + second, rel=1e-14)
    assert not gradient[0, 3:].any()


def test_a_batch_of_padding_costs_nothing() -> None:
    losses, gradient = run_cut(2, LOGITS, np.full((2, 5), -100), ignore_index=-100)
    assert losses == [0.0, 0.0]
    assert not gradient.any()


def test_huge_logits_on_one_rank_do_not_overflow_on_another() -> None:
    logits = np.zeros((1, VOCABULARY), np.float32)
    logits[0, 0] = 1e4
    losses, _ = run_cut(3, logits, np.array([10]))
    assert losses[0] == pytest.approx(1e4)


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    losses, _ = run_cut(4, np.zeros((3, VOCABULARY)), np.array([0, 5, 10]))
    assert losses[0] == pytest.approx(3 * math.log(VOCABULARY), rel=1e-14)


def test_three_numbers_a_position_are_exchanged_and_no_logits() -> None:
    def run(group: Any) -> list[Call]:
        own = LOGITS[..., slice(*group.bounds(VOCABULARY))]
        vocab_parallel_cross_entropy(own, TARGETS, vocabulary=VOCABULARY, group=group, scale=1.0)
        calls: list[Call] = group.calls
        return calls

    positions = TARGETS.size
    expected = [Call("all_reduce_max", positions * 8), Call("all_reduce", 2 * positions * 8)]
    assert run_ranks(3, run) == [expected] * 3


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (LOGITS, TARGETS, r"logits: expected [34] of 11 classes on rank [0-2] of 3, got shape \(2, 5, 11\)"),
        (None, TARGETS.T, r"targets: expected shape \(2, 5\)"),
        (None, TARGETS + 8, r"targets: expected 0\.\.10, got 8\.\.18"),
        (None, PADDED, r"targets: expected 0\.\.10, got -100\.\."),
        (None, TARGETS * 1.0, "targets: expected an integer dtype, got float64"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_is_sent(
    logits: Array | None, targets: Any, message: str
) -> None:
    def run(group: Any) -> None:
        own = LOGITS[..., slice(*split_bounds(VOCABULARY, 3)[group.rank])] if logits is None else logits
        vocab_parallel_cross_entropy(own, targets, vocabulary=VOCABULARY, group=group, scale=1.0)

    for error in errors_of(3, run):
        with pytest.raises(UsageError, match=message):
            raise error or AssertionError("nothing was refused")
