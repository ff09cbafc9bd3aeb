"""A matrix of endings: ranks x where they are x the signal x what started them.

Each case says with which code it ends, in which words, and that nothing is left: no process, no file.  It says when,
too: not before the signal or the note that lets it end, before the minute is over that ranks have to end in (an engine
gives them less), and not while a rank is stopped.  By default a sample runs, in which every starter meets two signals
and every place comes; ``--soak`` runs the whole, and stays for a minute where no signal comes.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch import ending_program
from tests.launch.agents.agent_groups import AgentGroup
from tests.leftovers import MARK, find_marked
from tests.soak import chosen

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROGRAM = Path(ending_program.__file__)
PATIENCE = 90.0
HELD_SECONDS = chosen(0.0, soak=60.0)

STARTERS = ("python", "launch", "agents", "engine")
RANKS = (1, 2, 4)
PLACES = ("forming", "collective", "python", "C call", "C call with the lock", "thread", "ending")
SIGNALS = ("SIGINT", "SIGTERM", "SIGSTOP", "nothing")

DRIVER = """
    import sys
    import asyncpar as ap
    from tests.launch.ending_program import stay

    if __name__ == "__main__":
        print(ap.cluster.run(stay, sys.argv[2], ranks=int(sys.argv[1])))
"""


def is_possible(starter: str, ranks: int, place: str, _number: str) -> bool:
    """Whether there is such a case: a program alone is one rank, and one rank waits for no other while it forms."""
    return (ranks == 1 or starter != "python") and (ranks > 1 or place != "forming")


FEW = [
    ("python", 1, "collective", "SIGINT"),
    ("python", 1, "C call with the lock", "SIGTERM"),
    ("launch", 2, "forming", "SIGINT"),
    ("launch", 2, "collective", "SIGTERM"),
    ("launch", 1, "C call", "SIGSTOP"),
    ("python", 1, "python", "nothing"),
    ("engine", 2, "ending", "SIGTERM"),
    ("engine", 1, "python", "SIGSTOP"),
    ("agents", 1, "thread", "SIGINT"),
    ("agents", 1, "C call with the lock", "SIGTERM"),
]
ALL = [case for case in itertools.product(STARTERS, RANKS, PLACES, SIGNALS) if is_possible(*case)]
CASES = chosen(FEW, soak=ALL)
assert set(FEW) <= set(ALL)
KILLED = "after they were asked to end; killing them"
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGSTOP": 0, "nothing": 0}
"""As shells have them, whatever started the ranks and wherever they are."""


def words_of(starter: str, number: str) -> tuple[str, ...]:
    """The words that report the end of a job."""
    if number not in ("SIGINT", "SIGTERM"):
        return ()
    return {"launch": (f"ended by {number}",), "agents": (number,)}.get(starter, ())


def has_traceback(starter: str, number: str) -> bool:
    """Whether Python shows where Ctrl-C met it: only in a process whose terminal it was, and that is the program's."""
    return number == "SIGINT" and starter in ("python", "engine")


def wait_for(is_so: Callable[[], object], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


class Started(ABC):
    """A job in ``folder``, of ``ranks`` ranks that go to ``place``."""

    def __init__(self, folder: Path, ranks: int, place: str) -> None:
        self.folder = folder
        self.ranks = ranks
        self.token = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_"))}
        mark = {MARK: f"{os.environ.get(MARK, '')}/{self.token}"}
        self.environment = clean | mark | {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(self.temporary)}
        self.process = self.start(place)

    @abstractmethod
    def start(self, place: str) -> subprocess.Popen[bytes]:
        """Start it, and return the process that gets the signals of the user."""

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "output", "ab") as output:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*put")) or "nothing was said"

    def pids(self) -> list[int]:
        """The processes of the ranks that have arrived."""
        return [int(path.read_text()) for path in self.folder.glob("at-*")]

    def allow(self, name: str) -> None:
        (self.folder / name).touch()

    def finish(self) -> int:
        """Return the code of the end as shells have it."""
        wait_for(lambda: self.process.poll() is not None, lambda: f"no end: {self.output()}")
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def left(self) -> list[str]:
        """What is there although the job has ended: processes, and files for a while."""
        shared = f"asyncpar-{os.geteuid()}"
        processes = [str(process) for process in find_marked(self.token)]
        return processes + [path.name for path in self.temporary.iterdir() if path.name != shared]

    def close(self) -> None:
        for process in find_marked(self.token):
            process.kill()
        self.process.wait()


class Python(Started):
    def start(self, place: str) -> subprocess.Popen[bytes]:
        return self.run(str(PROGRAM), place)


class Launch(Started):
    def start(self, place: str) -> subprocess.Popen[bytes]:
        options = ("--nproc-per-node", str(self.ranks), "--grace-period", "60")
        return self.run("-m", "asyncpar", "launch", *options, str(PROGRAM), place)


class Engine(Started):
    def start(self, place: str) -> subprocess.Popen[bytes]:
        (self.folder / "driver.py").write_text(textwrap.dedent(DRIVER))
        return self.run("driver.py", str(self.ranks), place)


class Agents(Started):
    """Two hosts where there are several ranks, else one; its agents outlive the job."""

    def start(self, place: str) -> subprocess.Popen[bytes]:
        self.group = AgentGroup(self.folder)
        hosts = ("one", "two") if self.ranks > 1 else ("one",)
        self.group.start_all(*hosts)
        count = len(hosts)
        common = ("--rdzv-endpoint", self.group.living_address, *self.group.proof("one"), "--grace-period", "60")
        sizes = ("--nnodes", f"{count}:{count}", "--nproc-per-node", str(self.ranks // count))
        return self.run("-m", "asyncpar", "launch", *common, *sizes, str(PROGRAM), place)

    def left(self) -> list[str]:
        processes = [str(process) for process in find_marked(self.token)]
        return processes + [f"rank {pid}" for name in self.group.agents for pid in self.group.pids(name)]

    def close(self) -> None:
        super().close()
        self.group.close()


KINDS: dict[str, type[Started]] = {"python": Python, "launch": Launch, "agents": Agents, "engine": Engine}


@pytest.mark.parametrize(("starter", "ranks", "place", "number"), CASES)
def test_what_ends_says_so_and_leaves_nothing(
    starter: str, ranks: int, place: str, number: str, tmp_path: Path
) -> None:
    job = KINDS[starter](tmp_path, ranks, place)
    try:
        wait_for(lambda: len(job.pids()) == ranks, lambda: f"ranks did not arrive: {job.output()}")
        if number in ("SIGINT", "SIGTERM"):
            job.process.send_signal(signal.Signals[number])
            job.allow("go")
        elif number == "SIGSTOP":
            stopped = psutil.Process(job.pids()[0])
            stopped.suspend()
            wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, lambda: "it is not stopped")
            job.allow("go")
            job.allow("end")
            assert job.process.poll() is None, job.output()
            stopped.resume()
        else:
            time.sleep(HELD_SECONDS)
            assert job.process.poll() is None, job.output()
            job.allow("go")
            assert job.process.poll() is None, job.output()
            job.allow("end")

        code = job.finish()
        assert KILLED not in job.output() or starter == "engine", "it used up its minute to end"
        assert code == CODES[number], job.output()
        for words in words_of(starter, number):
            assert words in job.output()
        assert ("Traceback" in job.output()) == has_traceback(starter, number), job.output()
        wait_for(lambda: not job.left(), lambda: f"{job.left()} are left: {job.output()}")
    finally:
        job.close()
