"""Idle connections to every socket on which any command listens end no job, and no command."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import psutil
import pytest

import asyncpar
from asyncpar.launch.cli import main
from asyncpar.net.membership.credentials import create_secret
from tests.hostile.floods import ELASTIC, PLAIN, Crowd, Flooded, eventually, many_descriptors, terminate
from tests.ports import free_port
from tests.soak import chosen

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs /proc"),
]

FOREVER = "1000000"
SHOWN = ("--dashboard=127.0.0.1:0", "--metrics=127.0.0.1:0")
STEPS = chosen(8, soak=25)
Start = Callable[[Flooded], subprocess.Popen[bytes]]


def plain(job: Flooded) -> subprocess.Popen[bytes]:
    return job.start("launch", "--nproc-per-node", "2", *SHOWN, job.write(PLAIN))


def by_tcp(job: Flooded) -> subprocess.Popen[bytes]:
    return job.start("launch", "--nproc-per-node", "2", "--transport", "tcp", *SHOWN, job.write(PLAIN))


def elastic(job: Flooded) -> subprocess.Popen[bytes]:
    options = ("--nproc-per-node", "2", "--nnodes", "1:1", "--elastic", "ranks", "--grace-period", "2", *SHOWN)
    return job.start("launch", *options, job.write(ELASTIC), FOREVER)


def agent(job: Flooded) -> subprocess.Popen[bytes]:
    secret, address = job.folder / "secret", f"127.0.0.1:{free_port()}"
    create_secret(secret)
    process = job.start("agent", "--listen", address, "--secret-file", str(secret), "--grace", "2", *SHOWN)
    eventually(lambda: "serves at" in job.said(), job.said)
    options = ("--nnodes", "1:1", "--nproc-per-node", "2", "--elastic", "ranks", "--rdzv-endpoint", address)
    program = job.write(ELASTIC)
    job.start("launch", *options, "--secret-file", str(secret), SHOWN[0], program, FOREVER, log="launch")
    return process


LISTENING: dict[str, tuple[Start, int]] = {
    "launch": (plain, 7),
    "launch, lanes over TCP": (by_tcp, 7),
    "launch --elastic": (elastic, 9),
    "agent": (agent, 11),
}
"""Commands that run jobs, each with the least number of sockets on which it and its ranks listen."""

BRIEF = ("launch, lanes over TCP",)
"""It listens in most ways that there are; ``test_http2_floods.py`` floods the servers of an agent and its ranks."""

OTHERS = {
    "doctor": "--listen, below",
    "bench": "launches a job",
    **dict.fromkeys(("drain", "status", "top", "stacks", "logs", "trace", "flight", "report"), "asks"),
    **dict.fromkeys(("slurm", "k8s"), "submits"),
    **dict.fromkeys(("certs", "plan"), "computes"),
}


LISTENS = re.compile(
    r"\b(?:start_server|start_unix_server|create_server|create_unix_server|add_insecure_port|add_secure_port)\(\w"
    r"|\bopen_listener\(|\b(?:TCPSite|SockSite|UnixSite|start_http_server)\(|\((?:\w+, )*\w*(?:HTTP|WSGI)Server\)"
    r"|\b(?:listen|listener|listening|listening_socket|sock|duplicate|server)\.listen\("
)
BOUNDED = {
    "core/addresses.py": "open_listener, of dashboard and doctor; a probe of a moment, whose port nobody learns",
    "core/concurrency/doorkeeper.py": "serve_streams: the control socket and the doctor",
    "dashboard/server.py": "Doorkeeper",
    "launch/doctor/host_checks.py": "opens a port to see that it is free, and closes it",
    "net/arena/rendezvous.py": "processes of the same user only; others are closed as they come",
    "net/transport/connect.py": "Porter",
    "net/transport/rpc.py": "ConnectionWatch",
    "net/transport/serving.py": "refuses services that would listen for themselves",
    "net/transport/sockets.py": "lengthens the queue of lanes",
    "observe/prometheus.py": "_BoundedServer",
}
"""Where the package listens, and what bounds the connections there."""


def test_every_place_that_listens_is_bounded() -> None:
    package = Path(asyncpar.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if LISTENS.search(path.read_text())}
    assert found == set(BOUNDED)


def test_every_command_is_known_here() -> None:
    assert isinstance(main, click.Group)
    assert set(main.list_commands(click.Context(main))) == {
        name.partition(",")[0].partition(" ")[0] for name in LISTENING
    } | set(OTHERS)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Flooded]:
    with many_descriptors():
        made = Flooded(tmp_path, descriptors=256)
        yield made
        made.close()


def go_on(job: Flooded, ranks: int = 2) -> None:
    """Wait until the ranks have come ``STEPS`` further; none of them may be another one than before."""
    before = job.steps()

    def are_further() -> bool:
        now = job.steps()
        assert now.keys() == before.keys(), job.said()
        return all(now[rank] >= before[rank] + STEPS for rank in before)

    assert len(before) == ranks
    eventually(are_further, lambda: f"{before} {job.steps()} {job.said()}")


@pytest.mark.parametrize("name", chosen(BRIEF, soak=tuple(LISTENING)))
def test_a_job_goes_on_and_ends_while_every_socket_is_flooded(job: Flooded, name: str) -> None:
    start, least = LISTENING[name]
    process = start(job)
    eventually(lambda: len(job.steps()) == 2, job.said)
    addresses = job.listening()
    assert len(addresses) >= least, addresses
    with Crowd(list(addresses), 400) as crowd:
        eventually(lambda: crowd.knocks >= 400 * len(addresses), lambda: "the flood never came")
        go_on(job)
        assert terminate(process) in (0, 143), job.said()


def test_a_doctor_answers_on_while_it_is_flooded(job: Flooded) -> None:
    port = free_port()
    process = job.start("doctor", "--listen", f"127.0.0.1:{port}")
    eventually(lambda: ("127.0.0.1", port) in job.listening(), job.said)
    with Crowd([("127.0.0.1", port)], 400) as crowd:
        eventually(lambda: crowd.knocks >= 1000, lambda: "the flood never came")
        assert process.poll() is None
        assert psutil.Process(process.pid).num_fds() < 200
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert "Traceback" not in job.said()


def test_a_launcher_that_can_open_nothing_for_a_while_lives_on(job: Flooded) -> None:
    process = plain(job)
    eventually(lambda: len(job.steps()) == 2, job.said)
    addresses = [address for address, pid in job.listening().items() if pid == process.pid]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, hard))
    with Crowd(addresses, 100) as crowd:
        eventually(lambda: crowd.knocks >= 100 * len(addresses), lambda: "the flood never came")
        go_on(job)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        go_on(job)
    (job.folder / "end").touch()
    assert process.wait(60) == 0, job.said()
