"""Operations that are waited for by their tensors: ``wait_tensor`` of torch's functional collectives.

torch keeps, for each thread, which works belong to which storage.  Functional collectives enter theirs themselves,
and take them out by ``wait_tensor``.  Under ``allow_inflight_collective_as_graph_input_ctx()`` all other operations are
entered, too, and taken out by ``Work.wait``.  For a work of Python torch offers no way to take out one, only to wait
for all of a storage; so ``forget`` does that, while works other than its own only enter themselves again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

is_on = c10d._allow_inflight_collective_as_graph_input
"""Are operations to be waited for by their tensors?"""


class _Removal(threading.local):
    """The work that this thread is taking out, and the others that it has met meanwhile."""

    work: object = None
    met: list[Any]


_removal = _Removal()


def enter(work: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Let ``wait_tensor`` wait for ``work`` where it is given one of ``tensors``; return those that have storages."""
    known = [tensor for tensor in tensors if tensor.layout is torch.strided]
    for tensor in known:
        c10d._register_work(tensor, work)
    return known


def forget(work: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Undo ``enter``, in the same thread, for a work that is over."""
    for tensor in tensors:
        _removal.work, _removal.met = work, []
        try:
            torch.ops._c10d_functional.wait_tensor(tensor)
        finally:
            _removal.work, met = None, _removal.met
            for other in met:
                c10d._register_work(tensor, other)


def is_passed_over(work: Any) -> bool:
    """Is ``work`` being waited for only because ``forget`` takes out another, or itself?"""
    if _removal.work is None:
        return False
    if _removal.work is not work:
        _removal.met.append(work)
    return True
