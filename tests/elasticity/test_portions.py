"""Sums over portions have the same bits in every world; proved for all counts up to 32 and all world sizes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncpar.elasticity.portions import Node, PartialSums, Portions, children, sum_tree
from asyncpar.elasticity.samples import PortionSampler, SampleLog, portion_rng
from asyncpar.errors import UsageError

MOST = 32
Array = NDArray[np.float32]


def leaves(count: int) -> list[Array]:
    """Return values whose float32 sum depends on the order of the additions."""
    rng = np.random.default_rng(count)
    return [(rng.standard_normal(64) * 10.0 ** rng.integers(-6, 6, 64)).astype(np.float32) for _ in range(count)]


def in_world(values: list[Array], size: int, *, shuffled: random.Random | None = None) -> Array:
    """Return the sum as the ranks of a world of ``size`` come to it."""
    portions = Portions(len(values), size)
    shown: dict[Node, Array] = {}
    for rank in range(size):
        sums, held = PartialSums(portions, rank), dict[Node, Array]()
        mine = list(portions.of(rank))
        if shuffled is not None:
            shuffled.shuffle(mine)
        for portion in mine:
            sums.take(portion)
            held[range(portion, portion + 1)] = values[portion].copy()
            sums.fold(portion, held, lambda left, right: np.add(left, right, out=left))
        assert sums.missing == ()
        assert set(held) == set(sums.partials)
        shown.update(held)
    return sum_tree(portions.root, shown, lambda left, right: np.add(left, right, out=left))


@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_every_world_size_gives_the_bits_of_one_rank(count: int) -> None:
    values = leaves(count)
    alone = in_world(values, 1)
    for size in range(2, count + 3):
        assert in_world(values, size).tobytes() == alone.tobytes(), size
        assert in_world(values, size, shuffled=random.Random(size)).tobytes() == alone.tobytes(), size


def test_the_values_of_these_tests_depend_on_the_order() -> None:
    values = leaves(16)
    in_turn = values[0].copy()
    for value in values[1:]:
        in_turn += value
    assert in_turn.tobytes() != in_world(values, 1).tobytes()


@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_each_portion_is_owned_once_and_shown_in_few_partials(count: int) -> None:
    for size in range(1, count + 3):
        portions = Portions(count, size)
        owned = [portion for rank in range(size) for portion in portions.of(rank)]
        assert owned == list(range(count))
        assert all(portions.owner(portion) == rank for rank in range(size) for portion in portions.of(rank))
        lengths = [len(portions.of(rank)) for rank in range(size)]
        assert max(lengths) - min(lengths) <= 1
        assert portions.rounds <= max(1, 2 * (count - 1).bit_length())
        for rank in range(size):
            assert [p for node in portions.partials(rank) for p in node] == list(portions.of(rank))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_powers_of_two_show_one_partial_each(size: int) -> None:
    assert Portions(16, size).rounds == 1


def test_halves_hold_all_portions_and_the_left_is_a_power_of_two() -> None:
    for count in range(2, MOST + 1):
        left, right = children(range(count))
        assert (left.start, left.stop, right.stop) == (0, right.start, count)
        assert len(left).bit_count() == 1
        assert len(left) >= len(right) >= 1


def test_what_is_not_mine_or_came_before_is_refused() -> None:
    sums = PartialSums(Portions(16, 4), 1)
    sums.take(4)
    for wrong, text in (
        (4, "before"),
        (3, r"4\.\.7"),
        (8, r"4\.\.7"),
        (-1, r"4\.\.7"),
        (True, "number"),
        (4.0, "number"),
    ):
        with pytest.raises(UsageError, match=text):
            sums.take(wrong)  # type: ignore[arg-type]
    assert sums.missing == (5, 6, 7)


def test_a_sum_with_a_hole_names_it() -> None:
    with pytest.raises(UsageError, match="portion 2"):
        sum_tree(range(4), {range(2): 1, range(3, 4): 1}, lambda left, right: left + right)


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1 << 17, 1), (4, 0)])
def test_impossible_portions_are_refused(count: int, size: int) -> None:
    with pytest.raises(UsageError, match=r"portions|size"):
        Portions(count, size)
    with pytest.raises(UsageError, match="rank"):
        Portions(4, 2).of(2)
    with pytest.raises(UsageError, match="portion"):
        Portions(4, 2).owner(4)


def test_random_streams_depend_on_seed_step_and_portion_alone() -> None:
    first = portion_rng(7, 3, 5).standard_normal(4)
    assert first.tobytes() == portion_rng(7, 3, 5).standard_normal(4).tobytes()
    places = [(7, 3, 5), (7, 5, 3), (3, 7, 5), (8, 3, 5), (7, 4, 5), (7, 3, 6)]
    assert len({portion_rng(*place).standard_normal(4).tobytes() for place in places}) == len(places)
    with pytest.raises(UsageError, match="step"):
        portion_rng(7, -1, 5)


def test_each_epoch_holds_each_sample_once_however_it_is_cut() -> None:
    for samples, batch, portions in ((10, 4, 4), (7, 5, 2), (3, 8, 8), (64, 16, 16)):
        sampler = PortionSampler(samples=samples, batch=batch, portions=portions, seed=1)
        steps = samples  # ``batch`` epochs
        drawn = np.concatenate([sampler.indices(step, p) for step in range(steps) for p in range(portions)])
        for epoch in drawn.reshape(batch, samples):
            assert sorted(epoch) == list(range(samples))
        again = PortionSampler(samples=samples, batch=batch, portions=portions, seed=1)
        assert again.indices(steps - 1, portions - 1).tobytes() == sampler.indices(steps - 1, portions - 1).tobytes()


def test_the_log_names_what_is_missing_and_what_came_twice() -> None:
    log = SampleLog(4)
    log.note(0, range(2))
    log.note(0, range(2, 4))
    log.note(1, range(3))
    log.note(1, range(2))
    assert log.faults(1) == []
    assert log.faults(2) == ["step 1: missing [3], more than once [0, 1]"]
