"""Combined stacks of several ranks: which task waits for which other, on whichever rank.  Pure.

A task that asks an actor waits for the task that serves the call, on the actor's rank; a task in an operation waits for
the ranks that the operation needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from asyncpar.observe.stack_views import FrameView, ProcessStacks, TaskView, ThreadView

_MOST_STEPS: Final = 64

Place = tuple[int, str]
"""A rank and the name of one of its tasks."""


def chains_of(stacks: Mapping[int, ProcessStacks]) -> list[str]:
    """Return a line for each chain of waits that begins in a task that no other one waits for."""
    tasks = {(rank, task.name): task for rank, process in stacks.items() for task in process.tasks}
    servers = {
        (task.serves.rank, task.serves.number, rank): (rank, task.name)
        for (rank, _), task in tasks.items()
        if task.serves is not None
    }
    following = {place: list(_next(place, task, tasks, servers)) for place, task in tasks.items()}
    awaited = {place for places in following.values() for place in places}
    heads = [place for place in tasks if place not in awaited and _is_shown(tasks[place], following[place])]
    cycles = _cycles(following, heads)
    return [_chain(head, tasks, following, stacks) for head in [*heads, *cycles]]


def _next(
    place: Place,
    task: TaskView,
    tasks: Mapping[Place, TaskView],
    servers: Mapping[tuple[int, int, int], Place],
) -> Iterable[Place]:
    rank = place[0]
    if task.ask is not None and task.ask.number:
        server = servers.get((rank, task.ask.number, task.ask.rank))
        if server is not None:
            yield server
    for name in task.tasks:
        if (rank, name) in tasks:
            yield (rank, name)


def _is_shown(task: TaskView, following: Sequence[Place]) -> bool:
    """Return whether to show ``task``: tasks of libraries that only sleep are left out."""
    return bool(following) or task.user_frame is not None


def _cycles(following: Mapping[Place, Sequence[Place]], heads: Iterable[Place]) -> list[Place]:
    """Return one place of each cycle that no head leads to."""
    seen: set[Place] = set()
    for head in heads:
        _visit(head, following, seen)
    found = []
    for place, others in following.items():
        if place not in seen and others:
            found.append(place)
            _visit(place, following, seen)
    return found


def _visit(place: Place, following: Mapping[Place, Sequence[Place]], seen: set[Place]) -> None:
    waiting = [place]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            waiting += following.get(here, ())


def _chain(
    head: Place,
    tasks: Mapping[Place, TaskView],
    following: Mapping[Place, Sequence[Place]],
    stacks: Mapping[int, ProcessStacks],
) -> str:
    parts, seen, place = [], set[Place](), head
    for _ in range(_MOST_STEPS):
        if place in seen:
            parts.append(f"which waits for task {place[1]!r} of rank {place[0]} again: a cycle")
            break
        seen.add(place)
        task = tasks[place]
        parts.append(_step(place, task, stacks))
        if not following[place]:
            break
        place = following[place][0]
    return " -> ".join(parts)


def _step(place: Place, task: TaskView, stacks: Mapping[int, ProcessStacks]) -> str:
    rank, name = place
    frame = task.user_frame
    at = f" at {frame.site}" if frame is not None else ""
    if task.is_running:
        return f"rank {rank} task {name!r} runs{at}"
    waits = f" waits for {task.waits}" if task.waits else " waits"
    others = [str(other) for other in task.ranks if other != rank]
    if others and task.ask is None:
        waits += f", which needs rank{'s' if len(others) > 1 else ''} {', '.join(others[:8])}"
    elif task.ask is not None:
        waits += f" on rank {task.ask.rank}" + ("" if task.ask.rank in stacks else ", which has not sent its stacks")
    return f"rank {rank} task {name!r}{waits}{at}"


def show_stacks(stacks: Mapping[int, ProcessStacks], silent: Mapping[int, str], *, all_threads: bool = False) -> str:
    """Describe everything: chains, then tasks and threads of each rank; ``silent`` ranks with the reason."""
    lines = [f"rank {rank}: {why}" for rank, why in sorted(silent.items())]
    chains = chains_of(stacks)
    if chains:
        lines += ["waits:", *(f"  {chain}" for chain in chains), ""]
    for rank, process in sorted(stacks.items()):
        lines.append(f"rank {rank} (pid {process.pid})")
        if process.text:
            lines += [f"  {line}" for line in process.text.splitlines()]
        for task in process.tasks:
            if task.user_frame is not None or all_threads:
                what = "runs" if task.is_running else f"waits for {task.waits}" if task.waits else "waits"
                lines += [f"  task {task.name}: {what}", *_frames(task.frames, all_threads=all_threads)]
        for thread in process.threads:
            if all_threads or _is_in_program(thread):
                lines += [f"  thread {thread.name}", *_frames(thread.frames, all_threads=all_threads)]
        if process.more_tasks:
            lines.append(f"  ... and {process.more_tasks} more tasks")
    return "".join(line + "\n" for line in lines)


def _is_in_program(thread: ThreadView) -> bool:
    """Return whether the thread runs code of the program, not the loop that it has started."""
    for frame in reversed(thread.frames):
        if frame.is_user:
            return True
        if f"{os.sep}asyncio{os.sep}" in frame.file:
            return False
    return False


def _frames(frames: Sequence[FrameView], *, all_threads: bool) -> Iterable[str]:
    """Yield the lines of a stack: frames of the program, or the innermost one if there are none."""
    has_user = any(frame.is_user for frame in frames)
    for number, frame in enumerate(frames):
        if all_threads or frame.is_user or (not has_user and number == len(frames) - 1):
            yield f"    {frame.file}:{frame.line} in {frame.function}"
            if frame.source:
                yield f"        {frame.source}"
