"""Workers of Dask that die or hang before ranks run there, or that have another Python or asyncpar than the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.engines import dask as engine
from asyncpar.engines import dask_worker
from asyncpar.engines.interface import PlaceOrder, encode
from asyncpar.testing import engine_programs as programs
from tests.engines import dask_programs
from tests.engines.consoles import RecordingConsole
from tests.engines.dask_workers import (
    find_workers,
    start_scheduler,
    start_worker,
    wait_for_workers,
    write_other_asyncpar,
)
from tests.soak import first
from tests.stopped import stop_process

distributed = pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def client(two_workers: Any) -> Iterator[Any]:
    with distributed.Client(two_workers, set_as_default=False) as client:
        wait_for_workers(client)
        yield client


async def launch(client: Any, ranks: int | tuple[int, int] = 2, **options: Any) -> list[Any]:
    return await ap.dask.launch(client, programs.add, 1, 2, ranks=ranks, console=RecordingConsole(), **options)


async def check_that_nothing_is_left(client: Any, dead: Collection[str] = ()) -> None:
    """The workers have no agents, no job holds them, and the next job runs."""
    wait_for_workers(client, dead)
    deadline = time.monotonic() + 30.0
    while set((found := client.run(dask_programs.count_places, on_error="return")).values()) != {0}:
        assert time.monotonic() < deadline, found  # one that died last may be known still
        await asyncio.sleep(0.1)
    assert client.run_on_scheduler(_gangs) == 0
    assert await launch(client) == [3, 1003]


def _gangs(dask_scheduler: Any) -> int:
    ledger = dask_scheduler.extensions.get("asyncpar-gangs")  # the first job brings it
    return 0 if ledger is None else len(ledger.gangs)


@pytest.mark.soak
@pytest.mark.parametrize(("death", "lost"), [(dask_programs.die_as_second, 1), (dask_programs.die, 2)])
async def test_workers_that_die_as_places_start_are_named(
    client: Any, monkeypatch: pytest.MonkeyPatch, death: Any, lost: int
) -> None:
    workers = find_workers(client)
    monkeypatch.setattr(dask_worker, "start_place", death)
    with pytest.raises(ExceptionGroup) as failed:
        await launch(client)
    monkeypatch.undo()
    losses = [str(error) for error in failed.value.exceptions if isinstance(error, ap.PeerLost)]
    assert len(losses) == lost
    dead = {address for address in workers if any(address in loss for loss in losses)}
    assert len(dead) == lost
    await check_that_nothing_is_left(client, dead)


@pytest.mark.soak
async def test_workers_that_die_whenever_they_are_asked_end_the_job(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = find_workers(client)
    monkeypatch.setattr(dask_worker, "describe_worker", dask_programs.die)
    with pytest.raises(ap.LaunchError, match="cannot start ranks"):
        await launch(client, ranks=1, wait=60.0)
    monkeypatch.undo()
    await check_that_nothing_is_left(client, workers)


async def test_a_worker_that_hangs_is_named(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = client.run(os.getpid)
    stopped = min(pids)
    stop_process(pids[stopped])
    try:
        monkeypatch.setattr(engine, "ANSWER_SECONDS", 1.0)
        with pytest.raises(ap.LaunchError, match=f"{stopped}.*no answer within 1 s"):
            await launch(client, ranks=1, workers=[stopped])
        monkeypatch.undo()
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    await check_that_nothing_is_left(client)


@pytest.mark.soak
async def test_an_elastic_job_names_a_worker_that_hangs(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = client.run(os.getpid)
    stopped = min(pids)
    stop_process(pids[stopped])
    try:
        monkeypatch.setattr(engine, "ANSWER_SECONDS", 1.0)
        with pytest.raises(ap.LaunchError, match=f"{stopped}.*no answer within 1 s"):
            await launch(client, ranks=(1, 2), workers=[stopped])
        monkeypatch.undo()
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    await check_that_nothing_is_left(client)


async def test_a_job_that_is_cancelled_while_a_worker_hangs_leaves_nothing(client: Any) -> None:
    pids = client.run(os.getpid)
    stopped = min(pids)
    stop_process(pids[stopped])
    try:
        launching = asyncio.ensure_future(launch(client, ranks=2))
        while client.run_on_scheduler(_gangs) == 0:  # noqa: ASYNC110  # then it asks the workers
            await asyncio.sleep(0.05)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(30.0):
                await launching
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    await check_that_nothing_is_left(client)


@pytest.mark.soak
async def test_a_worker_that_hangs_as_its_place_starts_is_named_and_its_place_ends(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on later, and starts a place of which nobody wants to know any more."""
    pids = client.run(os.getpid)
    stopped = min(pids)
    monkeypatch.setattr(dask_worker, "start_place", dask_programs.stop_before_start)
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 5.0)
    try:
        with pytest.raises(ExceptionGroup) as failed:
            await launch(client, ranks=1, workers=[stopped])
        assert f"{stopped} gives no answer within 5 s" in str(failed.value.exceptions[0])
        monkeypatch.undo()
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    deadline = time.monotonic() + 60.0
    while any(client.run(dask_programs.count_places).values()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await check_that_nothing_is_left(client)


@pytest.mark.soak
async def test_a_job_waits_for_a_worker_that_comes(client: Any, tmp_path: Path) -> None:
    launching = asyncio.ensure_future(launch(client, ranks=3, wait=90.0))
    await asyncio.sleep(0)  # it looks for workers
    with start_worker(client, tmp_path):
        assert await launching == [3, 1003, 2003]
    with pytest.raises(ap.UsageError, match=r"expected at most 2, 1 on each of 2 workers of Dask, got 3; wait=SECONDS"):
        await launch(client, ranks=3, wait=0.5)
    await check_that_nothing_is_left(client)


async def test_a_result_that_cannot_travel_is_told(client: Any) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await ap.dask.launch(client, dask_programs.return_a_lock, ranks=1, console=RecordingConsole())
    first = failed.value.exceptions[0]
    assert isinstance(first, ap.RemoteError)
    assert "the result: it cannot be pickled: TypeError: cannot pickle '_thread.lock' object" in str(first)


async def test_a_place_that_starts_after_its_end_is_not_started() -> None:
    """What a worker was told while it was stopped comes in any order."""
    worker = SimpleNamespace()
    order = encode(
        PlaceOrder(
            job="late",
            number=0,
            places=1,
            slots=1,
            address="127.0.0.1",
            secret=bytes(32),
            program=b"",
            timeout=1.0,
            grace=1.0,
            max_restarts=0,
            environment={},
            transport=None,
        )
    )
    await dask_worker.end_place("late", 0, dask_worker=worker)
    await dask_worker.start_place("late", 0, order, False, dask_worker=worker)
    assert dask_programs.count_places(dask_worker=worker) == 0


@pytest.mark.parametrize(
    ("source", "text"),
    first(
        1,
        [
            ("__version__ = '9.9'", "lacks this asyncpar .*No module named 'asyncpar.engines'.*install asyncpar"),
            ("raise ModuleNotFoundError(\"No module named 'asyncpar'\")", "lacks this asyncpar .*No module named"),
        ],
    ),
)
async def test_another_asyncpar_on_a_worker_is_refused(client: Any, tmp_path: Path, source: str, text: str) -> None:
    write_other_asyncpar(tmp_path, source)
    with start_worker(client, tmp_path) as address, pytest.raises(ap.UsageError, match=f"{address} {text}"):
        await launch(client, ranks=1, workers=[address])
    assert client.run_on_scheduler(_gangs) == 0


@pytest.mark.soak
async def test_another_python_on_a_worker_is_refused(client: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import platform\nplatform.python_version_tuple = lambda: ('3', '99', '0')\n"
    )
    with start_worker(client, tmp_path) as address, pytest.raises(ap.UsageError, match=r"has Python 3\.99, the caller"):
        await launch(client, ranks=1, workers=[address])
    assert client.run_on_scheduler(_gangs) == 0


async def test_a_scheduler_without_asyncpar_is_named(tmp_path: Path) -> None:
    write_other_asyncpar(tmp_path, "raise ModuleNotFoundError(\"No module named 'asyncpar'\")")
    with start_scheduler(tmp_path) as address:
        async with distributed.Client(address, asynchronous=True, set_as_default=False) as client:
            with pytest.raises(ap.UsageError, match="Dask's scheduler lacks this asyncpar"):
                await launch(client, ranks=1)
            with pytest.raises(ap.UsageError, match="Dask's scheduler lacks this asyncpar"):
                await ap.dask.launch(client, programs.add, 1, 2)  # which asks for the number of places first
