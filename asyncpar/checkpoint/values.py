"""Saving and loading of plain nested dictionaries of arrays, by any numbers of ranks."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint.group import CheckpointGroup
from asyncpar.checkpoint.loading import Loaded, load_checkpoint
from asyncpar.checkpoint.piece import Piece, Wanted, dtype_named
from asyncpar.checkpoint.rank_state import pieces_of_rank, wanted_of_rank
from asyncpar.checkpoint.saving import Saved, save_checkpoint
from asyncpar.checkpoint.tree import TreeEntry, check_root, decode_entries, flatten, merge, unflatten
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.slicing import TensorSlice, ceil_chunks
from asyncpar.errors import UsageError

_log = logging.getLogger(__name__)

_MODEL: Final = {"values": "plain"}
_SPLIT_BYTES: Final = 1 << 20
"""Arrays are cut into one range per rank, none smaller than this size."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint loaded from ``path``: its ``step``, and ``values`` as they were saved."""

    path: Path
    step: int
    values: dict[str, Any]


def save(
    folder: Path | str,
    values: Mapping[str, Any],
    *,
    step: int,
    communicator: Communicator | None = None,
    keep: int | None = None,
    snapshot: bool = False,
) -> Coroutine[Any, Any, Saved]:
    """Save ``values`` as the checkpoint of ``step`` in ``folder``, which all ranks of ``communicator`` share.

    ``values`` is a dictionary of arrays and scalars of numpy, numbers, strings, None, and dictionaries, lists and
    tuples of them.  All of it is equal on all ranks except values marked as ``PerRank``; a difference is an error
    naming the place and the ranks.  States of ``DiLoCo`` may be included directly.  Each array is written once: every
    rank writes its share.  Without ``communicator`` this process saves alone.

    Otherwise like ``save_checkpoint``: atomic on all ranks, so that a kill during a save preserves the last one; all
    ranks call it; arrays must not change before it returns, unless ``snapshot`` is true; ``keep`` is the number of
    checkpoints that stay.  Raises ``UsageError`` naming the place of a value that would not be restored as it is.
    """
    try:
        check_root(values, "values")
        flat = flatten(dict(values), "values")
        own = [flatten(value, f"values: PerRank {index}", may_split=False) for index, value in enumerate(flat.of_rank)]
        rank, size = _place_in(communicator)
    except UsageError as error:
        checked = communicator if isinstance(communicator, Communicator) else None
        return CheckpointGroup(checked, f"saving step {step!r:.40}").refuse(error)
    names = [entry.name for entry in flat.entries if entry.has_array]
    pieces = [piece for name, array in zip(names, flat.arrays, strict=True) for piece in _pieces(name, array, size)]
    arrays = {str(index): array for index, array in enumerate(array for one in own for array in one.arrays)}
    entries = msgspec.to_builtins(flat.entries)
    return save_checkpoint(
        folder,
        step=step,
        pieces=pieces + pieces_of_rank(rank, arrays),
        model=_MODEL,
        communicator=communicator,
        extra={"entries": entries, "of_rank": [msgspec.to_builtins(one.entries) for one in own]},
        equal={"values": _described(flat.entries)},
        keep=keep,
        snapshot=snapshot,
    )


