"""The doctor on a Dask worker: answer the doctors of other workers at a free port, and connect to them, as ranks do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from asyncpar.launch.doctor.findings import Finding, Verdict, fail
from asyncpar.launch.doctor.peer_checks import compare
from asyncpar.launch.doctor.peer_service import meet, serve_doctor

MEET_SECONDS: Final = 2.0
_SERVE_SECONDS: Final = 60.0

Probe = tuple[str, int]
"""Address and port of a worker that answers."""


def is_import_error(error: Exception) -> bool:
    """Return whether a function of asyncpar failed to load; Dask turns errors of unpickling into an ``Exception``."""
    return isinstance(error, ImportError) or str(error).startswith(("ImportError(", "ModuleNotFoundError("))


async def open_probe(secret: bytes, dask_worker: Any = None) -> Probe:
    """Answer doctors at a free port for a minute.  Raises ``LaunchError`` if that is impossible."""
    from distributed.comm import get_address_host

    server = await serve_doctor(get_address_host(dask_worker.address), 0, secret)
    asyncio.get_running_loop().call_later(_SERVE_SECONDS, server.close)
    address, port = server.sockets[0].getsockname()[:2]
    return address, port


async def meet_probes(own: str, probes: Mapping[str, Probe], secret: bytes) -> list[Finding]:
    """Return the problems of the connections from the place called ``own`` to ``probes``, all checked concurrently."""
    found = await asyncio.gather(*(_meet(f"{own} -> {name}", probe, secret) for name, probe in probes.items()))
    return [finding for findings in found for finding in findings if finding.verdict is not Verdict.OK]


async def _meet(way: str, probe: Probe, secret: bytes) -> list[Finding]:
    address, port = probe
    try:
        report = await meet(address, port, secret, within=MEET_SECONDS)
    except (OSError, ValueError) as error:
        why = f"nothing within {MEET_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
        advice = (
            "let a firewall pass TCP between all workers' hosts, at any port; "
            "or start workers with --interface NAME of a network that all of them are on"
        )
        return [fail("dask way", f"no connection to {address}, port {port} ({why})", advice, host=way)]
    return compare(way, report)
