"""`asyncpar status`: the current activity of the ranks of a job, and which ranks wait for which."""

from __future__ import annotations

import os
import sys

import click

from asyncpar.core.addresses import loopback
from asyncpar.errors import LaunchError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result
from asyncpar.launch.commands.job_choice import ask_job, job_argument


@click.command(cls=OneLineCommand)
@option("--agent", "address", metavar="HOST:PORT", default=None, help="Ask an agent: of hosts, ranks and the leader.")
@option("--secret-file", metavar="FILE", default=None, envvar="ASYNCPAR_SECRET_FILE", help="The agents' secret.")
@option("--certs", metavar="DIR", default=None, envvar="ASYNCPAR_CERTS", help="This host's, where agents use TLS.")
@job_argument
def status(job: str | None, address: str | None, secret_file: str | None, certs: str | None, *, as_json: bool) -> None:
    """Report what each rank does, who waits for whom, and where.

    JOB is the name of a job that runs on this host; it is needed only if there
    are several.  Where none runs, an agent on this host is asked.  Exits with
    code 1 if nobody answers.
    """
    exit_with("status", lambda: _status(job, address, secret_file, certs, as_json=as_json))


def _status(job: str | None, address: str | None, secret_file: str | None, certs: str | None, *, as_json: bool) -> int:
    if address is not None:
        return _of_agent(address, secret_file, certs, as_json=as_json)
    try:
        entry, reply = ask_job(job, "status")
    except LaunchError:
        if job is not None or not _is_agent_here():
            raise
        return _of_agent(loopback(), secret_file, certs, as_json=as_json)
    from asyncpar.launch.commands.job_text import name_dashboard, show_job
    from asyncpar.observe.summary import to_json

    assert reply.job is not None
    if as_json:
        print_result("the status", to_json(reply.job) + b"\n")
        return 0
    if entry.agent:
        _of_agent(entry.agent, secret_file, certs, as_json=False)
        print_result("the status", "\n")
    page = name_dashboard(reply.job, is_whole=entry.is_whole, is_agent=bool(entry.agent))
    width = os.get_terminal_size(1).columns if sys.stdout.isatty() else None
    shown = f"{show_job(reply.job, width=width or None)}\n" if reply.job.ranks or not entry.agent else ""
    print_result("the status", f"{shown}{page}\n")
    return 0


def _of_agent(address: str, secret_file: str | None, certs: str | None, *, as_json: bool) -> int:
    from asyncpar.launch.agents.commands import show_status

    return show_status(address, secret_file, certs, as_json=as_json)


def _is_agent_here() -> bool:
    """Return whether anything listens at the port of this host's agents."""
    import socket

    from asyncpar.launch.agents.requests import AGENTS_PORT

    try:
        socket.create_connection((loopback(), AGENTS_PORT), timeout=0.5).close()
    except OSError:
        return False
    return True
