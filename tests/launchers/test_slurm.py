"""Programs under real daemons of Slurm; `scripts/test-slurm` runs them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import asyncpar as ap
from asyncpar.core.config.hostlist import expand_hosts
from asyncpar.errors import LaunchError
from tests.core.config.test_hostlist import LISTS
from tests.launchers.slurm_cluster import NODES, SlurmCluster, has_ended, is_unpacked

PROGRAM = str(Path(__file__).with_name("ranks.py"))
ELASTIC = str(Path(__file__).with_name("elastic_ranks.py"))
ENGINES = Path(__file__).parents[2] / "scripts" / "examples" / "engines"
TINY = ("--steps", "3", "--batch", "8", "--seq", "16", "--dim", "32", "--layers", "1", "--heads", "2")
RANKS = [sys.executable, PROGRAM]
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not is_unpacked(), reason="scripts/test-slurm unpacks Slurm and runs these"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def ranks_in(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank"))


def expected(size: int, hosts: list[str]) -> list[str]:
    total = size * (size + 1) // 2
    return [f"rank {rank} of {size} sum {total} hosts {','.join(hosts)}" for rank in range(size)]


def test_five_tasks_on_three_nodes_make_one_world(cluster: SlurmCluster) -> None:
    one, two, three = NODES
    output = cluster.run("srun", "-N", "3", "-n", "5", *RANKS, "twice")
    assert ranks_in(output) == expected(5, [one, one, one, two, three])
    assert list((cluster.home / ".asyncpar" / "meetings").iterdir()) == []


def test_a_heterogeneous_step_makes_one_world(cluster: SlurmCluster) -> None:
    one, two, three = NODES
    output = cluster.run("srun", "-N", "1", "-n", "1", *RANKS, "sum", ":", "-N", "2", "-n", "3", *RANKS, "sum")
    assert ranks_in(output) == expected(4, [one, two, two, three])


def test_tasks_of_an_array_are_worlds_of_their_own(cluster: SlurmCluster) -> None:
    script = cluster.home / "array.sh"
    script.write_text(f"#!/bin/sh\nsrun {sys.executable} {PROGRAM} sum\n")
    job = cluster.run("sbatch", "--parsable", "--array=0-1", "-N2", "--ntasks-per-node=1", str(script)).strip()
    for task in range(2):
        assert cluster.finish(f"{job}_{task}") == "COMPLETED"
        assert len(ranks_in(cluster.output(f"{job}_{task}"))) == 2
        assert "of 2 sum 3" in cluster.output(f"{job}_{task}")


def test_a_submitted_program_runs_and_ends(cluster: SlurmCluster) -> None:
    job = cluster.submit("--nodes", "2", "--tasks-per-node", "2", PROGRAM, "sum")
    assert cluster.finish(job) == "COMPLETED", cluster.output(job)
    assert ranks_in(cluster.output(job)) == expected(4, [NODES[0]] * 2 + [NODES[1]] * 2)


def test_a_rank_that_fails_ends_the_job_with_its_cause(cluster: SlurmCluster) -> None:
    job = cluster.submit("--nodes", "3", PROGRAM, "fail")
    assert cluster.finish(job) == "FAILED"
    assert "ValueError: the data of rank 1 is damaged" in cluster.output(job)


def test_a_task_that_dies_before_it_meets_the_others_ends_the_job(cluster: SlurmCluster) -> None:
    job = cluster.submit("--nodes", "3", PROGRAM, "gone")
    assert cluster.finish(job) == "FAILED"
    assert "task 1: Exited with exit code 3" in cluster.output(job)
    assert list((cluster.home / ".asyncpar" / "meetings").iterdir()) == []


def test_agents_start_all_ranks_again(cluster: SlurmCluster) -> None:
    job = cluster.submit(
        "--nodes", "2", "--tasks-per-node", "2", "--elastic", "restart", "--max-restarts", "1", PROGRAM, "again"
    )
    assert cluster.finish(job) == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    assert "ValueError: the first attempt fails" in output
    for rank in range(4):
        assert f"rank {rank} of 4 sum 10 hosts" in output
    assert output.count("attempt 1") == 4, output


def endless(cluster: SlurmCluster, *options: str) -> tuple[str, list[int]]:
    """Submit a job that does not end; return it and the processes of its three ranks."""
    folder = cluster.home / f"pids-{time.monotonic_ns()}"
    folder.mkdir()
    job = cluster.submit("--nodes", "3", *options, PROGRAM, "endless", str(folder))
    cluster.until(lambda: len(list(folder.glob("pid-*"))) == 3, "three ranks")
    time.sleep(0.3)  # they exchange a few steps
    return job, [int((folder / f"pid-{rank}").read_text()) for rank in range(3)]


def test_a_rank_that_is_killed_is_named(cluster: SlurmCluster) -> None:
    job, ranks = endless(cluster)
    os.kill(ranks[2], signal.SIGKILL)
    cluster.until(lambda: "rank 2" in cluster.output(job) or "Killed" in cluster.output(job), "the cause")
    assert cluster.finish(job) == "FAILED"
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def test_scancel_leaves_nothing_behind(cluster: SlurmCluster) -> None:
    job, ranks = endless(cluster)
    cluster.run("scancel", job)
    assert cluster.finish(job) == "CANCELLED"
    cluster.until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks")
    assert list((cluster.home / ".asyncpar" / "meetings").iterdir()) == []


def test_at_the_time_limit_ranks_leave_and_the_job_is_queued_again(cluster: SlurmCluster) -> None:
    job, ranks = endless(cluster, "--requeue", "--time", "1", "--signal-before", "55")
    cluster.until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks", seconds=90)
    cluster.until(lambda: "goes into the queue again" in cluster.output(job), "the requeue")
    assert "less than 55 s are left of the time limit" in cluster.output(job)
    cluster.until(lambda: "Restarts=1" in cluster.run("scontrol", "-o", "show", "job", job), "the second start")
    cluster.run("scancel", job)


def test_at_the_time_limit_ranks_leave_and_the_job_ends_if_nobody_wants_it_again(cluster: SlurmCluster) -> None:
    job, ranks = endless(cluster, "--time", "1", "--signal-before", "55")
    cluster.until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks", seconds=90)
    assert cluster.finish(job) == "FAILED"
    assert "less than 55 s are left of the time limit" in cluster.output(job)
    assert "goes into the queue again" not in cluster.output(job)
    assert "Restarts=0" in cluster.run("scontrol", "-o", "show", "job", job)


def test_an_elastic_job_outlives_a_node(cluster: SlurmCluster) -> None:
    folder = cluster.home / "elastic"
    folder.mkdir()
    job = cluster.submit("--nodes", "2:3", "--elastic", "ranks", ELASTIC, "150", str(folder))

    def worlds() -> list[str]:
        return [path.read_text().split()[0] for path in folder.glob("*.step")]

    cluster.until(lambda: worlds() == ["3", "3", "3"], "training on three nodes")
    rank = psutil.Process(int((folder / "127.0.0.3.step").read_text().split()[1]))
    agents = [parent for parent in rank.parents() if "asyncpar" in parent.cmdline()]
    agents[0].kill()
    # a rank may write once more until its agent's end has ended it
    cluster.until(lambda: has_ended(rank.pid), "the end of the third rank")
    (folder / "127.0.0.3.step").unlink()
    cluster.until(lambda: worlds() == ["2", "2"], "training on two nodes")
    cluster.finish(job)
    assert cluster.output(job).count("ended with ") == 2


def test_lists_of_hosts_are_those_of_scontrol(cluster: SlurmCluster) -> None:
    for text in LISTS:
        if not text.endswith(".org"):  # a suffix after brackets is beyond this version
            assert cluster.run("scontrol", "show", "hostnames", text).split() == expand_hosts(text)


def test_more_nodes_than_there_are_is_told_at_once(cluster: SlurmCluster) -> None:
    output = cluster.run(sys.executable, "-m", "asyncpar", "slurm", "--nodes", "9", PROGRAM, "sum", status=1)
    assert "the job could not run here (queue_anyway lets it wait): allocation failure: Requested node" in output
    assert len(output.splitlines()) == 1
    waiting = cluster.submit("--nodes", "9", "--queue-anyway", PROGRAM, "sum")
    assert "JobState=PENDING" in cluster.run("scontrol", "-o", "show", "job", waiting)
    cluster.run("scancel", waiting)


def test_the_doctor_looks_at_the_cluster_and_at_the_place_in_a_job(cluster: SlurmCluster) -> None:
    output = cluster.run(
        "srun", "-N", "2", "-n", "2", sys.executable, "-m", "asyncpar", "doctor", "--slurm", status=None
    )
    for found in (
        "is UP",
        "munge makes credentials",
        "3 take jobs",
        "rank 1 of 2 on 127.0.0.2",
        "2 nodes are known by name",
    ):
        assert found in output, output


def test_a_preempted_job_drains_and_is_queued_again(cluster: SlurmCluster) -> None:
    job, ranks = endless(cluster, "--requeue", "--sbatch=--exclusive")
    urgent = cluster.submit("--nodes", "3", "--partition", "urgent", PROGRAM, "sum")
    cluster.until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks")
    assert cluster.finish(urgent) == "COMPLETED", cluster.output(urgent)
    cluster.until(lambda: "goes into the queue again" in cluster.output(job), "the requeue")
    cluster.until(lambda: "Restarts=1" in cluster.run("scontrol", "-o", "show", "job", job), "the second start")
    cluster.run("scancel", job)


def test_two_jobs_on_the_same_nodes_have_nothing_to_do_with_each_other(cluster: SlurmCluster) -> None:
    (one, ranks), (other, others) = endless(cluster), endless(cluster)
    cluster.run("scancel", one)
    assert cluster.finish(one) == "CANCELLED"
    cluster.until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks")
    assert all(psutil.pid_exists(pid) for pid in others)
    assert "JobState=RUNNING" in cluster.run("scontrol", "-o", "show", "job", other)
    cluster.run("scancel", other)


@pytest.fixture
def at_home(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """Be a user of the cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(cluster.home)
    return cluster