async def load(folder: Path | str, *, communicator: Communicator | None = None, step: int | None = None) -> Checkpoint:
    """Return the last complete checkpoint in ``folder``, or that of ``step``; all ranks of ``communicator`` call it.

    Their number may differ from that of the ranks that saved it; each gets all values, and its own of ``PerRank`` ones
    (see there for another number of ranks).  ``folder`` may also be that of one checkpoint.  Use ``latest`` to check
    whether there is one.  Raises ``CheckpointError`` if there is none, it is damaged or was not saved by ``save``, on
    all ranks alike.
    """
    rank, size = _place_in(communicator)
    seen = await load_checkpoint(folder, [], model=_MODEL, communicator=communicator, step=step)
    entries = decode_entries(seen.extra.get("entries"), seen.path)
    described = [[decode_entries(one, seen.path) for one in extra.get("of_rank", ())] for extra in seen.extras]
    is_same = len(described) == size
    readers = [rank] if is_same else range(len(described))
    wanted = [_wanted(entry) for entry in entries if entry.has_array]
    of_ranks = [wanted_of_rank(reader, _sizes(described[reader])) for reader in readers]
    loaded = await load_checkpoint(
        seen.path, wanted + [one for each in of_ranks for one in each], model=_MODEL, communicator=communicator
    )
    given = iter(loaded.arrays[len(wanted) :])
    own = [[_rebuilt(one, given, seen) for one in described[reader]] for reader in readers]
    mine = own[0] if is_same else _merged(own, seen, rank)
    shared = [array.reshape(entry.shape) for array, entry in zip(loaded.arrays, _with_arrays(entries), strict=False)]
    return Checkpoint(path=seen.path, step=seen.step, values=unflatten(entries, shared, mine, seen.path))


def _place_in(communicator: object) -> tuple[int, int]:
    """Return rank and size.  Raises ``UsageError`` for anything but a communicator of coroutines."""
    if communicator is None:
        return 0, 1
    if not isinstance(communicator, Communicator):
        raise UsageError(
            "communicator: expected a Communicator such as node.world, or None to be alone, got "
            f"{communicator!r:.80}; blocking programs call asyncpar.checkpoint.blocking.save and load"
        )
    return communicator.rank, communicator.size


def _pieces(name: str, array: NDArray[Any], size: int) -> list[Piece]:
    """Return ``array`` in as many ranges as ranks can divide among themselves."""
    flat = np.ascontiguousarray(array).reshape(-1)
    parts = max(1, min(size, array.nbytes // _SPLIT_BYTES))
    whole = TensorSlice.whole(array.shape)
    return [
        Piece(name=name, kind="value", slice=whole, flat=(start, stop), array=flat[start:stop])
        for start, stop in ceil_chunks(flat.size, parts)
    ]


def _described(entries: Sequence[TreeEntry]) -> dict[str, Any]:
    """Return the entries that must be equal on all ranks, by place, for messages."""
    return {
        "/".join(map(str, entry.path)) or "(all)": {
            key: value for key, value in msgspec.to_builtins(entry).items() if key != "path"
        }
        for entry in entries
    }


def _with_arrays(entries: Sequence[TreeEntry]) -> list[TreeEntry]:
    return [entry for entry in entries if entry.has_array]


def _wanted(entry: TreeEntry) -> Wanted:
    whole = TensorSlice.whole(entry.shape)
    size = int(np.prod(entry.shape, dtype=np.int64))
    dtype = dtype_named(entry.dtype)
    assert dtype is not None, "decode_entries has checked it"
    return Wanted(name=entry.name, kind="value", slice=whole, flat=(0, size), dtype=dtype)


def _sizes(trees: Sequence[Sequence[TreeEntry]]) -> list[tuple[int, str]]:
    """Return count and dtype of each array of a rank's own values, in order."""
    return [(int(np.prod(entry.shape, dtype=np.int64)), entry.dtype) for tree in trees for entry in _with_arrays(tree)]


def _rebuilt(entries: Sequence[TreeEntry], given: Any, seen: Loaded) -> Any:
    arrays = [next(given).reshape(entry.shape) for entry in _with_arrays(entries)]
    return unflatten(entries, arrays, (), seen.path)


def _merged(own: Sequence[Sequence[Any]], seen: Loaded, rank: int) -> list[Any]:
    """Return one value in place of each rank's, for each ``PerRank``."""
    dropped: list[str] = []
    merged = [merge(values, dropped) for values in zip(*own, strict=True)]
    if dropped and rank == 0:
        _log.warning(
            "%s: %s of the %d ranks that saved cannot be given to another number of ranks, and is left out",
            seen.path,
            ", ".join(dropped),
            len(own),
        )
    return merged
