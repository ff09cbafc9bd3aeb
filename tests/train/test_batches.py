"""Batches depend on the seed and the step, never on the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.train import Batches, split_rows

CORPUS = np.arange(200, dtype=np.uint8)


def make(seed: int = 3, rows: int = 8, length: int = 16) -> Batches:
    return Batches(CORPUS, rows=rows, length=length, seed=seed)


def test_windows_are_pieces_of_the_text() -> None:
    windows = make().windows(0)
    assert windows.shape == (8, 17)
    np.testing.assert_array_equal(np.diff(windows, axis=1), 1)


def test_a_step_gives_the_same_batch_again_and_another_step_another() -> None:
    np.testing.assert_array_equal(make().windows(5), make().windows(5))
    assert not np.array_equal(make().windows(5), make().windows(6))
    assert not np.array_equal(make().windows(5), make(seed=4).windows(5))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shares_of_all_ranks_make_the_whole_batch(size: int) -> None:
    shares = [make().windows(2, split_rows(8, rank=rank, size=size)) for rank in range(size)]
    np.testing.assert_array_equal(np.concatenate(shares), make().windows(2))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_more_ranks_than_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="batch: expected at least one row for each of 9 ranks, got 8"):
        split_rows(8, rank=0, size=9)


def test_every_window_of_the_text_can_be_drawn() -> None:
    batches = Batches(CORPUS[:18], rows=64, length=16, seed=0)
    assert set(batches.windows(0)[:, 0].tolist()) == {0, 1}


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(UsageError, match="expected at least 17 bytes for windows of 16, got 16"):
        Batches(CORPUS[:16], rows=1, length=16, seed=0)


@pytest.mark.parametrize("setting", [{"rows": 0}, {"length": 0}])
def test_sizes_of_zero_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected 1 or more"):
        make(**setting)