async def test_a_job_submitted_from_python_is_followed_to_its_end(at_home: SlurmCluster) -> None:
    job = await ap.slurm.submit(PROGRAM, "sum", nodes=3, tasks_per_node=2)
    ending = await job.wait()
    assert (ending.state, ending.exit_code, ending.reason) == ("COMPLETED", 0, ""), job.output.read_text()
    assert ranks_in(job.output.read_text()) == expected(6, [node for node in NODES for _ in range(2)])
    await job.cancel()  # does nothing
    assert await job.state() == "COMPLETED"
    failing = await ap.slurm.submit(PROGRAM, "fail", nodes=3)
    ending = await failing.wait()
    assert (ending.state, ending.reason) == ("FAILED", "NonZeroExitCode")
    assert ending.exit_code != 0
    assert "ValueError: the data of rank 1 is damaged" in failing.output.read_text()


async def test_a_job_submitted_from_python_is_cancelled(at_home: SlurmCluster, tmp_path: Path) -> None:
    job = await ap.slurm.submit(PROGRAM, "endless", str(tmp_path), nodes=3)
    while len(list(tmp_path.glob("pid-*"))) < 3:  # noqa: ASYNC110  # other processes
        await asyncio.sleep(0.1)
    assert await job.state() == "RUNNING"
    await job.cancel()
    ending = await job.wait()
    assert ending.state == "CANCELLED"
    assert ending.exit_code != 0
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.glob("pid-*"))


