"""Checks of a Dask cluster: its scheduler and workers, their installed packages, and connections between workers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import platform
import secrets
import warnings
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncpar.core.config.secret import SECRET_BYTES
from asyncpar.errors import UsageError
from asyncpar.launch.doctor.dask_probe import MEET_SECONDS, Probe, is_import_error, meet_probes, open_probe
from asyncpar.launch.doctor.findings import Finding, Verdict, fail, warn, well

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")
_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 5.0
_MOST_PROBED: Final = 16
"""The most workers whose connections to each other are checked, of as many hosts as there are."""
_PACKAGES: Final = ("asyncpar", "distributed")


async def examine_dask(address: str) -> list[Finding]:
    """Return the findings on the cluster whose scheduler is at ``address``, within half a minute.

    Raises ``UsageError`` for an invalid address.
    """
    try:
        from distributed import Client
        from distributed.comm.addressing import get_address_host, parse_address, parse_host_port
    except ImportError as error:
        return [fail("dask", f"it is not installed here ({error})", 'pip install "asyncpar[dask]"')]
    try:
        scheme, place = parse_address(address)
        parse_host_port(place)
        get_address_host(address)  # knows the schemes
    except ValueError as error:
        raise UsageError(f"--dask: expected the scheduler's address, as in tcp://host:8786 ({error})") from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # its findings are reported as ours
    with warnings.catch_warnings(action="ignore"):  # versions that differ
        client = Client(address, asynchronous=True, set_as_default=False, timeout=_CONNECT_SECONDS)
        try:
            try:
                async with asyncio.timeout(2 * _CONNECT_SECONDS):
                    await client
            except (OSError, ImportError, RuntimeError, TypeError, ValueError) as error:
                advice = "see whether `dask scheduler` runs there and a firewall lets its port pass"
                if scheme == "tls":
                    advice += "; settings of Dask (DASK_DISTRIBUTED__COMM__TLS__...) name the certificates of tls://"
                return [fail("dask scheduler", f"{address} does not answer as one ({_why(error)})", advice)]
            return await _examine(client, address)
        finally:
            with suppress(OSError):
                await client.close(timeout=_CONNECT_SECONDS)


async def _examine(client: Client, address: str) -> list[Finding]:
    state = await _within(client.scheduler.identity(n_workers=-1))
    versions = await _within(client.scheduler.versions(packages=_PACKAGES))
    if isinstance(state, OSError) or isinstance(versions, OSError):
        error = state if isinstance(state, OSError) else versions
        return [fail("dask scheduler", f"{address} does not answer ({_why(error)})", "look at its log")]
    findings = [well("dask scheduler", f"{state['address']}, Dask {versions['packages']['distributed']}")]
    findings.append(check_workers(state["workers"]))
    running = [name for name, worker in state["workers"].items() if worker["status"] == "running"]
    answers = await asyncio.gather(
        *(_within(client.scheduler.broadcast(msg=_VERSIONS, workers=[name])) for name in running)
    )
    installed: dict[str, Any] = {"scheduler": versions}
    for name, answer in zip(running, answers, strict=True):
        if isinstance(answer, OSError):
            advice = "look at its log and at the load of its host; `client.restart_workers` starts it again"
            findings.append(fail("dask worker", f"it does not answer ({_why(answer)})", advice, host=name))
        else:
            installed[name] = answer[name]
    compared = check_versions(installed)
    findings += compared
    wrong = {finding.host for finding in compared if finding.verdict is Verdict.FAIL}
    usable = [name for name in running if name in installed and name not in wrong]
    return findings + await _examine_ways(client, usable)


def check_workers(workers: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Count the workers that take ranks."""
    states = [str(worker["status"]) for worker in workers.values()]
    running = states.count("running")
    other = ", ".join(f"{states.count(state)} {state}" for state in sorted({*states} - {"running"}))
    if running == 0:
        advice = "start some: `dask worker ADDRESS` on each host, or cluster.scale(N); ap.dask.run(wait=SECONDS) waits"
        return fail("dask workers", f"none runs{f' ({other})' if other else ''}", advice)
    if other:
        advice = "a paused worker is short of memory (--memory-limit); see its log and Dask's dashboard"
        return warn("dask workers", f"{running} run, {other}", advice)
    return well("dask workers", f"{running} run, with {sum(worker['nthreads'] for worker in workers.values())} threads")


