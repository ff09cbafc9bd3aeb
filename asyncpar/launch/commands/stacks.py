"""`asyncpar stacks`: tasks and threads of all ranks, and how they wait for each other."""

from __future__ import annotations

import click

from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result
from asyncpar.launch.commands.job_choice import ask_job, job_argument, parse_ranks


@click.command(cls=OneLineCommand)
@option("--ranks", "-r", "ranks", metavar="N,...", multiple=True, help="Of these ranks only: 0,2 or 4-7.")
@option("--all", "shows_all", is_flag=True, help="All threads, tasks and frames, of libraries, too.")
@job_argument
def stacks(job: str | None, ranks: tuple[str, ...], *, shows_all: bool, as_json: bool) -> None:
    """Show where each rank is: its tasks, what they await, and its threads.

    Waits are followed across ranks: from an actor's caller to the task that
    works for it.  No debugger is needed, and nothing stops; a rank that cannot
    answer is named with the reason.  SIGQUIT (Ctrl-\\) to the launcher prints
    the same.
    """
    exit_with("stacks", lambda: _stacks(job, ranks, shows_all=shows_all, as_json=as_json))


def _stacks(job: str | None, ranks: tuple[str, ...], *, shows_all: bool, as_json: bool) -> int:
    import msgspec

    from asyncpar.launch.stack_answers import sort_answers
    from asyncpar.observe.chains import chains_of, show_stacks

    _, reply = ask_job(job, "stacks", parse_ranks(ranks))
    stacks, silent = sort_answers(reply.ranks)
    if as_json:
        both = {"ranks": stacks, "silent": silent, "chains": chains_of(stacks)}
        print_result("the stacks", msgspec.json.encode(both) + b"\n")
        return 0
    print_result("the stacks", show_stacks(stacks, silent, all_threads=shows_all))
    return 0
