"""Clocks, random words and threads of the interpreter, for the time of a simulation.

The services of the machine to a program, and their replacements here:

- ``loop.time()``, ``time.monotonic``, ``perf_counter``, ``process_time``, ``thread_time``: the clock of the process
  that asks; ``time.time``: the same, since a fixed moment, plus what a fault has added to it.  Also where asyncpar's
  own modules have imported such a function by its name (``BOUND_CLOCKS``).
- ``time.sleep``: the process does nothing else for that long; a thread sleeps.
- ``random``, ``numpy.random``: seeded.  ``os.urandom``, ``secrets``, ``uuid.uuid4``, unseeded generators of numpy:
  words from the seed.
- ``asyncio.to_thread``, ``run_in_executor``, ``WorkerThread``, ``DaemonThread``: threads in lockstep (see ``threads``).
- collection of garbage: at fixed moments, so that finalizers run in the same place in every run.

Not taken over: ``datetime.now()``, ``uuid.uuid1``, files, sockets, other processes, threads that the program starts
itself, and the order of sets of strings (``PYTHONHASHSEED``) and of objects that hash by their address.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final

import numpy as np

from asyncpar.core.concurrency.bridge import PendingResult
from asyncpar.core.concurrency.worker import DaemonThread
from asyncpar.errors import UsageError
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.process import CURRENT

EPOCH: Final = 1_800_000_000.0
"""The wall-clock time at which every simulation begins."""

BOUND_CLOCKS: Final = (
    ("asyncpar.collectives.quick_call", "perf_counter"),
    ("asyncpar.collectives.shared_memory.call", "perf_counter"),
)
"""Modules that have imported a clock by its name."""

_CLOCKS: Final = ("monotonic", "perf_counter", "process_time", "thread_time")
_NANOSECONDS: Final = 1_000_000_000


class _Machine:
    """Stand-in for the machine.  Outside a simulation it passes every call on to the real one.

    A module that is imported during a simulation may keep these functions for good.
    """

    def __init__(self) -> None:
        self._loop: SimulationLoop | None = None
        self._words = random.Random()

    @contextmanager
    def simulating(self, loop: SimulationLoop, seed: object) -> Iterator[None]:
        if self._loop is not None:
            raise UsageError("simulate: expected one simulation at a time, and none inside of another")
        self._loop, self._words = loop, random.Random(f"{seed} words")
        try:
            yield
        finally:
            self._loop = None

    def clock(self, real: Callable[[], Any], scale: int | None = None) -> Callable[[], Any]:
        """Return a clock of processes in place of ``real``; with ``scale``, in so many parts of a second."""

        def read() -> Any:
            if self._loop is None:
                return real()
            return self._loop.time() if scale is None else int(self._loop.time() * scale)

        return read

    def time_of_day(self) -> float:
        if self._loop is None:
            return _REAL_TIME()
        process = CURRENT.get()
        return EPOCH + self._loop.time() + (0.0 if process is None else process.skew)

    def time_of_day_ns(self) -> int:
        return int(self.time_of_day() * _NANOSECONDS)

    def sleep(self, seconds: float) -> None:
        if self._loop is None:
            _REAL_SLEEP(seconds)
        elif not self._loop.lockstep.sleep(seconds):
            self._loop.block(seconds)

    def urandom(self, size: int) -> bytes:
        return _REAL_URANDOM(size) if self._loop is None else self._words.randbytes(size)

    @property
    def loop(self) -> SimulationLoop:
        assert self._loop is not None, "there is no simulation"
        return self._loop


_MACHINE: Final = _Machine()
_REAL_TIME, _REAL_SLEEP, _REAL_URANDOM = time.time, time.sleep, os.urandom


def _wait(pending: PendingResult[Any]) -> Any:
    _MACHINE.loop.lockstep.wait_for(pending._future)
    return pending._future.result()


def _become_one_thread(thread: Any, name: str) -> None:  # noqa: ARG001
    thread._max_workers = 1


async def _run(thread: DaemonThread, function: Callable[[], Any]) -> Any:
    return await _MACHINE.loop.run_in_executor(thread, function)


_REPLACEMENTS: Final[tuple[tuple[object, str, Callable[..., Any]], ...]] = (
    *((time, name, _MACHINE.clock(getattr(time, name))) for name in _CLOCKS),
    *((time, f"{name}_ns", _MACHINE.clock(getattr(time, f"{name}_ns"), _NANOSECONDS)) for name in _CLOCKS),
    *((import_module(module), name, _MACHINE.clock(getattr(time, name))) for module, name in BOUND_CLOCKS),
    (time, "time", _MACHINE.time_of_day),
    (time, "time_ns", _MACHINE.time_of_day_ns),
    (time, "sleep", _MACHINE.sleep),
    (os, "urandom", _MACHINE.urandom),
    (random, "_urandom", _MACHINE.urandom),  # the source of ``secrets`` and ``random.SystemRandom``
    (PendingResult, "wait", _wait),
    (DaemonThread, "__init__", _become_one_thread),
    (DaemonThread, "run", _run),
    (DaemonThread, "close", lambda thread, *, patience=0.0: None),  # noqa: ARG005
)


@contextmanager
def simulated_machine(loop: SimulationLoop, seed: object) -> Iterator[None]:
    """Provide time, random words and threads from ``loop`` and ``seed`` in place of the machine's."""
    saved, saved_numpy, had_collector = random.getstate(), np.random.get_state(), gc.isenabled()
    with ExitStack() as stack:
        stack.enter_context(_MACHINE.simulating(loop, seed))
        for place, name, value in _REPLACEMENTS:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        random.seed(f"{seed} random")
        np.random.seed(random.getrandbits(32))
        gc.disable()
        try:
            yield
        finally:
            random.setstate(saved)
            np.random.set_state(saved_numpy)
            if had_collector:
                gc.enable()
