"""Jobs that are submitted and followed, with programs of ours in the place of Slurm's.

`scripts/test-slurm` does the same with Slurm itself.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import asyncpar as ap
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.cli import main
from asyncpar.launch.slurm.script import write_script
from asyncpar.launch.slurm.submission import QueuedJob, SlurmOptions, describe_job, parse_records

SHOWN = """\
JobId={job} JobName=train
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   Priority=1 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   WorkDir=/home/me/a b
   StdErr=/home/me/a b/slurm-{job}.out
   StdIn=/dev/null
   StdOut=/home/me/a b/slurm-{job}.out
   Power=
"""


def shown(state: str, code: str = "0:0", reason: str = "None", job: str = "77") -> str:
    return SHOWN.format(job=job, state=state, code=code, reason=reason)


class FakeSlurm:
    """Programs that note how they were called; ``scontrol`` shows one file after the other, and the last for good."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.program("sbatch", '[ "$1" = --test-only ] || { cat > script; echo "77;far"; }')
        self.program("scancel", "")
        self.show(shown("RUNNING"))

    def program(self, name: str, body: str) -> None:
        path = self._folder / name
        path.write_text(f'#!/bin/bash\ncd {self._folder}\necho "{name} $*" >> calls\n{body}\n')
        path.chmod(0o755)

    def show(self, *texts: str) -> None:
        for number, text in enumerate(texts):
            (self._folder / f"shown-{number}").write_text(text)
        rest = '[ -e "shown-$((n + 1))" ] && echo $((n + 1)) > next'
        self.program("scontrol", f'n=$(cat next 2>/dev/null || echo 0); cat "shown-$n"; {rest}; true')

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()

    @property
    def script(self) -> str:
        return (self._folder / "script").read_text()


@pytest.fixture(name="slurm")
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return FakeSlurm(tmp_path / "bin")


def job_of(slurm: FakeSlurm, *texts: str) -> QueuedJob:
    slurm.show(*texts)
    return QueuedJob("77", "", Path("out"))


async def test_a_program_is_submitted_as_the_command_does(slurm: FakeSlurm) -> None:
    job = await ap.slurm.submit("train.py", "--layers", "12", nodes="2:4", tasks_per_node=3, time=10, requeue=True)
    assert (job.id, job.cluster, job.output) == ("77", "far", Path("/home/me/a b/slurm-77.out"))
    assert slurm.calls == ["sbatch --test-only", "sbatch --parsable", "scontrol --clusters=far show job 77"]
    asked = ["--nodes", "2:4", "--tasks-per-node", "3", "--time", "10", "--requeue", "train.py", "--layers", "12"]
    printed = CliRunner().invoke(main, ["slurm", "--dry-run", *asked])
    assert slurm.script == printed.stdout
    assert "#SBATCH --nodes=2-4\n" in slurm.script


async def test_its_end_is_waited_for_over_requeues(slurm: FakeSlurm) -> None:
    running, again = shown("RUNNING"), shown("PENDING", reason="BeginTime")
    job = job_of(slurm, running, again, running, shown("COMPLETING"), shown("FAILED", "3:0", "NonZeroExitCode"))
    assert await job.state() == "RUNNING"
    ending = await job.wait(every=0.01)
    assert (ending.state, ending.exit_code, ending.reason) == ("FAILED", 3, "NonZeroExitCode")
    assert await job.state() == "FAILED"


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("COMPLETED", "0:0", 0), ("FAILED", "2:0", 2), ("CANCELLED", "0:15", 143), ("TIMEOUT", "0:0", 1)],
)
def test_only_jobs_that_completed_have_exit_code_zero(state: str, code: str, expected: int) -> None:
    [record] = parse_records(shown(state, code))
    assert (record.state, record.exit_code, record.reason) == (state, expected, "")


async def test_an_array_has_ended_when_all_of_its_tasks_have(slurm: FakeSlurm) -> None:
    first, second = shown("COMPLETED", job="78"), shown("RUNNING", job="77")
    job = job_of(slurm, f"{first}\n{second}", f"{first}\n{shown('FAILED', '1:0')}")
    assert await job.state() == "RUNNING"
    assert (await job.wait(every=0.01)).state == "FAILED"


