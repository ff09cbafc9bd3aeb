"""Run a job on an engine: places, agents, events, and the one result.  ``machine.py`` decides."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from asyncpar.engines.function_call import decode_error, decode_value, encode_call, name_of
from asyncpar.engines.interface import (
    GrowingEngine,
    Handle,
    JobSpec,
    Place,
    PlaceEvent,
    PlaceLost,
    PlacementEngine,
    PlaceOrder,
    PlaceOutput,
    PlaceProgress,
    PlaceReport,
    PlaceServes,
    spread,
)
from asyncpar.engines.machine import CallerInterrupted, JobEvent, PlaceReported, PlacesMachine, PlaceTick, SendToPlace
from asyncpar.engines.output import Console, PlaceMessages, StreamConsole
from asyncpar.engines.result import settle
from asyncpar.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from asyncpar.engines.elastic_job import ElasticEngineJob


class JobOptions(TypedDict, total=False):
    """The options of all engines; see ``JobSpec``."""

    per_place: int | None
    wait: float
    timeout: float
    grace: float
    max_restarts: int
    environment: dict[str, str]
    transport: str | None


def make_spec(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    ranks: int | tuple[int, int],
    pickle: bool,
    **options: Unpack[JobOptions],
) -> JobSpec:
    """Return the job of ``function(*arguments)`` on ``ranks`` ranks, or, if it is elastic, on (least, most) of them.

    Raises ``UsageError`` before anything is started.
    """
    least = None
    if isinstance(ranks, tuple):
        if len(ranks) != 2:
            raise UsageError(f"ranks: expected a number, or (least, most) for an elastic job, got {ranks!r}")
        least, ranks = ranks
    program = encode_call(function, arguments, pickle=pickle)
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name_of(program)).strip("-") or "fn"
    return JobSpec(program=program, ranks=ranks, least=least, name=f"{plain}-{secrets.token_hex(4)}", **options)


async def run_job(engine: PlacementEngine, spec: JobSpec, console: Console | None = None) -> list[Any]:
    """Run ``spec`` on ``engine`` and return the results of its ranks, in their order.

    Raises the errors of ``settle``.  When cancelled, it interrupts the ranks and waits for their end; when cancelled
    again, it kills them.  Nothing that it started is left when it returns.  For an elastic job see ``settle_elastic``.
    ``console`` takes output and progress (None: printed).
    """
    job = _make_job(engine, spec, console or StreamConsole())
    running = asyncio.create_task(job.run(), name=f"asyncpar job {spec.name}")
    was_cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            was_cancelled = error
            job.interrupt(running)
    if was_cancelled is not None:
        with suppress(asyncio.CancelledError, Exception):  # its outcome no longer matters
            running.result()
        raise was_cancelled
    return running.result()


def _make_job(engine: PlacementEngine, spec: JobSpec, console: Console) -> _EngineJob | ElasticEngineJob:
    if spec.least is None:
        return _EngineJob(engine, spec, console)
    if not isinstance(engine, GrowingEngine):
        raise UsageError(
            f"ranks: expected a number, as this engine's places are fixed, got ({spec.least}, {spec.ranks}); elastic "
            "jobs run with ap.cluster on this machine, with ap.dask, and with `asyncpar launch --elastic ranks`"
        )
    from asyncpar.engines.elastic_job import ElasticEngineJob  # it imports the agents' modules: half as much again

    return ElasticEngineJob(engine, spec, console)


class _EngineJob:
    """One job.  ``run`` it once."""

    def __init__(self, engine: PlacementEngine, spec: JobSpec, console: Console) -> None:
        self._engine = engine
        self._spec = spec
        self._console = console
        self._messages = PlaceMessages()
        self._machine: PlacesMachine | None = None
        self._handles: dict[int, Handle] = {}
        self._events: asyncio.Queue[JobEvent | BaseException] = asyncio.Queue()
        self._sending: set[asyncio.Task[None]] = set()

    def interrupt(self, running: asyncio.Task[Any]) -> None:
        """End the job; the second time at once."""
        if self._machine is None:  # it still looks for places
            running.cancel()
        else:
            self._events.put_nowait(CallerInterrupted())

    async def run(self) -> list[Any]:
        try:
            places = await self._engine.allocate(self._spec)
            counts = spread(self._spec.ranks, [place.slots for place in places])
            used = [(place, count) for place, count in zip(places, counts, strict=True) if count]
            places, counts = [place for place, _ in used], [count for _, count in used]
            self._machine = PlacesMachine(len(places), grace=self._spec.grace)
            await self._run(self._machine, places, counts)
        finally:
            await self._engine.release()
            self._console.close()
        return settle(self._machine, places, counts, decode=decode_value, decode_error=decode_error)

    async def _run(self, machine: PlacesMachine, places: Sequence[Place], counts: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch(), name="asyncpar watch places")
        starting = asyncio.create_task(self._start_all(places, counts), name="asyncpar start places")
        for task in (watching, starting):
            task.add_done_callback(self._raise_error_of)
        try:
            while not machine.is_over:
                due = machine.next_deadline
                try:
                    async with asyncio.timeout_at(due):
                        event = await self._events.get()
                except TimeoutError:
                    event = PlaceTick()
                if isinstance(event, BaseException):
                    raise event
                for command in machine.handle(event, now=loop.time()):
                    task = loop.create_task(self._send(starting, command))
                    self._sending.add(task)
                    task.add_done_callback(self._sending.discard)
        finally:
            tasks = (watching, starting, *self._sending)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _raise_error_of(self, task: asyncio.Task[None]) -> None:
        """End the job with the error of a task without which it would wait forever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.put_nowait(error)

    async def _start_all(self, places: Sequence[Place], counts: Sequence[int]) -> None:
        orders = [
            PlaceOrder.of(self._spec, place, number=number, places=len(places), slots=counts[number])
            for number, place in enumerate(places)
        ]
        await asyncio.gather(*(self._start(place, order) for place, order in zip(places, orders, strict=True)))

    async def _start(self, place: Place, order: PlaceOrder) -> None:
        number = order.number
        try:
            self._handles[number] = await self._engine.start(place, order, lambda event: self._take(number, event))
        except (LaunchError, OSError) as error:
            self._events.put_nowait(PlaceLost(number, f"could not start: {error}"))

    def _take(self, place: int, event: PlaceEvent) -> None:
        match event:
            case PlaceOutput() if self._messages.is_new(place, event):
                self._console.output(event)
            case PlaceProgress():
                self._console.progress(event)
            case PlaceReport():
                self._events.put_nowait(PlaceReported(place, event))
            case PlaceServes() | PlaceLost():
                self._events.put_nowait(event)

    async def _watch(self) -> None:
        async for lost in self._engine.failures():
            self._events.put_nowait(lost)

    async def _send(self, starting: asyncio.Task[None], command: SendToPlace) -> None:
        """Send a command to a place, once it has started; the engine notices one that cannot be reached."""
        await asyncio.wait({starting})
        handle = self._handles.get(command.place)
        if handle is not None:
            with suppress(OSError):
                await handle.send(command.command)
