"""Let commands inspect the job of this launcher: its directory and its control socket, while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from asyncpar.errors import AsyncparError
from asyncpar.launch.control_socket import serve_control
from asyncpar.launch.job import LaunchJob
from asyncpar.launch.job_directory import JobEntry, make_job_directory, remove_job_directory
from asyncpar.launch.job_view import JobWatch
from asyncpar.launch.reaper_client import ReaperClient


@asynccontextmanager
async def serve_job(
    job: LaunchJob,
    view: JobWatch,
    reaper: ReaperClient,
    *,
    report: Callable[[str], None],
    is_whole: bool,
    on_signals: bool = True,
) -> AsyncIterator[None]:
    """Serve ``view`` of a launched job inside the block.  See ``serve_watch``."""
    entry = JobEntry(
        job=job.placement.job,
        pid=os.getpid(),
        host=job.placement.host,
        started=time.time(),
        command=job.command,
        is_whole=is_whole,
    )
    async with serve_watch(entry, job.environment, view, reaper, report=report, on_signals=on_signals):
        yield


@asynccontextmanager
async def serve_watch(
    entry: JobEntry,
    environment: Mapping[str, str],
    view: JobWatch,
    reaper: ReaperClient,
    *,
    report: Callable[[str], None],
    on_signals: bool = True,
) -> AsyncIterator[None]:
    """Serve ``view`` inside the block.  A failure to serve does not stop the job: ``report`` gets the message.

    With ``on_signals`` SIGQUIT prints the stacks of the ranks.
    """
    try:
        entry = await asyncio.to_thread(make_job_directory, environment, entry)
        reaper.add_path(Path(entry.directory))
        serving = serve_control(entry.socket_path, view)
        await serving.__aenter__()
    except (OSError, AsyncparError) as error:
        report(f"`asyncpar status` will not find this job: {error}")
        yield
        return
    loop, answering = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def print_stacks() -> None:
        task = loop.create_task(_print_stacks(view, report), name="asyncpar print stacks")
        answering.add(task)
        task.add_done_callback(answering.discard)

    if on_signals:
        loop.add_signal_handler(signal.SIGQUIT, print_stacks)
    try:
        yield
    finally:
        if on_signals:
            loop.remove_signal_handler(signal.SIGQUIT)
        if answering:
            await asyncio.wait(answering)
        await serving.__aexit__(None, None, None)
        remove_job_directory(entry)


async def _print_stacks(view: JobWatch, report: Callable[[str], None]) -> None:
    """Print the output of `asyncpar stacks`."""
    from asyncpar.launch.stack_answers import sort_answers
    from asyncpar.observe.chains import show_stacks

    report("got SIGQUIT; the stacks of the ranks:\n" + show_stacks(*sort_answers(await view.collect("stacks", None))))
