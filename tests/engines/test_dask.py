"""Ranks on a real Dask cluster of processes on this host."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.engines import polled_place
from asyncpar.engines.dask_plugin import make_page
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import EngineConformance, EngineOutput
from tests.engines import dask_programs
from tests.engines.consoles import RecordingConsole
from tests.engines.dask_workers import find_workers, wait_for_workers

distributed = pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster(two_workers: Any) -> Any:
    return two_workers


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    with distributed.Client(cluster) as client:
        wait_for_workers(client)
        yield client


class TestDask(EngineConformance):
    @pytest.fixture(autouse=True)
    def _use(self, client: Any) -> None:
        self.client = client

    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await ap.dask.launch(
            self.client,
            function,
            *arguments,
            ranks=ranks,
            per_worker=2,
            console=RecordingConsole(output),
            **options,
        )


def test_a_blocking_run_has_a_rank_on_each_worker_by_default(client: Any) -> None:
    def place() -> int:
        return int(os.environ["GROUP_RANK"])

    assert ap.dask.run(client, place, console=RecordingConsole()) == [0, 1]


async def test_an_asynchronous_client_launches_on_its_own_loop(cluster: Any) -> None:
    async with distributed.Client(cluster.scheduler_address, asynchronous=True) as client:
        assert await ap.dask.launch(client, programs.add, 1, 2, ranks=1, console=RecordingConsole()) == [3]
        with pytest.raises(ap.UsageError, match="await"):
            ap.dask.run(client, programs.add, 1, 2, ranks=1)


def test_futures_of_dask_among_the_arguments_are_the_values_for_the_ranks(client: Any) -> None:
    numbers = client.submit(list, (1, 2))
    more = client.map(abs, [-3, -4])
    got = ap.dask.run(client, programs.echo, [numbers, {"more": more}], ranks=1, console=RecordingConsole())
    assert got == [[[1, 2], {"more": [3, 4]}]]
    # another engine takes them as well
    assert ap.cluster.run(programs.add, more[0], more[1], ranks=1, console=RecordingConsole()) == [7]


@pytest.mark.soak
async def test_futures_of_an_asynchronous_client_are_awaited(cluster: Any) -> None:
    async with distributed.Client(cluster.scheduler_address, asynchronous=True) as client:
        one = client.submit(abs, -1)
        assert await ap.dask.launch(client, programs.add, one, 2, ranks=1, console=RecordingConsole()) == [3]
        async with ap.dask.world(client, ranks=1, console=RecordingConsole()) as mesh:
            actors = await mesh.spawn(dask_programs.Holder, [one])
            assert list((await actors.get()).values()) == [[1]]


async def test_futures_of_dask_that_have_no_value_say_why(client: Any, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        await ap.dask.launch(client, programs.add, client.submit(divmod, 1, 0), 2, ranks=1)
    assert caught.value.__notes__ == ["(the value of arguments[0], which the ranks were to get)"]
    over = tmp_path / "over"
    waiting = client.submit(dask_programs.wait_for_file, str(over))
    await asyncio.to_thread(waiting.cancel, force=True)
    with pytest.raises(ap.UsageError, match=r"arguments\[1\]: expected a value, Future was cancelled"):
        await ap.dask.launch(client, programs.add, 1, waiting, ranks=1)
    over.touch()  # its thread would keep the worker from ending


async def test_nodes_live_on_the_loops_of_workers(client: Any) -> None:
    async with ap.dask.world(client, console=RecordingConsole()) as mesh:
        assert len(mesh) == 2
        actors = await mesh.spawn(dask_programs.WorkerActor)
        places = list((await actors.place()).values())
    assert {address for address, _ in places} == set(client.scheduler_info(n_workers=-1)["workers"])
    assert {total for _, total in places} == {"2"}


async def test_too_few_workers_are_reported_at_once_or_waited_for(client: Any) -> None:
    with pytest.raises(ap.UsageError, match=r"at most 2.*got 3.*wait=SECONDS"):
        await ap.dask.launch(client, programs.add, 1, 2, ranks=3)
    begun = time.monotonic()
    with pytest.raises(ap.UsageError, match="at most 2"):
        await ap.dask.launch(client, programs.add, 1, 2, ranks=3, wait=0.5)
    assert time.monotonic() - begun >= 0.5
    with pytest.raises(ap.UsageError, match="no worker of this cluster"):
        await ap.dask.launch(client, programs.add, 1, 2, ranks=1, workers=["tcp://127.0.0.1:1"])


async def test_a_world_of_nodes_on_workers_has_a_fixed_size(client: Any) -> None:
    with pytest.raises(ap.UsageError, match=r"ranks: expected a number"):
        async with ap.dask.world(client, ranks=(1, 2)):  # type: ignore[arg-type]
            pass


async def test_several_ranks_of_a_worker_go_and_come_together(client: Any) -> None:
    with pytest.raises(ap.UsageError, match=r"multiples of the 2 ranks of a place, got \(1, 4\)"):
        await ap.dask.launch(client, programs.raise_elastically, ranks=(1, 4), per_worker=2)


@pytest.mark.soak
async def test_jobs_that_share_workers_take_turns(three_workers: Any) -> None:
    """Eight gangs of two on three workers: none waits for another that waits for it."""
    with distributed.Client(three_workers, set_as_default=False) as client:
        names = sorted(find_workers(client))
        pairs = [[names[i % 3], names[(i + 1) % 3]] for i in range(8)]

        async def one(workers: list[str]) -> None:
            async with ap.dask.world(client, workers=workers, console=RecordingConsole()) as mesh:
                assert len(mesh) == 2

        async with asyncio.timeout(100):
            await asyncio.gather(*(one(workers) for workers in pairs))
        assert client.run_on_scheduler(_gangs) == 0


def _wait_for_file(folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not os.listdir(folder):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as page:
        text: str = page.read().decode()
    return text


def _gangs(dask_scheduler: Any) -> int:
    ledger = dask_scheduler.extensions.get("asyncpar-gangs")  # the first job brings it
    return 0 if ledger is None else len(ledger.gangs)


def test_a_job_shows_dask_that_its_workers_are_busy_has_a_page_and_ends_when_it_is_cancelled(
    client: Any, tmp_path: Path
) -> None:
    address = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    host, port = "127.0.0.1", client.scheduler_info()["services"]["dashboard"]

    async def look() -> tuple[str, Any]:
        launching = asyncio.ensure_future(
            ap.dask.launch(
                client, programs.linger, str(tmp_path), ranks=1, workers=[address], console=RecordingConsole()
            )
        )
        await asyncio.to_thread(_wait_for_file, tmp_path)
        text = await asyncio.to_thread(_read, f"http://{host}:{port}/asyncpar")
        busy = client.processing()[address]
        launching.cancel()
        await asyncio.wait({launching})
        assert launching.cancelled()
        assert not [pid for pid in os.listdir(tmp_path) if os.path.exists(f"/proc/{pid}")]
        return text, busy

    text, busy = asyncio.run(look())
    assert "linger-" in text
    assert "runs" in text
    assert [key for key in busy if key.startswith("asyncpar-linger-")]


async def test_versions_that_differ_are_reported(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_place, "__version__", "9.9")
    with pytest.raises(ap.UsageError, match=r"has asyncpar 0.*the caller 9.9; install the same"):
        await ap.dask.launch(client, programs.add, 1, 2, ranks=1)


async def test_a_module_that_workers_lack_is_named(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_at_the_caller.py").write_text("def nothing():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_at_the_caller  # type: ignore[import-not-found]

    with pytest.raises(ExceptionGroup) as failed:
        await ap.dask.launch(client, only_at_the_caller.nothing, ranks=1, console=RecordingConsole())
    assert "this rank cannot load it: No module named 'only_at_the_caller'" in str(failed.value.exceptions[0])


async def test_the_failure_of_a_rank_reaches_the_caller_with_its_traceback(client: Any) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await ap.dask.launch(client, divmod, 1, 0, ranks=1, console=RecordingConsole())
    first = failed.value.exceptions[0]
    assert isinstance(first, ap.RemoteError)
    assert (first.rank, first.type_name) == (0, "ZeroDivisionError")
    assert "rank_program" in first.remote_traceback


def test_the_death_of_a_worker_reaches_the_caller(client: Any, tmp_path: Path) -> None:
    pids = client.run(os.getpid)
    chosen = sorted(pids)[:2]
    victim = chosen[1]

    async def kill_later() -> None:
        launching = asyncio.ensure_future(
            ap.dask.launch(client, programs.linger, str(tmp_path), ranks=2, workers=chosen, console=RecordingConsole())
        )
        await asyncio.to_thread(_wait_for_file, tmp_path)
        os.kill(pids[victim], signal.SIGKILL)
        await launching

    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(kill_later())
    wait_for_workers(client, {victim})
    first = failed.value.exceptions[0]
    assert isinstance(first, ap.PeerLost)
    assert victim in str(first)


CLIENT = """
import sys
from distributed import Client
import asyncpar as ap
from asyncpar.testing import engine_programs as programs

