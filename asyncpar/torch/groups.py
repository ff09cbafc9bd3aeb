"""Where process groups come from: what torch calls to make one."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist

from asyncpar.blocking.thread import LoopThread, background
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.node import Node, start_node
from asyncpar.torch.errors import as_torch
from asyncpar.torch.group_base import remains
from asyncpar.torch.meeting.rendezvous import attach_store
from asyncpar.torch.process_group import ProcessGroup
from asyncpar.torch.threads.in_process import InProcess


def create_group(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Make the group that torch describes: a world of its own, or part of the one of the default group.

    Raises what forming a world raises: ``PeerTimeout`` naming ranks that do not come, ``UsageError``.
    """
    if backend_options is not None and not isinstance(backend_options, InProcess):
        raise as_torch(UsageError(f"pg_options: expected None, as asyncpar has none, got {backend_options!r}"))
    try:
        parent = _default_group() if options.global_ranks_in_group else None
        if parent is None:
            return _own_world(options, backend_options)
        return _part(parent, options)
    except AsyncparError as error:
        raise as_torch(error) from None


def _default_group() -> ProcessGroup | None:
    """Return the default group if it is one of ours."""
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return group if isinstance(group, ProcessGroup) and not group.is_ended else None


def _own_world(options: Any, in_process: InProcess | None) -> ProcessGroup:
    if remains and in_process is None:
        gc.collect()  # shared memory of worlds before, for which Python may see no hurry
    thread = background()
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    if in_process is None:
        attach = attach_store(options.store, rank=rank, size=size, timeout=seconds)
    else:
        attach = in_process.attach
    node = thread.call(lambda: start_node(attach))
    group = _group(node, node.world, thread, options, owns_node=True)
    thread.at_close(group, group.leave_at_exit)
    return group


def _part(parent: ProcessGroup, options: Any) -> ProcessGroup:
    """Return a group of ranks of the default group, which they find without talking."""
    thread, node = parent.thread, parent.node
    ranks, name = list(options.global_ranks_in_group), options.group_id

    async def divide() -> Any:
        return parent.communicator.subgroup(ranks, name=name, key=f"torch {name}", has_own_timeout=True)

    communicator = thread.call(divide)
    if communicator is None:
        raise UsageError(f"ranks: expected this rank, {parent.rank()}, among those of group {name}, got {ranks}")
    return _group(node, communicator, thread, options, owns_node=False)


def _group(node: Node, communicator: Any, thread: LoopThread, options: Any, *, owns_node: bool) -> ProcessGroup:
    communicator.timeout = options.timeout.total_seconds()
    return ProcessGroup(communicator, thread, node, store=options.store, owns_node=owns_node)
