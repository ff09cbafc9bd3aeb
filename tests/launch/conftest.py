"""Start real launchers, and never leave one behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.program_host import ProgramHost
from tests.soak import is_soak

_MISSING = re.compile(r"cannot be|does not exist|no such|is not a")

_PROGRAM = Path(__file__).with_name("launch_program.py")

_GROUPS = Path("/sys/fs/cgroup/memory")

LIMIT = 50.0
"""Seconds that anything may take here, far more than it needs."""


class Launcher:
    """Runs ``asyncpar launch`` in ``directory``; ranks that want to be found write their pid into ``pids/``."""

    def __init__(self, directory: Path, host: ProgramHost | None = None) -> None:
        """``host`` runs what ``run`` starts; None: each launcher has a process of its own."""
        self.directory = directory
        self._host = host
        self.pids_directory = directory / "pids"
        self.pids_directory.mkdir()
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, *, name: str = "job.py") -> str:
        """Write a rank's program; ``register()`` in it makes a process known to ``ranks_alive``."""
        head = (
            "import os, sys, time, json, signal, subprocess\n"
            "rank = int(os.environ['RANK'])\n"
            "def register(pid=None):\n"
            f"    os.close(os.open(f'{self.pids_directory}/{{pid or os.getpid()}}', os.O_CREAT))\n"
            "def report(**record):\n"
            "    os.write(int(os.environ['ASYNCPAR_REPORT_FD']), json.dumps(record).encode() + b'\\n')\n"
            "def park():\n"
            "    signal.pause()\n"
        )
        path = self.directory / name
        path.write_text(head + textwrap.dedent(text))
        return str(path)

    def start(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        output: int = subprocess.PIPE,
        program: tuple[str, ...] = ("-m", "asyncpar"),
    ) -> subprocess.Popen[str]:
        """Start ``asyncpar launch``; its stdout and stderr are ``output``, a pipe each by default.

        ``program`` are the arguments of Python that run the command.
        """
        process = subprocess.Popen(
            [*prefix, sys.executable, *program, "launch", *arguments],
            cwd=self.directory,
            env=self._environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            errors="replace",
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``asyncpar launch`` to its end; its own process is one that has imported what it needs."""
        return self.command("launch", *arguments, env=env)

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command ``asyncpar`` to its end, as ``run`` does."""
        environment = self._environment(env)
        if self._host is None or is_soak():
            done = subprocess.run(
                [sys.executable, "-m", "asyncpar", *words],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT,
                check=False,
            )
        else:
            done = self._host.run(_PROGRAM, *words, home=self.directory, environment=environment)
        self._check_paths(done.stderr)
        return done

    def look(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command that looks at jobs that were started here without XDG_RUNTIME_DIR."""
        return self.command(*words, env={"XDG_RUNTIME_DIR": ""})

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_"))}
        return clean | {"TMPDIR": str(self.temporary)} | dict(more or {})

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait for a started launcher."""
        stdout, stderr = process.communicate(timeout=LIMIT)
        if isinstance(stderr, str):
            self._check_paths(stderr)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def _check_paths(self, said: str) -> None:
        """Check that the files that the launcher names, in lines of its own, are there, or said to be missing."""
        for line in said.splitlines():
            if line.startswith("[") or line.lstrip().startswith("File ") or _MISSING.search(line):
                continue  # output of a rank, or a place in a program
            named = re.findall(rf"{re.escape(str(self.directory))}/[\w./+-]*\w", line)
            assert all(Path(path).exists() for path in named), line

    def registered(self) -> list[int]:
        """Return the pids of all processes that registered."""
        return [int(name) for name in os.listdir(self.pids_directory)]

    def ranks_alive(self) -> list[int]:
        """Return those of ``registered`` that still run."""
        return [pid for pid in self.registered() if _is_running(pid)]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            process.wait()
        left = self.ranks_alive()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "ranks outlived their launcher"
        _eventually(lambda: not self._traces())

    def _traces(self) -> list[str]:
        """Return what must not be there once all launchers are gone: processes, and directories with secrets."""
        directory = str(self.directory)
        processes = [str(process) for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == directory]
        shared = f"asyncpar-{os.geteuid()}"
        return processes + [name for name in os.listdir(self.temporary) if name != shared]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.01)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for another process: poll a condition until it holds."""
    return _eventually


@pytest.fixture(scope="session")
def launch_host() -> Iterator[ProgramHost]:
    """A process that has imported the launcher and runs one command after another."""
    host = ProgramHost()
    yield host
    host.close()


@pytest.fixture
def launcher(tmp_path: Path, launch_host: ProgramHost) -> Iterator[Launcher]:
    """A launcher with a directory of its own; whatever it started is gone afterwards."""
    instance = Launcher(tmp_path, launch_host)
    yield instance
    instance.close()


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a wire: 10.213.7.1 and 10.213.7.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    left, right = f"apl{os.getpid()}", f"apr{os.getpid()}"
    commands = [
        f"ip netns add {left}",
        f"ip netns add {right}",
        f"ip link add {left} netns {left} type veth peer name {right} netns {right}",
        f"ip -n {left} addr add 10.213.7.1/24 dev {left}",
        f"ip -n {right} addr add 10.213.7.2/24 dev {right}",
        f"ip -n {left} link set {left} up",
        f"ip -n {right} link set {right} up",
        f"ip -n {left} link set lo up",
        f"ip -n {right} link set lo up",
    ]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        yield left, right
    finally:
        for name in (left, right):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 600 MiB."""
    line = next((line for line in Path("/proc/self/cgroup").read_text("ascii").splitlines() if ":memory:" in line), "")
    place = _GROUPS / line.rpartition(":")[2].strip("/") / f"asyncpar-test-{os.getpid()}"
    if os.geteuid() != 0 or not line or shutil.which("sh") is None:
        pytest.skip("control groups of memory need root, and version 1 of them")
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    (place / "memory.limit_in_bytes").write_text("600M")
    yield place
    place.rmdir()
