"""Load a checkpoint: all ranks at once, each what it wants of it, or none."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from asyncpar.checkpoint.council import Council
from asyncpar.checkpoint.library import load_safetensors
from asyncpar.checkpoint.loading import Contents, LoadedPart, LoadRequest, find_contents, read_contents
from asyncpar.checkpoint.piece import Wanted
from asyncpar.checkpoint.plain import plain_dict
from asyncpar.collectives.call import Call
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What was loaded, from ``path``.

    ``arrays`` are in the order of what was wanted, each of the shape of the part, or flat where only a range of it was
    wanted; nobody else holds them.  ``extra`` is what rank 0 saved as that, ``extras`` what each rank did, ``nbytes``
    how many bytes of values this rank has read.
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
    communicator: Communicator,
    step: int | None = None,
) -> Coroutine[Any, Any, Loaded]:
    """Return what this rank wants of the last complete checkpoint in ``folder``, or of that of ``step``.

    ``folder`` may also be that of one checkpoint.  All ranks call it, in the same order, however many have saved it
    and in whatever layout; each reads only the blocks (of 1 MiB) that hold something it wants.  Every value is
    verified before any is returned, and they are returned on all ranks or none: what fails on one rank is an error on
    every rank, naming it.  (Only a rank that dies or is cancelled in the last exchange may be the only one to raise.)

    Raises ``UsageError`` for wrong arguments (the others get ``CheckpointError``); ``CheckpointError`` if there is no
    complete checkpoint, it is one of another ``model`` or of a newer format, lacks a tensor or has it in another shape
    or dtype, cannot be read or is damaged; ``PeerError`` for a rank that dies, is cancelled or does not come.
    """
    council = Council(communicator, "loading a checkpoint")
    try:
        request = _checked(folder, tuple(wanted), model, step)
    except UsageError as error:
        return council.refuse(error)
    return Call(_load(council, request), council.leave_unbegun)


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


async def _load(council: Council, request: LoadRequest) -> Loaded:
    is_first = council.rank == 0
    found = await council.agree(
        lambda progress: find_contents(request, progress) if is_first else None, wanted=Contents | None
    )
    contents = found[0]
    assert contents is not None, "rank 0 has found it, or failed"
    parts: list[LoadedPart] = []
    await council.agree(
        lambda progress: parts.append(read_contents(request, contents, progress, rank=council.rank)), wanted=None
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
