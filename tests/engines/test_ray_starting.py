"""Actors of Ray that die or hang, other versions, and places that are missing; ``scripts/test-ray`` has ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.engines import polled_place
from asyncpar.testing import engine_programs as programs
from tests.engines import ray_places
from tests.engines.consoles import RecordingConsole

ray = pytest.importorskip("ray", reason="ray (extra ray) is not installed; scripts/test-ray has it")

from asyncpar.engines import ray_engine as engine  # noqa: E402  # it imports ray

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[dict[str, str]]:
    context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield context.address_info
    ray.shutdown()


async def launch(function: Any = programs.add, *arguments: Any, ranks: Any = 1, **options: Any) -> list[Any]:
    if function is programs.add:
        arguments = (1, 2)
    return await ap.ray.launch(function, *arguments, ranks=ranks, console=RecordingConsole(), **options)


async def check_that_nothing_is_left() -> None:
    """No process of this test is stopped, and a job that needs all CPUs runs."""
    assert await launch(ranks=2, wait=60.0) == [3, 1003]
    stopped = [path for path in Path("/proc").glob("[0-9]*/stat") if _is_stopped_place(path)]
    assert stopped == []


def _is_stopped_place(stat: Path) -> bool:
    try:
        name, _, rest = stat.read_text().rpartition(")")
    except OSError:  # it has ended
        return False
    return rest.split()[0] == "T" and any(place in name for place in ("Stopped", "Deaf", "RayPlace"))


async def test_an_actor_that_hangs_before_it_runs_anything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RayPlace", ray_places.StoppedBeforeItsDescription)
    with pytest.raises(ap.LaunchError, match=r"Ray's bundle 0 gives no answer within 10 s \(timeout= and wait=\)"):
        await launch(ranks=2, timeout=10.0)
    monkeypatch.undo()
    await check_that_nothing_is_left()


async def test_an_actor_that_hangs_as_its_place_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RayPlace", ray_places.StoppedBeforeItsStart)
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 2.0)
    with pytest.raises(ExceptionGroup) as failed:
        await launch(ranks=1)
    assert "Ray's bundle 0 could not start: Ray's bundle 0 gives no answer within 2 s" in str(
        failed.value.exceptions[0]
    )
    monkeypatch.undo()
    await check_that_nothing_is_left()


async def test_an_actor_that_hangs_while_its_ranks_run_is_lost_when_its_lease_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launching = asyncio.ensure_future(launch(programs.linger, str(tmp_path), ranks=1))
    rank = await _rank_in(tmp_path, launching)
    monkeypatch.setattr(polled_place, "LEASE_SECONDS", 8.0)  # at the caller, from its next question on
    agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    await asyncio.sleep(polled_place.POLL_SECONDS)  # the question before is answered
    os.kill(agent, signal.SIGSTOP)
    with pytest.raises(ExceptionGroup) as failed:
        await launching
    assert isinstance(failed.value.exceptions[0], ap.PeerLost)
    assert "Ray's bundle 0 gives no answer within 8 s" in str(failed.value)
    monkeypatch.undo()
    await check_that_nothing_is_left()
    async with asyncio.timeout(30):
        while Path(f"/proc/{rank}").exists():  # noqa: ASYNC110  # it ends after its agent, which its reaper notices
            await asyncio.sleep(0.05)


async def test_an_interrupt_that_an_actor_does_not_take_does_not_hold_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "RayPlace", ray_places.DeafToCommands)
    launching = asyncio.ensure_future(launch(programs.linger, str(tmp_path), ranks=1, grace=1.0))
    await _rank_in(tmp_path, launching)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(90.0):
            await launching
    monkeypatch.undo()
    await check_that_nothing_is_left()


async def _rank_in(folder: Path, launching: asyncio.Future[Any]) -> int:
    """Return the process that ``linger`` has named."""
    while not (found := os.listdir(folder)):
        assert not launching.done(), launching
        await asyncio.sleep(0.05)
    return int(found[0])


async def test_an_actor_that_dies_in_start_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RayPlace", ray_places.DiesInStartUp)
    with pytest.raises(ap.LaunchError, match=r"Ray's bundle 0 cannot run asyncpar: .*died"):
        await launch(ranks=2)
    monkeypatch.undo()
    await check_that_nothing_is_left()


async def test_another_asyncpar_in_the_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_place, "__version__", "9.9")
    with pytest.raises(ap.UsageError, match=r"Ray's bundle 0 has asyncpar 0.*the caller 9\.9; install the same"):
        await launch()
    monkeypatch.undo()
    await check_that_nothing_is_left()


async def test_a_module_that_workers_lack_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_at_the_caller.py").write_text("def nothing():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_at_the_caller  # type: ignore[import-not-found]

    with pytest.raises(ExceptionGroup) as failed:
        await launch(only_at_the_caller.nothing)
    assert "this rank cannot load it: No module named 'only_at_the_caller'" in str(failed.value.exceptions[0])


async def test_places_that_do_not_come_are_reported_when_the_wait_is_over() -> None:
    begun = time.monotonic()
    with pytest.raises(ap.UsageError, match=r"1 places-that-come in 1 bundles, this cluster of Ray has 0"):
        await launch(resources={"CPU": 1.0, "places-that-come": 1.0}, wait=1.0)
    assert time.monotonic() - begun >= 1.0


async def test_a_job_waits_for_a_node_that_comes(cluster: dict[str, str]) -> None:
    launching = asyncio.ensure_future(launch(ranks=2, resources={"late": 1.0}, wait=90.0))
    node = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("ray")), "start", f"--address={cluster['gcs_address']}", "--block"),
        *("--num-cpus=1", '--resources={"late": 2}', "--disable-usage-stats"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert await launching == [3, 1003]
    finally:
        node.terminate()
        await node.wait()
        note = Path(cluster["session_dir"]).parent / "ray_current_cluster"
        note.unlink(missing_ok=True)  # by which later programs would look for this cluster


async def test_bounds_for_an_elastic_job_are_refused_in_words() -> None:
    with pytest.raises(ap.UsageError, match=r"ranks: expected a number, as this engine's places are fixed, got \(1, 2"):
        await launch(ranks=(1, 2))