async def test_a_controller_that_is_away_for_a_while_does_not_end_the_wait(slurm: FakeSlurm) -> None:
    job = job_of(slurm, shown("COMPLETED"))
    there = "cat shown-0"
    slurm.program("scontrol", f'[ -e was ] && {there} || {{ touch was; echo "Unable to contact" >&2; exit 1; }}')
    assert (await job.wait(every=0.01)).exit_code == 0


async def test_a_job_that_slurm_has_forgotten_is_reported(slurm: FakeSlurm) -> None:
    slurm.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    with pytest.raises(LaunchError, match=r"^Slurm does not report job 77: .*Invalid job id"):
        await QueuedJob("77", "", Path("out")).wait()


async def test_a_job_is_cancelled(slurm: FakeSlurm) -> None:
    await QueuedJob("77", "far", Path("out")).cancel()
    assert slurm.calls == ["scancel --clusters=far 77"]


async def test_a_submission_that_is_cancelled_leaves_no_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.program("sbatch", "touch asked; until [ -e go ]; do sleep 0.02; done; echo 77")
    submitting = asyncio.create_task(ap.slurm.submit("train.py", queue_anyway=True))
    while not (tmp_path / "bin" / "asked").exists():  # noqa: ASYNC110  # another process tells
        await asyncio.sleep(0.01)
    submitting.cancel()
    (tmp_path / "bin" / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert slurm.calls[-1] == "scancel 77"


async def test_a_missing_sbatch_is_reported(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(UsageError, match="sbatch: it is not in PATH"):
        await ap.slurm.submit("train.py")


async def test_a_job_that_is_refused_is_reported_in_the_words_of_sbatch(slurm: FakeSlurm) -> None:
    slurm.program("sbatch", 'echo "error: Unable to contact slurm controller" >&2; echo "failed" >&2; exit 1')
    words = r"error: Unable to contact slurm controller; failed$"
    with pytest.raises(LaunchError, match=rf"could not run here \(queue_anyway lets it wait\): {words}"):
        await ap.slurm.submit("train.py")
    with pytest.raises(LaunchError, match=rf"^the job was refused: {words}"):
        await ap.slurm.submit("train.py", queue_anyway=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes: expected a positive number"),
        ({"nodes": "two"}, "nodes: expected a whole number, got 'two'"),
        ({"nodes": "3:2"}, "nodes: expected MIN:MAX"),
        ({"tasks": 4}, "submit: expected options of nodes, tasks_per_node, .*; got tasks$"),
        ({"module": True, "no_python": True}, "--module: expected alone"),
        ({"sbatch": ["account=me"]}, "sbatch: expected one option"),
        ({"time": "soon"}, "time: expected minutes"),
    ],
)
def test_bad_options_are_named(slurm: FakeSlurm, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        describe_job("train.py", (), **options)


OPTIONS: dict[str, Any] = {
    "nodes": 2,
    "tasks_per_node": 2,
    "job_name": "other",
    "partition": "gpu",
    "time": 10,
    "signal_before": 90,
    "requeue": True,
    "elastic": "ranks",
    "max_restarts": 2,
    "sbatch": ["--exclusive"],
    "python": "python3.13",
    "module": True,
    "no_python": True,
}


def test_every_option_changes_the_script(slurm: FakeSlurm) -> None:
    assert OPTIONS.keys() == SlurmOptions.__annotations__.keys()
    for name, value in OPTIONS.items():
        given = {"elastic": "ranks"} if name == "max_restarts" else {}
        usual, other = (write_script(describe_job("train.py", (), **one)) for one in (given, {**given, name: value}))
        assert usual != other, name


def test_a_program_that_is_not_there_is_reported(slurm: FakeSlurm) -> None:
    with pytest.raises(UsageError, match=r"^program: other.py is no file"):
        describe_job("other.py", ())
    assert describe_job("package.train", (), module=True).name == "package"