async def test_a_job_that_could_not_run_is_refused_in_the_words_of_slurm(at_home: SlurmCluster) -> None:
    with pytest.raises(LaunchError, match=r"could not run here \(queue_anyway lets it wait\): .*Requested node"):
        await ap.slurm.submit(PROGRAM, "sum", nodes=9)
    with pytest.raises(LaunchError, match=r"^the job was refused: .*invalid partition specified: nowhere"):
        await ap.slurm.submit(PROGRAM, "sum", partition="nowhere", queue_anyway=True)
    job = await ap.slurm.submit(PROGRAM, "sum", nodes=9, queue_anyway=True)
    assert await job.state() == "PENDING"
    await job.cancel()
    assert (await job.wait()).state == "CANCELLED"


def test_the_language_model_has_the_losses_of_the_launcher(cluster: SlurmCluster) -> None:
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "4", str(ENGINES / "ranks.py"), *TINY]
    figures = []
    for command in (launch, [sys.executable, str(ENGINES / "slurm_job.py"), *TINY]):
        output = cluster.run(*command)
        figures.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
    launched, placed = figures
    assert (placed["engine"], placed["ranks"]) == ("srun", 4)
    assert placed["first_loss"] == pytest.approx(launched["first_loss"], rel=1e-12)
    # two nodes add up gradients in another order than one
    assert placed["last_loss"] == pytest.approx(launched["last_loss"], rel=1e-6)


def test_a_cluster_that_is_broken_off_leaves_no_process_behind(tmp_path: Path) -> None:
    with SlurmCluster(tmp_path) as other:
        endless(other)
    place = f"SLURM_CONF={tmp_path / 'slurm.conf'}".encode()
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if place in _content(path)]
    assert left == []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ends just now, or is another user's
        return b""
