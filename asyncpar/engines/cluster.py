"""``ap.cluster``: ranks on this machine from a script, a test or a notebook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from asyncpar.core.addresses import loopback
from asyncpar.engines.awaited_arguments import with_values
from asyncpar.engines.blocking_run import make_run
from asyncpar.engines.function_call import encode_call
from asyncpar.engines.job import JobOptions, make_spec, run_job
from asyncpar.engines.local import LocalEngine
from asyncpar.engines.output import Console

if TYPE_CHECKING:
    from asyncpar.engines.mesh import ClusterMesh


class Cluster:
    """Ranks on this machine: ``async with ap.cluster(4) as mesh``, or ``ap.cluster.run(function, ranks=4)``.

    As a block, ``mesh`` has nodes in ``ranks`` new processes, on which actors can be started; the caller is one more
    node of their world, the last.  Functions and classes travel by name, or, with ``pickle=True``, as code.

    ``console`` gets output and progress of the ranks (None: this process's streams).
    """

    def __init__(
        self, ranks: int, *, pickle: bool = False, console: Console | None = None, **options: Unpack[JobOptions]
    ) -> None:
        from asyncpar.engines.mesh import refuse_bounds, serve_actors  # as much to import as all the rest

        refuse_bounds(ranks)
        self._spec = make_spec(serve_actors, (), ranks=ranks, pickle=False, **options)
        self._pickle = pickle
        self._console = console
        self._opened: AbstractAsyncContextManager[ClusterMesh] | None = None

    async def __aenter__(self) -> ClusterMesh:
        from asyncpar.engines.mesh import open_mesh, serve_actors

        spec = self._spec

        async def run(rendezvous: str) -> None:
            program = encode_call(serve_actors, (rendezvous, spec.ranks + 1, self._pickle), pickle=False)
            await run_job(LocalEngine(), replace(spec, program=program), self._console)

        self._opened = open_mesh(
            run,
            job=spec.name,
            ranks=spec.ranks,
            secret=spec.secret,
            address=loopback(),
            timeout=spec.timeout,
            pickle=self._pickle,
        )
        return await self._opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, where)

    @staticmethod
    async def launch(
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | tuple[int, int],
        pickle: bool = False,
        console: Console | None = None,
        **options: Unpack[JobOptions],
    ) -> list[Any]:
        """Run ``function(*arguments)`` in ``ranks`` new processes of this machine; return their results by rank.

        In it, ``asyncpar.init()`` joins the world of these ranks; a coroutine function is run with ``asyncpar.run``.
        It travels by its name, and arguments and results as plain data and arrays; with ``pickle=True`` it travels as
        code, by cloudpickle, as functions of notebooks must.  ``console`` takes output and progress (None: printed).

        ``ranks=(2, 4)`` is an elastic job, of a program with ``asyncpar.elastic``: it goes on when ranks die, as long
        as 2 are left, and ``max_restarts`` of each start again.  Then the results are those of the ranks at the end.

        Raises ``UsageError`` for functions, arguments and results that cannot travel, and an ``ExceptionGroup``, the
        first failure first, if ranks fail.  When cancelled, it ends the ranks in order; when cancelled again, it kills
        them.
        """
        function, arguments = await with_values(function, arguments)
        spec = make_spec(function, arguments, ranks=ranks, pickle=pickle, **options)
        return await run_job(LocalEngine(), spec, console)

    run = staticmethod(make_run(launch))


cluster = Cluster
