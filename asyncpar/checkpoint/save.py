"""Save a checkpoint: all ranks at once, each its part, atomically.

Theory of operation.  Everything is written into a folder under another name, ``step_000000042.saving-...``.  When all
ranks have said that theirs is on disk, rank 0 gives the folder its name and puts the marker into it, each step being
on disk before the next is taken.  So whatever dies whenever, each folder that has a marker is whole; folders without
one are removed by the next save.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncpar.checkpoint.council import Council
from asyncpar.checkpoint.files import FileSystem, LocalFiles
from asyncpar.checkpoint.folder import MOST_STEPS
from asyncpar.checkpoint.library import load_safetensors
from asyncpar.checkpoint.manifest import ManifestStamp
from asyncpar.checkpoint.piece import Piece, check_distinct
from asyncpar.checkpoint.plain import plain_dict
from asyncpar.checkpoint.saving import Prepared, Request, Saved, Saving, check_terms
from asyncpar.checkpoint.writer import identity_of
from asyncpar.collectives.call import Call
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError


def save_checkpoint(
    folder: Path | str,
    *,
    step: int,
    pieces: Sequence[Piece],
    model: Mapping[str, Any],
    communicator: Communicator,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    snapshot: bool = False,
    files: FileSystem | None = None,
) -> Coroutine[Any, Any, Saved]:
    """Save the ``pieces`` of all ranks as the checkpoint of ``step`` in ``folder``, which all ranks must share.

    All ranks call it, in the same order; it takes its place in that order when it is called.  What several ranks hold
    is written once.  Returns, on every rank, when the checkpoint is complete and on disk; the loop stays free
    meanwhile.  The arrays must not change until then (it is an error if they have), unless ``snapshot`` is true: then
    they are copied in the call itself, and what it returns may run as a task beside the training.

    ``model`` says what identifies the model; loading compares it.  ``extra`` is anything JSON keeps (see ``plain``);
    each rank's is saved.  With ``keep``, all complete checkpoints but the ``keep`` last ones are removed, after this
    one is complete.

    Raises on every rank, and leaves no checkpoint of this step: ``UsageError`` for wrong arguments (the others get
    ``CheckpointError``); ``CheckpointError`` naming rank and cause if a rank cannot write, does not see the files of
    the others, or replicas differ, if the step was saved before, or if another save into ``folder`` is under way;
    ``PeerError`` for a rank that dies, is cancelled or does not come.
    """
    council = Council(communicator, f"saving step {step!r:.40}")
    try:
        request = _checked(folder, step, tuple(pieces), model, extra, keep, files or LocalFiles())
    except UsageError as error:
        return council.refuse(error)
    if snapshot:
        copies = tuple(replace(piece, array=np.array(piece.array, order="C")) for piece in request.pieces)
        request = replace(request, pieces=copies, is_snapshot=True)
    return Call(_save(council, request), council.leave_unbegun)


def _checked(
    folder: object,
    step: object,
    pieces: tuple[Piece, ...],
    model: object,
    extra: object,
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
        keep=keep,
        files=files,
    )


async def _save(council: Council, request: Request) -> Saved:
    saving = Saving(request=request, rank=council.rank)
    try:
        prepared = await council.agree(saving.prepare, wanted=Prepared)
        check_terms([each.terms for each in prepared])
        written = await council.agree(
            lambda progress: saving.write(prepared, progress), wanted=tuple[ManifestStamp, int]
        )
        stamps = [stamp for stamp, _ in written]
        ends = await council.agree(
            lambda progress: saving.complete(stamps, progress), wanted=tuple[list[str], str | None]
        )
    finally:
        saving.close()
    removed, left = ends[0]
    return Saved(
        path=request.path,
        step=request.step,
        nbytes=written[council.rank][1],
        removed=tuple(Path(path) for path in removed),
        left=left,
    )
