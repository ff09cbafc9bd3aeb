"""Worlds of real processes in which unmodified torch programs run on a backend, for tests.

A test whose body runs on every rank of a world that is already there, started once for the whole session:

    @on_ranks(2)
    def test_sums_arrive_everywhere() -> None:
        x = torch.full((3,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        torch.testing.assert_close(x, torch.full((3,), 3.0))

Parameters (``pytest.mark.parametrize``) must be JSON; fixtures are not for such tests, they run elsewhere.  The default
group exists.  The test fails with the tracebacks of all ranks when one raises, ends, leaves the ranks out of step,
loses an exception in a thread or logs an error; and with the stacks of all threads of all ranks when ``limit`` seconds
pass, or when some ranks are still waiting shortly after another failed.  Then the world is killed, and the next test
gets a new one.  Groups that a test made are destroyed after it.  Use ``torch.testing.assert_close``: bare ``assert``
has no details there.  ``@on_ranks(2, fresh=True)`` takes a world of its own; ``joins=False`` one without a group yet,
in which the test calls ``initialize()`` of ``tests.torch.ranks`` itself.

Tests that look from outside, because ranks die or are to fail, open their own world and ask for outcomes:

    with open_world(2) as world:
        ended, raised = world.outcomes(kill_rank_0, limit=20)
        assert ended.status == -signal.SIGKILL
        assert raised.error is not None

where ``kill_rank_0`` is a function at the top of a module.  What it returns must be JSON.  ``world.start`` and
``world.finish`` do the same in two steps, with ``world.kill(rank)`` in between.

``ASYNCPAR_TORCH_REFERENCE=gloo`` runs everything on that backend instead, to see what torch itself does.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.fork_server import ForkedProcess
from tests.torch.fork_servers import fork_servers

BACKEND = os.environ.get("ASYNCPAR_TORCH_REFERENCE") or "asyncpar"
LIMIT = 60.0
"""Seconds after which a test is taken for hung."""
START_LIMIT = 120.0
GRACE = 4.0
"""Seconds that ranks have to end after another has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a function on one rank: a value, an error (a traceback), an exit status, or none of them: hung."""

    rank: int
    value: Any = None
    error: str | None = None
    status: int | None = None
    is_hung: bool = False
    log: str = ""

    @property
    def is_good(self) -> bool:
        return self.error is None and self.status is None and not self.is_hung

    def __str__(self) -> str:
        if self.error is not None:
            what = f"raised\n{self.error}"
        elif self.status is not None:
            what = f"ended with status {self.status}"
        else:
            what = "was still at it" if self.is_hung else f"returned {self.value!r}"
        printed = f"\n----- rank {self.rank} printed\n{self.log.rstrip()}" if self.log.strip() else ""
        return f"===== rank {self.rank} {what}{printed}"


class World:
    """Processes that wait for functions to run.  Made by ``open_world``."""

    def __init__(self, size: int, directory: Path, *, backend: str, joins: bool) -> None:
        self.size = size
        self.is_broken = False
        self._logs = [directory / f"rank-{rank}.log" for rank in range(size)]
        self._log_starts = [0] * size
        self._channels: list[socket.socket] = []
        self._processes: list[ForkedProcess] = []
        for rank in range(size):
            self._start(rank, directory, [str(rank), backend, str(size), f"file://{directory}/store", str(int(joins))])

    def _start(self, rank: int, directory: Path, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._channels.append(ours)
        servers = fork_servers()
        with theirs, self._logs[rank].open("ab") as log:
            process = servers[rank % len(servers)].start(
                "tests.torch.ranks:main",
                arguments,
                environment=_environment(directory),
                log=log.fileno(),
                channel=theirs.fileno(),
            )
        self._processes.append(process)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def run(self, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, *, limit: float) -> Any:
        """Run ``function`` on all ranks and return what they returned; fail the test if one did not."""
        outcomes = self.outcomes(function, arguments, limit=limit)
        if not all(outcome.is_good for outcome in outcomes):
            self.is_broken = True
            pytest.fail("\n".join(map(str, outcomes)), pytrace=False)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, *, limit: float = LIMIT
    ) -> list[Outcome]:
        """Run ``function`` on all ranks that live and return the outcomes, within ``limit`` and a bit."""
        self.start(function, arguments, limit=limit)
        return self.finish(limit=limit)

    def start(self, function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, *, limit: float) -> None:
        """Send ``function`` to all ranks, which run it; ``finish`` must follow."""
        name = f"{function.__module__}:{function.__qualname__}"
        order = {"function": name, "arguments": dict(arguments or {}), "limit": limit}
        for rank, channel in enumerate(self._channels):
            self._log_starts[rank] = self._logs[rank].stat().st_size
            with suppress(BrokenPipeError, ConnectionResetError):  # it ended: finish() reports it
                channel.sendall(json.dumps(order).encode() + b"\n")

    def finish(self, *, limit: float = LIMIT, grace: float = GRACE) -> list[Outcome]:
        """Wait for all ranks; after ``limit`` seconds, or ``grace`` after one failed, ask the rest for their stacks."""
        waiting = set(range(self.size))
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank = key.data
                    answers[rank] = self._receive(rank)
                    waiting.discard(rank)
                    selector.unregister(key.fileobj)
                    if "value" not in answers[rank]:
                        deadline = min(deadline, time.monotonic() + grace)
        self._dump(waiting)
        return [self._outcome(rank, answers.get(rank)) for rank in range(self.size)]

    def _receive(self, rank: int) -> dict[str, Any]:
        line = b""
        with suppress(ConnectionResetError):
            while not line.endswith(b"\n") and (part := self._channels[rank].recv(1 << 16)):
                line += part
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"status": self._processes[rank].wait(timeout=5)}

    def _dump(self, ranks: set[int]) -> None:
        """Abort hung ranks, which makes them write the stacks of all their threads into their logs."""
        self.is_broken |= bool(ranks)
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGABRT)
            self._processes[rank].send_signal(signal.SIGCONT)  # should it be one that was stopped
        for rank in ranks:
            with suppress(TimeoutError):  # killed at the end
                self._processes[rank].wait(timeout=5)

    def _outcome(self, rank: int, answer: dict[str, Any] | None) -> Outcome:
        with self._logs[rank].open("rb") as file:
            file.seek(self._log_starts[rank])
            log = file.read().decode(errors="replace")[-20_000:]
        if answer is None:
            return Outcome(rank=rank, is_hung=True, log=log)
        return Outcome(rank=rank, log=log, **answer)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank a signal, SIGKILL by default."""
        self._processes[rank].send_signal(number)

    def close(self, *, limit: float = 30.0) -> list[int]:
        """Let the ranks end (they destroy their group) and return their exit statuses; kill what is left."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + (0.0 if self.is_broken else limit)
        for process in self._processes:
            with suppress(TimeoutError):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self._dump({rank for rank, process in enumerate(self._processes) if not process.has_ended()})
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # children of ranks, such as workers of a data loader, too
        return [process.wait() for process in self._processes]

    def last_words(self) -> str:
        """Return the logs, whole."""
        return "\n".join(f"----- rank {rank}\n{log.read_text()}" for rank, log in enumerate(self._logs))


def _environment(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    (directory / "temporary").mkdir(exist_ok=True)
    return kept | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(directory / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


@contextmanager
def open_world(size: int, *, joins: bool = True, backend: str = BACKEND) -> Iterator[World]:
    """Yield a world of new processes, in a group over ``backend`` if ``joins``; nothing of it is left at the end.

    Fails the test when ranks of a world that nobody broke (``world.is_broken``) do not end well.
    """
    with TemporaryDirectory(prefix="asyncpar-torch-") as directory:
        world = World(size, Path(directory), backend=backend, joins=joins)
        statuses = [0] * size
        try:
            beginnings = world.finish(limit=START_LIMIT)
            if not all(outcome.is_good for outcome in beginnings):
                world.is_broken = True
                pytest.fail("\n".join(map(str, beginnings)), pytrace=False)
            yield world
        except BaseException:
            world.is_broken = True
            raise
        finally:
            was_broken = world.is_broken
            statuses = world.close()
        if any(statuses) and not was_broken:
            pytest.fail(f"the ranks ended with {statuses}\n{world.last_words()}", pytrace=False)


class Worlds:
    """Worlds of a session or module, one per size, each started when first asked for and again after it was broken."""

    def __init__(self, *, joins: bool = True) -> None:
        """Without ``joins`` they have no group yet."""
        self._joins = joins
        self._open: dict[int, tuple[World, Any]] = {}

    def get(self, size: int) -> World:
        if size in self._open and self._open[size][0].is_broken:
            self._close(size)
        if size not in self._open:
            opened = open_world(size, joins=self._joins)
            self._open[size] = opened.__enter__(), opened
        return self._open[size][0]

    def _close(self, size: int) -> None:
        _, opened = self._open.pop(size)
        opened.__exit__(None, None, None)

    def close(self) -> None:
        """End all; fail if one does not end well."""
        for size in list(self._open):
            self._close(size)


def on_ranks(
    size: int, *, limit: float = LIMIT, fresh: bool = False, joins: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that is to run on every rank of a world.  See the module."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(request: pytest.FixtureRequest, **parameters: Any) -> None:
            if fresh or not joins:
                with open_world(size, joins=joins) as world:
                    world.run(function, parameters, limit=limit)
            else:
                request.getfixturevalue("torch_worlds").get(size).run(function, parameters, limit=limit)

        original = inspect.signature(function)
        request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = original.replace(  # type: ignore[attr-defined]
            parameters=[*original.parameters.values(), request]
        )
        marked: Callable[..., None] = pytest.mark.process(pytest.mark.timeout(limit + START_LIMIT + 30)(test))
        return marked

    return decorate