ap.dask.run(Client(sys.argv[1]), programs.linger, sys.argv[2], ranks=1, wait=60.0)
"""


@pytest.mark.soak
def test_ranks_end_with_a_client_that_is_killed(client: Any, tmp_path: Path) -> None:
    """Long before the lease is over: the scheduler tells the workers."""
    command = [sys.executable, "-c", CLIENT, client.scheduler.address, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as caller:
        _wait_for_file(tmp_path)
        found = [int(name) for name in os.listdir(tmp_path)]
        caller.kill()
    deadline = time.monotonic() + polled_place.LEASE_SECONDS / 2
    while any(os.path.exists(f"/proc/{pid}") for pid in found) or any(client.run(dask_programs.count_places).values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def test_a_place_whose_caller_is_gone_ends(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease, on this process's loop: nothing asks for events."""
    from asyncpar.engines.interface import PlaceOrder, encode

    monkeypatch.setattr(polled_place, "LEASE_SECONDS", 0.2)
    order = PlaceOrder(
        job="left",
        number=1,
        places=2,
        slots=1,
        address="127.0.0.1",
        secret=b"s" * 32,
        program=b"",
        timeout=60.0,
        grace=1.0,
        max_restarts=0,
        environment={},
        transport=None,
    )
    place = polled_place.PolledPlace(encode(order), on_loop=False)
    async with asyncio.timeout(10):
        await place.wait()


def test_the_page_without_jobs_says_so() -> None:
    assert "no job" in make_page([], now=0.0)
