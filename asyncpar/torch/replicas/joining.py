"""Ranks with fewer batches than others: the announcements of all ranks in each forward, and the work of finished ranks.

Under torch's ``Join`` (torch.distributed.algorithms.join) a rank that has finished repeats the collectives of the
others until all have finished.  Before each forward all ranks announce what they are about to do, so finished ranks
learn which collectives follow, and all learn which ranks remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.algorithms.join import JoinHook

from asyncpar.errors import UsageError
from asyncpar.torch.process_group import ProcessGroup

_OPERATION = "all_gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTurn:
    """The forward of a rank and the backward that follows: the same on all ranks that have not finished.

    ``source`` is the rank whose buffers, and whose order of gradients, count; ``active`` are the ranks that have not
    finished, all of them without ``Join``.
    """

    reduces: bool
    copies: bool
    source: int = 0
    active: int = 0


def agree_on_turn(group: ProcessGroup, own: ForwardTurn | None) -> ForwardTurn:
    """Return the turn of the ranks that have not finished; ``own`` is None on a rank that has.

    Raises ``UsageError`` on all ranks if they are about to do different things.
    """
    rows = _exchange(group, [0, 0, 0] if own is None else [1, own.reduces, own.copies])
    (active,) = np.nonzero(rows[:, 0])
    odd = np.flatnonzero((rows[active] != rows[active[:1]]).any(1))
    if len(odd):
        ranks = group.communicator.ranks
        raise UsageError(
            f"forward: expected all ranks to reduce gradients, or none, got rank {ranks[active[0]]} "
            f"{_describe(rows[active[0]])} and rank {ranks[active[odd[0]]]} {_describe(rows[active[odd[0]]])}; use "
            "no_sync() and torch.no_grad() on all ranks alike"
        )
    _, reduces, copies = rows[active[-1]]
    return ForwardTurn(reduces=bool(reduces), copies=bool(copies), source=int(active[-1]), active=len(active))


def find_last(group: ProcessGroup, *, is_last: bool) -> int:
    """Return the highest of the ranks that finished last."""
    return int(np.flatnonzero(_exchange(group, [is_last])[:, 0])[-1])


def _exchange(group: ProcessGroup, row: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Return the rows of all ranks; ``row`` is that of this one."""
    communicator = group.communicator
    own, every = np.array(row, np.int32), np.zeros((communicator.size, len(row)), np.int32)
    group.start(lambda: communicator.all_gather(own, out=every), (), operation=_OPERATION).wait()
    return every


def _describe(row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
    _, reduces, copies = row.tolist()
    return f"{'with' if reduces else 'without'} reduction and {'with' if copies else 'without'} buffers from another"


class OwnGradients:
    """A copy of the gradients of ``parameters``."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._kept = [(each, None if each.grad is None else each.grad.clone()) for each in parameters]

    def restore(self) -> None:
        """Make them the gradients again, in the current buckets."""
        for parameter, gradient in self._kept:
            now = parameter.grad
            if gradient is None or now is None or now.layout is not torch.strided:
                parameter.grad = gradient
            else:
                now.copy_(gradient)


class ReplicaJoinHook(JoinHook):
    """Calls ``shadow`` for each forward and backward of other ranks, and ``end`` once all have finished."""

    def __init__(self, shadow: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._shadow = shadow
        self._end = end

    def main_hook(self) -> None:
        """Repeat one forward and backward of the ranks that have not finished."""
        self._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that finished last."""
        self._end(is_last_joiner)
