"""Faults of hosts for ``chaos.py --agents N``: agents are killed (the leader's, too), stopped, drained and replaced.

With ``--namespaces`` each host is a network namespace: then hosts are cut off, too, from both sides or from one, ranks
are killed and stopped, and another host comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncpar.errors import AsyncparError
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.requests import DrainRequest
from asyncpar.launch.agents.views import GroupView, RankView
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.transport.rpc import Credentials
from scripts.bench.chaos.chaos_wire import Samples, line_share, watched
from scripts.bench.namespaces import Hosts, NoNamespacesError, hosts

HOST_KINDS = ("leader", "kill", "stop", "drain")
CUTS = ("cut", "mute", "deaf")
"""A host's link is down; what it sends gets lost; what others send to it does."""

RANK_SIGNALS = {"rank-kill": signal.SIGKILL, "rank-stop": signal.SIGSTOP, "rank-term": signal.SIGTERM}
NETWORK_KINDS = (*HOST_KINDS, *RANK_SIGNALS, "join", *CUTS)
GUEST = "guest"
"""The host that comes with ``join``, and leaves before the next one."""
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
    """Seconds until the next commit in a later world; of a join, in one that it is in."""
    whole: float | None = None
    """Seconds until all hosts are in the world again."""


class Agents:
    """The agents of pretended hosts: on loopback, or each in its namespace."""

    def __init__(self, folder: Path, network: Hosts | None = None) -> None:
        self.folder = folder
        self.network = network
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.addresses: dict[str, str] = {}
        self.silent: set[str] = set()
        """Hosts whose agents do not answer now: stopped, or cut off."""
        self._started: list[asyncio.subprocess.Process] = []
        self.credentials = Credentials(create_secret(folder / "secret"))

    async def asyncpar(self, *arguments: str, log: str, on: str | None = None) -> asyncio.subprocess.Process:
        """Start a command of asyncpar on a host; its output is in the file ``log``."""
        command = [sys.executable, "-m", "asyncpar", *arguments]
        if self.network is not None and on is not None:
            command = self.network.ends[on].enter(command)
        with (self.folder / log).open("ab") as output:
            process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, cwd=self.folder)
        self._started.append(process)
        return process

    async def start(self, name: str) -> None:
        """Start the agent of a host; the first founds the group."""
        alive = [self.addresses[other] for other, process in self.processes.items() if process.returncode is None]
        join = ["--join", ",".join(alive)] if alive else []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            host = "127.0.0.1" if self.network is None else self.network.ends[name].address
            self.addresses[name] = f"{host}:{probe.getsockname()[1]}"
        options = ("--name", name, "--listen", self.addresses[name], *self.proof)
        self.processes[name] = await self.asyncpar("agent", *options, *join, log=f"{name}.log", on=name)

    async def launch_alone(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        """Start a launcher that is the agent of its only host."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.addresses[name] = f"127.0.0.1:{probe.getsockname()[1]}"
        place = ("--host-name", name, "--rdzv-endpoint", self.addresses[name], *self.proof)
        launch = ("launch", "--elastic", "ranks", *place, *arguments)
        self.processes[name] = await self.asyncpar(*launch, log=f"{name}.log")
        return self.processes[name]

    @property
    def proof(self) -> tuple[str, str]:
        """The options by which commands prove themselves."""
        return ("--secret-file", str(self.folder / "secret"))

    @property
    def running(self) -> list[str]:
        """The hosts whose agents have not ended."""
        return [name for name, process in self.processes.items() if process.returncode is None]

    async def drain(self, name: str) -> None:
        """Return when the ranks of a host, and its agent, have left."""
        await ControlClient(self.addresses[name], self.credentials).drain(DrainRequest(host=name, grace=LONGEST))
        await asyncio.wait_for(self.processes[name].wait(), LONGEST)

    async def view(self) -> GroupView | None:
        """Return what an agent tells that answers."""
        for name in self.running:
            if name not in self.silent:
                try:
                    return await ControlClient(self.addresses[name], self.credentials, seconds=2.0).status()
                except AsyncparError:
                    continue
        return None

    def any_address(self) -> str:
        """The address of an agent that runs."""
        return self.addresses[self.running[0]]

    async def close(self) -> None:
        """End all."""
        for process in self._started:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()


class HostChaos:
    """One run under faults of hosts."""

    def __init__(self, options: argparse.Namespace, folder: Path, logs: Any, network: Hosts | None = None) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._agents = Agents(folder, network)
        self.logs = logs
        self._deck: list[str] = []
        self.drained: set[int] = set()
        """The generations that a drain has ended."""
        self.faults: list[HostFault] = []
        self.copies: list[Samples] = []
        """What the wire of each newcomer has carried."""

    async def run(self, arguments: Sequence[str], steps: int) -> int:
        """Run the job to its end, and return its exit code.  ``arguments`` are those of the program."""
        agents, options = self._agents, self._options
        names = host_names(options)
        try:
            for name in names:
                await agents.start(name)
                await self._until(lambda: self._sees(name), f"the agent of {name}")  # noqa: B023
            most, last_call = (len(names), 30) if agents.network is None else (len(names) + 1, 5)
            job = (
                "--nnodes",
                f"1:{most}",
                "--elastic",
                "ranks",
                "--max-restarts",
                "100",
                "--last-call",
                str(last_call),
            )
            where = ("--rdzv-endpoint", agents.any_address(), *agents.proof)
            launcher = await agents.asyncpar("launch", *job, *where, *arguments, log="launch.log")
            await self._until(lambda: self._done(options.every), "the first steps")
            for number in range(options.faults):
                await self._until(lambda: self._done((number + 1) * options.every), f"fault {number}")  # noqa: B023
                await self._fault(self._draw_kind(), names[number % len(names)])  # each in its turn
            await self._until(lambda: self._done(steps), "the end")
            return await asyncio.wait_for(launcher.wait(), LONGEST)
        finally:
            await agents.close()
            self.logs.refresh()

    async def _sees(self, name: str) -> bool:
        view = await self._agents.view()
        return view is not None and name in [host.name for host in view.hosts]

    async def _done(self, steps: int) -> bool:
        self.logs.refresh()
        return bool(self.logs.position >= steps)

    async def _until(self, condition: Callable[[], Any], what: str) -> None:
        deadline, before = time.monotonic() + LONGEST, self.logs.position
        while not await condition():
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"chaos: {what} did not come, and nothing was committed for {LONGEST:g} s; is the job over? then "
                    "give a larger --every"
                )
            await asyncio.sleep(0.02)
            self.logs.refresh()
            if self.logs.position != before:
                deadline, before = time.monotonic() + LONGEST, self.logs.position

    def _draw_kind(self) -> str:
        """Draw from all kinds, in an order that the seed says, until each has come: then anew."""
        if not self._deck:
            self._deck = self._options.kinds.split(",")
            self._random.shuffle(self._deck)
        return self._deck.pop()

    async def _fault(self, kind: str, host: str) -> None:
        if kind == "join":
            host = await self._bid_farewell()
        await self._until(self._is_whole, f"all hosts before {kind} {host}")
        view = await self._agents.view()
        assert view is not None, "it was whole"
        if kind == "leader":
            host = view.leader or host
        fault = HostFault(kind, host, time.monotonic(), -1 if view.generation is None else view.generation)
        self.faults.append(fault)
        if kind in ("drain", "rank-term"):
            self.drained.add(fault.generation)
        pids = [rank.pid for one in view.hosts if one.name == host for rank in one.ranks if rank.pid is not None]
        await self._strike(kind, host, pids)
        async with self._watch_wire(kind, host):
            await self._until(lambda: self._recovered(fault), f"the recovery of {kind} {host}")
        await self._undo(fault)
        await self._until(self._is_whole, f"all hosts after {kind} {host}")
        self._agents.silent.discard(host)  # not before: it does not know yet what the others have done meanwhile
        fault.whole = time.monotonic() - fault.time

    def _watch_wire(self, kind: str, host: str) -> AbstractAsyncContextManager[None]:
        """Note what a newcomer receives, if wires have a speed."""
        if kind != "join" or self._options.rate is None:
            return nullcontext()
        self.copies.append([])
        return watched(self._agents.processes[host].pid, self.copies[-1])

    async def _bid_farewell(self) -> str:
        """Return who can come: the guest, which leaves first if it is there."""
        if GUEST in self._agents.running:
            await self._until(self._is_whole, "all hosts before the guest leaves")
            view = await self._agents.view()
            assert view is not None, "it was whole"
            if view.generation is not None:
                self.drained.add(view.generation)
            await self._agents.drain(GUEST)
        return GUEST

    async def _strike(self, kind: str, host: str, pids: Sequence[int]) -> None:
        agents, network = self._agents, self._agents.network
        if kind in ("stop", *CUTS):
            agents.silent.add(host)
        match kind:
            case "stop":
                agents.processes[host].send_signal(signal.SIGSTOP)
            case "drain":
                await agents.drain(host)
            case "join":
                await agents.start(host)
            case "rank-kill" | "rank-stop" | "rank-term":
                for pid in pids:
                    os.kill(pid, RANK_SIGNALS[kind])
            case "leader" | "kill":
                agents.processes[host].kill()
            case _:
                assert network is not None, "cuts need namespaces"
                {"cut": network.pull, "mute": network.mute, "deaf": network.deafen}[kind](host)

    async def _undo(self, fault: HostFault) -> None:
        """Wake, reconnect or start again what was struck; ranks are started again by their agent."""
        agents, network, host = self._agents, self._agents.network, fault.host
        if fault.kind in ("stop", *CUTS):
            await asyncio.sleep(max(0.0, fault.time + WOKEN_AFTER - time.monotonic()))
            if network is not None and fault.kind != "stop":
                network.heal(host)
            else:
                agents.processes[host].send_signal(signal.SIGCONT)
        elif fault.kind in HOST_KINDS:
            await asyncio.wait_for(agents.processes[host].wait(), LONGEST)
            await agents.start(host)

    async def _recovered(self, fault: HostFault) -> bool:
        self.logs.refresh()
        first = fault.generation + 1
        if fault.kind == "join":
            worlds = [line["generation"] for _, line in self.logs.of("change") if joins(line["change"], fault.host)]
            first = next((generation for generation in sorted(worlds) if generation >= first), sys.maxsize)
        for commit in self.logs.commits:
            if commit["time"] > fault.time and commit["generation"] >= first:
                fault.recovered = commit["time"] - fault.time
                return True
        return False

    async def _is_whole(self) -> bool:
        view, running = await self._agents.view(), self._agents.running
        if view is None or view.world_size != len(running):
            return False
        return {host.name for host in view.hosts if host.state == "up"} == set(running)


def placed_ranks(view: GroupView) -> list[tuple[str, RankView]]:
    """Return the ranks of the current world that run, in their order, each with its host."""
    found = [(host.name, rank) for host in view.hosts for rank in host.ranks if rank.pid is not None]
    return sorted(((host, rank) for host, rank in found if rank.rank is not None), key=lambda one: one[1].rank or 0)


def joins(change: str, host: str) -> bool:
    """Has a rank of a host joined by a change, as its text says?"""
    joined = next((part for part in change.split("; ") if part.startswith("joined: ")), "joined: ")
    return any(member.partition("/")[0] == host for member in joined.removeprefix("joined: ").split(", "))


def host_names(options: argparse.Namespace) -> list[str]:
    """Return the names of the hosts that are there from the beginning."""
    return [f"host{number}" for number in range(options.agents)]


async def measure_hosts(
    options: argparse.Namespace, folder: Path, *, chaos: Any, arguments: Callable[[str], list[str]], steps: int
) -> int:
    """Run with and without faults of hosts, print the table, and return the exit code; ``chaos`` is ``chaos.py``."""
    wanted = await chaos.run_alone(options, folder)
    logs = chaos.Logs(folder)
    with ExitStack() as stack:
        network = None
        if options.namespaces:
            try:
                network = stack.enter_context(hosts([*host_names(options), GUEST], options.rate))
            except NoNamespacesError as error:
                raise SystemExit(f"chaos: --namespaces: {error}") from error
        run = HostChaos(options, folder, logs, network)
        code = await run.run(arguments(str(folder / "rank-{pid}.jsonl")), steps)
    verdict = chaos.judge(logs, wanted, {"launch": code}, steps=steps, portions=options.portions, drained=run.drained)
    rows = host_rows(options, run, verdict, chaos)
    for number, what, measured, goal in rows:
        print(f"{number:4} {what:46} {measured:>12}   goal {goal}")
    for text in verdict.troubles[:20]:
        print(f"  {text}")
    figures = {"rows": rows, "faults": [asdict(fault) for fault in run.faults], "settings": vars(options)}
    print(json.dumps(figures, default=str), flush=True)
    return 1 if verdict.troubles else 0


def host_rows(options: argparse.Namespace, run: HostChaos, verdict: Any, chaos: Any) -> list[tuple[str, str, str, str]]:
    """Return the rows of measured against goal."""
    show, quantile = chaos.show, chaos.quantile
    gaps = chaos.step_seconds(run.logs)
    usual = statistics.median(gaps) if gaps else 0.0

    def seconds(*kinds: str) -> list[float]:
        found = [fault for fault in run.faults if fault.kind in kinds]
        return [fault.recovered - usual for fault in found if fault.recovered is not None]

    def largest(*kinds: str) -> str:
        return str(show(max(seconds(*kinds), default=None)))

    replaced = {fault.host for fault in run.faults if fault.kind in ("leader", "kill", "drain")}
    rows = [
        ("G1", "parameters, losses, sample log", "bit-equal" if verdict.is_equal else "DIFFERENT", "bit-equal"),
        ("G2", "committed steps lost or repeated", str(len(verdict.repeated)), "0"),
        ("G7", "leader's host killed to the next commit, p50", show(quantile(seconds("leader"), 0.5)), "2 s"),
        ("G7", "the same, largest", largest("leader"), "2 s"),
        ("", "another host killed, largest", largest("kill"), "-"),
        ("G4", "agent stopped to the next commit, largest", largest("stop"), "5 s"),
        *chaos.drain_rows(verdict),
        ("G16", "host drained to the next commit, largest", largest("drain"), "-"),
        ("G8", "hosts replaced", f"{len(replaced)} of {options.agents}", "all"),
        ("", "a step, median", show(usual, "ms"), "-"),
    ]
    if options.namespaces:
        rows[6:6] = [
            ("G4", "rank stopped to the next commit, largest", largest("rank-stop"), "5 s"),
            ("G4", "black hole to the next commit, p50", show(quantile(seconds(*CUTS), 0.5)), "5 s"),
            ("G4", "the same, largest", largest(*CUTS), "5 s"),
            *(("", f"of these: {kind}, largest", largest(kind), "-") for kind in CUTS),
            ("", "rank killed, largest", largest("rank-kill"), "-"),
            ("G16", "rank that gets SIGTERM, largest", largest("rank-term"), "-"),
            ("G6", "agent's start to counted member, largest", largest("join"), "3 s"),
            *wire_rows(options, run.copies),
        ]
    return rows


def wire_rows(options: argparse.Namespace, copies: Sequence[Samples]) -> list[tuple[str, str, str, str]]:
    """Return the row of what share of the line rate newcomers have used, if wires have a speed."""
    if options.rate is None:
        return []
    size = int(options.megabytes * (1 << 20)) * (3 if options.adam else 2)  # values, and the optimizer's for each
    shares = [line_share(samples, size, options.rate) for samples in copies]
    known = sorted(share for share in shares if share is not None)
    figure = f"{known[0]:.2f} to {known[-1]:.2f}" if known else "-"
    return [("G6", f"share of line rate, {len(known)} of {len(shares)} joins", figure, "0.9")]
