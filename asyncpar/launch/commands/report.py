"""`asyncpar report`: one HTML file of a run with its data, to view without a launcher and to share."""

from __future__ import annotations

from pathlib import Path

import click

from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_line, write_result


@click.command(cls=OneLineCommand)
@click.argument("run")
@option("--output", "-o", metavar="FILE", default="run.html", help="The file to write.  [run.html]")
def report(run: str, output: str) -> None:
    """Write the page of a job as one HTML file that needs nothing else.

    RUN is the folder that `asyncpar launch --log-dir` wrote, or its run.json;
    it is there while the job runs, too, at most ten seconds old.
    """
    exit_with("report", lambda: _report(Path(run), Path(output)))


def _report(run: Path, output: Path) -> int:
    from asyncpar.dashboard.page_file import report_page
    from asyncpar.dashboard.run_file import read_run

    html = report_page(read_run(run)).encode()
    write_result(output, html)
    print_line(f"{output}: {len(html) / 1000:.0f} kB", err=True)
    return 0
