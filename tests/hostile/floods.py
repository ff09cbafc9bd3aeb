"""Floods of real processes: find every socket on which a command listens, and fill it with idle connections."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.soak import chosen

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
"""Seconds that anything may take here, far more than it needs."""

REST = chosen(0.05, soak=0.02)
"""Seconds after which a crowd looks who was turned away."""

_LISTENS = 0x10000  # __SO_ACCEPTCON of linux/net.h
Address = tuple[str, int] | str
"""A TCP address, or the name of a Unix socket."""

PLAIN = """
    import asyncio, os
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            x = np.ones(1000, np.float32)
            step = 0
            while True:
                await node.world.all_reduce(x, op="max")
                step += 1
                with open(f"new-{node.rank}", "w") as file:
                    file.write(str(step))
                os.replace(f"new-{node.rank}", f"step-{os.getpid()}")
                go_on = np.array([os.path.exists("end")], np.int64)
                await node.world.all_reduce(go_on, op="max")
                if go_on[0]:
                    break
                await asyncio.sleep(0.02)

    asyncio.run(main())
"""

ELASTIC = """
    import os, sys, time
    from pathlib import Path
    import asyncpar as ap
    from tests.elasticity.training import train

    def on_step(place, step):
        if place == "computed":
            Path(f"new-{os.getpid()}").write_text(str(step.number))
            os.replace(f"new-{os.getpid()}", f"step-{os.getpid()}")
            if not os.path.exists("end"):
                time.sleep(0.02)

    ap.run(train(None, until=int(sys.argv[1]), on_step=on_step, pause=0.0))
"""


class Flooded:
    """Runs commands in ``folder`` with few descriptors each, and knows what they listen on; none outlives it."""

    def __init__(self, folder: Path, *, descriptors: int) -> None:
        self.folder = folder
        self._descriptors = descriptors
        self._started: list[subprocess.Popen[bytes]] = []

    def write(self, program: str) -> str:
        """Write the program of the ranks."""
        (self.folder / "job.py").write_text(textwrap.dedent(program))
        return "job.py"

    def start(self, *arguments: str, log: str = "log") -> subprocess.Popen[bytes]:
        """Start ``asyncpar`` with ``arguments``."""
        limited = [sys.executable, "-c", _LIMITED, str(self._descriptors), sys.executable, "-m", "asyncpar"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_"))}
        (self.folder / "tmp").mkdir(exist_ok=True)
        with open(self.folder / log, "ab") as output:
            process = subprocess.Popen(
                [*limited, *arguments],
                cwd=self.folder,
                env=clean | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder / "tmp")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._started.append(process)
        return process

    def steps(self) -> dict[str, int]:
        """Return the last step of each rank that was ever there."""
        return {path.name: int(path.read_text() or 0) for path in self.folder.glob("step-*")}

    def said(self, log: str = "log") -> str:
        return (self.folder / log).read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return everything that runs."""
        alive = []
        for process in self._started:
            if process.poll() is None:
                leader = psutil.Process(process.pid)
                alive += [leader, *leader.children(recursive=True)]
        return alive

    def listening(self) -> dict[Address, int]:
        """Return all addresses on which a process of ours listens, and its number."""
        named = _unix_listeners()
        found: dict[Address, int] = {}
        for process in self.processes():
            for place in process.net_connections("tcp"):
                if place.status == psutil.CONN_LISTEN:
                    found[place.laddr.ip, place.laddr.port] = process.pid
            for inode in _socket_inodes(process.pid):
                if inode in named:
                    found[named[inode]] = process.pid
        return found

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self._started:
            started.wait()


_LIMITED = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


def _unix_listeners() -> dict[int, str]:
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split()
        if int(flags, 16) & _LISTENS and name:
            found[int(inode)] = name[0]
    return found


def _socket_inodes(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])


class Crowd:
    """A thread that keeps ``count`` idle connections to each of ``addresses`` open, and comes back when turned away."""

    def __init__(self, addresses: Sequence[Address], count: int) -> None:
        self._addresses = addresses
        self._count = count
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.knocks = 0

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        held: dict[Address, list[socket.socket]] = {address: [] for address in self._addresses}
        while not self._ends.is_set():
            for address, sockets in held.items():
                gone = [sock for sock in sockets if _is_gone(sock)]
                for sock in gone:
                    sockets.remove(sock)
                    sock.close()
                for _ in range(min(64, self._count - len(sockets))):
                    sockets.append(_knock(address))
                    self.knocks += 1
            self._ends.wait(REST)
        for sockets in held.values():
            for sock in sockets:
                sock.close()


def _knock(address: Address) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        place: bytes | str | tuple[str, int] = b"\0" + address[1:].encode() if address.startswith("@") else address
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        place = address
    sock.setblocking(False)
    sock.connect_ex(place)
    return sock


def _is_gone(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError as error:
        return isinstance(error, ConnectionError) or sock.family == socket.AF_UNIX
    return True


def eventually(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until ``is_so``."""
    deadline = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Let this process, which floods, have as many descriptors as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def terminate(process: subprocess.Popen[bytes]) -> int:
    """Ask a process to end, and return its exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(LIMIT)
