"""Many ranks in one process, for quick tests: each is a thread with a ``torch.distributed`` of its own.

def sums(rank: int) -> float:
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    return float(x.sum())

assert run_threads(4, sums) == [18.0] * 4

torch keeps its groups in one object of ``torch.distributed.distributed_c10d``, which may be replaced, and by name in
C++, where it can keep them by thread.  While ``thread_worlds`` is open, a thread that has called ``ThreadWorlds.enter``
has groups of its own.  All other threads use those of the process, but cannot find them by name, as functional
collectives do.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from asyncpar.blocking.thread import background
from asyncpar.bootstrap import Attach, WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.core.observe.loop_watch import format_frames
from asyncpar.errors import PeerTimeout, UsageError
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.torch.instrumentation import NAME

_HOST = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """The ``pg_options`` of a default group whose ranks are all in this process: this rank's access to it."""

    attach: Attach


def in_process_world(size: int) -> list[InProcess]:
    """Return the options of the ranks of one world, in which frames are passed in memory."""
    members = tuple(Member(rank=rank, host=_HOST, host_id=_HOST, local_rank=rank) for rank in range(size))
    world, fabric = World(members=members), InprocFabric()

    def attach_as(rank: int) -> Attach:
        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            stack.callback(fabric.leave, rank)
            return WorldBootstrap(world=world, rank=rank, connector=InprocConnector(fabric), join=fabric.join)

        return attach

    return [InProcess(attach=attach_as(rank)) for rank in range(size)]


class RankWorld(c10d._World):
    """The groups of one rank.  The attributes hide torch's properties of these names, which belong to the process."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


class ThreadWorlds:
    """Replaces torch's world: that of the thread, or ``others`` for threads without one."""

    def __init__(self, others: Any) -> None:
        vars(self).update(others=others, own=threading.local(), is_kept=False)

    def of_thread(self) -> Any:
        return getattr(self.own, "world", self.others)

    def enter(self) -> None:
        """Give this thread its own world, without groups."""
        self.own.world = RankWorld()

    def keep(self) -> None:
        """Stay installed, because threads remain that must not use the groups of others."""
        vars(self).update(is_kept=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_thread(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of_thread(), name, value)


_lock = threading.Lock()
_users = 0
"""The number of open blocks of ``thread_worlds`` in this process."""


@contextmanager
def thread_worlds() -> Iterator[ThreadWorlds]:
    """Allow threads their own worlds in the block; blocks of several threads may overlap."""
    global _users  # noqa: PLW0603
    with _lock:
        if _users == 0:
            _install()
        _users += 1
        worlds: ThreadWorlds = c10d._world
    try:
        yield worlds
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _uninstall(worlds)


_replaced: dict[str, Any] = {}


def _install() -> None:
    """Replace the state that torch has once per process."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # takes a second

    _replaced.update(lock=ShardingPropagator._fake_mode_lock, hook=sys.excepthook, threads=torch.get_num_threads())
    ShardingPropagator._fake_mode_lock = threading.Lock()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    if not isinstance(c10d._world, ThreadWorlds):
        c10d._world = ThreadWorlds(c10d._world)


def _uninstall(worlds: ThreadWorlds) -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    if not worlds.is_kept:
        c10d._world = worlds.others
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    ShardingPropagator._fake_mode_lock = _replaced["lock"]
    sys.excepthook = _replaced["hook"]  # each group that is initialized puts one in front of it
    torch.set_num_threads(_replaced["threads"])
    _replaced.clear()


T = TypeVar("T")
Arguments = ParamSpec("Arguments")

_LONGER = 60.0

TIMEOUT = 60.0
"""Default seconds for a run."""

GRACE = 5.0
"""Default seconds for ranks to end after their groups were ended."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """State shared by the ranks of one run."""

    size: int
    worlds: ThreadWorlds
    store: Any
    seconds: float
    begun: threading.Barrier
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[int, BaseException]] = field(default_factory=list)
    """Failures in the order in which they happened."""
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
    """``size`` ranks, threads of this process, with ``timeout`` seconds for a run.

    Each has an initialized default group of the backend ``asyncpar`` and may make other groups.  All share the
    background event loop, and frames are passed in memory.  They also share torch's state of the process, such as the
    generator of random numbers; threads that a rank starts have the groups of the process.  ``torch.compile`` does not
    support several threads.
    """

    def __init__(self, size: int, *, timeout: float = TIMEOUT) -> None:
        if size < 1:
            raise UsageError(f"size: expected at least 1 rank, got {size}")
        if not timeout > 0.0:
            raise UsageError(f"timeout: expected a positive number of seconds, got {timeout}")
        self.size = size
        self.timeout = timeout
        self.grace = GRACE
        """Seconds for ranks to end after their groups were ended."""

    def run(
        self, function: Callable[Concatenate[int, Arguments], T], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> list[T]:
        """Return the results of ``function(rank, ...)`` by rank.

        When it raises on one rank, the groups of that rank end, and the operations of others with it fail; the first
        error is raised here.  Raises ``PeerTimeout``, with the stacks of the ranks that have not returned in time;
        only the threads of ranks that never return are left.
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
                    args=(_run_rank, run, rank, options, lambda rank: function(rank, *args, **kwargs)),
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


def _run_rank(run: _Run, rank: int, options: InProcess, function: Callable[[int], Any]) -> None:
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
    """Create the default group, and wait until all ranks have theirs."""
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
    """End the groups of ranks that have not returned; return their stacks."""
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
    """Return the stack of ``thread`` as text."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (
        "ended just now" if frame is None else format_frames([each for each, _ in traceback.walk_stack(frame)]) + "\n"
    )


def _raise_failure(run: _Run, late: dict[int, str]) -> None:
    """Raise the first error, or ``PeerTimeout`` if ranks were ``late``."""
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
