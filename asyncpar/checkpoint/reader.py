"""Read what one rank wants: only the blocks that hold it, each verified before a value of it is used.  Blocking."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint.catalog import Reading
from asyncpar.checkpoint.folder import translated
from asyncpar.checkpoint.library import check_shard
from asyncpar.checkpoint.manifest import BLOCK_BYTES, Manifest, shard_name
from asyncpar.checkpoint.piece import Wanted
from asyncpar.checkpoint.plain import digest_of
from asyncpar.checkpoint.progress import Progress
from asyncpar.checkpoint.threads import for_each
from asyncpar.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What was read: an array for each entry of what was wanted, and the bytes of values that were read for them."""

    arrays: tuple[NDArray[Any], ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    path: Path
    descriptor: int

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from ``offset``.  Raises ``CheckpointError`` where the file ends."""
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
    progress: Progress,
) -> Read:
    """Return the arrays for ``wanted``.  Raises ``CheckpointError`` naming file, tensor and hashes of damage."""
    flat = [np.empty(each.flat[1] - each.flat[0], each.dtype) for each in wanted]
    with _opened(folder, manifests, readings) as shards:

        def read(task: tuple[Reading, int]) -> int:
            reading, block = task
            count = _read_block(shards[reading.place.rank], reading, block, flat[reading.target])
            progress.advance(count)
            return count

        tasks = [(reading, block) for reading in readings for block in _blocks(reading)]
        nbytes = sum(for_each(read, tasks))
    arrays = tuple(array.reshape(each.shape) for array, each in zip(flat, wanted, strict=True))
    return Read(arrays=arrays, nbytes=nbytes)


@contextmanager
def _opened(folder: Path, manifests: Sequence[Manifest], readings: Sequence[Reading]) -> Iterator[Mapping[int, _Shard]]:
    """Open the shards that are needed, after looking at their headers."""
    shards: dict[int, _Shard] = {}
    try:
        for rank in sorted({reading.place.rank for reading in readings}):
            path = folder / shard_name(rank)
            with translated(f"cannot read {path}"):
                shards[rank] = _Shard(path=path, descriptor=os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                _check_header(shards[rank], manifests[rank])
        yield shards
    finally:
        for shard in shards.values():
            os.close(shard.descriptor)


def _check_header(shard: _Shard, manifest: Manifest) -> None:
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
    """Return the numbers of the blocks that hold something of a reading."""
    per_block = BLOCK_BYTES // reading.place.record.itemsize
    moves = reading.moves
    changes = np.zeros(len(reading.place.record.blocks) + 1, np.int64)
    np.add.at(changes, moves.sources // per_block, 1)
    np.add.at(changes, (moves.sources + moves.lengths - 1) // per_block + 1, -1)
    return np.flatnonzero(np.cumsum(changes[:-1]) > 0).tolist()


def _read_block(shard: _Shard, reading: Reading, block: int, target: NDArray[Any]) -> int:
    """Read one block, verify it, and copy what is wanted of it; return how many bytes it has."""
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
