"""A wait with a timeout that is over in vain names the rank that has not come.

Generated: each kind of operation, of a few bytes and of many, with each rank as the one that is late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncpar.collectives.inquiry
import asyncpar.torch.group_base
from asyncpar.errors import PeerTimeout
from asyncpar.torch import run_threads
from tests.soak import chosen

SIZE = 4
SOON = timedelta(milliseconds=50)
MANY = 1 << 18


def _tensors(rank: int, length: int = 4) -> list[torch.Tensor]:
    return [torch.ones(length) for _ in range(SIZE)]


def _ones(length: int = 4) -> torch.Tensor:
    return torch.ones(length)


def _if_root(rank: int, root: int) -> list[torch.Tensor] | None:
    return _tensors(rank) if rank == root else None


CALLS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda r: dist.all_reduce(_ones(), async_op=True),
    "all_reduce of many": lambda r: dist.all_reduce(_ones(MANY), async_op=True),
    "broadcast": lambda r: dist.broadcast(_ones(), 1, async_op=True),
    "broadcast of many": lambda r: dist.broadcast(_ones(MANY), 1, async_op=True),
    "reduce": lambda r: dist.reduce(_ones(), 2, async_op=True),
    "all_gather": lambda r: dist.all_gather(_tensors(r), _ones(), async_op=True),
    "all_gather of uneven": lambda r: dist.all_gather([_ones(1 + n) for n in range(SIZE)], _ones(1 + r), async_op=True),
    "all_gather_into_tensor": lambda r: dist.all_gather_single(_ones(4 * MANY), _ones(MANY), async_op=True),
    "gather": lambda r: dist.gather(_ones(), _if_root(r, 3), 3, async_op=True),
    "scatter": lambda r: dist.scatter(_ones(), _if_root(r, 0), 0, async_op=True),
    "reduce_scatter": lambda r: dist.reduce_scatter_single(_ones(), _ones(4 * SIZE), async_op=True),
    "reduce_scatter of many": lambda r: dist.reduce_scatter_single(_ones(MANY), _ones(4 * MANY), async_op=True),
    "all_to_all": lambda r: dist.all_to_all_single(_ones(4 * SIZE), _ones(4 * SIZE), async_op=True),
    "barrier": lambda r: dist.barrier(async_op=True),
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks take as long as they need for their answers, however busy the machine is."""
    monkeypatch.setattr(asyncpar.torch.group_base, "ANSWER_SECONDS", 30.0)
    monkeypatch.setattr(asyncpar.collectives.inquiry, "SILENT_AFTER", 30.0)


def _named(work: Any) -> tuple[int | None, bool]:
    """Wait in vain for ``work``; return the rank that the error has, and whether its text names it."""
    with pytest.raises(PeerTimeout, match=r"not over after the 0\.05 s that wait was given") as caught:
        work.wait(SOON)
    return caught.value.rank, f"because of rank {caught.value.rank}; it goes on" in str(caught.value)


class Late:
    """Rank ``missing`` comes to ``call`` when the other ranks have waited in vain."""

    def __init__(self, call: Callable[[int], Any], missing: int) -> None:
        self.call = call
        self.missing = missing
        self.begun = threading.Barrier(SIZE - 1, timeout=60)
        self.waited = threading.Barrier(SIZE, timeout=60)

    def __call__(self, rank: int) -> tuple[int | None, bool] | None:
        found = None
        if rank != self.missing:
            work = self.call(rank)
            self.begun.wait()  # else another rank could be late, too
            if not work.is_completed():  # as for the root of a small broadcast, which waits for no rank
                found = _named(work)
            self.waited.wait()
        else:
            self.waited.wait()
            work = self.call(rank)
        work.wait()
        return found


@pytest.mark.parametrize(("name", "late"), [(name, 1 + number % (SIZE - 1)) for number, name in enumerate(CALLS)])
def test_the_rank_that_has_not_come_is_named(name: str, late: int) -> None:
    for missing in chosen((0, late), soak=tuple(range(SIZE))):
        found = [named for named in run_threads(SIZE, Late(CALLS[name], missing)) if named is not None]
        assert set(found) <= {(missing, True)}, f"rank {missing} was late"
        assert found or (name, missing) not in {("all_reduce", 0), ("barrier", 0)}


class LateSender:
    """Rank 2 sends to ranks 0 and 3 when rank 0 has waited in vain; rank 3 has that message before it sends itself."""

    def __init__(self) -> None:
        self.begun, self.waited = threading.Event(), threading.Event()

    def __call__(self, rank: int) -> list[tuple[int | None, bool]]:
        x = _ones()
        if rank == 0:
            first, missing, behind = (dist.irecv(_ones(), other) for other in (1, 2, 3))
            assert first is not None
            assert missing is not None
            assert behind is not None
            first.wait()
            assert self.begun.wait(60)
            found = [_named(missing), _named(behind)]
            self.waited.set()
            missing.wait()
            behind.wait()
            return found
        if rank == 2:
            assert self.waited.wait(120)
            dist.send(x, 3)
        elif rank == 3:
            work = dist.irecv(x, 2)
            self.begun.set()
            assert work is not None
            work.wait()
        dist.send(x, 0)
        return []


def test_the_rank_that_has_not_sent_is_named_also_behind_another_one() -> None:
    assert run_threads(SIZE, LateSender())[0] == [(2, True), (2, True)]
