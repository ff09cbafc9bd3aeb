"""Going through a vector in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.codecs import Codec, Int8, Sign
from asyncpar.codecs.codec import PIECE, corrected, inverse, is_finite, largest_magnitudes, plan_pieces, row_buffers
from asyncpar.errors import NonFiniteValue


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 128, 3 * PIECE + 131])
@pytest.mark.parametrize("block", [128, 1024, PIECE])
def test_pieces_cover_each_value_once_in_blocks_of_equal_width(count: int, block: int) -> None:
    values = blocks = 0
    for piece in plan_pieces(count, block):
        rows, width = piece.shape
        assert (piece.values.start, piece.blocks.start) == (values, blocks)
        assert piece.size == rows * width <= PIECE
        assert width == block or (rows == 1 and piece.values.stop == count)
        values, blocks = values + piece.size, blocks + rows
        assert (piece.values.stop, piece.blocks.stop) == (values, blocks)
    assert values == count
    assert blocks == -(-count // block)


@pytest.mark.parametrize("codec", [Int8(), Sign()], ids=lambda codec: codec.name)
def test_numpys_buffers_are_as_before_also_after_an_error(codec: Codec) -> None:
    before = np.getbufsize()
    values = np.ones(5000, np.float32)
    out = np.empty(codec.encoded_bytes(5000), np.uint8)
    codec.encode(values, out)
    codec.decode(out, values)
    assert np.getbufsize() == before
    values[3] = np.nan
    with pytest.raises(NonFiniteValue):
        codec.encode(values, out)
    assert np.getbufsize() == before


def test_buffers_are_as_long_as_a_row_in_between() -> None:
    with row_buffers(1024):
        assert np.getbufsize() == 1024


def test_largest_magnitudes_are_those_of_each_row() -> None:
    x = np.array([[1.0, -3.0, 2.0], [-0.0, 0.0, 0.0], [-1e-45, 0.0, 0.0], [3e38, -3.1e38, 1.0]], np.float32)
    np.testing.assert_array_equal(largest_magnitudes(x, np.empty_like(x)), np.abs(x).max(axis=1))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found(bad: float) -> None:
    x = np.full((4, 3), np.finfo(np.float32).max)
    x[::2] *= -1
    assert is_finite(x.reshape(-1))
    x[2, 1] = bad
    assert not is_finite(x.reshape(-1))
    with pytest.raises(NonFiniteValue):
        largest_magnitudes(x, np.empty_like(x))


def test_nothing_is_copied_where_nothing_changes() -> None:
    values, room = np.ones(5, np.float32), np.empty(3, np.float32)
    assert np.shares_memory(corrected(values, None, None, slice(2, 5), room), values)
    total = corrected(values, values, None, slice(2, 5), room)
    assert np.shares_memory(total, room)
    assert total.tolist() == [2.0, 2.0, 2.0]
    lost = np.zeros(5, np.float32)
    corrected(values, None, lost, slice(2, 5), room)
    assert lost.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_the_inverse_of_no_scale_is_zero() -> None:
    assert inverse(np.array([0.0, 4.0], np.float32)).tolist() == [0.0, 0.25]
