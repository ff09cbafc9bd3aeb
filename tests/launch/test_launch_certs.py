"""Jobs with certificates, as real processes: one host, two agents, and two hosts with a listener on the wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncpar.launch.cli import main
from tests.net.security.parties import make_directory
from tests.ports import free_port
from tests.soak import first

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py

MARKER = b"asyncpar"
REDUCE = f"""
    import asyncio, numpy as np, asyncpar as ap
    async def main():
        async with ap.init() as node:
            x = np.frombuffer({MARKER!r} * 65_536, np.int64).copy()
            await node.world.all_reduce(x, op="max")
            assert x.tobytes() == {MARKER!r} * 65_536
            others = [other for other in range(node.size) if other != rank]
            kinds = sorted({{node.links.lane_kind(other) for other in others}})
            print(rank, node.size, *kinds, file=sys.stderr)
            await node.world.barrier()
    ap.run(main)
"""
LISTEN = """
import select, socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
wire.bind((sys.argv[1], 0))
print("ready", flush=True)
count = hits = 0
is_over = False
while True:
    readable, _, _ = select.select([wire] if is_over else [wire, sys.stdin], [], [], 0.2 if is_over else None)
    if wire in readable:
        packet = wire.recv(1 << 18)
        count += len(packet)
        hits += b"asyncpar" * 4 in packet
    elif is_over:
        break
    is_over = is_over or sys.stdin in readable
print(count, hits)
"""


def make_certificates(directory: Path, *, ranks: int, hosts: str) -> str:
    """Run `asyncpar certs init`, as users do."""
    words = ["certs", "init", str(directory), "--ranks", str(ranks), "--hosts", hosts]
    made = CliRunner().invoke(main, words)
    assert made.exit_code == 0, made.output
    return str(directory)


@contextmanager
def listening(namespace: str) -> Iterator[list[int]]:
    """Listen on the wire of ``namespace``; the list gets how many bytes passed, and in how many packets the marker."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", LISTEN, namespace]
    heard: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        try:
            if listener.stdout.readline() != "ready\n":
                pytest.skip("packet sockets cannot be opened here")
            yield heard
            shown, _ = listener.communicate("", timeout=30)
            heard += map(int, shown.split())
        finally:
            listener.kill()


def test_ranks_of_one_host_with_certificates_still_share_memory(launcher: Launcher, tmp_path: Path) -> None:
    certs = make_certificates(tmp_path / "certs", ranks=2, hosts="1")
    done = launcher.run("--nproc-per-node", "2", "--certs", certs, launcher.script(REDUCE))
    assert done.returncode == 0, done.stderr
    assert sorted(line.split("] ")[1] for line in done.stderr.splitlines()) == ["0 2 shm", "1 2 shm"]


def test_the_environment_may_name_the_certificates(launcher: Launcher, tmp_path: Path) -> None:
    certs = make_certificates(tmp_path / "certs", ranks=1, hosts="1")
    script = launcher.script("print(os.environ['ASYNCPAR_CERTS'], os.environ['ASYNCPAR_SECRET_FILE'])")
    done = launcher.run(script, env={"ASYNCPAR_CERTS": certs})
    assert done.stdout == f"{certs} {certs}/secret\n"


@pytest.mark.soak
def test_two_agents_with_certificates_need_no_node_rank_and_no_secret_file(launcher: Launcher, tmp_path: Path) -> None:
    certs = make_certificates(tmp_path / "certs", ranks=3, hosts="2,1")
    common = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    script = launcher.script(REDUCE)
    leader = launcher.start(*common, "--nproc-per-node", "2", "--certs", f"{certs}/host-0", script)
    other, one = launcher.run(*common, "--certs", f"{certs}/host-1", script), launcher.finish(leader)
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr


