"""Places of pieces in a whole tensor equal those of numpy's own indexing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.checkpoint.spans import CopyPlan, Runs, Spans, first_gap, intersect, reach_of, spans_of, subtract
from asyncpar.core.config.slicing import TensorSlice

SHAPE = (4, 3, 6)
SIZE = math.prod(SHAPE)


@st.composite
def slices(draw: st.DrawFn) -> TensorSlice:
    view = draw(st.sampled_from([SHAPE, (12, 6), (4, 18), (SIZE,), (2, 2, 3, 3, 2), (4, 3, 6, 1)]))
    dim = draw(st.integers(0, len(view) - 1))
    start, stop = sorted([draw(st.integers(0, view[dim])), draw(st.integers(0, view[dim]))])
    local = tuple(stop - start if at == dim else length for at, length in enumerate(view))
    return TensorSlice(global_shape=SHAPE, view_shape=view, dim=dim, start=start, stop=stop, local_shape=local)


@st.composite
def parts(draw: st.DrawFn) -> tuple[TensorSlice, tuple[int, int]]:
    part = draw(slices())
    size = math.prod(part.local_shape)
    ends = sorted([draw(st.integers(0, size)), draw(st.integers(0, size))])
    return part, (ends[0], ends[1])


def positions(part: TensorSlice, flat: tuple[int, int]) -> list[int]:
    """The values of a part, by numpy."""
    everything = np.arange(SIZE).reshape(SHAPE)
    return [int(position) for position in part.cut(everything).reshape(-1)[flat[0] : flat[1]]]


def listed(spans: Spans) -> list[int]:
    return [position for start, stop in zip(spans.starts, spans.stops, strict=True) for position in range(start, stop)]


@given(parts())
def test_spans_are_the_positions_that_numpy_finds(one: tuple[TensorSlice, tuple[int, int]]) -> None:
    spans = spans_of(*one)
    assert listed(spans) == positions(*one)
    assert (spans.starts < spans.stops).all()
    assert spans.size == len(positions(*one))
    if spans.size:
        assert reach_of(*one) == (spans.starts[0], spans.stops[-1])


@given(parts(), parts())
def test_intersection_and_difference_are_those_of_sets(
    left: tuple[TensorSlice, tuple[int, int]], right: tuple[TensorSlice, tuple[int, int]]
) -> None:
    one, other = spans_of(*left), spans_of(*right)
    both, mine = listed(intersect(one, other)), listed(subtract(one, other))
    assert both == sorted(set(positions(*left)) & set(positions(*right)))
    assert mine == sorted(set(positions(*left)) - set(positions(*right)))


@given(parts(), parts(), st.integers(1, 20))
def test_moves_copy_what_both_have_block_by_block(
    left: tuple[TensorSlice, tuple[int, int]], right: tuple[TensorSlice, tuple[int, int]], block: int
) -> None:
    source = np.array(positions(*left), np.int64)
    wanted = positions(*right)
    target = np.full(len(wanted), -1)
    one, other = spans_of(*left), spans_of(*right)
    moves = CopyPlan.between(one, other, intersect(one, other))
    for start in range(0, len(source), block):
        stop = min(start + block, len(source))
        moves.within(start, stop).copy(source[start:stop], target)
    held = set(source.tolist())
    assert target.tolist() == [position if position in held else -1 for position in wanted]


@given(st.lists(parts(), max_size=5))
def test_the_first_gap_is_found(several: list[tuple[TensorSlice, tuple[int, int]]]) -> None:
    held = {position for one in several for position in positions(*one)}
    missing = [position for position in range(SIZE) if position not in held]
    gap = first_gap([spans_of(*one) for one in several], SIZE)
    if not missing:
        assert gap is None
    else:
        end = next((position for position in range(missing[0], SIZE) if position in held), SIZE)
        assert gap == (missing[0], end)


def test_a_scalar_is_one_value_and_an_empty_tensor_none() -> None:
    assert listed(spans_of(TensorSlice.whole(()), (0, 1))) == [0]
    assert listed(spans_of(TensorSlice.whole((0, 3)), (0, 0))) == []
    assert first_gap([], 0) is None
    assert first_gap([], 3) == (0, 3)


def test_short_runs_are_copied_by_index_and_long_ones_one_by_one() -> None:
    for width, length in ((3, 1), (300, 100)):
        whole = np.arange(20 * width).reshape(20, width)
        part = TensorSlice.along((20, width), 1, length, 2 * length)
        spans, mine = spans_of(TensorSlice.whole((20, width)), (0, 20 * width)), spans_of(part, (0, 20 * length))
        target = np.zeros(20 * length, whole.dtype)
        CopyPlan.between(spans, mine, intersect(mine, spans)).copy(whole.reshape(-1), target)
        np.testing.assert_array_equal(target.reshape(20, length), part.cut(whole))


def test_equal_runs_mean_equal_values() -> None:
    whole = Runs.of(TensorSlice.whole((4, 6)))
    assert whole == Runs.of(TensorSlice.along((4, 6), 1, 0, 6)) == Runs.of(TensorSlice.along((4, 6), 0, 0, 4))
    assert whole != Runs.of(TensorSlice.along((4, 6), 1, 0, 5))
    assert Runs.of(TensorSlice.along((4, 6), 1, 2, 2)) == Runs.of(TensorSlice.whole((0,)))
