"""Submit jobs to Slurm and follow them, through Slurm's programs: sbatch, scontrol, scancel."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict, Unpack

from asyncpar.core.config.checks import check_positive
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.options import ProgramKind, parse_kind, parse_nnodes
from asyncpar.launch.scheduler_programs import ask_scheduler
from asyncpar.launch.slurm.script import SlurmJob, write_script

_PROBE: Final = "scontrol ping"
_ENDED: Final = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""Final states of a job; see ``man squeue``, JOB STATE CODES."""
_UNKNOWN: Final = "Invalid job id"
_OUTAGE: Final = 300.0
"""Seconds that the controller may be away while a job is awaited: it is restarted now and then."""


class SlurmOptions(TypedDict, total=False):
    """Options of ``submit``, the same as those of ``asyncpar slurm``.

    ``nodes`` is a number (1) or ``"MIN:MAX"``, ``tasks_per_node`` the ranks on each (1).  ``job_name`` is the program's
    name by default, ``partition`` Slurm's.  ``time`` is the limit in minutes, or H:MM:SS, D-HH:MM:SS; ``signal_before``
    seconds (60) before it ranks get SIGTERM, and with ``requeue`` the job is requeued then, and after preemption.
    ``elastic`` ``"restart"`` or ``"ranks"`` runs an agent per node, which starts ranks again ``max_restarts`` times.
    ``sbatch`` are further options of sbatch (``["--account=physics"]``), ``python`` is Python on the nodes (this one).
    ``module``: the program is a Python module; ``no_python``: it is executed directly.
    """

    nodes: int | str
    tasks_per_node: int
    job_name: str | None
    partition: str | None
    time: int | str | None
    signal_before: int
    requeue: bool
    elastic: str | None
    max_restarts: int
    sbatch: Sequence[str]
    python: str
    module: bool
    no_python: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnding:
    """The end of a job: Slurm's ``state`` (``COMPLETED``, ``FAILED``, ``CANCELLED``, ``TIMEOUT``, ...) and ``reason``.

    ``exit_code`` is 0 if and only if the job completed; else that of its script, 128 + N if signal N ended it, and 1
    where Slurm knows none.  ``reason`` is "" where Slurm gives none; messages of ranks are in the job's output.
    """

    state: str
    exit_code: int
    reason: str


class QueuedJob:
    """A job in Slurm's queue, as returned by ``submit``.

    ``id`` is its number, ``cluster`` the name of its cluster, "" for the default one, and ``output`` the file with its
    output, on the nodes' file system.  An array is one job here: it has ended when all of its tasks have.
    """

    def __init__(self, number: str, cluster: str, output: Path) -> None:
        self.id = number
        self.cluster = cluster
        self.output = output

    def __repr__(self) -> str:
        return f"<job {self.id} of Slurm{self.cluster and f' on {self.cluster}'}, output {self.output}>"

    async def state(self) -> str:
        """Return Slurm's name for the job's state, such as ``PENDING``, ``RUNNING``, ``COMPLETED``.

        Raises ``LaunchError`` if Slurm does not answer, or no longer knows the job: minutes after its end (MinJobAge).
        """
        records = await _read_records(self.id, self.cluster)
        return next((one.state for one in records if one.state not in _ENDED), _worst(records).state)

    async def wait(self, *, every: float = 1.0) -> JobEnding:
        """Wait for the end of the job, also over requeues, and return it; poll ``every`` so many seconds.

        For jobs of hours, poll every half minute: the controller serves all users.  Cancelling the wait leaves the job
        alone.  Raises ``LaunchError`` if Slurm does not answer for five minutes, or no longer knows the job.
        """
        check_positive("every", every, "seconds")
        clock = asyncio.get_running_loop().time
        answered = clock()
        while True:
            try:
                records = await _read_records(self.id, self.cluster)
            except LaunchError as error:
                if _UNKNOWN in str(error) or clock() > answered + _OUTAGE:
                    raise
            else:
                answered = clock()
                if all(one.state in _ENDED for one in records):
                    worst = _worst(records)
                    return JobEnding(state=worst.state, exit_code=worst.exit_code, reason=worst.reason)
            await asyncio.sleep(every)

    async def cancel(self) -> None:
        """Cancel the job: its ranks get SIGTERM, and SIGKILL after Slurm's KillWait.  No effect on one that has ended.

        Returns once Slurm has accepted the request; use ``wait`` for the end.  Raises ``LaunchError`` if it does not.
        """
        await _cancel(self.id, self.cluster)


