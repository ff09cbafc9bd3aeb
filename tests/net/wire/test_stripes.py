from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.net.wire.frame import STRIPE_BYTES, FrameHeader, FrameKind, parts_of, share_of, stripe
from asyncpar.net.wire.reader import STAGING_BYTES

connections = st.integers(1, 16)
lengths = st.integers(0, 1 << 36)


@given(length=lengths, count=connections)
def test_parts_follow_each_other_cover_everything_and_are_nearly_equal(length: int, count: int) -> None:
    parts = [stripe(length, count, index) for index in range(count)]
    assert parts[0][0] == 0
    assert parts[-1][1] == length
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@given(length=lengths, count=connections)
def test_parts_of_what_is_striped_are_longer_than_a_reader_reads_ahead(length: int, count: int) -> None:
    parts = parts_of(length, count)
    assert 1 <= parts <= count
    if parts > 1:
        assert min(stop - start for start, stop in (stripe(length, parts, index) for index in range(parts))) > (
            STAGING_BYTES
        )


@pytest.mark.parametrize(
    ("length", "count", "parts"),
    [
        (1 << 30, 1, 1),
        (0, 4, 1),
        (2 * STRIPE_BYTES - 1, 4, 1),
        (2 * STRIPE_BYTES, 4, 2),
        (4 * STRIPE_BYTES - 1, 4, 3),
        (1 << 30, 16, 16),
    ],
)
def test_payloads_travel_in_as_many_parts_as_pay(length: int, count: int, parts: int) -> None:
    assert parts_of(length, count) == parts


def test_only_striped_frames_come_in_parts() -> None:
    header = FrameHeader(FrameKind.STRIPED, 0, 1, 2, 3, 4, 1_000_001)
    assert [share_of(header, 3, index) for index in range(3)] == [333_333, 333_334, 333_334]
    assert share_of(header._replace(length=300_001), 3, 1) == 150_001
    assert share_of(header._replace(kind=FrameKind.BULK), 3, 0) == 1_000_001
