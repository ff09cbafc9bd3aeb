"""`asyncpar slurm`: submit a program to Slurm."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result
from asyncpar.launch.options import parse_count


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
    from asyncpar.launch.slurm.script import write_script
    from asyncpar.launch.slurm.submission import SlurmOptions, describe_job, submit

    counts = {name: parse_count(name, given[name]) for name in ("tasks_per_node", "signal_before", "max_restarts")}
    asked = {name: given[name] for name in SlurmOptions.__annotations__} | counts
    if given["dry_run"]:
        print_result("the script", write_script(describe_job(program, arguments, **asked)))
        return 0
    job = asyncio.run(submit(program, *arguments, queue_anyway=given["queue_anyway"], **asked))
    print_result("the job's number", f"asyncpar slurm: job {job.id} is in the queue; its output: {job.output}\n")
    return 0