async def submit(
    program: str | Path, *arguments: str, queue_anyway: bool = False, **options: Unpack[SlurmOptions]
) -> QueuedJob:
    """Submit ``program``, a Python script, with ``arguments`` to Slurm; return its job, which is then in the queue.

    Its ranks form one world: in it, ``async with ap.init() as node``.  It runs in this working directory, with this
    environment.  ``queue_anyway``: also accept a job for which there are no nodes, which Slurm would queue forever.

    Raises ``UsageError`` for invalid options, and where there is no ``sbatch``; ``LaunchError`` with Slurm's message if
    it refuses the job.  When cancelled, it cancels a job that was accepted meanwhile.
    """
    script = write_script(describe_job(program, arguments, **options))
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch: it is not in PATH; run this where jobs are submitted (`asyncpar slurm --dry-run`)")
    if not queue_anyway:
        await _ask(["sbatch", "--test-only"], script, "the job could not run here (queue_anyway lets it wait)")
    submitting = asyncio.ensure_future(_ask(["sbatch", "--parsable"], script, "the job was refused"))
    try:
        number, _, cluster = (await asyncio.shield(submitting)).strip().partition(";")
    except asyncio.CancelledError:
        with suppress(LaunchError):  # there is no job then
            await _cancel(*(await submitting).strip().partition(";")[::2])
        raise
    return QueuedJob(number, cluster, (await _read_records(number, cluster))[0].output)


def describe_job(program: str | Path, arguments: Sequence[str], **options: Unpack[SlurmOptions]) -> SlurmJob:
    """Return the job that ``options`` describe.  Raises ``UsageError`` that names the invalid option."""
    unknown = sorted(options.keys() - SlurmOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(SlurmOptions.__annotations__)
        raise UsageError(f"submit: expected options of {known}, queue_anyway; got {', '.join(unknown)}")
    kind = parse_kind(is_module=options.get("module", False), is_executed=options.get("no_python", False))
    if kind is ProgramKind.SCRIPT and not Path(program).is_file():
        raise UsageError(f"program: {program} is no file; with module it is a Python module")
    nodes, time = options.get("nodes", 1), options.get("time")
    least, most = parse_nnodes(nodes, "nodes") if isinstance(nodes, str) else (None, nodes)
    return SlurmJob(
        program=str(program),
        arguments=tuple(map(str, arguments)),
        kind=kind,
        python=options.get("python", sys.executable),
        nodes=most,
        least_nodes=least,
        tasks_per_node=options.get("tasks_per_node", 1),
        name=options.get("job_name") or Path(program).stem,
        partition=options.get("partition"),
        time=None if time is None else str(time),
        warning=options.get("signal_before", 60),
        requeue=options.get("requeue", False),
        elastic=options.get("elastic"),
        max_restarts=options.get("max_restarts", 0),
        options=tuple(options.get("sbatch", ())),
    )


@dataclass(frozen=True, slots=True)
class _JobRecord:
    """The report of ``scontrol show job`` on a job, or on one task of an array."""

    state: str
    exit_code: int
    reason: str
    output: Path


def parse_records(shown: str) -> list[_JobRecord]:
    """Parse the output of ``scontrol show job``: a paragraph for each job."""
    return [_parse_record(text) for text in shown.split("\n\n") if "JobState=" in text]


def _parse_record(text: str) -> _JobRecord:
    state, code, reason, output = (
        found[1] if (found := re.search(rf"(?m)^\s+(?:.* )?{key}=({value})", text)) else ""
        for key, value in (("JobState", r"\w+"), ("ExitCode", r"\d+:\d+"), ("Reason", r"\S+"), ("StdOut", r".+"))
    )
    status, _, number = code.partition(":")
    exit_code = 128 + int(number) if number not in ("", "0") else int(status or 0)
    return _JobRecord(
        state=state,
        exit_code=0 if state == "COMPLETED" else exit_code or 1,
        reason="" if reason == "None" else reason,
        output=Path(output),
    )


def _worst(records: Sequence[_JobRecord]) -> _JobRecord:
    """Return the first record that did not complete, otherwise the first."""
    return next((one for one in records if one.state != "COMPLETED"), records[0])


async def _read_records(number: str, cluster: str) -> list[_JobRecord]:
    command = ["scontrol", *_on(cluster), "show", "job", number]
    return parse_records(await _ask(command, "", f"Slurm does not report job {number}"))


async def _cancel(number: str, cluster: str) -> None:
    await _ask(["scancel", *_on(cluster), number], "", f"job {number} was not cancelled")


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


async def _ask(command: list[str], given: str, refused: str) -> str:
    return await asyncio.to_thread(ask_scheduler, command, given, refused=refused, probe=_PROBE)
