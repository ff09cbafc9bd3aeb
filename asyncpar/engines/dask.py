"""``ap.dask``: ranks on the workers of a Dask cluster: ``launch``, ``run`` and ``world``.

Everything goes over Dask's own connections, secret and pickles included; only ranks communicate directly.  An
agent on a worker is not a task of Dask, so a job starts however busy its workers' threads are; a task on each of its
workers shows Dask that the worker is busy.  Jobs that share workers take turns: see ``gangs.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack
from urllib.parse import urlsplit

from asyncpar import __version__
from asyncpar.core.addresses import loopback, resolve, route_to
from asyncpar.core.config.secret import Secret
from asyncpar.engines import dask_scheduler, dask_worker
from asyncpar.engines.awaited_arguments import with_values
from asyncpar.engines.blocking_run import make_run
from asyncpar.engines.dask_client import on_loop_of
from asyncpar.engines.function_call import encode_call
from asyncpar.engines.interface import (
    GrowingEngine,
    Handle,
    JobSpec,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlaceOrder,
    encode,
)
from asyncpar.engines.job import JobOptions, make_spec, run_job
from asyncpar.engines.output import Console
from asyncpar.engines.polled_place import ANSWER_SECONDS, check_process, pass_events_on
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.doctor.dask_probe import is_import_error

if TYPE_CHECKING:
    from distributed import Client

    from asyncpar.engines.mesh import ClusterMesh

T = TypeVar("T")
ASK_SECONDS: Final = 0.1
"""Seconds between two requests for workers."""
LOOK_SECONDS: Final = 1.0
"""Seconds between two inspections of the workers."""
_MOST_MISSES: Final = 3
"""Workers that may be gone when they are asked before the job is given up."""
_CHECK_ALL: Final = "`asyncpar doctor --dask ADDRESS` checks all of them"
_END_SECONDS: Final = 10.0
_BUSY_SECONDS: Final = 10.0
_log = logging.getLogger(__name__)


class DaskEngine(GrowingEngine):
    """Workers of the cluster that ``client`` is connected to, ``workers`` or any.  Used on the client's event loop.

    ``on_loop``: nodes live on the event loops of workers, one each, instead of in processes.
    """

    def __init__(self, client: Client, *, workers: Sequence[str] | None = None, on_loop: bool = False) -> None:
        self._client = client
        self._wanted = workers
        self._on_loop = on_loop
        self._job = ""
        self._lost: asyncio.Queue[PlaceLost] = asyncio.Queue()
        self._addresses: tuple[str, ...] = ()
        self._numbers: dict[str, int] = {}
        self._polls: set[asyncio.Task[None]] = set()
        self._holds: list[Any] = []
        self._gone: set[int] = set()
        self._misses = 0
        self._refused: set[str] = set()

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        loop = asyncio.get_running_loop()
        self._job, per_place = spec.name, spec.per_place or 1
        size, begun, is_reported = -(-spec.ranks // per_place), loop.time(), False
        while True:
            wanted = await self._list_workers()
            if len(wanted) >= size:
                self._addresses = await self._on_scheduler(
                    dask_scheduler.ask_for_workers, spec.name, self._client.id, wanted, size
                )
                places = await self._describe(per_place) if self._addresses else []
                if places:
                    return places
                if not is_reported and loop.time() > begun + _BUSY_SECONDS:
                    is_reported = True
                    _log.warning("job %s waits for %d workers, which other jobs hold", spec.name, size)
            elif loop.time() >= begun + spec.wait:
                raise UsageError(
                    f"ranks: expected at most {len(wanted) * per_place}, {per_place} on each of {len(wanted)} workers "
                    f"of Dask, got {spec.ranks}; wait=SECONDS waits for more workers, per_worker= puts more on each"
                )
            await asyncio.sleep(ASK_SECONDS)

    @property
    def caller_address(self) -> str:
        return _own_address(self._client)

    async def grow(self, spec: JobSpec, count: int) -> Sequence[Place]:
        """Return places on free workers; one that died and is back at its own address counts as a new one."""
        known = self._living() | self._refused
        wanted = [worker for worker in await self._list_workers(may_miss=True) if worker not in known]
        if not wanted:
            return []
        found = await self._on_scheduler(dask_scheduler.ask_for_more, spec.name, wanted, count)
        described = [(address, await self._describe_worker(address)) for address in found]
        places = []
        for address, worker in described:
            try:
                if not isinstance(worker, OSError):
                    _check_worker(address, worker)
            except UsageError as error:  # the job goes on without it
                self._refused.add(address)
                _log.warning("job %s: %s", spec.name, error)
            if isinstance(worker, OSError) or address in self._refused:  # one that does not answer is asked again
                await self._on_scheduler(dask_scheduler.give_back, spec.name, address)
                continue
            self._addresses = (*self._addresses, address)
            places.append(_place(address, worker, spec.per_place or 1))
        return places

    def _living(self) -> set[str]:
        """Return the workers whose places are not lost."""
        return {address for number, address in enumerate(self._addresses) if number not in self._gone}

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        address, number = self._addresses[order.number], order.number
        self._numbers[address] = number
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._on_worker(
                    address, dask_worker.start_place, order.job, number, Secret(encode(order)), self._on_loop
                )
        except TimeoutError as error:
            raise LaunchError(f"{place.name} gives no answer within {ANSWER_SECONDS:g} s") from error
        except OSError as error:
            self._gone.add(number)
            raise LaunchError(f"{place.name} is not reached: {error}") from error
        poll = asyncio.create_task(self._poll(address, number, take), name=f"asyncpar events of {address}")
        self._polls.add(poll)
        poll.add_done_callback(self._polls.discard)
        self._holds.append(
            self._client.submit(
                dask_worker.hold_worker,
                order.job,
                number,
                workers=[address],
                allow_other_workers=False,
                pure=False,
                retries=0,
                key=f"asyncpar-{order.job}-{number}",
            )
        )
        return DaskHandle(self, address, number)

    async def failures(self) -> AsyncIterator[PlaceLost]:
        watching = asyncio.create_task(self._watch_workers(), name="asyncpar watch Dask's workers")
        try:
            while True:
                yield await self._lost.get()
        finally:
            watching.cancel()

    async def release(self) -> None:
        for poll in self._polls:
            poll.cancel()
        ends = [
            self._on_worker(address, dask_worker.end_place, self._job, number)
            for address, number in self._numbers.items()
            if number not in self._gone
        ]
        with suppress(OSError):  # a worker hangs, or the scheduler is gone: places end by themselves
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.gather(*ends, return_exceptions=True)
        with suppress(OSError):
            async with asyncio.timeout(_END_SECONDS):
                for hold in self._holds:
                    await hold.cancel()
                await self._on_scheduler(dask_scheduler.release_workers, self._job)
        self._numbers.clear()
        self._holds.clear()

    async def send(self, address: str, number: int, command: PlaceCommand) -> None:
        """Send a command to the agent on a worker."""
        await self._on_worker(address, dask_worker.send_to_place, self._job, number, encode(command))

    async def _list_workers(self, *, may_miss: bool = False) -> list[str]:
        found: list[str] = await self._on_scheduler(dask_scheduler.list_workers)
        if self._wanted is None:
            return found
        if may_miss:
            return [worker for worker in self._wanted if worker in found]
        missing = [worker for worker in self._wanted if worker not in found]
        if missing:
            raise UsageError(
                f"workers: {missing[0]} is no worker of this cluster, which has {', '.join(found) or 'none'}"
            )
        return list(self._wanted)

    async def _describe(self, per_place: int) -> list[Place]:
        """Return the places on the workers that this job holds; [] if one of them is gone.

        Raises ``LaunchError`` for a worker that does not answer, and if workers die again and again.
        """
        answers = await asyncio.gather(*(self._describe_worker(address) for address in self._addresses))
        described = dict(zip(self._addresses, answers, strict=True))
        for address, worker in described.items():
            if isinstance(worker, OSError):
                await self._on_scheduler(dask_scheduler.release_workers, self._job)
                self._misses += 1
                if isinstance(worker, TimeoutError) or self._misses == _MOST_MISSES:
                    cause = str(worker) or f"no answer within {ANSWER_SECONDS:g} s"
                    raise LaunchError(f"Dask's worker {address} cannot start ranks: {cause}; {_CHECK_ALL}")
                return []
            _check_worker(address, worker)
        return [_place(address, described[address], per_place) for address in self._addresses]

    async def _describe_worker(self, address: str) -> Any:
        """Return the description of a worker, or its exception."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answers = await self._client._run(  # the coroutine behind run
                    dask_worker.describe_worker, workers=[address], on_error="return"
                )
        except OSError as error:
            return error
        return answers[address]

    async def _poll(self, address: str, number: int, take: Callable[[PlaceEvent], None]) -> None:
        ask = partial(self._on_worker, address, dask_worker.place_events, self._job, number)
        await pass_events_on(ask, take, partial(self._lose, number))

    async def _watch_workers(self) -> None:
        """Report workers that leave; a connection to them may hang."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                found = (await self._client.scheduler.identity(n_workers=-1))["workers"]
                for address, number in self._numbers.items():
                    if address not in found:
                        self._lose(number, "died, or left the cluster")
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing would be reported of lost workers
            for number in self._numbers.values():
                self._lose(number, f"cannot be reached: Dask's scheduler is lost ({type(error).__name__}: {error})")

    def _lose(self, number: int, cause: str) -> None:
        if number not in self._gone:
            self._gone.add(number)
            self._lost.put_nowait(PlaceLost(number, cause))

    async def _on_scheduler(self, function: Callable[..., T], *arguments: Any) -> T:
        return await _on_scheduler(self._client, function, *arguments)

    async def _on_worker(self, address: str, function: Callable[..., Any], *arguments: Any) -> Any:
        answers = await self._client._run(function, *arguments, workers=[address])
        return answers[address]


def _place(address: str, worker: Mapping[str, str], slots: int) -> Place:
    return Place(name=f"Dask's worker {address}", host=worker["host"], address=worker["address"], slots=slots)


class DaskHandle(Handle):
    """An agent on a worker."""

    def __init__(self, engine: DaskEngine, address: str, number: int) -> None:
        self._engine = engine
        self._address = address
        self._number = number

    async def send(self, command: PlaceCommand) -> None:
        await self._engine.send(self._address, self._number, command)


async def _on_scheduler(client: Client, function: Callable[..., T], *arguments: Any) -> T:
    try:
        result: T = await client._run_on_scheduler(function, *arguments)
    except Exception as error:
        if not is_import_error(error):
            raise
        raise UsageError(
            f"Dask's scheduler lacks this asyncpar ({error}); install asyncpar {__version__} there and on all "
            f"workers; {_CHECK_ALL}"
        ) from error
    return result


def _check_worker(address: str, worker: Any) -> None:
    """Raise ``UsageError`` unless the worker can run this asyncpar, in the caller's versions."""
    if isinstance(worker, Exception) and is_import_error(worker):
        raise UsageError(
            f"Dask's worker {address} lacks this asyncpar ({worker}); install asyncpar {__version__} there; "
            f"{_CHECK_ALL}"
        )
    if isinstance(worker, Exception):
        raise UsageError(f"Dask's worker {address} cannot run asyncpar: {type(worker).__name__}: {worker}")
    check_process(f"Dask's worker {address}", worker)


