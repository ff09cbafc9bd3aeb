"""Real agents on loopback, each of which pretends to be a host of its own; none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from asyncpar.errors import AsyncparError
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.views import GroupView, HostView
from asyncpar.net.membership.credentials import create_secret, load_certificates, read_secret
from asyncpar.net.security.identity import agent_role
from asyncpar.net.transport.rpc import Credentials
from tests.net.security.parties import make_homes
from tests.ports import free_port

LIMIT = 90.0

TRAINING = """
    import os, sys, time
    from pathlib import Path
    import asyncpar as ap
    from tests.elasticity.training import encode, train

    def on_step(place, step):
        if place == "computed":
            Path(f"new-{os.getpid()}").write_text(f"{step.number} {job_size(step)}")
            os.replace(f"new-{os.getpid()}", f"step-{os.getpid()}")
            if not step.is_replay and not os.path.exists("hurry"):
                time.sleep(0.1 if step.number < int(sys.argv[1]) / 2 else 0.5)

    def job_size(step):
        return step.world.size if not step.is_replay else 0

    result = ap.run(train(None, until=int(sys.argv[1]), on_step=on_step, pause=0.0))
    Path(f"result-{os.getpid()}").write_text(encode(result))
"""

PLAIN = """
    import os, signal, sys, time
    place = "-".join(os.environ[name] for name in ("RANK", "WORLD_SIZE"))
    open(f"world-{os.environ['ASYNCPAR_GENERATION']}-{place}", "w").close()
    while not os.path.exists("end"):
        time.sleep(0.02)
