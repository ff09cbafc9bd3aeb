"""`asyncpar logs`: the last lines of output of ranks, from all hosts of a job."""

from __future__ import annotations

from collections.abc import Iterable

import click

from asyncpar.errors import UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result
from asyncpar.launch.commands.job_choice import ask_job, job_argument, parse_ranks
from asyncpar.observe.summary import RankAnswer


@click.command(cls=OneLineCommand)
@option("--ranks", "-r", "ranks", metavar="N,...", multiple=True, help="Of these ranks only: 0,2 or 4-7.")
@option("--lines", "-n", "lines", metavar="N", default="20", help="Last lines of each rank.  [20]")
@job_argument
def logs(job: str | None, ranks: tuple[str, ...], lines: str, *, as_json: bool) -> None:
    """Show what each rank has printed last, stdout and stderr together.

    The launchers keep the last 64 KiB of each rank, whether there are log files
    or not; also of ranks that are stopped, or have ended.
    """
    exit_with("logs", lambda: _logs(job, ranks, lines, as_json=as_json))


def _logs(job: str | None, ranks: tuple[str, ...], lines: str, *, as_json: bool) -> int:
    if not lines.isdecimal() or int(lines) < 1:
        raise UsageError(f"--lines: expected a number above 0, got {lines!r}")
    wanted = parse_ranks(ranks)
    entry, reply = ask_job(job, "output", wanted)
    missing = set(wanted or ()) - {answer.rank for answer in reply.ranks}
    if missing:
        raise UsageError(f"--ranks: {entry.name} has no rank {min(missing)}")
    if as_json:
        import msgspec

        texts = {str(answer.rank): last_lines(answer, int(lines)) for answer in reply.ranks}
        print_result("the output", msgspec.json.encode(texts) + b"\n")
        return 0
    print_result("the output", show_logs(reply.ranks, int(lines)), colors=True)
    return 0


def last_lines(answer: RankAnswer, count: int) -> list[str]:
    """Return the last ``count`` lines of a rank."""
    return answer.content.decode(errors="replace").splitlines()[-count:]


def show_logs(answers: Iterable[RankAnswer], count: int) -> str:
    """Return the last ``count`` lines of each rank, each prefixed with its host and its number."""
    lines = []
    for answer in answers:
        texts = last_lines(answer, count) or ["(nothing was printed)"]
        lines += [f"[{answer.host}:{answer.rank}] {line}\n" for line in texts]
    return "".join(lines)
