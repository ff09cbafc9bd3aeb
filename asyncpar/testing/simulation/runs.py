"""Run a program in a simulation, judge its end, and shorten a failing list of faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, TypeVar, cast

from asyncpar.actors.runtime.deadline_discovery import check_interpreter
from asyncpar.errors import AsyncparError, PeerError, StaleGeneration, UsageError
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.elastic_job import ElasticMain, SimulatedElasticJob
from asyncpar.testing.simulation.faults import DRAWN, KINDS, Fault, check_faults, draw_faults
from asyncpar.testing.simulation.job import Main, SimulatedJob
from asyncpar.testing.simulation.loop import SimulatedDeadlock, SimulationLoop
from asyncpar.testing.simulation.network import Conditions
from asyncpar.testing.simulation.patches import simulated_machine
from asyncpar.testing.simulation.process import SimulatedProcess
from asyncpar.testing.simulation.result import REMOVED, SimulationFailed, SimulationResult, SimulationSearch
from asyncpar.testing.simulation.trace import Trace

Check = Callable[[SimulationResult], object]

BOUND_SECONDS: Final = 400.0
"""Virtual seconds within which a program must end after the last new fault."""

_GRACE_SECONDS: Final = 1.0
"""Seconds after the end of the program in which its processes still answer requests."""

_LAST_SECONDS: Final = 60.0


T = TypeVar("T")


class SimulatedHang(AsyncparError):  # noqa: N818
    """The program did not end in time although nothing was in its way; the message says where it waits."""


class SimulatedLeak(AsyncparError):  # noqa: N818
    """A process whose ``main`` and node have ended has tasks, timers, lanes or services left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run, all but seed and faults.  See ``simulate``."""

    size: int
    conditions: Conditions
    check: Check | None
    expected: tuple[type[BaseException], ...] | None
    is_elastic: bool
    core: int | None
    bound: float
    pin: str | None
    record: bool
    witnesses: int


def simulate(
    main: Main | ElasticMain,
    *,
    size: int = 4,
    seed: int = 0,
    faults: Iterable[Fault] | int = (),
    kinds: Sequence[str] = DRAWN,
    within: float | None = None,
    check: Check | None = None,
    expected: tuple[type[BaseException], ...] | None = None,
    elastic: bool = False,
    conditions: Conditions | None = None,
    core: int | None = None,
    bound: float = BOUND_SECONDS,
    pin: str | None = None,
    witnesses: int = 3,
    shrinks: bool = True,
    record: bool = False,
) -> SimulationResult:
    """Run ``main(node)`` on ``size`` simulated nodes and return the result; equal arguments give equal runs.

    ``faults`` are the faults to inject, or the number to draw from the seed (of ``kinds``, ``within`` so many virtual
    seconds, by default the duration of the program without any).  The run fails if ``main`` raises on a node, except
    for ``expected`` exceptions (by default ``PeerError`` in a run with faults); if it leaves tasks, timers, lanes or
    services behind; if ``check``, called with the result, raises; or if it does not end within ``bound`` virtual
    seconds after the end of the faults.  From then on ``core`` nodes, drawn from those that live, are healthy (None:
    all), and faults of others are permanent.  With ``elastic`` it is ``main()``, which uses ``ap.elastic`` and outlives
    faults: only ``StaleGeneration`` is expected, of processes that the others went on without.  Its agents are those of
    production; ``witnesses`` further ones vote with them, and never fail: a quorum is always there.  ``pin`` pins
    algorithms; ``record`` keeps the trace as text.

    Raises ``SimulationFailed``, with ``shrinks`` for as few faults as are needed; ``UsageError`` for bad arguments.

    ``conditions`` are those of the network.
    """
    if core is not None and not 1 <= core <= size:
        raise UsageError(f"core: expected 1..{size} nodes, got {core}")
    settings = Settings(
        size=_check_size(size),
        conditions=conditions or Conditions(),
        check=check,
        expected=expected,
        is_elastic=elastic,
        core=core,
        bound=bound,
        pin=pin,
        record=record,
        witnesses=witnesses,
    )
    if isinstance(faults, int):
        faults = _draw(main, settings, seed, faults, kinds, within)
    chosen = check_faults(faults, size)
    try:
        return _run(main, settings, seed, chosen)
    except SimulationFailed as failed:
        if not shrinks or not chosen:
            raise
        raise _shortest(main, settings, failed) from failed.cause


def explore(
    main: Main | ElasticMain, *, seeds: Iterable[int], faults: int = 0, kinds: Sequence[str] = DRAWN, **settings: Any
) -> list[SimulationResult]:
    """Simulate ``main`` with each of ``seeds`` and ``faults`` drawn faults each; return the results.

    ``settings`` and errors are those of ``simulate``: the first seed that fails raises, and ``simulate`` with that seed
    fails in the same way.  Without ``within`` each seed is first run without faults, to measure the program's duration.

    Faults are drawn of ``kinds``.
    """
    return [simulate(main, seed=seed, faults=faults, kinds=kinds, **settings) for seed in seeds]


def _check_size(size: object) -> int:
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"size: expected at least 1 node, got {size!r}")
    return size


def _draw(
    main: Main | ElasticMain, settings: Settings, seed: int, count: int, kinds: Sequence[str], within: float | None
) -> tuple[Fault, ...]:
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"kinds: expected some of {', '.join(KINDS)}, got {kind!r}")
    if count < 0:
        raise UsageError(f"faults: expected a number of faults of at least 0, got {count}")
    if count == 0:
        return ()
    if within is None:
        within = 1.1 * _run(main, replace(settings, record=False), seed, ()).seconds
    return draw_faults(seed, count=count, size=settings.size, within=within, kinds=kinds)


def _run(main: Main | ElasticMain, settings: Settings, seed: int, faults: tuple[Fault, ...]) -> SimulationResult:
    """Run once.  Raises ``SimulationFailed``."""
    check_interpreter()  # one-time work of a process must not happen in its first simulation
    lines: list[str] | None = [] if settings.record else None
    trace = Trace(lines)
    loop = SimulationLoop(seed, trace)
    run = _Verdict(loop, trace, main, settings, seed, faults)
    asyncio.set_event_loop(loop)
    try:
        with simulated_machine(loop, seed), run.installed():
            failure = run.go()
        result = run.result(tuple(lines or ()))
        failure = failure or _check(settings.check, result)
        if asyncio.all_tasks(loop):
            with simulated_machine(loop, seed), run.installed():
                run.dispose()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    if failure is None:
        return result
    failed = SimulationFailed(
        failure,
        seed=seed,
        size=settings.size,
        faults=faults,
        trace_hash=result.trace_hash,
        search=_search(main, settings),
    )
    failed.lines = tuple(lines or ())
    raise failed from failure


def _search(main: Main | ElasticMain, settings: Settings) -> SimulationSearch:
    """Return the arguments of the run, for a test that repeats it."""
    options: dict[str, object] = {"elastic": True} if settings.is_elastic else {}
    usual = {"conditions": Conditions(), "core": None, "bound": BOUND_SECONDS, "pin": None}
    options |= {name: each for name in usual if (each := getattr(settings, name)) != usual[name]}
    return SimulationSearch(
        main=main, check=settings.check, expected=settings.expected, options=options, removed=REMOVED.get()
    )


def _check(check: Check | None, result: SimulationResult) -> BaseException | None:
    """Return the error that ``check`` raises about ``result``, if any."""
    try:
        if check is not None:
            check(result)
    except Exception as error:  # noqa: BLE001  # whatever the check raises is how it failed
        return error
    return None


class _Verdict:
    """One run: from the start of the processes to the verdict."""

    def __init__(
        self,
        loop: SimulationLoop,
        trace: Trace,
        main: Main | ElasticMain,
        settings: Settings,
        seed: int,
        faults: tuple[Fault, ...],
    ) -> None:
        self._loop = loop
        self._trace = trace
        self._settings = settings
        self._seed = seed
        self._faults = faults
        self._broken: list[BaseException] = []
        loop.set_exception_handler(self._note)
        self._cluster = SimulatedCluster(
            loop, size=settings.size, seed=seed, trace=trace, conditions=settings.conditions
        )
        self._job: SimulatedJob | SimulatedElasticJob
        if settings.is_elastic:
            self._job = SimulatedElasticJob(
                self._cluster, cast("ElasticMain", main), seed=seed, witnesses=settings.witnesses
            )
        else:
            self._job = SimulatedJob(self._cluster, cast("Main", main), seed=seed, pin=settings.pin)
        self._cluster.on_death, self._cluster.on_restart = self._job.ended, self._job.begin_anew
        self._core = frozenset(range(settings.size))
        self._seconds = 0.0
        self._dice = Random(f"{seed} core")

    def installed(self) -> AbstractContextManager[None]:
        """Install the patches that the program needs."""
        return self._job.installed()

    def go(self) -> BaseException | None:
        """Run to the end and return the failure, if there is one."""
        self._job.begin()
        self._cluster.plan(self._faults)
        try:
            self._loop.run_until_complete(self._watch())
        except SimulatedDeadlock as error:
            return SimulatedHang(f"{error}; {self._where()}")
        except SimulatedHang as error:
            return error
        return self._judge()

    def result(self, lines: tuple[str, ...]) -> SimulationResult:
        """Return the result of the run."""
        job = self._job
        return SimulationResult(
            seed=self._seed,
            size=self._settings.size,
            faults=self._faults,
            results={p.node: job.results[p] for p in job.ranks if p in job.results and p.node is not None},
            errors={p.node: job.errors[p] for p in job.ranks if p in job.errors and p.node is not None},
            trace_hash=self._trace.digest,
            seconds=self._seconds,
            events=self._trace.events,
            notes=tuple(self._loop.notes),
            lines=lines,
        )

    def dispose(self) -> None:
        """Release everything that has not ended.  Effects of ``finally`` blocks from now on are ignored."""
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._cluster.network.mute()
        self._loop.bury(_LAST_SECONDS)
        self._loop.bury(_LAST_SECONDS)  # work begun by tasks that ended

    async def _watch(self) -> None:
        """Wait until the program has ended; check that it does so in time."""
        last = max((fault.at for fault in self._faults), default=0.0)
        if self._faults:
            end = max(fault.at + (fault.seconds or 0.0) for fault in self._faults)
            if self._settings.core is not None:  # then some faults never end
                end = last + self._dice.random() * max(0.0, end - last)
            await self._until(end)
            if len(self._cluster.happened) == len(self._faults):
                self._core = self._draw_core()
                self._cluster.settle(self._core)
        await self._until(max(last, self._loop.now) + self._settings.bound)
        if not self._job.is_over(self._core):
            raise SimulatedHang(
                f"the program did not end in {self._settings.bound:.0f} virtual seconds; {self._where()}"
            )
        self._seconds = self._loop.now
        await asyncio.sleep(_GRACE_SECONDS)

    async def _until(self, when: float) -> None:
        """Wait until ``when``, or until the program has ended, if no fault is still to come."""
        job, everyone = self._job, frozenset(range(self._settings.size))
        while self._loop.now < when and not job.is_over(everyone):
            job.changed.clear()
            try:
                async with asyncio.timeout_at(when):
                    await job.changed.wait()
            except TimeoutError:
                return

    def _draw_core(self) -> frozenset[int]:
        """Return the nodes that are healthy from now on."""
        living = [process.node for process in self._job.ranks if not process.is_dead and process.node is not None]
        count = len(living) if self._settings.core is None else min(len(living), self._settings.core)
        return frozenset(self._dice.sample(living, count))

    def _judge(self) -> BaseException | None:
        if self._broken:
            return self._broken[0]
        expected = self._settings.expected
        if expected is None:
            usual = (StaleGeneration,) if self._settings.is_elastic else (PeerError,)
            expected = usual if self._cluster.happened else ()
        for process, error in self._job.errors.items():
            if not isinstance(error, expected) and not self._job.excuses(process, error):
                return error
        failure = self._job.failure()
        return self._find_leak() if failure is None or isinstance(failure, expected) else failure

    def _find_leak(self) -> SimulatedLeak | None:
        """Look for remains of processes whose program has ended."""
        left = [task for task in sorted(asyncio.all_tasks(self._loop), key=hash) if self._is_left(task)]
        if left:
            return SimulatedLeak(f"tasks are left: {', '.join(task.get_name() for task in left)}")
        network = self._cluster.network
        for process in (*self._job.results, *self._job.errors):
            if process.is_dead:
                continue
            if timers := self._loop.timers(process):
                shown = ", ".join(str(timer._callback) for timer in timers)  # type: ignore[attr-defined]
                return SimulatedLeak(f"{process.name}: timers are left: {shown}")
            if count := network.lanes_of(process):
                return SimulatedLeak(f"{process.name}: {count} lanes are left")
            if names := network.served_by(process):
                return SimulatedLeak(f"{process.name}: services are left: {', '.join(names)}")
        return None

    def _is_left(self, task: asyncio.Task[Any]) -> bool:
        process = self._process_of(task)
        return (
            not task.done()
            and process is not None
            and not process.is_dead
            and (process in self._job.results or process in self._job.errors)
        )

    def _process_of(self, task: asyncio.Task[Any]) -> SimulatedProcess | None:
        return self._loop.owners.get(task)

    def _where(self) -> str:
        """Describe where the processes wait that should have ended."""
        places = []
        for task in sorted(asyncio.all_tasks(self._loop), key=hash):
            process = self._process_of(task)
            if process is None or process.is_dead or task.done() or process.node not in self._core:
                continue
            places.append(f"{process.name}, {task.get_name()} at {_place(task.get_coro())}")
        return "; ".join(places[:12]) or "nothing waits"

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record the error of a callback, which is raised nowhere else."""
        error = context.get("exception")
        if isinstance(error, BaseException) and "callback" in context.get("message", ""):
            self._broken.append(error)


