"""State that belongs to one rank of one layout, such as residuals of gradient compression.

It is saved beside the pieces that any layout can load, and is restored only by as many ranks in the same layout.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint.loading import Loaded, load_checkpoint
from asyncpar.checkpoint.piece import Piece, Wanted, dtype_named
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.slicing import TensorSlice

_KIND: Final = "rank_state"
_MOST_NAMES: Final = 8
"""Limit of array names that a warning lists."""

_log = logging.getLogger(__name__)


def pieces_of_rank(rank: int, state: Mapping[str, NDArray[Any]]) -> list[Piece]:
    """Return the pieces that hold ``state`` of ``rank``."""
    return [
        Piece(
            name=_name(rank, index),
            kind=_KIND,
            slice=TensorSlice.whole((array.size,)),
            flat=(0, array.size),
            array=array.reshape(-1),
        )
        for index, array in enumerate(state.values())
    ]


def wanted_of_rank(rank: int, arrays: Sequence[tuple[int, str]], *, first: int = 0) -> list[Wanted]:
    """Return the requests for the pieces that ``pieces_of_rank`` has saved.

    ``arrays`` are its counts and names of dtypes, from number ``first`` on.
    """
    return [
        Wanted(
            name=_name(rank, index),
            kind=_KIND,
            slice=TensorSlice.whole((size,)),
            flat=(0, size),
            dtype=dtype_named(dtype) or np.dtype(dtype),
        )
        for index, (size, dtype) in enumerate(arrays, first)
    ]


def describe_state(layout: str, state: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the description of ``state`` to save in this rank's ``extra``.

    ``layout`` describes what each rank holds; equal on all ranks.
    """
    return {"layout": layout, "arrays": [[key, array.size, str(array.dtype)] for key, array in state.items()]}


async def load_rank_state(
    loaded: Loaded,
    described: Sequence[Mapping[str, Any] | None],
    *,
    layout: str,
    model: Mapping[str, Any],
    communicator: Communicator,
    what: str,
    lost: Collection[str] | None = None,
) -> dict[str, NDArray[Any]] | None:
    """Return this rank's state in a ``loaded`` checkpoint; None if it has none for this ``layout``.

    ``described`` are the results of ``describe_state`` on each rank that saved; all ranks call this.  State of another
    layout is dropped, and rank 0 logs a warning about it, called ``what`` there, naming its arrays: those that are
    ``lost`` (None: all), if there are any.
    """
    saved = [one for one in described if one is not None]
    is_same = len(saved) == len(described) == communicator.size and all(one["layout"] == layout for one in saved)
    if not is_same:
        names = dict.fromkeys(key for one in saved for key, _, _ in one["arrays"])
        dropped = [key for key in names if lost is None or key in lost]
        if communicator.rank == 0 and dropped:
            _log.warning(
                "%s: %s was saved by %d ranks (%s) and is dropped on %d ranks (%s): %s",
                loaded.path,
                what,
                len(described),
                saved[0]["layout"],
                communicator.size,
                layout,
                _listed(dropped),
            )
        return None
    if not any(one["arrays"] for one in saved):
        return {}
    rank = communicator.rank
    wanted = wanted_of_rank(rank, [(size, dtype) for _, size, dtype in saved[rank]["arrays"]])
    again = await load_checkpoint(loaded.path, wanted, model=model, communicator=communicator)
    keys = [key for key, _, _ in saved[rank]["arrays"]]
    return dict(zip(keys, again.arrays, strict=True))


def _listed(keys: Collection[str]) -> str:
    """Return the first of ``keys``, and their number."""
    shown = ", ".join(islice(keys, _MOST_NAMES))
    return shown if len(keys) <= _MOST_NAMES else f"{shown} and {len(keys) - _MOST_NAMES} more"


def _name(rank: int, index: int) -> str:
    return f"rank {rank}/{index}"