async def launch(
    client: Client,
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int | tuple[int, int] | None = None,
    per_worker: int = 1,
    workers: Sequence[str] | None = None,
    console: Console | None = None,
    **options: Unpack[JobOptions],
) -> list[Any]:
    """Run ``function(*arguments)`` in ``ranks`` processes on Dask's workers; return their results in order of ranks.

    ``per_worker`` of them share a worker, one of ``workers`` (None: any).  In ``function``, ``asyncpar.init()`` joins
    the world of these ranks, by default as many as there are places.  ``ranks=(2, 4)`` is an elastic job, of a program
    with ``asyncpar.elastic``: it begins with at least 2, goes on when workers die, and gets a rank on each worker that
    joins, up to 4.  Its workers must reach the caller, and the results are those of the ranks at the end.  A job whose
    workers are held by other jobs waits for them.  The client may be blocking or asynchronous, of this loop or another.
    Raises as ``ap.cluster.launch`` does; a worker that dies is a ``PeerLost`` for each of its ranks.  ``console`` takes
    output and progress (None: printed).
    """
    spec = await _spec(client, function, arguments, ranks, per_worker, workers, options)
    return await on_loop_of(client, lambda: run_job(DaskEngine(client, workers=workers), spec, console))


def _check_client(client: object) -> None:
    """Raise ``UsageError`` unless ``client`` is one of Dask's, which is installed."""
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(f"dask: it cannot be imported ({error}); pip install 'asyncpar[dask]'") from error
    if not isinstance(client, Client):
        raise UsageError(f"client: expected a distributed.Client, got {client!r}")


