"""The inference service as its users run it: real processes, real HTTP, weights pushed all the while."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.program_host import ProgramHost
from tests.soak import first

httpx = pytest.importorskip("httpx", reason="httpx (extra test) is not installed")
pytest.importorskip("fastapi", reason="fastapi (extra test) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (extra test) is not installed")

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "serve_weights.py"
SMALL = ("--rows", "4096", "--width", "16", "--push-every", "0.02")
LIMIT = 45.0

pytestmark = pytest.mark.process


class Job:
    """A launched trainer with its services."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.shown: list[str] = []

    def addresses(self, count: int) -> list[str]:
        """Return where the services listen, read from what they print."""
        assert self.process.stdout is not None
        found: dict[str, str] = {}
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, "".join(self.shown)
            self.shown.append(line)
            match = re.search(r"rank (\d+) serves on (http://\S+)", line)
            if match is not None:
                found[match[1]] = match[2]
        return list(found.values())

    def ranks(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if str(SCRIPT) in child.cmdline()]

    def finish(self) -> tuple[int, str]:
        """Return the exit code and everything that was printed, once all of the job has ended."""
        shown, _ = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, "".join(self.shown) + shown


@contextmanager
def launched(*arguments: str, ranks: int = 2) -> Iterator[Job]:
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(ranks), str(SCRIPT)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPAR_")}
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield Job(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def ask_until_version(address: str, last: int, *, seed: int) -> list[dict[str, Any]]:
    """Ask again and again until the answer comes from version ``last`` or a later one."""
    answers: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=address, timeout=LIMIT) as client:
        while not answers or answers[-1]["version"] < last:
            response = await client.post("/predict", json={"tokens": [seed, 1, 2]})
            assert response.status_code == 200, response.text
            answers.append(response.json())
    return answers


async def drive(addresses: list[str], last: int) -> list[list[dict[str, Any]]]:
    async with asyncio.timeout(LIMIT):
        questions = (ask_until_version(address, last, seed=seed) for address in addresses for seed in range(3))
        return await asyncio.gather(*questions)


@pytest.mark.parametrize("ranks", first(1, [2, 3]))
def test_no_request_that_makes_sense_fails_while_weights_are_pushed_and_all_ranks_end_with_code_0(ranks: int) -> None:
    with launched(*SMALL, "--port", "0", ranks=ranks) as job:
        addresses = job.addresses(ranks - 1)
        for answers in asyncio.run(drive(addresses, last=20)):
            versions = [answer["version"] for answer in answers]
            assert versions == sorted(versions)
            assert versions[0] >= 1
            of_one_version: dict[int, list[float]] = {}
            for answer in answers:  # equal questions to one version have one answer
                assert of_one_version.setdefault(answer["version"], answer["scores"]) == answer["scores"]
        with httpx.Client(base_url=addresses[0], timeout=LIMIT) as client:  # what makes no sense ends nothing
            senseless: list[dict[str, list[int]]] = [{"tokens": []}, {"tokens": [4096]}, {}]
            codes = [client.post("/predict", json=question).status_code for question in senseless]
            assert codes == [422, 422, 422]
            assert client.post("/predict", json={"tokens": [4095]}).status_code == 200
        for rank in job.ranks():
            rank.send_signal(signal.SIGTERM)
        code, shown = job.finish()
    assert code == 0, shown  # which is so only if every rank's is
    assert "Traceback" not in shown


@pytest.mark.soak
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_the_job_without_noise_or_orphans(number: signal.Signals, expected: int) -> None:
    """By default, ``tests/launch`` shows it of other jobs."""
    with launched(*SMALL, "--port", "0") as job:
        (address,) = job.addresses(1)
        asyncio.run(drive([address], last=2))
        ranks = job.ranks()
        job.process.send_signal(number)
        code, shown = job.finish()
        assert len(ranks) == 2
        assert not any(rank.is_running() for rank in ranks)
    assert code == expected
    assert "Traceback" not in shown
    assert "SIGKILL" not in shown


def test_alone_it_says_how_to_start_it(host: ProgramHost, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = host.run(SCRIPT, home=tmp_path, environment=environment)
    assert done.returncode == 1
    assert done.stderr == (
        "serve_weights: expected a trainer and at least one service; start it with `asyncpar launch`\n"
    )


@pytest.mark.soak
def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, launched("--port", str(taken.getsockname()[1])) as job:
        code, shown = job.finish()
    assert code == 1
    assert "cannot be bound: Address already in use" in shown
    assert "cannot be bound" in " ".join(of_service := re.findall(r"(?m)^\[[^]]+:1\] (.*)$", shown))
    assert not [line for line in of_service if "Traceback" in line]  # rank 0 may have been notified while it started
