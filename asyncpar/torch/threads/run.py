"""Many ranks in one process: each a thread with a ``torch.distributed`` of its own, for quick tests.

def sums(rank: int) -> float:
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    return float(x.sum())

assert run_threads(4, sums) == [18.0] * 4
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from asyncpar.blocking.thread import background
from asyncpar.core.observe.loop_watch import format_frames
from asyncpar.core.records import dataclass
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.torch.backend_name import NAME
from asyncpar.torch.threads.worlds import InProcess, ThreadWorlds, in_process_world, thread_worlds

T = TypeVar("T")
Arguments = ParamSpec("Arguments")

_LONGER = 60.0

TIMEOUT = 60.0
"""Seconds that ranks have by default."""

GRACE = 5.0
"""Seconds that ranks have to end after their groups were ended, by default."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """Shared by the ranks of one run."""

    size: int
    worlds: ThreadWorlds
    store: Any
    seconds: float
    begun: threading.Barrier
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    """In the order in which they happened."""
    groups: dict[int, Any] = field(default_factory=dict)


def run_threads(
    size: int,
    function: Callable[Concatenate[int, Arguments], T],
    /,
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> list[T]:
    """Call ``function(rank, *args, **kwargs)`` on ``size`` ranks, within ``TIMEOUT`` seconds; see ``ThreadRanks``."""
    return ThreadRanks(size).run(function, *args, **kwargs)


class ThreadRanks:
    """``size`` ranks, threads of this process, that have ``timeout`` seconds for a run.

    Each has its own default group of the backend ``asyncpar``, already initialized, and may make others; all share the
    background loop, and frames are handed over in memory.  What torch keeps once per process, they share, too: the
    random numbers, and what threads see that they start themselves.  ``torch.compile`` is not for several threads.
    """

    def __init__(self, size: int, *, timeout: float = TIMEOUT) -> None:
        if size < 1:
            raise UsageError(f"size: expected at least 1 rank, got {size}")
        if not timeout > 0.0:
            raise UsageError(f"timeout: expected a positive number of seconds, got {timeout}")
        self.size = size
        self.timeout = timeout
        self.grace = GRACE
        """Seconds that ranks have to end after their groups were ended."""

    def run(
        self, function: Callable[Concatenate[int, Arguments], T], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> list[T]:
        """Return what ``function(rank, ...)`` returns on each rank.

        When it raises on one rank, the groups of that rank end, and so do the operations of others with it; then what
        was raised first is raised here.  Raises ``PeerTimeout`` that says where ranks are that are not over in time.
        Nothing is left but threads that never end.
        """
        background().check_may_wait()
        with thread_worlds() as worlds:
            run = _Run(
                size=self.size,
                worlds=worlds,
                store=dist.HashStore(),
                seconds=self.timeout,
                begun=threading.Barrier(self.size),
            )
            threads = [
                threading.Thread(
                    target=copy_context().run,
                    args=(_be_rank, run, rank, options, lambda rank: function(rank, *args, **kwargs)),
                    name=f"rank {rank}",
                    daemon=True,
                )
                for rank, options in enumerate(in_process_world(self.size))
            ]
            try:
                for thread in threads:
                    thread.start()
                _join(threads, self.timeout)
            finally:
                where = _end(run, threads, self.grace)
        _raise_failure(run, where)
        return [run.results[rank] for rank in range(self.size)]


# -- in the thread of a rank -------------------------------------------------------------------------------------------


def _be_rank(run: _Run, rank: int, options: InProcess, function: Callable[[int], Any]) -> None:
    """Run ``rank``; its result or error is stored in ``run``."""
    run.worlds.enter()
    torch.autograd.set_multithreading_enabled(False)  # the engine's own threads have no groups
    torch.set_num_threads(1)
    try:
        try:
            _begin(run, rank, options)
            run.results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001  # raised where the run was begun
            run.failures.append((rank, error))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  # of the ending
        run.failures.append((rank, error))


def _begin(run: _Run, rank: int, options: InProcess) -> None:
    """Make the default group, and wait until all ranks have theirs."""
    try:
        dist.init_process_group(
            NAME,
            store=run.store,
            rank=rank,
            world_size=run.size,
            timeout=timedelta(seconds=run.seconds + _LONGER),  # so that ranks do not time out at the same time
            pg_options=options,
        )
    except BaseException:
        run.begun.abort()
        raise
    run.groups[rank] = dist.group.WORLD
    run.begun.wait(run.seconds)


# -- where the run was begun -------------------------------------------------------------------------------------------


def _join(threads: list[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _end(run: _Run, threads: list[threading.Thread], grace: float) -> dict[int, str]:
    """End the groups of ranks that are not over; return where those ranks were."""
    late = {rank: _place_of(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    run.begun.abort()
    for rank in late:
        if rank in run.groups:
            run.groups[rank].abort()
    _join(threads, grace if late else 0.0)
    if any(thread.is_alive() for thread in threads):
        run.worlds.keep()
    return late


def _place_of(thread: threading.Thread) -> str:
    """Return what ``thread`` is doing."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (
        "ended just now" if frame is None else format_frames([each for each, _ in traceback.walk_stack(frame)]) + "\n"
    )


def _raise_failure(run: _Run, late: dict[int, str]) -> None:
    """Raise what went wrong first, if anything did."""
    if late:
        ranks = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        error: BaseException = PeerTimeout(f"{ranks} of {run.size} threads: not over within {run.seconds} s")
        for rank, place in late.items():
            error.add_note(f"rank {rank} was here:\n{place}")
        early = [one for one in run.failures if one[0] not in late]
        raise error from (early[0][1] if early else None)
    if run.failures:
        rank, error = next(
            (one for one in run.failures if not isinstance(one[1], threading.BrokenBarrierError)), run.failures[0]
        )
        error.add_note(f"This was raised on rank {rank} of {run.size} threads.")
        for other, also in run.failures:
            if other != rank:
                error.add_note(f"Then rank {other} ended with {type(also).__name__}: {also}")
        raise error