def _refuse_asynchronous(client: Client, *_: Any, **__: Any) -> None:
    _check_client(client)
    if client.asynchronous:
        raise UsageError("client: expected a blocking one; await ap.dask.launch(client, ...) with an asynchronous one")


run = make_run(launch, check=_refuse_asynchronous)


class DaskWorld(AbstractAsyncContextManager["ClusterMesh"]):
    """Nodes on the event loops of Dask's workers, one each: ``async with ap.dask.world(client) as mesh``.

    They start within milliseconds, and actors on them reach what the worker holds.  The caller is the last node.
    There are ``ranks`` of them (None: one on each worker), on ``workers`` or any.  ``console`` takes their output
    (None: printed).
    """

    def __init__(
        self,
        client: Client,
        *,
        ranks: int | None = None,
        workers: Sequence[str] | None = None,
        console: Console | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        self._client = client
        self._ranks = ranks
        self._workers = workers
        self._console = console
        self._options = options
        self._opened: AbstractAsyncContextManager[ClusterMesh] | None = None

    async def __aenter__(self) -> ClusterMesh:
        from asyncpar.engines.mesh import open_mesh, refuse_bounds, serve_actors  # as much to import as all the rest

        client, workers = self._client, self._workers
        refuse_bounds(self._ranks)
        spec = await _spec(client, serve_actors, (), self._ranks, 1, workers, self._options, pickle=False)

        async def serve(rendezvous: str) -> None:
            program = encode_call(serve_actors, (rendezvous, spec.ranks + 1, True), pickle=False)
            engine = DaskEngine(client, workers=workers, on_loop=True)
            await on_loop_of(client, lambda: run_job(engine, replace(spec, program=program), self._console))

        self._opened = open_mesh(
            serve,
            job=spec.name,
            ranks=spec.ranks,
            secret=spec.secret,
            address=_own_address(client),
            timeout=spec.timeout,
            pickle=True,
        )
        return await self._opened.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(*error)


world = DaskWorld


async def _spec(
    client: Client,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    ranks: int | tuple[int, int] | None,
    per_worker: int,
    workers: Sequence[str] | None,
    options: JobOptions,
    *,
    pickle: bool = True,
) -> JobSpec:
    """Return the job; ``ranks`` None: as many as there are places."""
    _check_client(client)
    if ranks is None:
        found: Sequence[str] = workers or ()
        if workers is None:
            found = await on_loop_of(client, lambda: _on_scheduler(client, dask_scheduler.list_workers))
        ranks = max(1, len(found)) * per_worker
    options.setdefault("per_place", per_worker)
    function, arguments = await with_values(function, arguments)
    return make_spec(function, arguments, ranks=ranks, pickle=pickle, **options)


def _own_address(client: Client) -> str:
    """Return the address of this host that the cluster's workers reach."""
    place = urlsplit(client.scheduler.address)
    host = place.hostname if place.scheme in ("tcp", "tls", "ucx") else None
    return loopback() if host is None else route_to(resolve(host))
