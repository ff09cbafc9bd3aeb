"""Saving of a checkpoint: by all ranks at once, each its part, atomically.

Theory of operation.  Everything is written into a folder under another name, ``step_000000042.saving-...``.  When all
ranks have reported that their part is on disk, rank 0 gives the folder its name and puts the marker into it, each step
being on disk before the next is taken.  So whatever dies at any time, each folder that has a marker is complete;
folders without one are removed by the next save.
"""

from __future__ import annotations

import secrets
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncpar.checkpoint.catalog import Catalog, choose, encode_holdings
from asyncpar.checkpoint.files import FileSystem, LocalFiles
from asyncpar.checkpoint.folder import MOST_STEPS, clean_up, folder_name, remove_old, translated
from asyncpar.checkpoint.format import load_safetensors
from asyncpar.checkpoint.group import CheckpointGroup
from asyncpar.checkpoint.manifest import (
    FORMAT,
    MARKER,
    VERSION,
    ManifestStamp,
    Marker,
    decode_manifest,
    encode_marker,
    manifest_name,
)
from asyncpar.checkpoint.piece import Piece, check_distinct
from asyncpar.checkpoint.plain import decode_plain, encode_plain, first_difference, plain_dict
from asyncpar.checkpoint.threads import Stopped, WorkProgress
from asyncpar.checkpoint.writer import HashedPiece, check_unchanged, hash_pieces, identity_of, write_file, write_rank
from asyncpar.collectives.call import WatchedCall
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import CheckpointError, UsageError


def save_checkpoint(
    folder: Path | str,
    *,
    step: int,
    pieces: Sequence[Piece],
    model: Mapping[str, Any],
    communicator: Communicator | None,
    extra: Mapping[str, Any] | None = None,
    equal: Mapping[str, Any] | None = None,
    keep: int | None = None,
    snapshot: bool = False,
    files: FileSystem | None = None,
) -> Coroutine[Any, Any, Saved]:
    """Save the ``pieces`` of all ranks as the checkpoint of ``step`` in ``folder``, which all ranks must share.

    All ranks call it, in the same order; it takes its place in that order when it is called.  Without ``communicator``
    this process saves alone.  Pieces that several ranks hold are written once, distributed among them.  Returns, on
    every rank, when the checkpoint is complete and on disk; the loop stays free meanwhile.  The arrays must not change
    until then (it is an error if they have), unless ``snapshot`` is true: then they are copied in the call itself, and
    the returned coroutine may run as a task concurrently with training.

    ``model`` identifies the model; loading compares it.  ``extra`` is anything that JSON preserves (see ``plain``);
    each rank's is saved.  ``equal`` is also JSON, and must be the same on all ranks; it is not saved.  With ``keep``,
    all complete checkpoints but the ``keep`` last ones are removed, after this one is complete.

    Raises on every rank, and leaves no checkpoint of this step: ``UsageError`` for wrong arguments (the others get
    ``CheckpointError``); ``CheckpointError`` naming rank and cause if a rank cannot write, does not see the files of
    the others, or replicas differ, if the step was saved before, or if another save into ``folder`` is in progress;
    ``PeerError`` for a rank that dies, is cancelled or does not take part.
    """
    group = CheckpointGroup(communicator, f"saving step {step!r:.40}")
    try:
        request = _checked(folder, step, tuple(pieces), model, extra, equal, keep, files or LocalFiles())
    except UsageError as error:
        return group.refuse(error)
    if snapshot:
        copies = tuple(replace(piece, array=np.array(piece.array, order="C")) for piece in request.pieces)
        request = replace(request, pieces=copies, is_snapshot=True)
    return WatchedCall(_save(group, request), group.leave_unbegun)


