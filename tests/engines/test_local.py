"""Ranks on this machine: the conformance suite, and what only this engine has."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.engines.blocking_run import run_in_thread
from asyncpar.launch.job_directory import list_jobs
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import (
    ElasticConformance,
    EngineConformance,
    EngineOutput,
    finish_counting,
    ranks_of_world,
)
from tests.engines.consoles import RecordingConsole
from tests.engines.kernels import interrupt_a_cell, start_kernel
from tests.soak import first

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class TestLocal(EngineConformance):
    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await ap.cluster.launch(function, *arguments, ranks=ranks, console=RecordingConsole(output), **options)


class TestElasticLocal(ElasticConformance):
    async def launch(
        self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, int], **options: Any
    ) -> list[Any]:
        return await ap.cluster.launch(function, *arguments, ranks=ranks, console=RecordingConsole(), **options)


@pytest.mark.soak
async def test_commands_look_at_an_elastic_job_as_at_others(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}

    async def show(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncpar",
            *arguments,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    async with asyncio.timeout(90):
        launching = asyncio.ensure_future(
            ap.cluster.launch(programs.count_elastically, str(tmp_path), ranks=(1, 2), console=RecordingConsole())
        )
        pids = await ranks_of_world(str(tmp_path), 2, launching)
        (job,) = {entry.job for entry in list_jobs(os.environ) if entry.pid == os.getpid()}
        ranks: dict[int, int] = {}
        while len(ranks) < 2:  # a place tells of its rank once a second
            seen = json.loads(await show("status", job, "--json"))
            ranks = {rank["rank"]: rank["pid"] for host in seen["hosts"] for rank in host.get("ranks", ())}
        assert (seen["job"], seen["phase"], seen["world_size"]) == (job, "running", 2)
        assert (sorted(ranks), sorted(ranks.values())) == ([0, 1], pids)
        stacks = await show("stacks", job)
        assert all(f"(pid {pid})" in stacks for pid in pids), stacks
        await finish_counting(str(tmp_path), launching, results=2)
    assert [entry.job for entry in list_jobs(os.environ) if entry.job == job] == []


class Counter(ap.Actor):
    """Counts on each rank, and over all."""

    def __init__(self, start: int) -> None:
        self._count = start

    @ap.endpoint
    async def add(self, n: int) -> list[int]:
        """Count, and return this rank's count with the size of the mesh."""
        self._count += n
        return [self._count, self.group("rank").size]


async def test_actors_run_on_a_cluster_until_one_of_its_ranks_dies() -> None:
    """The caller is one more node, and the failure says which rank it was."""
    async with asyncio.timeout(90):
        with pytest.raises(ap.PeerLost) as failed:
            await _count_and_fall()
    assert "rank 0 on" in failed.value.__notes__[0]
    assert "SIGKILL" in failed.value.__notes__[0]


async def _count_and_fall() -> None:
    async with ap.cluster(2, console=RecordingConsole()) as mesh:
        assert (mesh.ranks, mesh.node.rank) == ((0, 1), 2)
        counters = await mesh.reshape(rank=2).spawn(Counter, 40)
        assert list((await counters.add(2)).values()) == [[42, 2], [42, 2]]
        victims = await mesh.spawn(Victim)
        await victims.at(member=0).fall()


class Victim(ap.Actor):
    """Kills its own rank."""

    @ap.endpoint
    async def fall(self) -> None:
        """Die."""
        os.kill(os.getpid(), signal.SIGKILL)


async def test_a_class_that_no_rank_can_import_is_refused_and_goes_as_code_with_consent() -> None:
    class Local(ap.Actor):
        @ap.endpoint
        async def one(self) -> int:
            return 1

    async with ap.cluster(1, pickle=True, console=RecordingConsole()) as mesh:
        assert list((await (await mesh.spawn(Local)).one()).values()) == [1]


def test_functions_travel_as_code_only_with_consent() -> None:
    with pytest.raises(ap.UsageError, match="pickle=True"):
        ap.cluster.run(lambda: 1, ranks=1)
    with pytest.raises(ap.UsageError, match="pickle=True"):
        ap.cluster.run(programs.add, object(), 1, ranks=1)
    assert ap.cluster.run(lambda: {1, 2}, ranks=1, pickle=True, console=RecordingConsole()) == [{1, 2}]


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ap.UsageError, match="cannot be pickled"):
        ap.cluster.run(lambda: lock, ranks=1, pickle=True)


async def test_a_blocking_run_works_where_a_loop_runs_as_in_a_notebook() -> None:
    assert ap.cluster.run(programs.add, 1, 2, ranks=1, console=RecordingConsole()) == [3]


def test_a_blocking_run_has_the_context_of_its_caller() -> None:
    cell = contextvars.ContextVar[str]("cell")
    cell.set("the caller's")

    async def look() -> str:
        return cell.get()

    assert run_in_thread(look) == "the caller's"


@pytest.mark.parametrize("engine", [ap.cluster, ap.dask, ap.mpi, ap.ray, ap.slurm])
def test_the_blocking_run_of_an_engine_has_the_parameters_of_its_launch(engine: Any) -> None:
    assert inspect.signature(engine.run) == inspect.signature(engine.launch)
    assert not inspect.iscoroutinefunction(engine.run)
    assert "and wait" in engine.run.__doc__


def test_a_script_runs_functions_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os
            import asyncpar as ap

            def rank():
                return int(os.environ["RANK"])

            if __name__ == "__main__":
                print(ap.cluster.run(rank, ranks=1))
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[0]"


NOTEBOOK = """
import asyncio, signal, sys, threading, time, os
import asyncpar as ap
from asyncpar.testing import engine_programs as programs

folder, times, function = sys.argv[1], int(sys.argv[2]), getattr(programs, sys.argv[3])

def interrupt():
    for _ in range(times):
        while not os.listdir(folder):
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

async def cell():  # a cell runs while the kernel's loop runs
    threading.Thread(target=interrupt).start()
    try:
        ap.cluster.run(function, folder, ranks=1, grace=900.0)
    except KeyboardInterrupt:
        print("interrupted")
    print([os.path.exists(f"/proc/{pid}") for pid in os.listdir(folder)])
    print(ap.cluster.run(programs.add, 1, 2, ranks=1))

loop = asyncio.new_event_loop()
loop.run_until_complete(cell())
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("times", "function"), first(1, [(1, "linger"), (2, "ignore_interrupts")]))
def test_an_interrupted_cell_leaves_nothing_and_can_be_run_again(tmp_path: Path, times: int, function: str) -> None:
    """The second interrupt kills ranks that ignore the first, long before their grace is over."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(tmp_path), str(times), function],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split("\n")[:3] == ["interrupted", "[False]", "[3]"], done


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_cell_of_a_kernel_is_interrupted_and_launches_again() -> None:
    """As ``test_an_interrupted_cell_leaves_nothing_and_can_be_run_again``, in a kernel of Jupyter, three times."""
    with start_kernel() as kernel:
        for _ in range(3):
            interrupt_a_cell(kernel)


def test_ranks_die_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, asyncpar as ap; from asyncpar.testing import engine_programs as p\n"
        "ap.cluster.run(p.ignore_interrupts, sys.argv[1], ranks=1)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as caller:
        deadline = time.monotonic() + 30.0
        while not (found := os.listdir(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        caller.kill()
    while os.path.exists(f"/proc/{found[0]}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
