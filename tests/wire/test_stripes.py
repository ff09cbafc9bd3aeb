from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.wire.header import FrameHeader, FrameKind
from asyncpar.wire.reader import STAGING_BYTES
from asyncpar.wire.stripes import STRIPE_BYTES, is_worth_striping, part_length, stripe

connections = st.integers(1, 16)
lengths = st.integers(0, 1 << 36)


@given(length=lengths, count=connections)
def test_parts_follow_each_other_cover_everything_and_are_nearly_equal(length: int, count: int) -> None:
    parts = [stripe(length, count, index) for index in range(count)]
    assert parts[0][0] == 0
    assert parts[-1][1] == length
    assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@given(length=lengths, count=connections)
def test_parts_of_what_is_striped_are_longer_than_a_reader_reads_ahead(length: int, count: int) -> None:
    if is_worth_striping(length, count):
        assert min(stop - start for start, stop in (stripe(length, count, index) for index in range(count))) > (
            STAGING_BYTES
        )


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [(1 << 30, 1, False), (2 * STRIPE_BYTES, 2, True), (2 * STRIPE_BYTES - 1, 2, False), (0, 4, False)],
)
def test_small_payloads_and_single_connections_are_not_striped(length: int, count: int, expected: bool) -> None:
    assert is_worth_striping(length, count) is expected


def test_only_striped_frames_come_in_parts() -> None:
    header = FrameHeader(FrameKind.STRIPED, 0, 1, 2, 3, 4, 1_000_001)
    assert [part_length(header, 3, index) for index in range(3)] == [333_333, 333_334, 333_334]
    assert part_length(header._replace(kind=FrameKind.BULK), 3, 0) == 1_000_001
