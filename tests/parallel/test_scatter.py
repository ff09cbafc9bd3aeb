"""Rows and replicas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.errors import UsageError
from asyncpar.parallel.scatter import chunk_rows, count_rows


@given(rows=st.integers(1, 200), parts=st.integers(1, 20))
def test_chunks_are_all_rows_in_order_and_only_the_last_may_be_shorter(rows: int, parts: int) -> None:
    chunks = chunk_rows(rows, parts)
    assert len(chunks) <= parts
    assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert set(sizes[:-1]) <= {-(-rows // parts)}
    assert 1 <= sizes[-1] <= -(-rows // parts)


def test_seven_rows_over_three_parts() -> None:
    assert chunk_rows(7, 3) == (slice(0, 3), slice(3, 6), slice(6, 7))


def test_no_rows_and_no_parts_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one row"):
        chunk_rows(0, 2)
    with pytest.raises(UsageError, match="parts"):
        chunk_rows(2, 0)


@pytest.mark.parametrize("x", [np.zeros(()), np.zeros((0, 3)), [1, 2]], ids=["scalar", "empty", "list"])
def test_what_has_no_rows_is_refused(x: object) -> None:
    with pytest.raises(UsageError, match="input: expected an array of at least one row"):
        count_rows(x, "input")
