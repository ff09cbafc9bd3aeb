"""Faults of hosts for ``chaos.py --agents N``: agents are killed (the leader's, too), stopped, drained and replaced."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncpar.errors import AsyncparError
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.views import GroupView
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.transport.rpc import Credentials

HOST_KINDS = ("leader", "kill", "stop", "drain")
LONGEST = 60.0
WOKEN_AFTER = 4.0


@dataclass
class HostFault:
    """What was done to the agent of a host, and what it cost."""

    kind: str
    host: str
    time: float
    generation: int
    recovered: float | None = None
    """Seconds until the next commit in a later world."""
    whole: float | None = None
    """Seconds until all hosts are in the world again."""


class Agents:
    """The agents of pretended hosts on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.addresses: dict[str, str] = {}
        self._credentials = Credentials(create_secret(folder / "secret"))

    async def asyncpar(self, *arguments: str, log: str) -> asyncio.subprocess.Process:
        """Start a command of asyncpar; its output is in the file ``log``."""
        with (self.folder / log).open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "asyncpar", *arguments, stdout=output, stderr=output, cwd=self.folder
            )

    async def start(self, name: str) -> None:
        """Start the agent of a host; the first founds the group."""
        alive = [self.addresses[other] for other, process in self.processes.items() if process.returncode is None]
        join = ["--join", ",".join(alive)] if alive else []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.addresses[name] = f"127.0.0.1:{probe.getsockname()[1]}"
        secret = ("--secret-file", str(self.folder / "secret"))
        listen = ("--listen", self.addresses[name])
        self.processes[name] = await self.asyncpar("agent", "--name", name, *listen, *join, *secret, log=f"{name}.log")

    async def view(self, *, without: str = "") -> GroupView | None:
        """Return what an agent other than ``without`` tells."""
        for name, process in self.processes.items():
            if process.returncode is None and name != without:
                try:
                    return await ControlClient(self.addresses[name], self._credentials, seconds=2.0).status()
                except AsyncparError:
                    continue
        return None

    def any_address(self) -> str:
        """The address of an agent that runs."""
        return next(self.addresses[name] for name, process in self.processes.items() if process.returncode is None)

    async def close(self) -> None:
        """End all."""
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()


class HostChaos:
    """One run under faults of hosts."""

    def __init__(self, options: argparse.Namespace, folder: Path, logs: Any) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._agents = Agents(folder)
        self._logs = logs
        self._folder = folder
        self.faults: list[HostFault] = []

    async def run(self, arguments: Sequence[str], steps: int) -> int:
        """Run the job to its end, and return its exit code.  ``arguments`` are those of the program."""
        agents, options = self._agents, self._options
        names = [f"host{number}" for number in range(options.agents)]
        try:
            for name in names:
                await agents.start(name)
                await self._until(lambda: self._sees(name), f"the agent of {name}")  # noqa: B023
            job = ("--nnodes", f"1:{len(names)}", "--elastic", "ranks", "--max-restarts", "100", "--last-call", "30")
            where = ("--rdzv-endpoint", agents.any_address(), "--secret-file", str(self._folder / "secret"))
            launcher = await agents.asyncpar("launch", *job, *where, *arguments, log="launch.log")
            await self._until(lambda: self._done(options.every), "the first steps")
            for number in range(options.faults):
                await self._until(lambda: self._done((number + 1) * options.every), f"fault {number}")  # noqa: B023
                await self._fault(number, names)
            await self._until(lambda: self._done(steps), "the end")
            return await asyncio.wait_for(launcher.wait(), LONGEST)
        finally:
            await agents.close()
            self._logs.refresh()

    async def _sees(self, name: str) -> bool:
        view = await self._agents.view()
        return view is not None and name in [host.name for host in view.hosts]

    async def _done(self, steps: int) -> bool:
        self._logs.refresh()
        return bool(self._logs.position >= steps)

    async def _until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + LONGEST
        while not await condition():
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"chaos: {what} did not come within {LONGEST:g} s; is the job over? then give a larger --every"
                )
            await asyncio.sleep(0.02)

    async def _fault(self, number: int, names: Sequence[str]) -> None:
        agents = self._agents
        view = await agents.view()
        assert view is not None, "a group has an agent"
        kind = self._random.choice(self._options.kinds.split(","))
        host = names[number % len(names)]  # each in its turn
        if kind == "leader":
            host = view.leader or host
        fault = HostFault(kind, host, time.monotonic(), -1 if view.generation is None else view.generation)
        self.faults.append(fault)
        process = agents.processes[host]
        match kind:
            case "stop":
                process.send_signal(signal.SIGSTOP)
            case "drain":
                secret = ("--secret-file", str(self._folder / "secret"))
                drained = await agents.asyncpar(
                    "drain", host, "--agent", agents.addresses[host], *secret, log="drain.log"
                )
                await asyncio.wait_for(drained.wait(), LONGEST)
            case _:
                process.kill()
        await self._until(lambda: self._recovered(fault), f"the recovery of {kind} {host}")
        if kind == "stop":
            await asyncio.sleep(max(0.0, fault.time + WOKEN_AFTER - time.monotonic()))
            process.send_signal(signal.SIGCONT)
        else:
            await asyncio.wait_for(process.wait(), LONGEST)
            await agents.start(host)
        await self._until(lambda: self._is_whole(len(names)), f"all hosts after {kind} {host}")
        fault.whole = time.monotonic() - fault.time

    async def _recovered(self, fault: HostFault) -> bool:
        self._logs.refresh()
        for commit in self._logs.commits:
            if commit["time"] > fault.time and commit["generation"] > fault.generation:
                fault.recovered = commit["time"] - fault.time
                return True
        return False

    async def _is_whole(self, size: int) -> bool:
        view = await self._agents.view()
        return view is not None and view.world_size == size and all(host.state == "up" for host in view.hosts)


