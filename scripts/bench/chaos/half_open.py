"""Measure how much half-open connections of strangers to all of its ports slow a job down.

    scripts/bench/run half_open --nproc 4 --connections 1000 --rounds 5 --seconds 4

Real processes on this host reduce an array over TCP lanes without a pause.  In every other stretch of time this program
connects ``--connections`` times to each port on which a rank listens (its TCP lanes, its gRPC server), says nothing,
and holds what it is not turned away from.  Printed are the median seconds of an all-reduce on rank 0 without and with
the strangers, the ratio (the median over the rounds), how many connections each kind of port let stay, and by how much
the largest rank grew.  The bursts of connecting are part of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import asyncpar as ap
from asyncpar.bench.sizes import parse_size

MOST_SLOWER = 1.05
_PER_CHECK = 20
_SETTLE_SECONDS = 1.0
_START_SECONDS = 60.0
_STOP = "stop"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time: when it began and ended, and what strangers held at its end (empty: there were none)."""

    began: float
    ended: float
    held: dict[str, int]


async def work(size: int, directory: Path) -> None:
    """Be one rank: reduce until told to stop, then write down when each all-reduce began and how long it took."""
    async with ap.init(transport="tcp") as node:
        x = np.zeros(max(size // 4, 1), np.float32)
        goes_on = np.ones(1, np.int32)
        await node.world.all_reduce(x)
        (directory / f"pid-{node.rank}").write_text(str(os.getpid()))
        samples = []
        while goes_on[0]:
            for _ in range(_PER_CHECK):
                began = time.monotonic()
                await node.world.all_reduce(x)
                samples.append((began, time.monotonic() - began))
            goes_on[0] = not (directory / _STOP).exists()
            await node.world.broadcast(goes_on)
        await node.world.barrier()  # no rank leaves before the slowest one knows of the end
        if node.rank == 0:
            (directory / "samples").write_text(json.dumps(samples))


class Strangers:
    """Connections that say nothing."""

    def __init__(self, ports: dict[str, list[int]], count: int) -> None:
        self._ports = ports
        self._count = count

    @contextmanager
    def standing(self) -> Iterator[dict[str, list[socket.socket]]]:
        """Connect, as fast as the ranks accept, and hold the connections."""
        sockets: dict[str, list[socket.socket]] = {kind: [] for kind in self._ports}
        try:
            for kind, ports in self._ports.items():
                for port in ports:
                    sockets[kind] += [_knock(port) for _ in range(self._count)]
            yield sockets
        finally:
            for some in sockets.values():
                for sock in some:
                    sock.close()


def _knock(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", port))
    return sock


def is_held(sock: socket.socket) -> bool:
    """Is this connection still open?"""
    try:
        while part := sock.recv(4096):
            del part
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def find_ports(pid: int, grpc_first: bool = True) -> tuple[int, int]:
    """Return the two ports on which a rank listens: that of its gRPC server, which it binds first, and of its lanes."""
    ports = [
        place.laddr.port
        for place in psutil.Process(pid).net_connections(kind="tcp")
        if place.status == psutil.CONN_LISTEN
    ]
    assert len(ports) == 2, f"a rank listens on two ports, not on {ports}"
    return (ports[0], ports[1]) if _speaks_first(ports[0]) == grpc_first else (ports[1], ports[0])


def _speaks_first(port: int) -> bool:
    """Does the server send something to a client that is silent?  Only gRPC does."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as sock:
        try:
            return bool(sock.recv(1))
        except TimeoutError:
            return False


def run(arguments: argparse.Namespace, directory: Path) -> int:
    """Run the job with and without strangers, and print what that did."""
    size = ["--directory", str(directory), "--size", str(arguments.size)]
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(arguments.nproc)]
    job = subprocess.Popen([*launch, "--transport", "tcp", __file__, *size])
    try:
        processes = _wait_for_ranks(job, directory, arguments.nproc)
        ports: dict[str, list[int]] = {"gRPC": [], "TCP": []}
        for process in processes:
            for kind, port in zip(ports, find_ports(process.pid), strict=True):
                ports[kind].append(port)
        time.sleep(_SETTLE_SECONDS)
        before = [process.memory_info().rss for process in processes]
        stretches = _alternate(Strangers(ports, arguments.connections), arguments.rounds, arguments.seconds)
        growth = max(process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True))
        (directory / _STOP).touch()
        job.wait(_START_SECONDS)
    finally:
        job.kill()
        job.wait()
    return show(json.loads((directory / "samples").read_text()), stretches, growth, arguments)


def _wait_for_ranks(job: subprocess.Popen[bytes], directory: Path, count: int) -> list[psutil.Process]:
    end = time.monotonic() + _START_SECONDS
    while len(found := sorted(directory.glob("pid-*"))) < count:
        if job.poll() is not None or time.monotonic() > end:
            raise SystemExit("the job did not start")
        time.sleep(0.1)
    time.sleep(_SETTLE_SECONDS)
    return [psutil.Process(int(path.read_text())) for path in found]


def _alternate(strangers: Strangers, rounds: int, seconds: float) -> list[Stretch]:
    stretches = []
    for _ in range(rounds):
        began = time.monotonic()
        time.sleep(seconds)
        stretches.append(Stretch(began, time.monotonic(), {}))
        began = time.monotonic()
        with strangers.standing() as sockets:
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            ended = time.monotonic()
            held = {kind: sum(map(is_held, some)) for kind, some in sockets.items()}
        stretches.append(Stretch(began, ended, held))
        time.sleep(_SETTLE_SECONDS)  # the job closes what the strangers left
    return stretches


def show(
    samples: list[tuple[float, float]], stretches: list[Stretch], growth: int, arguments: argparse.Namespace
) -> int:
    """Print the figures; 1 if the job was too much slower."""
    medians = [
        statistics.median(seconds for began, seconds in samples if stretch.began <= began < stretch.ended)
        for stretch in stretches
    ]
    alone, crowded = medians[::2], medians[1::2]
    ratio = statistics.median(with_them / without for without, with_them in zip(alone, crowded, strict=True))
    held = {kind: max(stretch.held[kind] for stretch in stretches[1::2]) for kind in stretches[1].held}
    print(f"all_reduce of {arguments.size} bytes, {arguments.nproc} ranks, TCP lanes, {len(samples)} times")
    print(f"alone: {1e6 * statistics.median(alone):.0f} us; with strangers: {1e6 * statistics.median(crowded):.0f} us")
    print(f"ratio (median of {arguments.rounds} rounds): {ratio:.3f}, wanted at most {MOST_SLOWER}")
    for kind, count in held.items():
        print(f"{kind}: {count} of {arguments.connections * arguments.nproc} strangers were still there at the end")
    print(f"the largest rank grew by {growth / 2**20:.1f} MiB")
    return int(ratio > MOST_SLOWER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--size", type=lambda text: parse_size("--size", text), default=1 << 20, help="(default: 1MiB)")
    parser.add_argument("--connections", type=int, default=1000, help="to each port of each rank (default: 1000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each stretch (default: 4)")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.directory is not None:
        ap.run(work(arguments.size, arguments.directory))
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * arguments.connections * arguments.nproc + 100
    if soft < needed:
        if hard < needed:
            parser.error(f"--connections: {needed} open files are needed, {hard} are allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    with tempfile.TemporaryDirectory() as directory:
        return run(arguments, Path(directory))


if __name__ == "__main__":
    sys.exit(main())
