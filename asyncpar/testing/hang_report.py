"""A report on a world in this process that does not end: waits between ranks, cycles, and tasks by rank."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final

import msgspec

from asyncpar.collectives.communicator import Communicator, engine_of
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.table import OperationTable
from asyncpar.core.observe.waits import WaitEdge, WaitNotice, describe_cycle, find_cycle, sum_up
from asyncpar.node import Node
from asyncpar.observe.chains import show_stacks
from asyncpar.observe.stack_views import FrameView, ProcessStacks, TaskView
from asyncpar.observe.stacks import await_chain, capture_threads, view_task

RankTasks = Mapping[asyncio.Task[Any], int]
"""The ranks of tasks, if they are known."""

NO_RANK: Final = -1
_TRIES: Final = 5


def describe_hang(nodes: Sequence[Node], loop: asyncio.AbstractEventLoop, known: RankTasks) -> str:
    """Describe what ``nodes``, which live on ``loop``, wait for: cycles and culprits first, then tasks by rank.

    It may be called from another thread: data that changes meanwhile is read again.
    """
    for attempt in range(_TRIES):
        with suppress(RuntimeError):
            return _describe(nodes, loop, known)
        time.sleep(0.01 * attempt)
    return _describe(nodes, loop, known)


def _describe(nodes: Sequence[Node], loop: asyncio.AbstractEventLoop, known: RankTasks) -> str:
    tasks: dict[int, list[TaskView]] = {node.rank: [] for node in nodes}
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())):
        rank = known.get(task, NO_RANK)
        view = view_task(task, loop)
        if view.is_running and (frames := _running_frames()):
            view = msgspec.structs.replace(view, frames=frames)
        tasks.setdefault(find_rank(task) if rank == NO_RANK else rank, []).append(view)
    lines = sum_up(find_waits(nodes, loop.time(), tasks))
    stacks = {rank: _stacks(rank, views) for rank, views in tasks.items() if rank != NO_RANK}
    text = show_stacks(stacks, {}).replace(f" (pid {os.getpid()})", "")
    others = [view for view in tasks.get(NO_RANK, ()) if view.user_frame is not None]
    if others:
        rest = show_stacks({NO_RANK: _stacks(NO_RANK, others)}, {})
        text += rest.replace(f"rank {NO_RANK} (pid {os.getpid()})", "tasks of no certain rank")
    return "\n".join([*lines, text.rstrip()])


def _running_frames() -> tuple[FrameView, ...]:
    """Return the frames of the main thread, from the event loop on; none if it is the caller."""
    if threading.current_thread() is threading.main_thread():
        return ()
    frames = capture_threads()[0].frames
    inside = takewhile(lambda frame: f"{os.sep}asyncio{os.sep}" not in frame.file, reversed(frames))
    return tuple(reversed(list(inside)))


def _stacks(rank: int, tasks: Sequence[TaskView]) -> ProcessStacks:
    return ProcessStacks(pid=os.getpid(), rank=rank, time=time.time(), tasks=tuple(tasks))


def find_rank(task: asyncio.Task[Any]) -> int:
    """Return the rank whose node, group or operation ``task`` uses; ``NO_RANK`` if none is found."""
    for frame in await_chain(task.get_coro()):
        for value in list(frame.f_locals.values()):
            match value:
                case Node():
                    return value.rank
                case Operation():
                    return value.context.links.rank
                case Communicator():
                    return engine_of(value).table.links.rank
    return NO_RANK


def find_waits(nodes: Iterable[Node], now: float, tasks: Mapping[int, Sequence[TaskView]]) -> dict[int, WaitNotice]:
    """Describe the waits of ranks in collectives, by rank; of several operations the one that has waited longest."""
    waits: dict[int, tuple[Operation, WaitEdge]] = {}
    for node in nodes:
        for operation in sorted(_pending(node), key=lambda each: each.progress_at):
            edge = operation.own_wait()
            if edge is not None:
                waits.setdefault(node.rank, (operation, edge))
    notices = {}
    for rank, (operation, edge) in waits.items():
        cycle = find_cycle([edge for _, edge in waits.values()], rank)
        group = operation.home.name
        notices[rank] = WaitNotice(
            operation=operation.label if group == "world" else f"{operation.label} of group {group}",
            seconds=now - operation.progress_at,
            site=edge.site,
            culprit=edge.awaited,
            where="" if edge.awaited in waits else _where(tasks.get(edge.awaited, ())),
            cycle=describe_cycle(cycle) if cycle else "",
        )
    return notices


def _pending(node: Node) -> list[Operation]:
    table = node.links.operations
    groups = list(table._groups.values()) if isinstance(table, OperationTable) else []
    operations = [operation for group in groups for operation in [*group.active.values(), *group.loose]]
    return [each for each in operations if each.has_started and not each.is_over and each.failure is None]


def _where(tasks: Sequence[TaskView]) -> str:
    """Return the activity of a rank that waits in no collective."""
    for task in tasks:
        if task.user_frame is not None:
            verb = "runs" if task.is_running else f"waits for {task.waits}" if task.waits else "waits"
            return f"{verb} at {task.user_frame.site}"
    return "has ended its part, or never began it"