def check_versions(installed: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Compare the packages of the scheduler and workers, as ``Client.get_versions`` reports them, with those here."""
    own = importlib.metadata.version("asyncpar")
    dask = importlib.metadata.version("distributed")
    python = ".".join(platform.python_version_tuple()[:2])
    findings = []
    for name, versions in installed.items():
        packages = versions["packages"]
        there = ".".join(str(versions["host"]["python"]).split(".")[:2])
        got = packages.get("asyncpar")
        if there != python:
            advice = f"run Python {python} there, or Python {there} here: functions travel as code"
            findings.append(fail("dask versions", f"Python {there} there, {python} here", advice, host=name))
        elif got != own:
            found = f"asyncpar {got} there, {own} here" if got else "asyncpar is not installed there"
            findings.append(fail("dask versions", found, f'pip install "asyncpar[dask]=={own}" there', host=name))
        elif packages.get("distributed") != dask:
            found = f"Dask {packages.get('distributed')} there, {dask} here"
            findings.append(warn("dask versions", found, f"pip install distributed=={dask} there", host=name))
    return findings or [well("dask versions", f"asyncpar {own}, Python {python} and Dask {dask} on all")]


async def _examine_ways(client: Client, workers: Iterable[str]) -> list[Finding]:
    """Have workers connect to each other at free ports, as ranks do, and connect to them from here."""
    chosen, secret = choose_workers(workers), secrets.token_bytes(SECRET_BYTES)
    opened = await asyncio.gather(*(_on_worker(client, name, open_probe, secret) for name in chosen))
    probes: dict[str, Probe] = {}
    findings: list[Finding] = []
    for name, probe in zip(chosen, opened, strict=True):
        if isinstance(probe, Exception) and is_import_error(probe):
            advice = "install asyncpar there again; `python -c 'import asyncpar'` in the worker's environment shows it"
            findings.append(fail("dask worker", f"it cannot import asyncpar ({_why(probe)})", advice, host=name))
        elif isinstance(probe, Exception):
            advice = "start workers with --host or --interface of a network that their host has; look at the log"
            findings.append(fail("dask way", f"no port can be had there ({_why(probe)})", advice, host=name))
        else:
            probes[name] = probe
    views = (
        _on_worker(client, name, meet_probes, name, {other: probes[other] for other in probes if other != name}, secret)
        for name in probes
    )
    for name, found in zip(probes, await asyncio.gather(*views), strict=True):
        if isinstance(found, Exception):
            advice = "look at its log and at the load of its host"
            findings.append(fail("dask way", f"it cannot inspect the others ({_why(found)})", advice, host=name))
        else:
            findings += found
    if len(probes) > 1 and not findings:
        findings.append(well("dask ways", f"{len(probes)} workers reach each other, at any port"))
    if probes and await meet_probes("here", probes, secret):
        advice = "run the caller of ap.dask.world on a host of the cluster's network; ap.dask.run does not need that"
        findings.append(warn("dask ways", "this host does not reach all workers", advice))
    return findings


def choose_workers(workers: Iterable[str], most: int = _MOST_PROBED) -> list[str]:
    """Return up to ``most`` of ``workers``: first one of each host, then others."""
    firsts: dict[str, str] = {}
    others: list[str] = []
    for name in workers:
        host = name.rpartition(":")[0]
        if host in firsts:
            others.append(name)
        else:
            firsts[host] = name
    return [*firsts.values(), *others][:most]


async def _on_worker(client: Client, name: str, function: Any, *arguments: Any) -> Any:
    """Return the result of ``function`` on a worker, or its exception."""
    answers = await _within(client._run(function, *arguments, workers=[name], on_error="return"))
    return answers if isinstance(answers, OSError) else answers[name]


async def _within(answer: Awaitable[T]) -> T | OSError:
    """Return ``answer``, or the error that replaces it."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS + 2 * MEET_SECONDS):
            return await answer
    except OSError as error:
        return error


def _why(error: Exception) -> str:
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)


_VERSIONS: Final = {"op": "versions", "packages": _PACKAGES}
