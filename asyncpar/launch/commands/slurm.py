"""`asyncpar slurm`: submit a program to Slurm."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from asyncpar.errors import UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result, submit_to
from asyncpar.launch.options import ProgramKind, parse_count, parse_kind, parse_nnodes


@click.command(cls=OneLineCommand, context_settings={"allow_interspersed_args": False})
@option(
    "--nodes",
    "-N",
    metavar="N",
    default="1",
    help="Number of nodes, or MIN:MAX (what an elastic job goes on with, and has).  [1]",
)
@option("--tasks-per-node", metavar="N", default="1", help="Ranks on each node.  [1]")
@option("--job-name", metavar="NAME", default=None, help="What the job is called.  [the program's name]")
@option("--partition", metavar="NAME", default=None, help="Where it runs.  [Slurm's default]")
@option("--time", metavar="LIMIT", default=None, help="Time limit: minutes, H:MM:SS, D-HH:MM:SS.")
@option("--signal-before", metavar="SECONDS", default="60", help="SIGTERM to ranks before the time limit.  [60]")
@option("--requeue", is_flag=True, help="Queue it again at the time limit and after preemption.")
@option("--elastic", metavar="HOW", default=None, help="One agent per node: restart ranks, or ranks live on.")
@option("--max-restarts", metavar="N", default="0", help="With --elastic: start ranks again N times.  [0]")
@option("--sbatch", metavar="OPTION", multiple=True, help="Another option of sbatch: --sbatch=--account=NAME.")
@option("--python", metavar="FILE", default=sys.executable, help="Python on the nodes.  [this one]", show_default=False)
@option("--dry-run", is_flag=True, help="Print the batch script; submit nothing.")
@option("--queue-anyway", is_flag=True, help="Wait in the queue although nodes for it are not there.")
@option("--module", "-m", is_flag=True, help="PROGRAM is a Python module.")
@option("--no-python", is_flag=True, help="PROGRAM is executed as it is.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def slurm(program: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Submit PROGRAM, a Python script, as a job of Slurm.

    Its ranks find each other by themselves (as with srun in a script of yours).
    With --elastic an agent on each node starts them: the job outlives nodes.
    """
    exit_with("slurm", lambda: _slurm(program, arguments, given))


def _slurm(program: str, arguments: tuple[str, ...], given: dict[str, Any]) -> int:
    from asyncpar.launch.slurm.script import SlurmJob, write_script

    kind = parse_kind(is_module=given["module"], is_executed=given["no_python"])
    if kind is ProgramKind.SCRIPT and not Path(program).is_file():
        raise UsageError(f"PROGRAM: {program} is no file; with --module it is a Python module")
    least, nodes = parse_nnodes(given["nodes"])
    script = write_script(
        SlurmJob(
            program=program,
            arguments=arguments,
            kind=kind,
            python=given["python"],
            nodes=nodes,
            least_nodes=least,
            tasks_per_node=parse_count("--tasks-per-node", given["tasks_per_node"]),
            name=given["job_name"] or Path(program).stem,
            partition=given["partition"],
            time=given["time"],
            warning=parse_count("--signal-before", given["signal_before"]),
            requeue=given["requeue"],
            elastic=given["elastic"],
            max_restarts=parse_count("--max-restarts", given["max_restarts"]),
            options=given["sbatch"],
        )
    )
    if given["dry_run"]:
        print_result("the script", script)
    else:
        job = submit(script, is_tested=not given["queue_anyway"])
        print_result("the job's number", f"asyncpar slurm: job {job} is in the queue\n")
    return 0


def submit(script: str, *, is_tested: bool = True) -> str:
    """Submit the batch ``script`` and return the number of its job; ``is_tested``: refuse one that could not run now.

    Slurm itself takes jobs for more nodes than there are, and lets them wait for ever.
    Raises ``UsageError`` where there is no ``sbatch``, and ``LaunchError`` with its words if it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(
            "sbatch: it is not in PATH; run this where jobs are submitted, or see the script with --dry-run"
        )
    if is_tested:
        impossible = "could not run here (--queue-anyway lets it wait)"
        submit_to(["sbatch", "--test-only"], script, refused=impossible, probe="scontrol ping")
    job = submit_to(["sbatch", "--parsable"], script, refused="was refused", probe="scontrol ping")
    return job.strip().partition(";")[0]  # number;cluster
