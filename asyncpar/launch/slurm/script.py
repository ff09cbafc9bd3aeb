"""The batch script of a job: one task per rank, or one agent per node.  Pure.

Slurm notifies the script, not the ranks, when the time limit is near, and the script asks the ranks to end by SIGTERM:
so it knows why they end, and can requeue the job.  When Slurm itself ends a job (``scancel``, preemption), SIGTERM
comes from Slurm.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from asyncpar.core.config.checks import check_count
from asyncpar.errors import UsageError
from asyncpar.launch.options import ELASTIC_MODES, ProgramKind

_WORD = re.compile(r"[^\s'\"\\\x00-\x1f]+")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}", re.ASCII)
_OURS = ("--job-name", "--nodes", "--ntasks-per-node", "--ntasks", "--signal", "--requeue", "--no-requeue", "--wrap")
_MOST_WARNING = 65535
"""Seconds; the most that ``sbatch --signal`` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job of ``asyncpar slurm`` or ``ap.slurm.submit``; errors name its options in Python's spelling.

    ``program`` with its ``arguments`` runs with ``python`` in ``tasks_per_node`` ranks on each of ``nodes`` nodes;
    ``least_nodes`` suffice (None: all).  ``elastic`` None runs one task of Slurm per rank; ``restart`` and
    ``ranks`` one agent per node, as in ``asyncpar launch --elastic``, which starts ranks again ``max_restarts`` times:
    such a job begins with all nodes, and goes on while ``least_nodes`` are left.
    ``time`` is Slurm's time limit; ``warning`` seconds before it ranks get SIGTERM, and with ``requeue`` the job is
    requeued then, and when it is preempted.  ``options`` are further options of sbatch, each in one word.
    """

    program: str
    arguments: tuple[str, ...] = ()
    kind: ProgramKind = ProgramKind.SCRIPT
    python: str = "python"
    nodes: int = 1
    least_nodes: int | None = None
    tasks_per_node: int = 1
    name: str = "asyncpar"
    partition: str | None = None
    time: str | None = None
    warning: int = 60
    requeue: bool = False
    elastic: str | None = None
    max_restarts: int = 0
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        check_count("tasks_per_node", self.tasks_per_node)
        check_count("signal_before", self.warning)
        check_count("max_restarts", self.max_restarts, least=0)
        if self.warning > _MOST_WARNING:
            raise UsageError(f"signal_before: expected at most {_MOST_WARNING} seconds, got {self.warning}")
        if self.least_nodes is not None and not 1 <= self.least_nodes <= self.nodes:
            raise UsageError(f"nodes: expected MIN:MAX with 1 <= MIN <= MAX, got {self.least_nodes}:{self.nodes}")
        if self.elastic is not None and self.elastic not in ELASTIC_MODES:
            raise UsageError(f"elastic: expected {' or '.join(ELASTIC_MODES)}, got {self.elastic!r}")
        if self.max_restarts and self.elastic is None:
            raise UsageError("max_restarts: expected with elastic; without agents use requeue")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UsageError(f"time: expected minutes, H:MM:SS or D-HH:MM:SS, got {self.time!r}")
        for setting, value in (("job_name", self.name), ("partition", self.partition)):
            if value is not None and not _WORD.fullmatch(value):
                raise UsageError(f"{setting}: expected one word without quotes, got {value!r}")
        for given in self.options:
            if not given.startswith("-") or not _WORD.fullmatch(given):
                raise UsageError(f"sbatch: expected one option in one word, such as --account=NAME, got {given!r}")
            if given.partition("=")[0] in _OURS:
                raise UsageError(f"sbatch: {given} would contradict the other options; use those")


def write_script(job: SlurmJob) -> str:
    """Return the batch script for ``sbatch``."""
    lines = ["#!/bin/bash", *(f"#SBATCH {given}" for given in _directives(job)), "set -u"]
    if job.elastic is not None:
        lines += _MEETING_OF_AGENTS
        lines.append(f'port=$({shlex.quote(job.python)} -c "{_FREE_PORT}") || exit 1')  # this is the first node
    lines += _ASK.format(seconds=job.warning).splitlines()
    lines.append(f"{_step(job)} &")
    lines += _WAIT.splitlines()
    if job.requeue:
        lines += _REQUEUE.splitlines()
    return "\n".join([*lines, 'exit "$code"', ""])


def _directives(job: SlurmJob) -> list[str]:
    least = job.least_nodes or job.nodes
    agents = job.elastic is not None
    given = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes if agents or least == job.nodes else f'{least}-{job.nodes}'}",
        f"--ntasks-per-node={1 if agents else job.tasks_per_node}",
        f"--signal=B:USR1@{job.warning}",
        "--requeue" if job.requeue else "--no-requeue",
        "--open-mode=append",  # output of a requeued job is appended
    ]
    if agents:
        given += [f"--cpus-per-task={job.tasks_per_node}", "--no-kill"]  # a lost node is not the end
    if job.partition is not None:
        given.append(f"--partition={job.partition}")
    if job.time is not None:
        given.append(f"--time={job.time}")
    return [*given, *job.options]


def _step(job: SlurmJob) -> str:
    if job.elastic is None:
        prefix = {ProgramKind.SCRIPT: [job.python, "-u"], ProgramKind.MODULE: [job.python, "-u", "-m"]}
        command = [*prefix.get(job.kind, []), job.program, *job.arguments]
        return f"srun --kill-on-bad-exit=1 {shlex.join(command)}"
    least = job.least_nodes or job.nodes
    flags = {ProgramKind.MODULE: ["--module"], ProgramKind.PROGRAM: ["--no-python"]}.get(job.kind, [])
    # each task fills in its own values: the launcher of the first node founds the group of agents
    own = '--node-rank "$SLURM_NODEID" --host-name "$SLURMD_NODENAME"'
    agent = f'exec {shlex.quote(job.python)} -m asyncpar launch {own} "$@"'
    launch = ["--nproc-per-node", str(job.tasks_per_node), "--elastic", job.elastic]
    launch += ["--max-restarts", str(job.max_restarts), *flags, job.program, *job.arguments]
    nnodes = f'--nnodes {least}:"$SLURM_JOB_NUM_NODES" --rdzv-endpoint "$first:$port" --rdzv-id "slurm-$SLURM_JOB_ID"'
    return f"srun --no-kill --kill-on-bad-exit=0 --wait=0 sh -c {shlex.quote(agent)} sh {nnodes} {shlex.join(launch)}"


_MEETING_OF_AGENTS = [
    "umask 077",
    'export ASYNCPAR_SECRET_FILE="$HOME/.asyncpar/slurm-$SLURM_JOB_ID.secret"',
    'mkdir -p "$HOME/.asyncpar" && head -c 32 /dev/urandom > "$ASYNCPAR_SECRET_FILE" || exit 1',
    "trap 'rm -f \"$ASYNCPAR_SECRET_FILE\"' EXIT",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
]
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
_ASK = """\
out_of_time= asks=0 step=
ask() {{
    echo "asyncpar slurm: $1; job $SLURM_JOB_ID: ranks are asked to end" >&2
    asks=$((asks + 1))
    [ -z "$step" ] || kill -TERM "$step" 2>/dev/null  # it may have ended
}}
trap 'out_of_time=1; ask "less than {seconds} s are left of the time limit"' USR1
trap 'ask "Slurm ends the job"' TERM"""
_WAIT = """\
step=$!
[ "$asks" -eq 0 ] || kill -TERM "$step"  # asked before the number of the step was known
before=-1  # a signal ends a wait with a code that is not the step's, which the next wait returns
until [ "$asks" -eq "$before" ]; do before=$asks; wait "$step"; code=$?; done"""
_REQUEUE = """\
again=$out_of_time
if [ "$code" -ne 0 ] && [ -z "$again" ]; then
    # Slurm asks only the ranks of a job that it preempts, and queues it again if they do not end in their time
    shown=$(scontrol show job "$SLURM_JOB_ID")
    [[ $shown == *JobState=RUNNING* && $shown == *PreemptTime=[0-9]* ]] && again=1
fi
if [ -n "$again" ] && [ "$code" -ne 0 ]; then
    echo "asyncpar slurm: job $SLURM_JOB_ID goes into the queue again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi"""
