"""Let commands (`asyncpar status`, `stacks`, ...) inspect an elastic job of an engine, like other jobs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from asyncpar.launch.agents.group_part import GroupPart
from asyncpar.launch.agents.group_watch import GroupNow, GroupWatch, ask_with, group_of_status
from asyncpar.launch.job_directory import JobEntry
from asyncpar.launch.job_service import serve_watch
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.host import host_name
from asyncpar.net.transport.rpc import Credentials
from asyncpar.observe.summary import JobSummary

_COMMAND: Final = (sys.executable, "-m", "asyncpar.engines.rank_program")


def serve_elastic(
    job: str,
    part: GroupPart,
    credentials: Credentials,
    reaper: ReaperClient,
    *,
    place: str = "",
    report: Callable[[str], None] = lambda _: None,
) -> AbstractAsyncContextManager[None]:
    """Serve the state of all hosts of ``job`` inside the block, on the host of ``part``: a ``place``, or the caller's.

    The caller's ``place`` is "".  A failure to serve does not stop the job: ``report`` gets the message.
    """
    now = time.time()

    async def know() -> GroupNow:
        return group_of_status(await part.group.status())

    view = GroupWatch(
        JobSummary(job=job, pid=os.getpid(), time=now, started=now, command=_COMMAND),
        know,
        ask_with(credentials),
        place,
        part.agent.watch if place else None,
    )
    entry = JobEntry(job=job, pid=os.getpid(), host=host_name(), started=now, command=_COMMAND, is_whole=not place)
    return serve_watch(entry, os.environ, view, reaper, report=report, on_signals=False)
