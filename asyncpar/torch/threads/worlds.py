"""A world of ``torch.distributed`` for each thread.

Torch keeps its groups in one object of ``torch.distributed.distributed_c10d``, made to be replaced, and by name in C++,
where it can keep them by thread.  While ``thread_worlds`` is open, threads that ``enter_world`` have groups of their
own; all others go on with those of the process, but find none of them by name (functional collectives do).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from asyncpar.bootstrap import Attach, WorldBootstrap
from asyncpar.core.config.world import Member, World
from asyncpar.core.records import dataclass
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric

_HOST = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """The ``pg_options`` of a default group whose ranks are all in this process: how this rank gets there."""

    attach: Attach


def in_process_world(size: int) -> list[InProcess]:
    """Return the options of the ranks of one world, in which frames are handed over in memory."""
    members = tuple(Member(rank=rank, host=_HOST, host_id=_HOST, local_rank=rank) for rank in range(size))
    world, fabric = World(members=members), InprocFabric()

    def attach_as(rank: int) -> Attach:
        async def attach(stack: AsyncExitStack) -> WorldBootstrap:
            stack.callback(fabric.leave, rank)
            return WorldBootstrap(world=world, rank=rank, connector=InprocConnector(fabric), join=fabric.join)

        return attach

    return [InProcess(attach=attach_as(rank)) for rank in range(size)]


class RankWorld(c10d._World):
    """The groups of one rank, where torch's has those of the process."""

    def __init__(self) -> None:
        super().__init__()
        self._pg_map: dict[Any, Any] = {}
        self._pg_names: dict[Any, str] = {}
        self._pg_group_ranks: dict[Any, dict[int, int]] = {}
        self._pg_backend_config: dict[Any, str] = {}
        self._tags_to_pg: dict[str, list[Any]] = {}
        self._pg_to_tag: dict[Any, str] = {}
        self._group_count = 0

    @property
    def pg_map(self) -> dict[Any, Any]:
        return self._pg_map

    @property
    def pg_names(self) -> dict[Any, str]:
        return self._pg_names

    @property
    def pg_group_ranks(self) -> dict[Any, dict[int, int]]:
        return self._pg_group_ranks

    @property
    def pg_backend_config(self) -> dict[Any, str]:
        return self._pg_backend_config

    @property
    def group_count(self) -> int:
        return self._group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._group_count = value

    @property
    def tags_to_pg(self) -> dict[str, list[Any]]:
        return self._tags_to_pg

    @property
    def pg_to_tag(self) -> dict[Any, str]:
        return self._pg_to_tag


class ThreadWorlds:
    """Stands in for torch's world: that of the thread, or ``others`` for threads without one."""

    def __init__(self, others: Any) -> None:
        vars(self).update(others=others, own=threading.local(), is_kept=False)

    def of_thread(self) -> Any:
        return getattr(self.own, "world", self.others)

    def enter(self) -> None:
        """Give this thread a world of its own, without groups."""
        self.own.world = RankWorld()

    def keep(self) -> None:
        """Stay installed: threads with worlds of their own are left, which must not use those of others."""
        vars(self).update(is_kept=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_thread(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of_thread(), name, value)


_lock = threading.Lock()
_users = 0
"""How many blocks of ``thread_worlds`` are open in this process, whose torch has one place for this."""


@contextmanager
def thread_worlds() -> Iterator[ThreadWorlds]:
    """Allow threads worlds of their own in the block; blocks of several threads may overlap."""
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
    """Replace what torch has once per process."""
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
    sys.excepthook = _replaced["hook"]  # each group that is initialized puts one before it
    torch.set_num_threads(_replaced["threads"])
    _replaced.clear()
