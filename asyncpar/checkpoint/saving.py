"""One save on one rank: what it does in each phase.  Blocking; each phase runs in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncpar.checkpoint.catalog import Catalog
from asyncpar.checkpoint.files import FileSystem
from asyncpar.checkpoint.folder import folder_name, remove_old, tidy, translated
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
from asyncpar.checkpoint.piece import Piece
from asyncpar.checkpoint.plain import decode_plain, encode_plain, first_difference
from asyncpar.checkpoint.progress import Progress, Stopped
from asyncpar.checkpoint.replicas import choose, encode_holdings
from asyncpar.checkpoint.writer import Content, check_unchanged, hash_pieces, write_file, write_rank
from asyncpar.errors import CheckpointError, UsageError

_LOCK: Final = ".saving.lock"
_SHARED: Final = "all ranks must share one file system, with the folder in the same place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is complete: where, how many bytes this rank wrote, which old ones were removed.

    ``left`` says why old ones could not be removed, if that is so.
    """

    path: Path
    step: int
    nbytes: int
    removed: tuple[Path, ...] = ()
    left: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What a rank was asked to save."""

    folder: Path
    step: int
    pieces: tuple[Piece, ...]
    model: dict[str, Any]
    extra: dict[str, Any]
    keep: int | None
    files: FileSystem
    is_snapshot: bool = False
    """Has nobody else the arrays?"""

    @property
    def path(self) -> Path:
        return self.folder / folder_name(self.step)

    @property
    def terms(self) -> bytes:
        """What must be the same on all ranks."""
        return encode_plain({"step": self.step, "keep": self.keep, "model": self.model})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a rank tells the others before anything is written; rank 0 also where to write."""

    terms: bytes
    holdings: bytes
    temporary: str = ""


def check_terms(terms: Sequence[bytes]) -> None:
    """Raise ``UsageError`` naming ranks and field, unless all ranks were asked for the same."""
    for rank, other in enumerate(terms):
        if other != terms[0]:
            difference = first_difference(
                decode_plain(terms[0]), decode_plain(other), "arguments", ("rank 0", f"rank {rank}")
            )
            raise UsageError(f"ranks save different things: {difference}")


class Saving:
    """The phases, in order: ``prepare``, ``write``, ``complete``; then ``close``, whatever has happened."""

    def __init__(self, *, request: Request, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._held = ExitStack()
        self._is_closed = False
        self._contents: list[Content] = []
        self._temporary = request.folder

    def prepare(self, progress: Progress) -> Prepared:
        """Hash what this rank holds; rank 0 also makes the folder to write into."""
        temporary = self._open_folder() if self._rank == 0 else ""
        self._contents = hash_pieces(self._request.pieces, progress)
        holdings = encode_holdings([content.holding for content in self._contents])
        return Prepared(terms=self._request.terms, holdings=holdings, temporary=temporary)

    def write(self, prepared: Sequence[Prepared], progress: Progress) -> tuple[ManifestStamp, int]:
        """Write what no lower rank holds; return what the marker says of it, and its bytes."""
        request, rank = self._request, self._rank
        labels = [content.piece.label for content in self._contents]
        chosen = choose(labels, [each.holdings for each in prepared], rank)
        self._temporary = request.folder / prepared[0].temporary
        with translated(f"rank {rank} cannot write to {self._temporary}"):
            if not request.files.has_folder(self._temporary):
                raise CheckpointError(
                    f"rank {rank} does not see the folder {self._temporary} that rank 0 has made: {_SHARED}"
                )
            contents = [self._contents[index] for index in chosen]
            written = write_rank(
                self._temporary, contents, request.files, progress, rank=rank, step=request.step, extra=request.extra
            )
        if not request.is_snapshot:
            check_unchanged(contents, progress)
        return written

    def complete(self, stamps: Sequence[ManifestStamp], progress: Progress) -> tuple[list[str], str | None]:
        """Rank 0 looks at what all have written, and makes it a checkpoint; return what it removed, and why not."""
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
        """Free the lock on the folder, also one that a phase which nobody waits for any more is about to get."""
        self._is_closed = True
        self._held.close()

    def _open_folder(self) -> str:
        """Make the folder to write into, after removing what saves that failed have left."""
        request, files = self._request, self._request.files
        with translated(f"rank 0 cannot write to {request.folder}"):
            files.make_folder(request.folder)
            try:
                self._held.enter_context(files.lock(request.folder / _LOCK))
            except BlockingIOError as error:
                raise CheckpointError(f"{request.folder}: another save into this folder is under way") from error
            if self._is_closed:
                self._held.close()
                raise Stopped
            tidy(request.folder, files)
            if files.has_folder(request.path):
                raise CheckpointError(f"{request.path} is there already: remove it, or save another step")
            temporary = f"{request.path.name}.saving-{secrets.token_hex(8)}"
            files.make_folder(request.folder / temporary)
        return temporary

    def _check_written(self, stamps: Sequence[ManifestStamp], progress: Progress) -> None:
        """Read back what each rank says it has written: manifests, not values."""
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
        """Remove old checkpoints.  The new one is complete by now, so what fails here is told and no error."""
        request = self._request
        if request.keep is None:
            return [], None
        try:
            with translated(f"cannot remove old checkpoints from {request.folder}"):
                removed = remove_old(request.folder, request.files, keep=request.keep, saved=request.step)
        except CheckpointError as error:
            return [], str(error)
        return [str(path) for path in removed], None
