"""One load on one rank: what it does in each phase.  Blocking; each phase runs in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpar.checkpoint.catalog import Catalog
from asyncpar.checkpoint.files import LocalFiles
from asyncpar.checkpoint.folder import (
    Found,
    Survey,
    folder_name,
    is_step_folder,
    log_skipped,
    read_marker,
    survey,
    translated,
)
from asyncpar.checkpoint.manifest import (
    MARKER,
    Manifest,
    Marker,
    decode_manifest,
    decode_marker,
    encode_marker,
    manifest_name,
    shard_name,
)
from asyncpar.checkpoint.piece import Wanted
from asyncpar.checkpoint.plain import first_difference
from asyncpar.checkpoint.progress import Progress
from asyncpar.checkpoint.reader import Read, read_wanted
from asyncpar.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadRequest:
    """What a rank was asked to load."""

    folder: Path
    wanted: tuple[Wanted, ...]
    model: dict[str, Any]
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPart:
    """What this rank has read, and what it was told by."""

    marker: Marker
    manifests: tuple[Manifest, ...]
    read: Read


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What rank 0 has found and tells the others: the name of the checkpoint's folder (empty if it is the one asked
    for), its marker, and its manifests, as they are in their files."""

    name: str
    marker: bytes
    manifests: list[bytes]

    def path(self, request: LoadRequest) -> Path:
        """Return where the checkpoint is for this rank."""
        return request.folder / self.name if self.name else request.folder


def find_contents(request: LoadRequest, progress: Progress) -> Contents:
    """Choose the checkpoint and look at all of it but the values; see ``load_checkpoint`` for what it raises."""
    files = LocalFiles()
    found = _find(request, files)
    _check_model(found.marker, request, found.path)
    manifests = []
    for rank, stamp in enumerate(found.marker.manifests):
        path = found.path / manifest_name(rank)
        with translated(f"cannot read {path}"):
            content = files.read(path, limit=max(stamp.size, 1 << 16))
        manifest = decode_manifest(content, stamp, rank=rank, step=found.step, path=path)
        _check_size(found.path / shard_name(rank), manifest, files)
        manifests.append(content)
        progress.advance(1)
    name = "" if found.path == request.folder else found.path.name
    return Contents(name=name, marker=encode_marker(found.marker), manifests=manifests)


def read_contents(request: LoadRequest, contents: Contents, progress: Progress, *, rank: int) -> LoadedPart:
    """Read what this rank wants; see ``load_checkpoint`` for what it raises."""
    path = contents.path(request)
    marker = decode_marker(contents.marker, path=path)
    _check_model(marker, request, path)
    manifests = [
        decode_manifest(content, stamp, rank=saver, step=marker.step, path=path / manifest_name(saver))
        for saver, (content, stamp) in enumerate(zip(contents.manifests, marker.manifests, strict=True))
    ]
    readings = Catalog(manifests, path).plan(request.wanted)
    if not LocalFiles().has_folder(path):
        raise CheckpointError(
            f"rank {rank} does not see the folder {path} that rank 0 has found: all ranks must share one file system, "
            "with the folder in the same place"
        )
    read = read_wanted(path, manifests, request.wanted, readings, progress)
    return LoadedPart(marker=marker, manifests=tuple(manifests), read=read)


def _find(request: LoadRequest, files: LocalFiles) -> Found:
    folder = request.folder
    with translated(f"cannot look into {folder}"):
        if not files.has_folder(folder):
            raise CheckpointError(f"{folder}: there is no such folder")
        is_one = is_step_folder(folder) or files.has_file(folder / MARKER)
    if is_one:
        found = read_marker(folder, files)
        if request.step not in (None, found.step):
            raise CheckpointError(f"{folder}: expected the checkpoint of step {request.step}, got that of {found.step}")
        return found
    if request.step is not None:
        return read_marker(folder / folder_name(request.step), files)
    seen = survey(folder, files)
    if seen.later_unreadable is not None:
        path, reason = seen.later_unreadable
        raise CheckpointError(f"{reason} (to load an older one than {path.name}, say which step)")
    if not seen.complete:
        raise CheckpointError(_nothing(folder, seen))
    log_skipped(seen)
    return seen.complete[-1]


def _nothing(folder: Path, seen: Survey) -> str:
    """Say what is in a folder that has no complete checkpoint."""
    text = f"{folder}: there is no complete checkpoint"
    reasons = [f"saving {path.name} was not finished" for path in seen.unfinished[:4]]
    return f"{text}: {'; '.join(reasons)}" if reasons else text


def _check_model(marker: Marker, request: LoadRequest, path: Path) -> None:
    difference = first_difference(marker.model, request.model, "model", ("the checkpoint", "the one here"))
    if difference is not None:
        raise CheckpointError(f"{path}: this is a checkpoint of another model: {difference}")


def _check_size(path: Path, manifest: Manifest, files: LocalFiles) -> None:
    with translated(f"cannot read {path}"):
        size = files.size(path)
    if size != manifest.size:
        raise CheckpointError(f"{path}: damaged: expected {manifest.size} bytes, got {size}")