@pytest.mark.parametrize(
    ("leader_has", "follower_has", "message"),
    first(
        1,
        [
            ("one/host-0", "two/host-1", "the same `asyncpar certs init`"),
            ("one/host-0", None, "wants certificates, and this side has none; give all hosts --certs"),
            (None, "one/host-1", "does not answer in TLS"),
        ],
    ),
    ids=first(1, ["of two runs", "only the first has some", "only the second has some"]),
)
def test_agents_whose_certificates_do_not_fit_learn_it_at_once(
    launcher: Launcher, tmp_path: Path, leader_has: str | None, follower_has: str | None, message: str
) -> None:
    for name in ("one", "two"):
        make_certificates(tmp_path / name, ranks=2, hosts="2")
    secret = ("--secret-file", str(tmp_path / "one" / "host-0" / "secret"))
    common = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-timeout", "60", *secret)
    script = launcher.script("pass")
    ends = []
    for place, home in ((0, leader_has), (1, follower_has)):
        options = ("--certs", str(tmp_path / home)) if home else ("--node-rank", str(place))
        ends.append(launcher.start(*common, *options, script))
    leader, follower = ends
    refused = launcher.finish(follower)
    assert refused.returncode == 1
    assert message in refused.stderr
    leader.send_signal(signal.SIGTERM)
    assert launcher.finish(leader).returncode == 143


@pytest.mark.soak
def test_ranks_that_run_on_another_host_than_their_certificates_say_so(launcher: Launcher, tmp_path: Path) -> None:
    """The certificates were made for two ranks on each host, and each runs one: host 1 has rank 1, not rank 2."""
    certs = make_certificates(tmp_path / "certs", ranks=4, hosts="2")
    common = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    script = launcher.script(REDUCE)
    both = [launcher.start(*common, "--certs", f"{certs}/host-{host}", script) for host in (0, 1)]
    ends = [launcher.finish(process) for process in both]
    assert [end.returncode for end in ends] == [1, 1]
    assert "has none for rank 1 (only for the ranks 2, 3)" in ends[0].stderr


def test_certificates_for_fewer_ranks_than_the_job_has_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    certs = make_directory(tmp_path / "certs", ranks=2)
    done = launcher.run("--nproc-per-node", "3", "--certs", str(certs), launcher.script("pass"))
    assert done.returncode == 2
    assert "--certs: " in done.stderr
    assert "has certificates for 2 ranks, this host runs 3" in done.stderr


@pytest.mark.parametrize(("has_certificates", "lane"), first(1, [(True, "grpc"), (False, "tcp")]))
def test_who_listens_on_the_wire_reads_nothing_where_there_are_certificates(
    launcher: Launcher, namespaces: tuple[str, str], tmp_path: Path, has_certificates: bool, lane: str
) -> None:
    """And everything where there are none, which shows that the listener would have heard it."""
    certs = make_certificates(tmp_path / "certs", ranks=2, hosts="2")
    common = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400")
    script = launcher.script(REDUCE)
    ends = []
    with listening(namespaces[0]) as heard:
        for host in (1, 0):
            home = f"{certs}/host-{host}"
            secret = ("--node-rank", str(host), "--secret-file", f"{home}/secret")
            options = ("--certs", home) if has_certificates else secret
            prefix = ("ip", "netns", "exec", namespaces[host])
            ends.append(launcher.start(*common, *options, script, prefix=prefix))
        done = [launcher.finish(process) for process in ends]
    assert [end.returncode for end in done] == [0, 0], done[0].stderr + done[1].stderr
    shown = sorted(line.split("] ")[1] for end in done for line in end.stderr.splitlines() if line.startswith("["))
    assert shown == [f"0 2 {lane}", f"1 2 {lane}"]
    count, hits = heard
    assert count > 65_536 * len(MARKER), "the payload did go over this wire"
    assert (hits == 0) is has_certificates
    assert ("not encrypted" in "".join(end.stderr for end in done)) is not has_certificates


def test_keys_do_not_appear_in_arguments_or_in_the_environment(launcher: Launcher, tmp_path: Path) -> None:
    certs = Path(make_certificates(tmp_path / "certs", ranks=1, hosts="1"))
    script = launcher.script("""
        for pid in (os.getpid(), os.getppid()):
            for name in ("cmdline", "environ"):
                shown = open(f"/proc/{pid}/{name}", "rb").read()
                assert b"PRIVATE KEY" not in shown
                assert open(os.environ["ASYNCPAR_SECRET_FILE"], "rb").read() not in shown
        print("private")
    """)
    done = launcher.finish(launcher.start("--certs", os.fspath(certs), script))  # whose process is its own
    assert done.stdout == "private\n"