"""


def eventually(is_so: Callable[[], bool], what: str = "it") -> None:
    deadline = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < deadline, f"{what} never became so"
        time.sleep(0.1)


class AgentGroup:
    """Starts agents and launchers in ``folder``, which end with it.

    ``certified`` are the hosts that have certificates, with two ranks each; without, agents have a secret.
    """

    def __init__(self, folder: Path, *, certified: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        self.secret = folder / "secret"
        self.homes: dict[str, Path] = {}
        if certified:
            homes = make_homes(folder / "certs", hosts=len(certified))
            self.homes = dict(zip(certified, homes, strict=True))
            self.secret = homes[0] / "secret"
        else:
            create_secret(self.secret)
        self._started: list[subprocess.Popen[bytes]] = []

    def command(
        self,
        *arguments: str,
        log: str | None = None,
        prefix: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "asyncpar"),
    ) -> subprocess.Popen[bytes]:
        """Start ``asyncpar`` with more variables in its ``environment``; its output is in the file ``log``.

        ``program`` are the arguments of Python that run the command.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_"))}
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        with open(self.folder / (log or "output"), "ab") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, *program, *arguments],
                cwd=self.folder,
                env=clean | {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(temporary)} | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._started.append(process)
        return process

    def start(
        self, name: str, *more: str, secret: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the agent of a host; the first founds the group.  ``more`` are options."""
        alive = [self.addresses[other] for other, process in self.agents.items() if process.poll() is None]
        self.addresses[name] = f"{self.host_of(name)}:{free_port()}"
        join = ["--join", ",".join(alive)] if alive else []
        proof = self.proof(name) if secret is None else ("--secret-file", str(secret))
        arguments = ["--name", name, "--listen", self.addresses[name], *proof]
        self.agents[name] = self.command(
            "agent", *arguments, *join, *more, log=f"{name}.log", prefix=self.within(name), environment=environment
        )
        return self.agents[name]

    def proof(self, name: str) -> tuple[str, ...]:
        """The options by which commands on a host prove themselves."""
        if name in self.homes:
            return ("--certs", str(self.homes[name]))
        return ("--secret-file", str(self.secret))

    def host_of(self, name: str) -> str:
        """The address of a host."""
        return "127.0.0.1"

    def within(self, name: str) -> tuple[str, ...]:
        """The beginning of a command that runs on a host."""
        return ()

    def start_all(self, *names: str) -> None:
        """Start agents, and return when all are in the group."""
        for number, name in enumerate(names):
            self.start(name)
            if number == 0:
                eventually(lambda name=name: self.host(name) is not None, name)  # type: ignore[misc]
        eventually(lambda: all(self.host(name) is not None for name in names), "the group")

    def launch(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a launcher that hands a job to the agents."""
        common = ("--rdzv-endpoint", self.living_address, *self.proof(next(iter(self.agents))), "--grace-period", "5")
        return self.command("launch", *common, *options, self.script(script), *arguments, log="launch.log")

    def launch_alone(self, *program: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a launcher that is the agent of the only host, ``one``: its ranks outlive worlds."""
        self.addresses["one"] = f"127.0.0.1:{free_port()}"
        place = ("--host-name", "one", "--rdzv-endpoint", self.addresses["one"], *self.proof("one"))
        common = ("--elastic", "ranks", "--grace-period", "5", *place)
        self.agents["one"] = self.command("launch", *common, *options, *program, log="one.log")
        return self.agents["one"]

    def script(self, text: str) -> str:
        path = self.folder / "job.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    def free_port(self) -> int:
        return free_port()

    @property
    def living_address(self) -> str:
        """The address of an agent that runs."""
        running = [name for name, process in self.agents.items() if process.poll() is None]
        running = [name for name in running if psutil.Process(self.agents[name].pid).status() != psutil.STATUS_STOPPED]
        assert running, "every agent has ended:\n" + "\n".join(self.output(name) for name in self.agents)
        return self.addresses[running[-1]]

    def view(self) -> GroupView | None:
        """Return what an agent that runs tells; None if none answers."""
        home = next(iter(self.homes.values()), None)
        certificates = None if home is None else load_certificates(home, agent_role(0))
        client = ControlClient(self.living_address, Credentials(read_secret(self.secret), certificates), seconds=2.0)
        try:
            return asyncio.run(client.status())
        except AsyncparError:
            return None

    def host(self, name: str) -> HostView | None:
        view = self.view()
        return None if view is None else next((host for host in view.hosts if host.name == name), None)

    def leader(self) -> str:
        eventually(lambda: (view := self.view()) is not None and view.leader is not None, "a leader")
        view = self.view()
        assert view is not None
        assert view.leader is not None
        return view.leader

    def pids(self, name: str) -> list[int]:
        host = self.host(name)
        return [] if host is None else [rank.pid for rank in host.ranks if rank.pid is not None]

    def trains(self, size: int, *, beyond: int = 0) -> bool:
        """Do ``size`` ranks of one world train, each at more than ``beyond`` steps?"""
        view = self.view()
        if view is None or view.world_size != size:
            return False
        pids = [rank.pid for host in view.hosts for rank in host.ranks if rank.rank is not None]
        steps = [(self.folder / f"step-{pid}") for pid in pids]
        if len(pids) != size or not all(step.exists() for step in steps):
            return False
        found = [step.read_text().split() for step in steps]
        return all(int(number) > beyond and int(seen) == size for number, seen in found)

    def train_on(self, size: int, what: str) -> None:
        """Return when ``size`` ranks of one world have trained beyond the last step that any rank has noted by now."""
        reached = self.step()
        eventually(lambda: self.trains(size, beyond=reached), what)

    def step(self) -> int:
        """The last step that any rank has noted."""
        return max((int(path.read_text().split()[0]) for path in self.folder.glob("step-*")), default=0)

    def output(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def results(self) -> set[str]:
        return {path.read_text() for path in self.folder.glob("result-*")}

    def close(self) -> None:
        """End all that runs, and print what it has printed: it is shown if the test fails."""
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log.name}:\n{log.read_text()[-4000:]}")
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        eventually(lambda: not self._left(), "the end of everything")

    def _left(self) -> list[str]:
        folder = str(self.folder)
        return [str(process) for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == folder]
