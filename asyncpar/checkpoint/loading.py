"""Loading of a checkpoint: by all ranks at once, each the part it wants, or none."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

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
from asyncpar.checkpoint.format import load_safetensors
from asyncpar.checkpoint.group import CheckpointGroup
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
from asyncpar.checkpoint.plain import first_difference, plain_dict
from asyncpar.checkpoint.reader import Read, read_wanted
from asyncpar.checkpoint.threads import WorkProgress
from asyncpar.collectives.call import WatchedCall
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import CheckpointError, UsageError

_MOST_STEPS: Final = 8
"""Limit of alternative steps that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A loaded checkpoint, from ``path``.

    ``arrays`` are in the order of the request, each of the shape of the part, or flat if only a range of it was wanted;
    they are not shared.  ``extra`` is that saved by rank 0, ``extras`` those of all ranks, ``nbytes`` the number of
    bytes of values that this rank has read.
    """

    path: Path
    step: int
    arrays: tuple[NDArray[Any], ...]
    extra: dict[str, Any]
    extras: tuple[dict[str, Any], ...]
    nbytes: int


def load_checkpoint(
    folder: Path | str,
    wanted: Sequence[Wanted],
    *,
    model: Mapping[str, Any],
    communicator: Communicator | None,
    step: int | None = None,
) -> Coroutine[Any, Any, Loaded]:
    """Load this rank's ``wanted`` values from the last complete checkpoint in ``folder``, or that of ``step``.

    ``folder`` may also be that of one checkpoint.  All ranks call it, in the same order, whatever the number and layout
    of the ranks that saved it; without ``communicator`` this process loads alone.  Each reads only the blocks (of 1
    MiB) that contain something it wants.  Every value is verified before any is returned, and they are returned on all
    ranks or none: a failure on one rank is an error on every rank, naming it.  (Only a rank that dies or is cancelled
    in the last exchange may be the only one to raise.)

    Raises ``UsageError`` for wrong arguments (the others get ``CheckpointError``); ``CheckpointError`` if there is no
    complete checkpoint, it is one of another ``model`` or of a newer format, lacks a tensor or has it in another shape
    or dtype, cannot be read or is damaged; ``PeerError`` for a rank that dies, is cancelled or does not take part.
    """
    group = CheckpointGroup(communicator, "loading a checkpoint")
    try:
        request = _checked(folder, tuple(wanted), model, step)
    except UsageError as error:
        return group.refuse(error)
    return WatchedCall(_load(group, request), group.leave_unbegun)


def _checked(folder: object, wanted: tuple[Wanted, ...], model: object, step: object) -> LoadRequest:
    load_safetensors()
    if not isinstance(folder, str | Path):
        raise UsageError(f"folder: expected a path, got {folder!r:.80}")
    if step is not None and (type(step) is not int or step < 0):
        raise UsageError(f"step: expected an integer from 0 on or None, got {step!r:.80}")
    for each in wanted:
        if not isinstance(each, Wanted):
            raise UsageError(f"wanted: expected Wanted, got {type(each).__name__}")
    return LoadRequest(folder=Path(folder), wanted=wanted, model=plain_dict(model, "model"), step=step)


async def _load(group: CheckpointGroup, request: LoadRequest) -> Loaded:
    is_first = group.rank == 0
    found = await group.run_on_all(
        lambda progress: find_contents(request, progress) if is_first else None, wanted=Contents | None
    )
    contents = found[0]
    assert contents is not None, "rank 0 has found it, or failed"
    parts: list[LoadedPart] = []
    await group.run_on_all(
        lambda progress: parts.append(read_contents(request, contents, progress, rank=group.rank)), wanted=None
    )
    part = parts[0]
    return Loaded(
        path=contents.path(request),
        step=part.marker.step,
        arrays=part.read.arrays,
        extra=part.marker.extra,
        extras=tuple(manifest.extra for manifest in part.manifests),
        nbytes=part.read.nbytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadRequest:
    """The arguments of a load on one rank."""

    folder: Path
    wanted: tuple[Wanted, ...]
    model: dict[str, Any]
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPart:
    """The values that this rank has read, and their description."""

    marker: Marker
    manifests: tuple[Manifest, ...]
    read: Read


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The message of rank 0 to the others.

    It has the name of the checkpoint's folder (empty if it is the requested one), its marker, and its manifests, as in
    their files.
    """

    name: str
    marker: bytes
    manifests: list[bytes]

    def path(self, request: LoadRequest) -> Path:
        """Return the path of the checkpoint for this rank."""
        return request.folder / self.name if self.name else request.folder


def find_contents(request: LoadRequest, progress: WorkProgress) -> Contents:
    """Choose the checkpoint and check all of it but the values; for errors see ``load_checkpoint``."""
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


def read_contents(request: LoadRequest, contents: Contents, progress: WorkProgress, *, rank: int) -> LoadedPart:
    """Read this rank's values; for errors see ``load_checkpoint``."""
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
        return _find_step(folder, request.step, files)
    seen = survey(folder, files)
    if seen.later_unreadable is not None:
        path, reason = seen.later_unreadable
        raise CheckpointError(f"{reason} (to load an older one than {path.name}, say which step)")
    if not seen.complete:
        raise CheckpointError(_nothing(folder, seen))
    log_skipped(seen)
    return seen.complete[-1]


def _find_step(folder: Path, step: int, files: LocalFiles) -> Found:
    path = folder / folder_name(step)
    with translated(f"cannot look into {folder}"):
        is_there = files.has_folder(path)
    if not is_there:
        steps = ", ".join(str(found.step) for found in survey(folder, files).complete[-_MOST_STEPS:])
        raise CheckpointError(
            f"{folder}: there is no checkpoint of step {step}" + (f"; the last complete ones: {steps}" if steps else "")
        )
    return read_marker(path, files)


def _nothing(folder: Path, seen: Survey) -> str:
    """Describe the contents of a folder without a complete checkpoint."""
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