async def measure_hosts(
    options: argparse.Namespace, folder: Path, *, chaos: Any, arguments: Callable[[str], list[str]], steps: int
) -> int:
    """Run with and without faults of hosts, print the table, and return the exit code; ``chaos`` is ``chaos.py``."""
    wanted = await chaos.run_alone(options, folder)
    logs = chaos.Logs(folder)
    run = HostChaos(options, folder, logs)
    code = await run.run(arguments(str(folder / "rank-{pid}.jsonl")), steps)
    verdict = chaos.judge(logs, wanted, {"launch": code}, steps=steps, portions=options.portions)
    gaps = chaos.step_seconds(logs)
    usual = statistics.median(gaps) if gaps else 0.0
    seconds = {
        kind: [fault.recovered - usual for fault in run.faults if fault.kind == kind and fault.recovered is not None]
        for kind in HOST_KINDS
    }
    replaced = {fault.host for fault in run.faults if fault.kind != "stop"}
    is_equal = not verdict.different and not verdict.samples
    show, quantile = chaos.show, chaos.quantile
    rows = [
        ("G1", "parameters, losses, sample log", "bit-equal" if is_equal else "DIFFERENT", "bit-equal"),
        ("G2", "committed steps lost or repeated", str(len(verdict.repeated)), "0"),
        ("G7", "leader's host killed to the next commit, p50", show(quantile(seconds["leader"], 0.5)), "2 s"),
        ("G7", "the same, largest", show(max(seconds["leader"], default=None)), "2 s"),
        ("", "another host killed, largest", show(max(seconds["kill"], default=None)), "-"),
        ("G4", "agent stopped to the next commit, largest", show(max(seconds["stop"], default=None)), "5 s"),
        ("G16", "host drained, largest", show(max(seconds["drain"], default=None)), "-"),
        ("G8", "hosts replaced", f"{len(replaced)} of {options.agents}", "all"),
        ("", "a step, median", show(usual, "ms"), "-"),
    ]
    for number, what, measured, goal in rows:
        print(f"{number:4} {what:46} {measured:>12}   goal {goal}")
    troubles = [*verdict.different, *verdict.samples, *verdict.repeated, *verdict.failed]
    for text in troubles[:20]:
        print(f"  {text}")
    figures = {"rows": rows, "faults": [asdict(fault) for fault in run.faults], "settings": vars(options)}
    print(json.dumps(figures, default=str), flush=True)
    return 1 if troubles else 0
