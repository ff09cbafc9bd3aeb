"""Reading of one rank's values: only the blocks that contain them, each verified before use.  Blocking."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint.catalog import Reading
from asyncpar.checkpoint.folder import translated
from asyncpar.checkpoint.format import check_shard
from asyncpar.checkpoint.manifest import BLOCK_BYTES, Manifest, shard_name
from asyncpar.checkpoint.piece import Wanted
from asyncpar.checkpoint.plain import digest_of
from asyncpar.checkpoint.threads import WorkProgress, for_each
from asyncpar.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The result of a read: an array for each requested entry, and the number of bytes of values read for them."""

    arrays: tuple[NDArray[Any], ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShardFile:
    path: Path
    descriptor: int

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from ``offset``.  Raises ``CheckpointError`` if the file ends before that."""
        while memory:
            count = os.preadv(self.descriptor, [memory], offset)
            if count == 0:
                raise CheckpointError(f"{self.path}: damaged: it ends at byte {offset}")
            memory, offset = memory[count:], offset + count


def read_wanted(
    folder: Path,
    manifests: Sequence[Manifest],
    wanted: Sequence[Wanted],
    readings: Sequence[Reading],
    progress: WorkProgress,
) -> Read:
    """Return the arrays for ``wanted``.  Raises ``CheckpointError`` naming file, tensor and hashes of damage."""
    flat = [np.empty(each.flat[1] - each.flat[0], each.dtype) for each in wanted]
    of_rank: dict[int, list[Reading]] = {}
    for reading in readings:
        of_rank.setdefault(reading.place.rank, []).append(reading)
    nbytes = 0
    for rank, own in sorted(of_rank.items()):  # one file after the other, since there may be more than can be open
        with _opened(folder / shard_name(rank), manifests[rank]) as shard:
            nbytes += _read_shard(shard, own, flat, progress)
    arrays = tuple(array.reshape(each.shape) for array, each in zip(flat, wanted, strict=True))
    return Read(arrays=arrays, nbytes=nbytes)


def _read_shard(
    shard: _ShardFile, readings: Sequence[Reading], flat: Sequence[NDArray[Any]], progress: WorkProgress
) -> int:
    def read(task: tuple[Reading, int]) -> int:
        reading, block = task
        count = _read_block(shard, reading, block, flat[reading.target])
        progress.advance(count)
        return count

    return sum(for_each(read, [(reading, block) for reading in readings for block in _blocks(reading)]))


@contextmanager
def _opened(path: Path, manifest: Manifest) -> Iterator[_ShardFile]:
    """Open a shard, after checking its header."""
    with translated(f"cannot read {path}"):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        shard = _ShardFile(path=path, descriptor=descriptor)
        with translated(f"cannot read {path}"):
            _check_header(shard, manifest)
        yield shard
    finally:
        os.close(descriptor)


def _check_header(shard: _ShardFile, manifest: Manifest) -> None:
    size = os.fstat(shard.descriptor).st_size
    if size != manifest.size:
        raise CheckpointError(f"{shard.path}: damaged: expected {manifest.size} bytes, got {size}")
    header = bytearray(manifest.header_bytes)
    shard.read(0, memoryview(header))
    found = digest_of(memoryview(header))
    if found != manifest.header_sha256:
        raise CheckpointError(
            f"{shard.path}: header damaged or edited: expected SHA-256 {manifest.header_sha256}, got {found}"
        )
    check_shard(shard.path, manifest.pieces)


def _blocks(reading: Reading) -> list[int]:
    """Return the numbers of the blocks that contain a part of a reading."""
    per_block = BLOCK_BYTES // reading.place.record.itemsize
    moves = reading.moves
    changes = np.zeros(len(reading.place.record.blocks) + 1, np.int64)
    np.add.at(changes, moves.sources // per_block, 1)
    np.add.at(changes, (moves.sources + moves.lengths - 1) // per_block + 1, -1)
    return np.flatnonzero(np.cumsum(changes[:-1]) > 0).tolist()


def _read_block(shard: _ShardFile, reading: Reading, block: int, target: NDArray[Any]) -> int:
    """Read one block, verify it, and copy the requested part of it; return its number of bytes."""
    record, per_block = reading.place.record, BLOCK_BYTES // reading.place.record.itemsize
    start, stop = block * per_block, min((block + 1) * per_block, record.size)
    moves = reading.moves.within(start, stop)
    is_direct = len(moves.lengths) == 1 and int(moves.lengths[0]) == stop - start
    at = int(moves.targets[0])
    values = target[at : at + stop - start] if is_direct else np.empty(stop - start, target.dtype)
    memory = values.view(np.uint8).data
    with translated(f"cannot read {shard.path}"):
        shard.read(reading.place.offset + start * record.itemsize, memory)
    found = hashlib.sha256(memory).hexdigest()
    if found != record.blocks[block]:
        raise CheckpointError(
            f"{shard.path}: {record.label}: damaged or edited: its bytes from {block * BLOCK_BYTES} on: expected "
            f"SHA-256 {record.blocks[block]}, got {found}"
        )
    if not is_direct:
        moves.copy(values, target)
    return len(memory)
