"""Layouts cover every element of every chunk exactly once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.collectives.algorithms.catalog import schedule_of
from asyncpar.collectives.arrays import StagingPool
from asyncpar.collectives.plan import (
    PACKED_BYTES,
    SEGMENT_BYTES,
    AlongBuffer,
    AlongChunks,
    BoundRecv,
    PackedChunks,
    Plan,
    Slice,
    count_pieces,
    packed_segment,
)
from asyncpar.core.config.slicing import ceil_chunks


@given(length=st.integers(0, 10_000), parts=st.integers(1, 40))
def test_ceil_chunks_cover_a_length_in_order(length: int, parts: int) -> None:
    bounds = ceil_chunks(length, parts)
    assert len(bounds) == parts
    assert [index for low, high in bounds for index in range(low, high)] == list(range(length))
    assert len({high - low for low, high in bounds if high < length}) <= 1


@pytest.mark.parametrize(("dim", "expected"), [(5, [(0, 2), (2, 4), (4, 5), (5, 5)]), (0, [(0, 0)] * 4)])
def test_empty_bounds_lie_at_the_end(dim: int, expected: list[tuple[int, int]]) -> None:
    assert ceil_chunks(dim, 4) == expected


@given(count=st.integers(0, 5_000_000), chunks=st.integers(1, 20), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_pieces_along_a_buffer_cover_it_and_stay_small(count: int, chunks: int, itemsize: int) -> None:
    layout = AlongBuffer(count=count, chunks=chunks, itemsize=itemsize)
    end = 0
    for piece in range(layout.pieces):
        places = layout.place(piece)
        assert len(places) == chunks
        for _, start, stop in places:
            assert start in (end, stop)
            end = max(end, stop)
            assert (stop - start) * itemsize <= SEGMENT_BYTES + chunks * itemsize
    assert end == count


@given(
    lengths=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=6),
    itemsize=st.sampled_from([1, 4, 8]),
)
def test_pieces_along_chunks_cover_each_chunk(lengths: list[int], itemsize: int) -> None:
    ends = np.cumsum([0, *lengths]).tolist()
    slices = [Slice(0, low, high) for low, high in pairwise(ends)]
    segment = packed_segment(len(lengths))
    layout = AlongChunks(slices, longest=max(lengths), itemsize=itemsize, segment=segment)
    packed = PackedChunks(layout)
    covered = [chunk.start for chunk in slices]
    for piece in range(layout.pieces):
        for index, (spread, together) in enumerate(zip(layout.place(piece), packed.place(piece), strict=True)):
            assert spread.start == covered[index]
            covered[index] = spread.stop
            assert together.stop - together.start == spread.stop - spread.start
        assert packed.place(piece)[-1].stop * itemsize <= PACKED_BYTES + len(lengths) * itemsize
    assert covered == [chunk.stop for chunk in slices]


def test_a_chunk_of_some_size_is_cut_so_that_sending_and_reducing_overlap() -> None:
    assert [count_pieces(size) for size in (0, 1000, 256 << 10, 1 << 20, (1 << 20) + 1, 10 << 20)] == [
        1,
        1,
        2,
        2,
        2,
        10,
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sends_and_receives_of_all_ranks_have_equal_tags_and_lengths(size: int) -> None:
    plans = [
        Plan(
            schedule_of("all_reduce", "ring", rank=rank, size=size),
            AlongBuffer(count=1_000_003, chunks=size, itemsize=4),
            rank=rank,
            ranks=range(10, 10 + size),
        )
        for rank in range(size)
    ]
    sent, received = set(), set()
    for rank, plan in enumerate(plans):
        for piece in range(plan.pieces):
            for bound in plan.bind(piece):
                for send in bound.sends:
                    sent.add((10 + rank, send.peer, send.tag, sum(part.stop - part.start for part in send.slices)))
                for receive in bound.receives:
                    received.add((receive.peer, 10 + rank, receive.tag, receive.count))
    assert sent == received
    assert len(sent) == size * 2 * (size - 1) * plans[0].pieces


def test_receives_are_posted_early_where_nothing_touches_their_memory() -> None:
    schedule = schedule_of("all_gather", "ring", rank=0, size=4)
    layout = AlongBuffer(count=8, chunks=4, itemsize=4)
    rounds = Plan(schedule, layout, rank=0, ranks=range(4)).bind(0)
    assert [[receive.is_early for receive in bound.receives] for bound in rounds] == [[False], [True], [True]]
    early: list[tuple[BoundRecv, ...]] = [bound.early for bound in rounds]
    assert early == [rounds[1].receives, rounds[2].receives, ()]


def test_long_plans_do_not_keep_their_pieces() -> None:
    schedule = schedule_of("all_reduce", "tree", rank=0, size=2)
    plan = Plan(schedule, AlongBuffer(count=100 << 20, chunks=1, itemsize=1), rank=0, ranks=range(2))
    assert plan.pieces == 100
    assert plan.bind(3) is not plan.bind(3)
    assert plan.bind(3) == plan.bind(3)


def test_staging_memory_is_used_again_up_to_a_bound() -> None:
    pool = StagingPool(kept_bytes=1 << 20)
    block = pool.take(200_000, np.dtype(np.float32))
    address = block.ctypes.data
    pool.give_back(block)
    again = pool.take(190_000, np.dtype(np.float32))
    assert again.ctypes.data == address
    assert len(again) == 190_000
    large = pool.take(1 << 20, np.dtype(np.float32))
    pool.give_back(large)
    assert not pool._free.get(4 << 20)  # noqa: SLF001  # which buffers a pool keeps shows nowhere else: a buffer taken may be new or kept


def test_small_staging_memory_is_not_kept() -> None:
    pool = StagingPool()
    for dtype in (np.uint8, np.float64):
        pool.give_back(pool.take(100, np.dtype(dtype)))
    assert not pool._free  # noqa: SLF001  # which buffers a pool keeps shows nowhere else: a buffer taken may be new or kept
