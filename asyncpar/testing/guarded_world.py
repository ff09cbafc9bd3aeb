"""A test's world that always ends: a hang is a failure that reports what each rank waits for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from asyncpar.errors import PeerError, UsageError
from asyncpar.net.transport.lane_kinds import parse_transport
from asyncpar.node import Node
from asyncpar.testing.hang_report import describe_hang
from asyncpar.testing.loop import VirtualDeadlock, VirtualTimeLoop
from asyncpar.testing.watchdog import Watchdog, WorldHung
from asyncpar.testing.world import local_world

T = TypeVar("T")

DEFAULT_SECONDS: Final = 30.0
_RANK: ContextVar[int] = ContextVar("rank")

__all__ = ["GuardedWorld", "WorldHung"]


class GuardedWorld:
    """A world of ``size`` ranks in this process that must end within ``timeout`` seconds of real time.

    ``async with`` opens it in a coroutine and yields the nodes; ``run`` runs a program on all ranks from a plain
    function.  After ``timeout`` it is cancelled, even if code blocks the event loop of the main thread, and raises
    ``WorldHung``, whose message has the cycles of waits between ranks and the pending tasks of each.
    With ``virtual`` the clock of ``run`` is virtual (see ``run_virtual``): hours of waiting pass at once.
    Other ``options`` are those of ``local_world``: ``transport``, ``hosts``, ``pin``, ``arena``.
    """

    def __init__(self, size: int, *, timeout: float = DEFAULT_SECONDS, virtual: bool = False, **options: Any) -> None:
        if not 0 < timeout < math.inf:
            raise UsageError(f"timeout: expected seconds above 0, got {timeout}")
        if size < 1:
            raise UsageError(f"size: expected at least 1 rank, got {size}")
        parse_transport(options.get("transport", "inproc"), besides=("inproc",))
        self._size = size
        self._seconds = timeout
        self._is_virtual = virtual
        try:
            self._world: AbstractAsyncContextManager[tuple[Node, ...]] = local_world(size, **options)
        except TypeError as error:  # an unknown option
            raise UsageError(f"options: {str(error).removeprefix('local_world() ')}") from None
        self._nodes: tuple[Node, ...] = ()
        self._ranks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._watchdog: Watchdog | None = None
        self._failures: dict[int, BaseException] = {}

    async def __aenter__(self) -> tuple[Node, ...]:
        loop = asyncio.get_running_loop()
        if self._is_virtual and not isinstance(loop, VirtualTimeLoop):
            raise UsageError("virtual: expected `run` from a plain test: the event loop of this one keeps real time")
        self._watchdog = Watchdog(self._seconds, f"the world of {self._size} ranks", lambda: self._describe(loop))
        try:
            self._nodes = await self._world.__aenter__()
        except BaseException as error:
            self._unwatch(error)
            raise
        return self._nodes

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._world.__aexit__(kind, error, traceback)
        except BaseException as other:
            self._unwatch(other)
            raise
        self._unwatch(error)

    def _unwatch(self, error: BaseException | None) -> None:
        """Stop the watchdog; raise its finding, if that is why ``error`` ends the world."""
        assert self._watchdog is not None
        self._watchdog.stop()
        if self._watchdog.hung is not None and isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            raise self._watchdog.hung from None

    def _describe(self, loop: asyncio.AbstractEventLoop) -> str:
        text = describe_hang(self._nodes, loop, self._ranks)
        return "\n".join([*(f"rank {rank}: {_brief(error)}" for rank, error in self._failures.items()), text])

    def run(self, program: Callable[[Node], Awaitable[T]]) -> list[T]:
        """Await ``program(node)`` on every rank concurrently, and return the results by rank.

        A rank on which it raises leaves the world, as if its process had ended, so the others fail as well instead
        of waiting.  The first error is raised, with notes that name its rank and the errors of the others.
        Call it without a running event loop.  Raises ``WorldHung`` if the world does not end in time.
        """
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise UsageError("run: expected no running event loop; in a coroutine use `async with` the world")
        runner = asyncio.Runner(loop_factory=VirtualTimeLoop if self._is_virtual else None)
        try:
            runner.get_loop().set_task_factory(self._make_task)
            try:
                return runner.run(self._run(program))
            except VirtualDeadlock as error:
                raise WorldHung(f"{error}\n{self._describe(runner.get_loop())}") from None
        finally:
            with suppress(VirtualDeadlock):  # of tasks that are cancelled now; it was reported
                runner.close()

    async def _run(self, program: Callable[[Node], Awaitable[T]]) -> list[T]:
        tasks: list[asyncio.Task[T]] = []
        try:
            async with self as nodes:
                for node in nodes:
                    context = copy_context()
                    context.run(_RANK.set, node.rank)
                    work = self._run_rank(node, program)
                    tasks.append(asyncio.create_task(work, name=f"rank {node.rank}", context=context))
                    self._ranks[tasks[-1]] = node.rank
                try:
                    await asyncio.wait(tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
        return self._results(tasks)

    async def _run_rank(self, node: Node, program: Callable[[Node], Awaitable[T]]) -> T:
        try:
            return await program(node)
        except BaseException as error:
            self._failures[node.rank] = error
            await node.stop()
            raise

    def _results(self, tasks: list[asyncio.Task[T]]) -> list[T]:
        if not self._failures:
            return [task.result() for task in tasks]
        order = list(self._failures)
        rank = next((each for each in order if not isinstance(self._failures[each], PeerError)), order[0])
        error = self._failures.pop(rank)
        if not isinstance(error, Exception):  # pytest's way to skip a test, for instance
            raise error
        error.add_note(f"on rank {rank} of {self._size}")
        for other, what in sorted(self._failures.items()):
            error.add_note(f"rank {other}: {_brief(what)}")
        raise error

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task that is attributed to the rank whose task makes it."""
        task = asyncio.Task(work, loop=loop, **options)
        rank = _RANK.get(None)
        if rank is not None:
            self._ranks[task] = rank
        return task


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
