"""The runtime: backends by name, the worlds they open, groups of their ranks, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from asyncpar.backends.backend import CommunicationBackend, OpenBackend, open_native
from asyncpar.backends.compression import CompressionAlgorithm
from asyncpar.backends.config import BackendConfig, BackendNotRegistered, GroupNotFound, NoGroup
from asyncpar.backends.gloo.backend import open_gloo
from asyncpar.backends.group import CommunicationGroup
from asyncpar.backends.mpi.backend import open_mpi
from asyncpar.backends.nccl import open_nccl
from asyncpar.backends.operations import CollectiveOp, CollectiveResult, CommunicationMetrics, ReductionOp, sum_metrics
from asyncpar.backends.thread import PROCESS_THREADS
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, UsageError


def shipped_backends() -> dict[str, OpenBackend]:
    """Return the built-in backends, by name."""
    return {
        str(CommunicationBackend.NATIVE): open_native,
        str(CommunicationBackend.THREAD): PROCESS_THREADS,
        str(CommunicationBackend.NCCL): open_nccl,
        str(CommunicationBackend.MPI): open_mpi,
        str(CommunicationBackend.GLOO): open_gloo,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBackend:
    """The world of a backend, until ``close``, which any task may call."""

    name: str
    communicator: Communicator
    compression: CompressionAlgorithm
    task: asyncio.Task[None] | None
    """Holds the world open; None for a world that was open before, and stays so."""
    is_closing: asyncio.Event

    def group(self, name: str, communicator: Communicator) -> CommunicationGroup:
        """Return ``communicator``, of this backend, as a group."""
        return CommunicationGroup(name=name, backend=self.name, communicator=communicator, compression=self.compression)

    async def close(self) -> None:
        """Leave the world.  Raises the error of leaving it."""
        self.is_closing.set()
        if self.task is not None:
            await asyncio.wait({self.task})
            self.task.result()


async def open_in_task(name: str, backend: OpenBackend, config: BackendConfig) -> OpenedBackend:
    """Open ``backend`` in a separate task, which enters and leaves it, and return once it is open."""
    started: asyncio.Future[Communicator] = asyncio.get_running_loop().create_future()
    is_closing = asyncio.Event()
    task = asyncio.create_task(_hold(name, backend, config, started, is_closing), name=f"asyncpar backend {name}")
    try:
        waited: set[asyncio.Future[None] | asyncio.Future[Communicator]] = {task, started}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if not started.done():
        started.cancel()
        task.result()
        raise AsyncparError(f"the backend {name!r} ended before it had opened")
    return OpenedBackend(
        name=name,
        communicator=started.result(),
        compression=config.compression,
        task=task,
        is_closing=is_closing,
    )


async def _hold(
    name: str,
    backend: OpenBackend,
    config: BackendConfig,
    started: asyncio.Future[Communicator],
    is_closing: asyncio.Event,
) -> None:
    context: object = backend(config)
    if not isinstance(context, AbstractAsyncContextManager):
        raise UsageError(f"backend {name!r}: expected an asynchronous context manager, got {context!r}")
    async with context as communicator:
        if not isinstance(communicator, Communicator):
            raise UsageError(f"backend {name!r}: expected a Communicator when it is entered, got {communicator!r}")
        started.set_result(communicator)
        await is_closing.wait()


WORLD = "world"
"""Name of the group of all ranks of the first opened backend."""

_EXISTING = "existing"


class CommunicationRuntime:
    """The communication of one rank; use it as ``async with``, or call ``finalize`` at the end.

    The built-in backends are registered under the names of ``CommunicationBackend``.  Each initialized backend is a
    separate world, whose ranks make the same calls in the same order.
    """

    def __init__(self) -> None:
        self._known: dict[str, OpenBackend] = shipped_backends()
        self._opened: dict[str, OpenedBackend] = {}
        self._groups: dict[str, CommunicationGroup] = {}
        self._absent: set[str] = set()
        self._default: str | None = None
        self._past: list[CommunicationMetrics] = []

    @classmethod
    def on(cls, communicator: Communicator, *, group: str = WORLD) -> Self:
        """Return a runtime whose default group, called ``group``, is ``communicator``, such as ``node.world``.

        ``communicator`` keeps its timeout, and stays open when the runtime is finalized.  Raises ``UsageError`` for
        anything else.
        """
        if not isinstance(communicator, Communicator):
            raise UsageError(
                "communicator: expected a Communicator of a running node, such as node.world of `async with ap.init() "
                f"as node`, got {communicator!r:.80}"
            )
        runtime = cls()
        opened = OpenedBackend(
            name=_EXISTING,
            communicator=communicator,
            compression=CompressionAlgorithm.none(),
            task=None,
            is_closing=asyncio.Event(),
        )
        runtime._opened[_EXISTING] = opened
        runtime._groups[group] = opened.group(group, communicator)
        runtime._default = group
        return runtime

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.finalize()

    # -- backends ----------------------------------------------------------------------------------------------------

    @property
    def backends(self) -> tuple[str, ...]:
        """The names that ``initialize`` knows."""
        return tuple(sorted(self._known))

    def register_backend(self, name: CommunicationBackend | str, backend: OpenBackend) -> None:
        """Register ``backend`` under ``name`` from now on, replacing another one of that name.

        Raises ``UsageError`` for an empty name, for an object that cannot be a backend, and while one of that name is
        open.
        """
        if not name:
            raise UsageError(f"name: expected a name of at least one character, got {name!r}")
        if not callable(backend):
            raise UsageError(
                "backend: expected a function that takes a BackendConfig and returns an asynchronous context manager "
                f"of a Communicator, got {backend!r}"
            )
        if name in self._opened:
            raise UsageError(f"name: the backend {str(name)!r} is open; finalize the runtime first")
        self._known[str(name)] = backend

    async def initialize(
        self,
        backend: CommunicationBackend | str = CommunicationBackend.NATIVE,
        config: BackendConfig | None = None,
        *,
        group: str | None = None,
    ) -> CommunicationGroup:
        """Open a backend and return the group of all its ranks, which is the default group if it is the first.

        The group is called ``group``: by default ``world``, and for further backends like the backend.  ``config`` has
        its settings (None: the defaults).  Raises ``BackendNotRegistered``, ``BackendUnavailable`` if its requirements
        are missing, ``UsageError`` for settings that do not fit, and the errors of the backend if ranks do not arrive.
        """
        name = str(backend)
        found = self._known.get(name)
        if found is None:
            raise BackendNotRegistered(f"backend: expected one of {', '.join(self.backends)}, got {name!r}")
        if name in self._opened:
            raise UsageError(f"backend: {name!r} is open already")
        called = group or (name if WORLD in self._groups else WORLD)
        self._check_new(called)
        config = config or BackendConfig()
        opened = await open_in_task(name, found, config)
        if name in self._opened or called in self._groups:  # by another task meanwhile
            await opened.close()
            raise UsageError(f"backend: {name!r} or group {called!r} was opened by another task at the same time")
        opened.communicator.timeout = config.timeout
        self._opened[name] = opened
        self._groups[called] = opened.group(called, opened.communicator)
        if self._default is None:
            self._default = called
        return self._groups[called]

    async def finalize(self) -> None:
        """Leave all worlds, the last one opened first; the metrics stay.  Idempotent.

        Groups cannot be used any more; backends may be initialized again.  Raises the errors of closing a backend.
        """
        self._past = [self.get_metrics()]
        opened, self._opened = self._opened, {}
        self._groups, self._absent, self._default = {}, set(), None
        failures: list[Exception] = []
        for one in reversed(opened.values()):
            try:
                await one.close()
            except Exception as error:  # noqa: BLE001  # the others are closed first
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several backends could not be closed", failures)

    # -- groups ------------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of this rank's groups."""
        return tuple(self._groups)

    def create_group(
        self, name: str, ranks: Iterable[int] | None = None, *, within: str | None = None
    ) -> CommunicationGroup | None:
        """Create a group of ``ranks`` (default: all) of the group ``within`` (default: the default group).

        Returns it on its ranks, None on the others.  Nothing is sent: all ranks of ``within`` create it, by the same
        name.  Raises ``UsageError`` for a name that is taken and for ranks that do not exist, ``NoGroup``,
        ``GroupNotFound``.
        """
        parent = self.get_group(within)
        if not name:
            raise UsageError(f"name: expected a name of at least one character, got {name!r}")
        self._check_new(name)
        chosen = tuple(range(parent.size)) if ranks is None else tuple(ranks)
        communicator = parent.communicator.subgroup(chosen, name=name, key=f"group {name}")
        if communicator is None:
            self._absent.add(name)
            return None
        self._groups[name] = self._opened[parent.backend].group(name, communicator)
        return self._groups[name]

    def get_group(self, name: str | CommunicationGroup | None = None) -> CommunicationGroup:
        """Return the group called ``name`` (or with the name of that group); by default the default group.

        Raises ``NoGroup`` before a backend is initialized and after ``finalize``, ``GroupNotFound`` for a group that
        does not exist or that this rank is not in.
        """
        if self._default is None:
            raise NoGroup("group: there is none, because no backend is open; await initialize() first")
        name = None if name is None else str(name)
        found = self._groups.get(self._default if name is None else name)
        if found is None:
            if name in self._absent:
                raise GroupNotFound(f"group: this rank is not in {name!r}")
            raise GroupNotFound(f"group: expected one of {', '.join(self._groups)}, got {name!r}")
        return found

    # -- operations --------------------------------------------------------------------------------------------------

    def collective_op(
        self,
        operation: CollectiveOp | str,
        x: Array | None = None,
        *,
        group: str | None = None,
        reduction: ReductionOp | str = ReductionOp.SUM,
        root: int = 0,
        peer: int | None = None,
        tag: int = 0,
        out: Array | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, CollectiveResult]:
        """Start ``operation`` in ``group`` (default: the default group).

        ``x``, ``reduction``, ``root``, ``peer``, ``tag``, ``out`` and ``key`` are those of ``CommunicationGroup.run``.
        """
        return self.get_group(group).run(
            operation, x, reduction=reduction, root=root, peer=peer, tag=tag, out=out, key=key
        )

    def get_metrics(self, group: str | None = None) -> CommunicationMetrics:
        """Return the metrics of ``group`` so far; by default those of all groups, including finalized ones."""
        if group is not None:
            return self.get_group(group).metrics()
        return sum_metrics([*self._past, *(known.metrics() for known in self._groups.values())])

    def _check_new(self, name: str) -> None:
        if name in self._groups or name in self._absent:
            raise UsageError(f"group: {name!r} exists already")
