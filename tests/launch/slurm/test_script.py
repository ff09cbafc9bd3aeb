"""Batch scripts, run by bash with an `srun` of ours.  `scripts/test-slurm` runs them under Slurm itself."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.launch.options import ProgramKind
from asyncpar.launch.slurm.script import SlurmJob, write_script

JOB = SlurmJob(program="train.py", arguments=("--name", "a b$HOME"), nodes=3, tasks_per_node=2, name="train")
VARIABLES = {
    "SLURM_JOB_ID": "30007",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "n3",
}


def directives(job: SlurmJob) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in write_script(job).splitlines() if line.startswith("#SBATCH")]


def tools(folder: Path, **bodies: str) -> dict[str, str]:
    """Make programs with these bodies, and return an environment in which they are found."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), **VARIABLES}


def run(job: SlurmJob, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = write_script(job)
    return subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_ranks_are_tasks_of_one_step(tmp_path: Path) -> None:
    done = run(JOB, tools(tmp_path, srun='printf "%s|" "$@"'))
    assert done.stdout == "--kill-on-bad-exit=1|python|-u|train.py|--name|a b$HOME|"
    assert done.returncode == 0
    assert directives(JOB)[:3] == ["--job-name=train", "--nodes=3", "--ntasks-per-node=2"]


def test_agents_are_one_task_per_node_with_a_secret_that_is_gone_afterwards(tmp_path: Path) -> None:
    fakes = tools(
        tmp_path,
        srun='stat -c "%a %s" "$ASYNCPAR_SECRET_FILE"; while [ "$1" != sh ]; do shift; done; exec "$@"',
        scontrol="printf 'n1\\nn2\\nn3\\n'",
        agent='[ "$1" = -c ] && echo 20007 || printf "%s|" "$@"',
    )
    job = replace(JOB, elastic="ranks", least_nodes=2, max_restarts=4, python="agent")
    done = run(job, fakes)
    mode, _, words = done.stdout.partition("\n")
    assert mode == "600 32"
    assert shlex.split(words.replace("|", " ").replace("a b$HOME", "'a b$HOME'")) == [
        *("-m", "asyncpar", "launch", "--node-rank", "2", "--host-name", "n3", "--nnodes", "2:3"),
        *("--rdzv-endpoint", "n1:20007", "--rdzv-id", "slurm-30007", "--nproc-per-node", "2", "--elastic", "ranks"),
        *("--max-restarts", "4", "train.py", "--name", "a b$HOME"),
    ]
    assert list((tmp_path / ".asyncpar").iterdir()) == []
    assert "--no-kill" in directives(job)


SLOW = "trap 'echo asked; exit 143' TERM; touch begun; while true; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("requeue", "number"), [(True, signal.SIGUSR1), (False, signal.SIGUSR1), (True, signal.SIGTERM)]
)
def test_ranks_are_asked_to_end_and_the_job_is_queued_again_at_the_time_limit(
    tmp_path: Path, requeue: bool, number: int
) -> None:
    environment = tools(tmp_path, srun=SLOW, scontrol='echo "scontrol $@"')
    script = write_script(replace(JOB, requeue=requeue, warning=90))
    with subprocess.Popen(
        ["bash", "-c", script], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as batch:
        while not (tmp_path / "begun").exists():
            pass
        batch.send_signal(number)
        output, errors = batch.communicate(timeout=60)
    is_limit = number == signal.SIGUSR1
    assert output == "asked\n" + ("scontrol requeue 30007\n" if requeue and is_limit else "")
    assert ("less than 90 s are left of the time limit" if is_limit else "Slurm ends the job") in errors
    assert batch.returncode == 143


def test_ranks_are_asked_to_end_also_by_a_signal_that_comes_as_they_start(tmp_path: Path) -> None:
    environment = tools(tmp_path, srun=SLOW, scontrol='echo "scontrol $@"')
    script = write_script(replace(JOB, requeue=True, warning=90))
    early = script.replace("step=$!", "until [ -e begun ]; do sleep 0.02; done; kill -USR1 $$; step=$!")
    assert early != script
    done = subprocess.run(
        ["bash", "-c", early], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "asked\nscontrol requeue 30007\n"
    assert done.returncode == 143


@pytest.mark.parametrize("code", [0, 3, 143])
@pytest.mark.parametrize("where", ["in the trap", "after the wait"])
def test_the_exit_code_is_that_of_ranks_that_end_as_a_signal_is_handled(tmp_path: Path, code: int, where: str) -> None:
    """Bash ends a wait when it handles a signal, with a code of its own, whether or not the ranks have ended."""
    ends = SLOW.replace("143", str(code))
    environment = tools(tmp_path, srun=ends, scontrol="true")
    script = write_script(replace(JOB, warning=90))
    begun = "(until [ -e begun ]; do sleep 0.02; done; kill -{} {}) &"
    if where == "in the trap":
        changes = {"\n}\ntrap": "\n    sleep 0.5\n}\ntrap", "step=$!": f"step=$!; {begun.format('USR1', '$$')}"}
    else:
        late = '[ -n "${late-}" ] || { late=1; kill -USR1 $$; }'
        changes = {"code=$?;": f"code=$?; {late};", "step=$!": f"step=$!; {begun.format('TERM', '$step')}"}
    changed = script
    for old, new in changes.items():
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    done = subprocess.run(
        ["bash", "-c", changed], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert "asked" in done.stdout


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"least_nodes": 2}, "--nodes=2-3"),
        ({"least_nodes": 2, "elastic": "ranks"}, "--nodes=3"),
        ({"time": "1-02:00:00"}, "--time=1-02:00:00"),
        ({"partition": "gpu"}, "--partition=gpu"),
        ({"warning": 120}, "--signal=B:USR1@120"),
        ({"requeue": True}, "--requeue"),
        ({"options": ("--account=me", "--exclusive")}, "--exclusive"),
    ],
)
def test_settings_become_directives(change: dict[str, object], expected: str) -> None:
    assert expected in directives(replace(JOB, **change))  # type: ignore[arg-type]


def test_modules_and_programs_are_started_as_such() -> None:
    assert "python -u -m package.train" in write_script(SlurmJob(program="package.train", kind=ProgramKind.MODULE))
    assert "srun --kill-on-bad-exit=1 ./train &" in write_script(SlurmJob(program="./train", kind=ProgramKind.PROGRAM))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes"),
        ({"tasks_per_node": 0}, "tasks_per_node"),
        ({"least_nodes": 4}, "nodes: expected MIN:MAX"),
        ({"elastic": "yes"}, "elastic: expected restart or ranks"),
        ({"max_restarts": 1}, "max_restarts: expected with elastic"),
        ({"time": "soon"}, "time: expected minutes"),
        ({"name": "a\n#SBATCH --uid=0"}, "job_name: expected one word"),
        ({"partition": "a b"}, "partition: expected one word"),
        ({"warning": 70000}, "signal_before: expected at most 65535"),
        ({"options": ("--account me",)}, "sbatch: expected one option"),
        ({"options": ("account=me",)}, "sbatch: expected one option"),
        ({"options": ("--nodes=7",)}, "sbatch: --nodes=7 would contradict"),
    ],
)
def test_what_will_not_do_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(JOB, **change)  # type: ignore[arg-type]