def _place(waiting: Any) -> str:
    """Return where a coroutine waits: file and line of the innermost awaited frame, and of ours."""
    place = ours = "?"
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        place = f"{file}:{frame.f_lineno}"
        ours = ours if folder.endswith("/asyncio") else place
        waiting = waiting.cr_await
    return place if ours in (place, "?") else f"{place} in {ours}"


def _shortest(main: Main | ElasticMain, settings: Settings, failed: SimulationFailed) -> SimulationFailed:
    """Return the failure for the fewest and simplest faults that fail in the same way."""
    best = failed
    quiet = replace(settings, record=False)

    def fails(faults: tuple[Fault, ...]) -> bool:
        nonlocal best
        try:
            _run(main, quiet, failed.seed, faults)
        except SimulationFailed as again:
            if type(again.cause) is type(failed.cause):
                best = again
                return True
        return False

    shortest = shrink(failed.faults, fails)
    simplify(shortest, fails, _simpler)
    best.drawn = len(failed.faults)
    return best


def _simpler(fault: Fault) -> list[Fault]:
    """Return ``fault`` with rounder numbers, the roundest first."""
    forms = []
    for digits in (1, 2, 3, 4):
        seconds = None if fault.seconds is None else round(fault.seconds, digits)
        if seconds != 0.0:
            forms.append(replace(fault, at=round(fault.at, digits), seconds=seconds))
    return [form for form in dict.fromkeys(forms) if form != fault]


