"""Save and load by all ranks of a world in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncpar.checkpoint import FileSystem, Loaded, LocalFiles, NewFile, Saved, load_checkpoint, save_checkpoint
from asyncpar.errors import CheckpointError
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, Tensor

T = TypeVar("T")
MODEL = {"hidden": 6, "layers": 2}


class Gate(LocalFiles):
    """Real files; the first that is made reports that it is reached, and waits until it may be."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self._may_pass = threading.Event()

    def open(self) -> None:
        self._may_pass.set()

    def create(self, path: Path) -> NewFile:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._may_pass.wait(20.0), "the loop stands still"
        return super().create(path)


class NoSync(LocalFiles):
    """Real files that nobody waits for the disk for."""

    def create(self, path: Path) -> NewFile:
        return UnsyncedFile(super().create(path))

    def sync_folder(self, path: Path) -> None:
        pass


class UnsyncedFile(NewFile):
    def __init__(self, file: NewFile) -> None:
        self._file = file

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()


async def each(nodes: Sequence[Node], work: Callable[[Node], Awaitable[T]]) -> list[T]:
    """Run ``work`` for all ranks at once; the first error ends all."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_awaited(work(node))) for node in nodes]
    return [task.result() for task in running]


async def each_fails(nodes: Sequence[Node], work: Callable[[Node], Awaitable[object]]) -> list[BaseException]:
    """Run ``work`` for all ranks at once, and return the error of each."""
    results = await asyncio.gather(*(_awaited(work(node)) for node in nodes), return_exceptions=True)
    for rank, result in enumerate(results):
        assert isinstance(result, BaseException), f"rank {rank} went on as if nothing were wrong"
    return [result for result in results if isinstance(result, BaseException)]


def assert_all_raise(errors: Sequence[BaseException], *texts: str) -> None:
    """Assert that each rank got a ``CheckpointError`` with these texts."""
    for error in errors:
        assert isinstance(error, CheckpointError), repr(error)
        for text in texts:
            assert text in str(error), str(error)


def saving(
    node: Node, folder: Path, tensors: Sequence[Tensor], layout: Layout, *, step: int = 1, **options: Any
) -> Awaitable[Saved]:
    """Begin to save what the rank of ``node`` holds."""
    options.setdefault("model", MODEL)
    options.setdefault("files", NoSync())
    pieces = options.pop("pieces", None)
    return save_checkpoint(
        folder,
        step=step,
        pieces=layout.pieces(tensors, node.rank) if pieces is None else pieces,
        communicator=node.world,
        **options,
    )


def loading(
    node: Node, folder: Path, tensors: Sequence[Tensor], layout: Layout, *, model: Any = None, **options: Any
) -> Awaitable[Loaded]:
    """Begin to load what the rank of ``node`` should hold."""
    return load_checkpoint(
        folder,
        layout.wanted(tensors, node.rank),
        model=MODEL if model is None else model,
        communicator=node.world,
        **options,
    )


async def save(
    folder: Path,
    tensors: Sequence[Tensor],
    layout: Layout,
    *,
    step: int = 1,
    files: FileSystem | None = None,
    **options: Any,
) -> list[Saved]:
    """Save by all ranks of ``layout``."""
    async with local_world(layout.size) as nodes:
        return await each(
            nodes, lambda node: saving(node, folder, tensors, layout, step=step, files=files or NoSync(), **options)
        )


async def load_and_check(folder: Path, tensors: Sequence[Tensor], layout: Layout, **options: Any) -> list[Loaded]:
    """Load by all ranks of ``layout``, and assert that each gets its bits."""
    async with local_world(layout.size) as nodes:
        loaded = await each(nodes, lambda node: loading(node, folder, tensors, layout, **options))
    for rank, one in enumerate(loaded):
        layout.check(tensors, rank, one.arrays)
    return loaded


async def load_fails(folder: Path, tensors: Sequence[Tensor], layout: Layout, **options: Any) -> list[BaseException]:
    """Load by all ranks of ``layout``, which must fail on each; return the errors."""
    async with local_world(layout.size) as nodes:
        return await each_fails(nodes, lambda node: loading(node, folder, tensors, layout, **options))


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
