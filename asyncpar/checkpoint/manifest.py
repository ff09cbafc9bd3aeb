"""The texts of a checkpoint: the contents of each shard, and the marker that it is complete.  Pure.

A checkpoint is a folder ``step_000000042`` with, for each rank that saved it, ``rank_00003.safetensors`` (the values)
and ``rank_00003.json`` (its manifest: a description of the values, and their hashes), and ``COMPLETE``, written last,
which has the hashes of all manifests.  So the marker vouches, through the hashes, for every byte of the checkpoint.

Nothing in these texts is trusted: every number has its limits, names of tensors are never names of files, and
inconsistencies raise ``CheckpointError`` naming the place.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from asyncpar.checkpoint.piece import KIND_PATTERN, LONGEST_NAME, dtype_named, label_of, shape_of
from asyncpar.checkpoint.plain import decode_plain, digest_of, encode_plain
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import CheckpointError, UsageError

FORMAT: Final = "asyncpar checkpoint"
VERSION: Final = 1
MARKER: Final = "COMPLETE"
BLOCK_BYTES: Final = 1 << 20
"""Size of the blocks in which values are hashed, so that a reader of a part of a piece can verify that part."""

MOST_RANKS: Final = 100_000
_MOST_VALUES: Final = 1 << 60
_Size = Annotated[int, Meta(ge=0, le=_MOST_VALUES)]
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Shape = Annotated[tuple[_Size, ...], Meta(max_length=64)]


class SliceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``TensorSlice``."""

    global_shape: _Shape
    view_shape: _Shape
    dim: _Size
    start: _Size
    stop: _Size
    local_shape: _Shape


class PieceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece in a shard; ``blocks`` are the SHA-256 of each ``BLOCK_BYTES`` of its values."""

    key: Annotated[str, Meta(max_length=2 * LONGEST_NAME)]
    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    kind: Annotated[str, Meta(pattern=KIND_PATTERN)]
    dtype: str
    shape: _Shape
    slice: SliceRecord
    flat: tuple[_Size, _Size]
    blocks: list[_Digest]

    @property
    def label(self) -> str:
        return label_of(self.name, self.kind)

    @property
    def size(self) -> int:
        return self.flat[1] - self.flat[0]

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def itemsize(self) -> int:
        dtype = dtype_named(self.dtype)
        assert dtype is not None, "checked when it was decoded"
        return dtype.itemsize

    @property
    def part(self) -> TensorSlice:
        return TensorSlice(**msgspec.structs.asdict(self.slice))


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of one rank's shard: pieces in the order of their bytes, after a header of ``header_bytes``."""

    rank: _Size
    step: _Size
    size: _Size
    header_bytes: _Size
    header_sha256: _Digest
    pieces: list[PieceRecord]
    extra: dict[str, Any]


class ManifestStamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A manifest as the marker records it."""

    size: _Size
    sha256: _Digest


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``COMPLETE``; ``extra`` is that of rank 0."""

    format: str
    version: int
    step: _Size
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    model: dict[str, Any]
    extra: dict[str, Any]
    manifests: list[ManifestStamp]


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    content: Any
    sha256: _Digest


_R = TypeVar("_R", bound=msgspec.Struct)


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def manifest_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def encode_manifest(manifest: Manifest) -> bytes:
    return encode_plain(msgspec.to_builtins(manifest))


def decode_manifest(content: bytes, stamp: ManifestStamp, *, rank: int, step: int, path: object) -> Manifest:
    """Return the manifest of ``rank``, which the marker has stamped.  Raises ``CheckpointError`` naming ``path``."""
    found = digest_of(content)
    if found != stamp.sha256:
        raise CheckpointError(f"{path}: damaged or edited: expected SHA-256 {stamp.sha256}, got {found}")
    manifest = _converted(_parsed(content, path), Manifest, path)
    if (manifest.rank, manifest.step) != (rank, step):
        raise CheckpointError(
            f"{path}: expected the manifest of rank {rank} at step {step}, got that of rank {manifest.rank} at step "
            f"{manifest.step}"
        )
    for piece in manifest.pieces:
        _check_piece(piece, path)
    expected = manifest.header_bytes + sum(piece.nbytes for piece in manifest.pieces)
    if manifest.size != expected:
        raise CheckpointError(f"{path}: size: expected {expected} bytes as its pieces have, got {manifest.size}")
    return manifest


def encode_marker(marker: Marker) -> bytes:
    content = msgspec.to_builtins(marker)
    return encode_plain({"content": content, "sha256": digest_of(encode_plain(content))})


def decode_marker(content: bytes, *, path: object) -> Marker:
    """Return the marker.  Raises ``CheckpointError`` naming ``path``, with a note if the format is newer."""
    sealed = _converted(_parsed(content, path), _Sealed, path)
    found = digest_of(encode_plain(sealed.content))
    if found != sealed.sha256:
        raise CheckpointError(f"{path}: damaged or edited: expected SHA-256 {sealed.sha256}, got {found}")
    body = sealed.content
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path}: this is no checkpoint: its format is not {FORMAT!r}")
    version = body.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path}: version: expected 1 to {VERSION}, got {version!r:.80}; it was written by a newer asyncpar"
        )
    marker = _converted(body, Marker, path)
    if len(marker.manifests) != marker.ranks:
        raise CheckpointError(
            f"{path}: manifests: expected one for each of {marker.ranks} ranks, got {len(marker.manifests)}"
        )
    return marker


def _parsed(content: bytes, path: object) -> Any:
    try:
        return decode_plain(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: this is no JSON: {error}") from error


def _converted(value: object, kind: type[_R], path: object) -> _R:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_piece(piece: PieceRecord, path: object) -> None:
    """Raise ``CheckpointError`` unless the fields of ``piece`` are consistent."""
    if dtype_named(piece.dtype) is None:
        raise CheckpointError(f"{path}: {piece.label}: dtype {piece.dtype!r:.80} is unknown")
    try:
        part = piece.part
    except UsageError as error:
        raise CheckpointError(f"{path}: {piece.label}: {error}") from error
    size = math.prod(part.local_shape)
    if math.prod(part.global_shape) > _MOST_VALUES:
        raise CheckpointError(f"{path}: {piece.label}: global_shape: expected at most {_MOST_VALUES} values")
    if not piece.flat[0] <= piece.flat[1] <= size:
        raise CheckpointError(f"{path}: {piece.label}: flat: expected a range within 0..{size}, got {piece.flat}")
    if piece.shape != shape_of(part, piece.flat):
        raise CheckpointError(f"{path}: {piece.label}: shape: expected {shape_of(part, piece.flat)}, got {piece.shape}")
    blocks = -(-piece.nbytes // BLOCK_BYTES)
    if len(piece.blocks) != blocks:
        raise CheckpointError(f"{path}: {piece.label}: blocks: expected {blocks} hashes, got {len(piece.blocks)}")