def shrink(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool], *, attempts: int = 200) -> tuple[T, ...]:
    """Return a part of ``items``, in order, that still fails, and from which no single item can be left out.

    This is delta debugging (Zeller and Hildebrandt, 2002).  ``items`` fails.  After ``attempts`` calls of ``fails`` the
    shortest found so far is returned.
    """
    left = attempts

    def ask(part: tuple[T, ...]) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(part)

    current = tuple(items)
    if current and ask(()):
        return ()
    parts = 2
    while len(current) > 1 and left > 0:
        size = -(-len(current) // parts)
        for start in range(0, len(current), size):
            rest = current[:start] + current[start + size :]
            if ask(rest):
                current, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(current), 2 * parts)
    return current


def simplify(
    items: Sequence[T],
    fails: Callable[[tuple[T, ...]], bool],
    simpler: Callable[[T], Sequence[T]],
    *,
    attempts: int = 60,
) -> tuple[T, ...]:
    """Return ``items`` with each replaced by the first of its ``simpler`` forms with which the list still fails."""
    current = tuple(items)
    for place in range(len(current)):
        for form in simpler(current[place]):
            attempts -= 1
            candidate = (*current[:place], form, *current[place + 1 :])
            if attempts >= 0 and fails(candidate):
                current = candidate
                break
    return current
