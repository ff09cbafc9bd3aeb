"""Run a job with a fixed number of hosts, from validated options to its exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, closing
from datetime import UTC, datetime

from asyncpar.core.concurrency.tasks import new_loop
from asyncpar.core.descriptors import descriptor_limit
from asyncpar.core.observe.reporting import open_closed_streams
from asyncpar.errors import UsageError
from asyncpar.launch.agents.ending import EndRequests
from asyncpar.launch.agents.fixed_part import record_fixed, run_part, take_fixed_part
from asyncpar.launch.display import Display, OutputStream, make_display
from asyncpar.launch.host_placement import find_placement, make_log_directory, usable_directory
from asyncpar.launch.job import LaunchJob, adopt_certificates, check_secret_options, obtain_secret
from asyncpar.launch.options import LaunchOptions
from asyncpar.launch.rank_process import rank_command
from asyncpar.launch.reaper_client import ReaperClient, require_process_groups
from asyncpar.net.checked_settings import check_settings

_OUTPUT_PATIENCE = 0.2
"""Seconds that pending output may take to be written; a reader may have stopped reading."""
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""A variable that every container in Kubernetes has."""

_IN_CLEAR = (
    b"asyncpar launch: traffic between the hosts is authenticated, but not encrypted; `asyncpar certs init` makes "
    b"certificates for --certs\n"
)


_OWN_DESCRIPTORS, _DESCRIPTORS_PER_RANK = 32, 8


def check_descriptors(nproc: int) -> None:
    """Raise ``UsageError`` if this process may open fewer descriptors than a launch of ``nproc`` ranks here needs."""
    limit = descriptor_limit()
    least = _OWN_DESCRIPTORS + _DESCRIPTORS_PER_RANK * nproc
    if limit < least:
        raise UsageError(
            f"open files: expected a limit of at least {least} for {nproc} ranks on this host, got {limit}; raise it: "
            f"ulimit -n {max(4096, least)}"
        )


def run_launch(options: LaunchOptions, environment: Mapping[str, str]) -> int:
    """Run the job and return the exit code.  Ranks inherit ``environment``.

    Raises ``UsageError`` before anything starts when the options do not fit this machine.
    """
    open_closed_streams()
    require_process_groups()
    command = rank_command(options.kind, options.program, options.arguments)
    check_settings(environment)
    if options.post_mortem is not None:
        usable_directory("--post-mortem", options.post_mortem)
    options, certificates = adopt_certificates(options)
    placement = find_placement(options, patience=options.timeout if environment.get(_IN_KUBERNETES) else 0.0)
    if certificates is not None:
        certificates.check_ranks(nnodes=options.nnodes, nproc=placement.nproc)
    check_descriptors(placement.nproc)
    check_secret_options(options, placement)
    log_directory = make_log_directory(options)
    job = LaunchJob(
        options=options,
        placement=placement,
        command=command,
        log_directory=log_directory,
        environment=environment,
        certificates=certificates,
    )
    stdout, stderr = OutputStream(1, name="stdout"), OutputStream(2, name="stderr")
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(_run(job, make_display(stdout, stderr)))
    finally:
        stdout.close(patience=_OUTPUT_PATIENCE)
        stderr.close(patience=_OUTPUT_PATIENCE)


async def _run(job: LaunchJob, display: Display) -> int:
    if job.log_directory is not None and job.options.log_dir is None:
        await display.lines(f"asyncpar launch: logs are in {job.log_directory}\n".encode())
    if job.certificates is not None and (warning := job.certificates.warning(datetime.now(UTC))):
        await display.lines(f"asyncpar launch: {warning}\n".encode())
    if job.certificates is None and not job.placement.is_private and job.placement.serve_at is not None:
        await display.lines(_IN_CLEAR)
    record = record_fixed(job)
    ending = EndRequests(job.placement.host, record, grace=job.options.grace)
    with ending.signals(), closing(ReaperClient()) as reaper, ExitStack() as files:
        secret = obtain_secret(job.options, job.placement, reaper, files)
        async with AsyncExitStack() as stack:
            part = await take_fixed_part(stack, job, record, secret, display=display, reaper=reaper)
            return (await run_part(job, part, reaper, ending)).exit_code
