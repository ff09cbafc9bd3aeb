"""The job that a command inspects: its name, and requests to its launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from asyncpar.errors import UsageError
from asyncpar.launch.command_line import option
from asyncpar.launch.control_socket import ControlReply, ControlRequest, ask_control
from asyncpar.launch.job_directory import JobEntry, find_job

ANSWER_SECONDS: Final = 3.0


def job_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the argument JOB and the option --json."""
    json_option: Any = option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    declare: Any = click.argument("job", required=False, default=None)
    result: Callable[..., Any] = declare(json_option(function))
    return result


def ask_job(job: str | None, kind: str, ranks: Iterable[int] | None = None) -> tuple[JobEntry, ControlReply]:
    """Return the entry and the answer of a job of this user on this host.  See ``find_job`` for the errors."""
    entry = find_job(os.environ, job)
    request = ControlRequest(kind=kind, ranks=None if ranks is None else tuple(ranks))
    return entry, ask_control(entry.socket_path, request, within=ANSWER_SECONDS)


def parse_ranks(texts: Iterable[str]) -> tuple[int, ...] | None:
    """Return the ranks named by ``-r 0 -r 2-3`` or ``-r 0,2``; None if there are none."""
    ranks: list[int] = []
    for part in (part for text in texts for part in text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"--ranks: expected ranks as 0,2 or 4-7, got {part!r}")
        ranks += range(int(first), int(last or first) + 1) if int(last or first) - int(first) < 1 << 20 else ()
    return tuple(dict.fromkeys(ranks)) or None
