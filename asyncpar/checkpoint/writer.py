"""Writing of one rank's part: hash it, write it, ensure that it is on disk.  Blocking; runs in a thread."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint.catalog import Holding
from asyncpar.checkpoint.files import FileSystem
from asyncpar.checkpoint.format import encode_header
from asyncpar.checkpoint.manifest import (
    BLOCK_BYTES,
    Manifest,
    ManifestStamp,
    PieceRecord,
    SliceRecord,
    encode_manifest,
    manifest_name,
    shard_name,
)
from asyncpar.checkpoint.piece import Piece, shape_of
from asyncpar.checkpoint.plain import digest_of, encode_plain
from asyncpar.checkpoint.spans import Runs
from asyncpar.checkpoint.threads import WorkProgress, for_each
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import CheckpointError

_WRITE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HashedPiece:
    """The bytes of a piece, with the hashes of their blocks."""

    piece: Piece
    memory: memoryview
    blocks: tuple[bytes, ...]

    @property
    def holding(self) -> Holding:
        return Holding(identity=identity_of(self.piece), digest=hashlib.sha256(b"".join(self.blocks)).digest())


def identity_of(piece: Piece) -> bytes:
    """Return 16 bytes that are equal for pieces of the same values of the same tensor, however they were cut."""
    runs = Runs.of(piece.slice)
    geometry = [runs.first, runs.length, runs.stride, runs.count, *piece.flat]
    shape = _shape(piece.slice.global_shape)
    described = [piece.name, piece.kind, piece.array.dtype.name, shape, [int(number) for number in geometry]]
    return hashlib.sha256(encode_plain(described)).digest()[:16]


def hash_pieces(pieces: Sequence[Piece], progress: WorkProgress) -> list[HashedPiece]:
    """Return the bytes of ``pieces`` with their hashes, computed by a few threads."""
    memories = [_bytes_of(piece.array) for piece in pieces]
    blocks = _hash_blocks(memories, progress)
    return [
        HashedPiece(piece=piece, memory=memory, blocks=hashes)
        for piece, memory, hashes in zip(pieces, memories, blocks, strict=True)
    ]


def check_unchanged(hashed: Sequence[HashedPiece], progress: WorkProgress) -> None:
    """Raise ``CheckpointError`` naming the tensor if the written values may differ from the hashed ones."""
    blocks = _hash_blocks([content.memory for content in hashed], progress)
    for content, hashes in zip(hashed, blocks, strict=True):
        if content.blocks != hashes:
            raise CheckpointError(
                f"{content.piece.label}: its array has changed while it was saved; pass snapshot=True, or wait for the "
                "end of the save before changing it"
            )


def _hash_blocks(memories: Sequence[memoryview], progress: WorkProgress) -> list[tuple[bytes, ...]]:
    def digest(block: memoryview) -> bytes:
        found = hashlib.sha256(block).digest()
        progress.advance(len(block))
        return found

    cuts = [_cut(memory, BLOCK_BYTES) for memory in memories]
    digests = iter(for_each(digest, [block for blocks in cuts for block in blocks]))
    return [tuple(islice(digests, len(blocks))) for blocks in cuts]


def write_rank(
    folder: Path,
    hashed: Sequence[HashedPiece],
    files: FileSystem,
    progress: WorkProgress,
    *,
    rank: int,
    step: int,
    extra: dict[str, Any],
) -> tuple[ManifestStamp, int]:
    """Write the shard and the manifest of ``rank`` into ``folder``, and wait until both are on disk.

    Returns the record of the manifest for the marker, and the number of bytes written.
    """
    ordered = sorted(hashed, key=lambda content: -content.piece.array.dtype.itemsize)  # keeps values aligned
    records = [_record(content, index) for index, content in enumerate(ordered)]
    header = encode_header(records)
    write_file(folder / shard_name(rank), [header, *(content.memory for content in ordered)], files, progress)
    size = len(header) + sum(len(content.memory) for content in ordered)
    manifest = encode_manifest(
        Manifest(
            rank=rank,
            step=step,
            size=size,
            header_bytes=len(header),
            header_sha256=digest_of(header),
            pieces=records,
            extra=extra,
        )
    )
    write_file(folder / manifest_name(rank), [manifest], files, progress)
    files.sync_folder(folder)
    return ManifestStamp(size=len(manifest), sha256=digest_of(manifest)), size + len(manifest)


def write_file(path: Path, parts: Sequence[bytes | memoryview], files: FileSystem, progress: WorkProgress) -> None:
    """Write a new file of ``parts``, and wait until its content is on disk."""
    file = files.create(path)
    try:
        for part in parts:
            for chunk in _cut(memoryview(part), _WRITE_BYTES):
                file.write(chunk)
                progress.advance(len(chunk))
        file.sync()
    finally:
        file.close()


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _cut(memory: memoryview, length: int) -> list[memoryview]:
    return [memory[start : start + length] for start in range(0, len(memory), length)]


def _record(content: HashedPiece, index: int) -> PieceRecord:
    piece = content.piece
    return PieceRecord(
        key=f"{piece.kind}/{piece.name}#{index}",
        name=piece.name,
        kind=piece.kind,
        dtype=piece.array.dtype.name,
        shape=_shape(shape_of(piece.slice, piece.flat)),
        slice=_slice_record(piece.slice),
        flat=piece.flat,
        blocks=[block.hex() for block in content.blocks],
    )


def _slice_record(part: TensorSlice) -> SliceRecord:
    return SliceRecord(
        global_shape=_shape(part.global_shape),
        view_shape=_shape(part.view_shape),
        dim=int(part.dim),
        start=int(part.start),
        stop=int(part.stop),
        local_shape=_shape(part.local_shape),
    )


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` without numpy's integers, which JSON does not know."""
    return tuple(int(length) for length in shape)
