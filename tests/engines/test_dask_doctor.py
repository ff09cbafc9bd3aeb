"""`asyncpar doctor --dask`: a real cluster of processes on this host, and what keeps jobs from running on one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.launch.doctor import dask_checks
from asyncpar.launch.doctor.dask_checks import check_versions, check_workers, choose_workers, examine_dask
from asyncpar.launch.doctor.dask_probe import meet_probes
from asyncpar.launch.doctor.findings import Finding, Verdict
from tests.engines.dask_workers import start_worker, wait_for_workers, write_other_asyncpar
from tests.stopped import stop_process

distributed = pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

HERE = {
    "host": {"python": f"{platform.python_version()}.final.0"},
    "packages": {name: importlib.metadata.version(name) for name in ("asyncpar", "distributed")},
}


@pytest.fixture(scope="module")
def client(two_workers: Any) -> Iterator[Any]:
    with distributed.Client(two_workers, set_as_default=False) as client:
        wait_for_workers(client)
        yield client


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is not Verdict.OK]


def test_a_cluster_that_works_has_nothing_to_mend(client: Any) -> None:
    command = [sys.executable, "-m", "asyncpar", "doctor", "--dask", client.scheduler.address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr == ""
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"] if one["check"].startswith("dask")}
    assert {one["verdict"] for one in findings.values()} == {"ok"}
    assert findings["dask workers"]["found"] == "2 run, with 2 threads"
    assert "on all" in findings["dask versions"]["found"]
    assert findings["dask ways"]["found"] == "2 workers reach each other, at any port"


async def test_a_worker_that_does_not_answer_is_named_and_the_others_are_looked_at(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = client.run(os.getpid)
    stopped = min(pids)
    monkeypatch.setattr(dask_checks, "_ANSWER_SECONDS", 1.0)
    stop_process(pids[stopped])
    try:
        findings = await examine_dask(client.scheduler.address)
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    (finding,) = wrong(findings)
    assert (finding.check, finding.host, finding.verdict) == ("dask worker", stopped, Verdict.FAIL)
    assert "does not answer" in finding.found
    assert "dask versions" in {finding.check for finding in findings}


async def test_another_asyncpar_on_a_worker_is_named(client: Any, tmp_path: Path) -> None:
    write_other_asyncpar(tmp_path, "__version__ = '9.9'")
    with start_worker(client, tmp_path) as address:
        (finding,) = wrong(await examine_dask(client.scheduler.address))
    own = importlib.metadata.version("asyncpar")
    assert (finding.check, finding.host, finding.verdict) == ("dask versions", address, Verdict.FAIL)
    assert finding.found == f"asyncpar 9.9 there, {own} here"
    assert finding.advice == f'pip install "asyncpar[dask]=={own}" there'


@pytest.mark.soak
async def test_an_asyncpar_that_a_worker_cannot_import_is_named(client: Any, tmp_path: Path) -> None:
    own = importlib.metadata.version("asyncpar")
    write_other_asyncpar(tmp_path, "raise ImportError('libfortran.so.5: cannot open')", version=own)
    with start_worker(client, tmp_path) as address:
        (finding,) = wrong(await examine_dask(client.scheduler.address))
    assert (finding.check, finding.host) == ("dask worker", address)
    assert "cannot import asyncpar" in finding.found
    assert "libfortran.so.5: cannot open" in finding.found


async def test_no_scheduler_is_told_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_checks, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (finding,) = await examine_dask(address)
    assert finding.verdict is Verdict.FAIL
    assert f"{address} does not answer as one" in finding.found
    (closed,) = await examine_dask(address)
    assert "see whether `dask scheduler` runs there" in closed.advice
    (without_certificates,) = await examine_dask(f"tls://{address}")
    assert "name the certificates" in without_certificates.advice


@pytest.mark.parametrize("address", ["nonsense", "tcp://host", "host:port", "other://host:1", ""])
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ap.UsageError, match="--dask: expected the scheduler's address"):
        await examine_dask(address)


async def test_a_way_that_is_closed_is_named_from_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (finding,) = await meet_probes("tcp://a:1", {"tcp://b:2": ("127.0.0.1", port)}, b"")
    assert (finding.verdict, finding.host) == (Verdict.FAIL, "tcp://a:1 -> tcp://b:2")
    assert f"no connection to 127.0.0.1, port {port}" in finding.found
    assert "firewall" in finding.advice


def test_versions_are_compared_with_those_here() -> None:
    python = {**HERE, "host": {"python": "3.99.0.final.0"}}
    lacking = {**HERE, "packages": {**HERE["packages"], "asyncpar": None}}
    dask = {**HERE, "packages": {**HERE["packages"], "distributed": "1.0"}}
    found = check_versions({"scheduler": HERE, "a": python, "b": lacking, "c": dask})
    assert [(one.host, one.verdict) for one in found] == [
        ("a", Verdict.FAIL),
        ("b", Verdict.FAIL),
        ("c", Verdict.WARN),
    ]
    assert found[0].found.startswith("Python 3.99 there")
    assert found[1].found == "asyncpar is not installed there"
    assert found[2].found.startswith("Dask 1.0 there")
    (same,) = check_versions({"scheduler": HERE, "a": HERE})
    assert same.verdict is Verdict.OK


def test_workers_that_take_no_ranks_are_counted() -> None:
    running, paused = {"status": "running", "nthreads": 2}, {"status": "paused", "nthreads": 2}
    assert check_workers({}).found == "none runs"
    assert check_workers({"a": paused}).found == "none runs (1 paused)"
    assert check_workers({"a": paused}).verdict is Verdict.FAIL
    assert check_workers({"a": paused, "b": running}).verdict is Verdict.WARN
    assert check_workers({"b": running}).found == "1 run, with 2 threads"


def test_one_worker_of_each_host_comes_first() -> None:
    names = ["tcp://a:1", "tcp://a:2", "tcp://b:1", "tcp://c:1"]
    assert choose_workers(names, 3) == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
    assert choose_workers(names) == ["tcp://a:1", "tcp://b:1", "tcp://c:1", "tcp://a:2"]
