"""`asyncpar doctor`: find the obstacles that keep jobs from running, and recommend remedies."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import click

from asyncpar.core.addresses import split_address
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_result


@click.command(cls=OneLineCommand)
@option("--hosts", metavar="A,B:PORT,...", default=None, help="Look at the ways to these hosts, too.")
@option("--listen", metavar="[HOST]:PORT", default=None, help="Answer doctors of other hosts until Ctrl-C.  [:29399]")
@option("--slurm", is_flag=True, help="Look at Slurm, too; in a job, at its place.")
@option("--dask", metavar="ADDRESS", default=None, help="Look at Dask's cluster with this scheduler, too.")
@option("--secret-file", metavar="FILE", default=None, envvar="ASYNCPAR_SECRET_FILE", help="The job's secret.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    hosts: str | None, listen: str | None, dask: str | None, secret_file: str | None, *, slurm: bool, as_json: bool
) -> None:
    """Look for what keeps jobs from running here, and say what to do about it.

    Links, ports, names, clock, secret, versions, shared memory, limits and
    processors.  With --hosts, ways to other hosts: run `asyncpar doctor
    --listen :29399` on those first, so that MTU, clocks, secrets and versions
    can be compared.  Exits with code 1 if something is wrong.
    """
    exit_with("doctor", lambda: _doctor(hosts, listen, dask, secret_file, slurm=slurm, as_json=as_json))


def _doctor(
    hosts: str | None, listen: str | None, dask: str | None, secret_file: str | None, *, slurm: bool, as_json: bool
) -> int:
    if listen is not None:
        if hosts is not None or dask is not None or slurm or as_json:
            raise UsageError("--listen: expected alone; run another doctor to look at hosts")
        with suppress(KeyboardInterrupt):
            asyncio.run(_listen(listen, secret_file))
        return 0
    import importlib.metadata

    import msgspec

    from asyncpar.launch.doctor.findings import Examination, show_findings
    from asyncpar.launch.doctor.host_checks import examine_host
    from asyncpar.launch.doctor.peer_checks import examine_hosts
    from asyncpar.net.membership.host import host_name

    names = [name.strip() for name in (hosts or "").split(",") if name.strip()]
    if hosts is not None and not names:
        raise UsageError("--hosts: expected names of hosts, as in a,b:29399")
    findings = examine_host(os.environ, secret_file=secret_file, with_hosts=bool(names))
    if slurm:
        from asyncpar.launch.doctor.slurm_checks import examine_slurm

        findings += examine_slurm(os.environ)
    if dask is not None:
        from asyncpar.launch.doctor.dask_checks import examine_dask

        findings += asyncio.run(examine_dask(dask))
    if names:
        findings += asyncio.run(examine_hosts(names, _read_secret(secret_file)))
    examination = Examination(
        host=host_name(), version=importlib.metadata.version("asyncpar"), findings=tuple(findings)
    )
    text = msgspec.json.encode(examination) + b"\n" if as_json else show_findings(examination).encode()
    print_result("the findings", text)
    return examination.exit_code


def _read_secret(path: str | None) -> bytes:
    """Return the secret; b"" if it cannot be read, which another finding reports."""
    if path is None:
        return b""
    try:
        return Path(path).read_bytes()
    except (OSError, AsyncparError):
        return b""


async def _listen(listen: str, secret_file: str | None) -> None:
    from asyncpar.launch.doctor.peer_service import serve_doctor

    everywhere = listen.startswith(":") and listen.count(":") == 1
    address, port = split_address(
        f"*{listen}" if everywhere else listen, name="--listen", expected="HOST:PORT or :PORT"
    )
    if not port:
        raise UsageError(f"--listen: expected a port other than 0, got {listen!r}")
    server = await serve_doctor("" if everywhere else address, port, _read_secret(secret_file))
    print_result("the address", f"asyncpar doctor: answers at {listen}; end it with Ctrl-C\n")
    async with server:
        await server.serve_forever()