def _checked(
    folder: object,
    step: object,
    pieces: tuple[Piece, ...],
    model: object,
    extra: object,
    equal: object,
    keep: object,
    files: FileSystem,
) -> Request:
    load_safetensors()
    if not isinstance(folder, str | Path):
        raise UsageError(f"folder: expected a path, got {folder!r:.80}")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise UsageError(f"step: expected an integer from 0 to {MOST_STEPS - 1}, got {step!r:.80}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise UsageError(f"keep: expected at least 1 or None, got {keep!r:.80}")
    for piece in pieces:
        if not isinstance(piece, Piece):
            raise UsageError(f"pieces: expected Piece, got {type(piece).__name__}")
    check_distinct(((piece.label, identity_of(piece)) for piece in pieces), "pieces")
    return Request(
        folder=Path(folder),
        step=step,
        pieces=pieces,
        model=plain_dict(model, "model"),
        extra=plain_dict({} if extra is None else extra, "extra"),
        equal=plain_dict({} if equal is None else equal, "equal"),
        keep=keep,
        files=files,
    )


async def _save(group: CheckpointGroup, request: Request) -> Saved:
    saving = Saving(request=request, rank=group.rank)
    try:
        prepared = await group.run_on_all(saving.prepare, wanted=SavePlan)
        check_terms([each.terms for each in prepared])
        written = await group.run_on_all(
            lambda progress: saving.write(prepared, progress), wanted=tuple[ManifestStamp, int]
        )
        stamps = [stamp for stamp, _ in written]
        ends = await group.run_on_all(
            lambda progress: saving.complete(stamps, progress), wanted=tuple[list[str], str | None]
        )
    finally:
        saving.close()
    removed, left = ends[0]
    return Saved(
        path=request.path,
        step=request.step,
        nbytes=written[group.rank][1],
        removed=tuple(Path(path) for path in removed),
        left=left,
    )


_LOCK: Final = ".saving.lock"
_SHARED: Final = "all ranks must share one file system, with the folder in the same place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint: its place, the bytes that this rank wrote, and the old checkpoints that were removed.

    ``left`` is the reason why old ones could not be removed, if any.
    """

    path: Path
    step: int
    nbytes: int
    removed: tuple[Path, ...] = ()
    left: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """The arguments of a save on one rank."""

    folder: Path
    step: int
    pieces: tuple[Piece, ...]
    model: dict[str, Any]
    extra: dict[str, Any]
    equal: dict[str, Any]
    keep: int | None
    files: FileSystem
    is_snapshot: bool = False
    """Whether the arrays are copies that no caller changes."""

    @property
    def path(self) -> Path:
        return self.folder / folder_name(self.step)

    @property
    def terms(self) -> bytes:
        """Values that must be equal on all ranks."""
        return encode_plain({"step": self.step, "keep": self.keep, "model": self.model, **self.equal})


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The message of a rank to the others before anything is written; rank 0 adds the folder to write into."""

    terms: bytes
    holdings: bytes
    temporary: str = ""


def check_terms(terms: Sequence[bytes]) -> None:
    """Raise ``UsageError`` naming ranks and field, unless all ranks had the same request."""
    for rank, other in enumerate(terms):
        if other != terms[0]:
            difference = first_difference(
                decode_plain(terms[0]), decode_plain(other), "arguments", ("rank 0", f"rank {rank}")
            )
            raise UsageError(f"ranks save different things: {difference}")


class Saving:
    """The phases, in order: ``prepare``, ``write``, ``complete``; then ``close``, in any case."""

    def __init__(self, *, request: Request, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._held = ExitStack()
        self._is_closed = False
        self._hashed: list[HashedPiece] = []
        self._temporary = request.folder

    def prepare(self, progress: WorkProgress) -> SavePlan:
        """Hash this rank's values; rank 0 also creates the folder to write into."""
        temporary = self._open_folder() if self._rank == 0 else ""
        self._hashed = hash_pieces(self._request.pieces, progress)
        holdings = encode_holdings([content.holding for content in self._hashed])
        return SavePlan(terms=self._request.terms, holdings=holdings, temporary=temporary)

    def write(self, prepared: Sequence[SavePlan], progress: WorkProgress) -> tuple[ManifestStamp, int]:
        """Write the values that no lower rank holds; return their record for the marker, and their bytes."""
        request, rank = self._request, self._rank
        labels = [content.piece.label for content in self._hashed]
        chosen = choose(labels, [each.holdings for each in prepared], rank)
        self._temporary = request.folder / prepared[0].temporary
        with translated(f"rank {rank} cannot write to {self._temporary}"):
            if not request.files.has_folder(self._temporary):
                raise CheckpointError(
                    f"rank {rank} does not see the folder {self._temporary} that rank 0 has made: {_SHARED}"
                )
            hashed = [self._hashed[index] for index in chosen]
            written = write_rank(
                self._temporary, hashed, request.files, progress, rank=rank, step=request.step, extra=request.extra
            )
        if not request.is_snapshot:
            check_unchanged(hashed, progress)
        return written

    def complete(self, stamps: Sequence[ManifestStamp], progress: WorkProgress) -> tuple[list[str], str | None]:
        """Check all written parts on rank 0, and complete the checkpoint; return those removed, and why others stay."""
        if self._rank != 0:
            return [], None
        request, files = self._request, self._request.files
        self._check_written(stamps, progress)
        with translated(f"rank 0 cannot complete {request.path}"):
            files.sync_folder(self._temporary)
            files.rename(self._temporary, request.path)
            files.sync_folder(request.folder)
            unfinished = request.path / f"{MARKER}.saving"
            write_file(unfinished, [self._marker(stamps)], files, progress)
            files.rename(unfinished, request.path / MARKER)
            files.sync_folder(request.path)
        return self._remove_old()

    def close(self) -> None:
        """Free the lock on the folder, even one that an abandoned phase is about to get."""
        self._is_closed = True
        self._held.close()

    def _open_folder(self) -> str:
        """Create the folder to write into, after removing the remains of failed saves."""
        request, files = self._request, self._request.files
        with translated(f"rank 0 cannot write to {request.folder}"):
            files.make_folder(request.folder)
            try:
                self._held.enter_context(files.lock(request.folder / _LOCK))
            except BlockingIOError as error:
                raise CheckpointError(
                    f"{request.folder}: another save into this folder is under way (ranks that save together pass "
                    "their communicator)"
                ) from error
            if self._is_closed:
                self._held.close()
                raise Stopped
            clean_up(request.folder, files)
            if files.has_folder(request.path):
                raise CheckpointError(f"{request.path} is there already: remove it, or save another step")
            temporary = f"{request.path.name}.saving-{secrets.token_hex(8)}"
            files.make_folder(request.folder / temporary)
        return temporary

    def _check_written(self, stamps: Sequence[ManifestStamp], progress: WorkProgress) -> None:
        """Read back the written manifests of each rank, but not values."""
        manifests = []
        for rank, stamp in enumerate(stamps):
            path = self._temporary / manifest_name(rank)
            with translated(f"rank 0 cannot read {path}, which rank {rank} has written ({_SHARED})"):
                content = self._request.files.read(path, limit=stamp.size)
            manifests.append(decode_manifest(content, stamp, rank=rank, step=self._request.step, path=path))
            progress.advance(1)
        Catalog(manifests, self._request.path).check()

    def _marker(self, stamps: Sequence[ManifestStamp]) -> bytes:
        request = self._request
        return encode_marker(
            Marker(
                format=FORMAT,
                version=VERSION,
                step=request.step,
                ranks=len(stamps),
                model=request.model,
                extra=request.extra,
                manifests=list(stamps),
            )
        )

    def _remove_old(self) -> tuple[list[str], str | None]:
        """Remove old checkpoints.  The new one is already complete, so failures here are logged, not raised."""
        request = self._request
        if request.keep is None:
            return [], None
        try:
            with translated(f"cannot remove old checkpoints from {request.folder}"):
                removed = remove_old(request.folder, request.files, keep=request.keep, saved=request.step)
        except CheckpointError as error:
            return [], str(error)
        return [str(path) for path in removed], None
