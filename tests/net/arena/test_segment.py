"""Segments: who may write, what is refused, and that nobody can pull the memory away."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from asyncpar.errors import ArenaFull, ProtocolError, UsageError
from asyncpar.net.arena.segment import HEADER_BYTES, NONCE_BYTES, SLEEPING, STATE, Segment

CONTROL = 1 << 18
HEAP = 1 << 30
NONCE = bytes(range(NONCE_BYTES))


def create(*, room: Callable[[], int] = lambda: 1 << 40) -> Segment:
    return Segment.create(control_bytes=CONTROL, heap_bytes=HEAP, nonce=NONCE, room=room)


def open_as_peer(owner: Segment, *, nonce: bytes = NONCE, heap_bytes: int = HEAP) -> Segment:
    return Segment.open(owner.open_for_peers(), control_bytes=CONTROL, heap_bytes=heap_bytes, nonce=nonce)


@pytest.fixture
def owner() -> Iterator[Segment]:
    segment = create()
    yield segment
    segment.close()


@pytest.fixture
def peer(owner: Segment) -> Iterator[Segment]:
    segment = open_as_peer(owner)
    yield segment
    segment.close()


def test_what_the_owner_writes_a_peer_reads(owner: Segment, peer: Segment) -> None:
    owner.words(HEADER_BYTES, 2)[1] = 2**64 - 1
    owner.array(HEADER_BYTES + 64, 3, ml_dtypes.bfloat16)[:] = 1.5
    owner.take_heap_memory(mmap.PAGESIZE, mmap.PAGESIZE)
    owner.heap_array(mmap.PAGESIZE, 4, np.int32)[:] = 7
    assert list(peer.words(HEADER_BYTES, 2)) == [0, 2**64 - 1]
    assert peer.array(HEADER_BYTES + 64, 3, ml_dtypes.bfloat16).tolist() == [1.5] * 3
    assert peer.heap_array(mmap.PAGESIZE, 4, np.int32).tolist() == [7] * 4


def test_a_peer_cannot_write(peer: Segment) -> None:
    assert peer.control.readonly
    with pytest.raises(TypeError, match="read-only"):
        peer.words(HEADER_BYTES, 1)[0] = 1
    assert not peer.array(HEADER_BYTES, 1, np.int8).flags.writeable
    assert not peer.heap_array(0, 1, np.int8).flags.writeable


def test_the_descriptor_for_peers_neither_writes_nor_maps_for_writing(owner: Segment) -> None:
    descriptor = owner.open_for_peers()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, CONTROL, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.posix_fallocate(descriptor, 0, 1)
        assert os.get_inheritable(descriptor) is False
    finally:
        os.close(descriptor)


def test_nobody_can_shrink_a_segment_not_even_its_owner(owner: Segment) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(owner._descriptor, HEADER_BYTES)  # noqa: SLF001  # the attack needs the descriptor, which a segment hands to no user
    with pytest.raises(PermissionError):
        os.ftruncate(owner._descriptor, CONTROL + HEAP + mmap.PAGESIZE)  # noqa: SLF001  # the attack needs the descriptor, which a segment hands to no user


def test_a_segment_that_shows_another_number_is_not_the_owners(owner: Segment) -> None:
    with pytest.raises(ProtocolError, match="the memory is not shared"):
        open_as_peer(owner, nonce=bytes(NONCE_BYTES))


def test_a_segment_of_another_size_than_its_owner_announced_is_refused(owner: Segment) -> None:
    with pytest.raises(ProtocolError, match=f"has {CONTROL + HEAP} bytes, its owner announced {CONTROL + HEAP * 2}"):
        open_as_peer(owner, heap_bytes=HEAP * 2)


def test_a_memory_file_that_could_shrink_is_refused_and_closed() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CONTROL)
    with pytest.raises(ProtocolError, match="could be pulled away"):
        Segment.open(descriptor, control_bytes=CONTROL, heap_bytes=0, nonce=NONCE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_of_a_file_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(CONTROL))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC)
    with pytest.raises(ProtocolError, match=r"no sealed memory file|could be pulled away"):
        Segment.open(descriptor, control_bytes=CONTROL, heap_bytes=0, nonce=NONCE)


def test_too_little_memory_is_an_error_now_and_no_fault_later(owner: Segment) -> None:
    with pytest.raises(ArenaFull, match="1 MiB of shared memory needed, 0 MiB available"):
        create(room=lambda: 0)
    with pytest.raises(ArenaFull, match="3 MiB of shared memory needed, 1 MiB available"):
        owner.take_heap_memory(0, 3 << 20, room=lambda: 1 << 20)


def test_a_system_that_refuses_memory_is_an_error_too(owner: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ArenaFull, match=r"2 MiB of shared memory cannot be had \(No space left on device\)"):
        owner.take_heap_memory(0, 2 << 20)
    with pytest.raises(ArenaFull):
        create()


def test_only_the_bounded_part_takes_memory(owner: Segment) -> None:
    taken = os.fstat(owner._descriptor).st_blocks * 512  # noqa: SLF001  # pages that the system has given to a segment are found by its descriptor alone
    assert taken == CONTROL
    owner.take_heap_memory(0, 1 << 20)
    assert os.fstat(owner._descriptor).st_blocks * 512 == CONTROL + (1 << 20)  # noqa: SLF001  # pages that the system has given to a segment are found by its descriptor alone


@pytest.mark.parametrize(("offset", "count"), [(-8, 1), (0, CONTROL // 8 + 1), (CONTROL, 1), (4, 1), (0, -1)])
def test_words_outside_or_across_are_refused(owner: Segment, offset: int, count: int) -> None:
    with pytest.raises(UsageError, match=r"^words: expected a range within"):
        owner.words(offset, count)


def test_arrays_outside_are_refused(owner: Segment) -> None:
    with pytest.raises(UsageError, match=r"^array: expected a range within"):
        owner.array(CONTROL - 4, 2, np.int32)
    with pytest.raises(UsageError, match=r"^heap array: expected a range within"):
        owner.heap_array(HEAP, 1, np.int8)


def test_the_words_of_the_header_have_cache_lines_of_their_own() -> None:
    assert SLEEPING // 16 != STATE // 16
    assert min(SLEEPING, STATE) * 8 >= 128
    assert max(SLEEPING, STATE) * 8 < HEADER_BYTES


def test_peers_see_that_the_owner_has_left(owner: Segment, peer: Segment) -> None:
    assert not peer.has_left
    owner.leave()
    assert peer.has_left


def test_views_outlive_their_segment_and_the_memory_goes_with_the_last(owner: Segment) -> None:
    peer = open_as_peer(owner)
    before = _mappings()
    words, numbers = peer.words(HEADER_BYTES, 1), peer.heap_array(0, 1, np.int8)
    peer.close()
    peer.close()
    del peer
    assert (words[0], numbers[0]) == (0, 0)
    assert _mappings() == before + 1
    del words, numbers
    gc.collect()
    assert _mappings() == before - 1


def test_a_closed_segment_maps_no_heap(owner: Segment) -> None:
    peer = open_as_peer(owner)
    peer.close()
    with pytest.raises(UsageError, match="this segment is closed"):
        peer.heap_array(0, 1, np.int8)


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:asyncpar-arena" in line for line in maps)
