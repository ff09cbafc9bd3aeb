"""Run one siege: agents in network namespaces, a job that never ends by itself, and one fault after another."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from asyncpar.errors import AsyncparError
from asyncpar.launch.agents.control_client import ControlClient
from asyncpar.launch.agents.views import GroupView, show_group
from scripts.bench.chaos.chaos_agents import CUTS, Agents
from scripts.bench.chaos.chaos_judge import Logs
from scripts.bench.chaos.siege_judge import Hit, Line
from scripts.bench.chaos.siege_plan import Strike, choose_hosts
from scripts.bench.namespaces import Hosts

POLL = 0.05
STATUS_AT = (3.0, 10.0, 30.0, 60.0)
"""Seconds without a commit after which all agents are asked for their status."""

LAST_CALL = 30
WIDTH = 160


@dataclass(slots=True)
class Status:
    """What the agents said after so many seconds without a commit."""

    time: float
    seconds: float
    text: str


@dataclass
class AgentLogs:
    """What agents and the launcher print, line by line, with the time at which it was seen."""

    folder: Path
    lines: list[Line] = field(default_factory=list)
    _read: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read what is new."""
        for path in sorted(self.folder.glob("host*.log")):
            offset, number = self._read.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
            end = content.rfind(b"\n") + 1
            for text in content[:end].decode(errors="replace").splitlines():
                number += 1
                self.lines.append(Line(time.monotonic(), path.stem, number, text))
            self._read[path] = offset + end, number

    def around(self, line: Line, before: int = 12, after: int = 4) -> list[str]:
        """Return the lines of the same source near ``line``."""
        wanted = range(line.number - before, line.number + after + 1)
        near = [one for one in self.lines if one.source == line.source and one.number in wanted]
        return [f"{one.source}:{one.number}: {one.text}" for one in near]


class SiegeError(Exception):
    """The run cannot go on; the message says why."""


class Siege:
    """One run: so many hosts, so many faults."""

    def __init__(self, options: argparse.Namespace, names: Sequence[str], folder: Path, network: Hosts) -> None:
        self._options = options
        self._names = names
        self._network = network
        self._agents = Agents(folder, network)
        self._dice = random.Random(options.seed)
        self._cut: dict[str, str] = {}
        """Hosts whose links are cut now, and how."""
        self._commit_at = 0.0
        self.logs = Logs(folder)
        self.lines = AgentLogs(folder)
        self.hits: list[Hit] = []
        self.statuses: list[Status] = []
        self.faults = 0
        self.whole_after: list[float] = []
        """Seconds from the heal of each fault until all hosts had ranks in the world, of those that were waited for."""
        self.watched_until = 0.0

    async def run(self, arguments: Sequence[str], faults: Iterator[tuple[Strike, ...]]) -> str:
        """Run all faults, and return why that has not come to its end, "" if it has."""
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._options.limit):
                for name in self._names:
                    await self._agents.start(name)
                    await self._until(lambda: self._is_whole(members=False), "all agents", self._options.patience)
                launcher = await self._launch(arguments)
                tasks += [asyncio.create_task(self._watch(launcher)), asyncio.create_task(self._besiege(faults))]
                for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                    task.result()
        except TimeoutError:
            return f"the run took longer than {self._options.limit:g} s"
        except SiegeError as error:
            return str(error)
        finally:
            self.watched_until = time.monotonic()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await self._agents.close()
            self._refresh()
        return ""

    async def _launch(self, arguments: Sequence[str]) -> asyncio.subprocess.Process:
        job = ["--nnodes", f"1:{len(self._names)}", "--elastic", "ranks", "--max-restarts", "10000"]
        job += ["--last-call", str(LAST_CALL), "--rdzv-endpoint", self._agents.any_address(), *self._agents.proof]
        return await self._agents.asyncpar("launch", *job, *arguments, log="launch.log")

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _besiege(self, faults: Iterator[tuple[Strike, ...]]) -> None:
        patience = self._options.patience
        await self._until(self._goes_on, "the first step", patience)
        for strikes in faults:
            await self._settle()
            chosen = await self._choose(strikes)
            async with asyncio.TaskGroup() as group:
                for strike in chosen:
                    group.create_task(self._strike(strike))
            self.faults += 1
            await asyncio.sleep(self._dice.uniform(0.5, 1.5) * self._options.every)
            await self._until(self._goes_on, "the next commit", patience)
        await self._settle()
        await asyncio.sleep(self._options.quiet)

    async def _settle(self) -> None:
        """Wait a while until all hosts have ranks in the world: then there are most to be hit."""
        with suppress(SiegeError):
            await self._until(lambda: self._is_whole(members=True), "all hosts", self._options.settle)
            if self.hits:
                self.whole_after.append(time.monotonic() - max(hit.healed for hit in self.hits))

    async def _choose(self, strikes: Sequence[Strike]) -> tuple[Strike, ...]:
        """Choose hosts by what the group has now; wait until there is one that may be hit."""
        deadline = time.monotonic() + self._options.patience
        while True:
            view = self._newest(await self._views())
            if view is not None and view.leader is not None:
                members = [host.name for host in view.hosts if any(rank.rank is not None for rank in host.ranks)]
                present = [host.name for host in view.hosts if host.name in self._names]
                chosen = choose_hosts(strikes, present, leader=view.leader, members=members)
                if chosen:
                    return chosen
            if time.monotonic() > deadline:
                raise SiegeError(f"no leader, or no second host with a rank, for {self._options.patience:g} s")
            await asyncio.sleep(0.5)

    async def _strike(self, strike: Strike) -> None:
        """Do it, wait, and undo it."""
        await asyncio.sleep(strike.after)
        pids = [] if strike.what in CUTS else await self._pids(strike)
        hit = Hit(self.faults, strike.host, strike.what, time.monotonic(), float("inf"))
        self.hits.append(hit)
        try:
            if strike.what in CUTS:
                self._cut[strike.host] = strike.what
                self._sever(strike.host)
            _signal(pids, signal.SIGSTOP)
            await asyncio.sleep(strike.seconds)
        finally:
            _signal(pids, signal.SIGCONT)
            if strike.what in CUTS:
                del self._cut[strike.host]
                self._network.heal(strike.host)
                for other in self._cut:  # which share ways with this host
                    self._sever(other)
            hit.healed = time.monotonic()

    async def _pids(self, strike: Strike) -> list[int]:
        agent = self._agents.processes[strike.host].pid
        if strike.what == "agent":
            return [agent]
        views = await self._views([strike.host])
        own = [host for view in views.values() for host in view.hosts if host.name == strike.host]
        ranks = [rank.pid for host in own for rank in host.ranks if rank.pid is not None]
        return ranks if strike.what == "rank" else [agent, *ranks]

    def _sever(self, host: str) -> None:
        network = self._network
        {"cut": network.pull, "mute": network.mute, "deaf": network.deafen}[self._cut[host]](host)

    # -- what there is -------------------------------------------------------------------------------------------------

    async def _views(self, names: Sequence[str] | None = None) -> dict[str, GroupView]:
        """Return what agents say that answer."""
        credentials = self._agents.credentials

        async def ask(name: str) -> tuple[str, GroupView | None]:
            try:
                return name, await ControlClient(self._agents.addresses[name], credentials, seconds=2.0).status()
            except AsyncparError:
                return name, None

        asked = self._agents.running if names is None else names
        return {name: view for name, view in await asyncio.gather(*map(ask, asked)) if view is not None}

    @staticmethod
    def _newest(views: dict[str, GroupView]) -> GroupView | None:
        found = [view for view in views.values() if not view.parked]
        return max(found, key=lambda view: -1 if view.generation is None else view.generation, default=None)

    async def _is_whole(self, *, members: bool) -> bool:
        view, running = self._newest(await self._views()), set(self._agents.running)
        if view is None or {host.name for host in view.hosts if host.state == "up"} != running:
            return False
        return not members or view.world_hosts == len(running)

    async def _goes_on(self) -> bool:
        """Has anything been committed since all faults have healed?"""
        return self._commit_at > max((hit.healed for hit in self.hits), default=0.0)

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not await condition():
            if time.monotonic() > deadline:
                raise SiegeError(f"{what} did not come for {seconds:g} s")
            await asyncio.sleep(0.1)

    def _refresh(self) -> None:
        before = self.logs.position
        self.logs.refresh()
        self.lines.refresh()
        if self.logs.position != before:
            self._commit_at = time.monotonic()

    async def _watch(self, launcher: asyncio.subprocess.Process) -> None:
        """Read the logs all the time, and note what agents say while nothing is committed and no fault lasts."""
        noted = 0
        while True:
            self._refresh()
            if launcher.returncode is not None:
                raise SiegeError(f"the launcher has ended with exit code {launcher.returncode}")
            quiet_since = max([self._commit_at, *(hit.healed for hit in self.hits)])
            waited = time.monotonic() - quiet_since
            noted = 0 if waited < STATUS_AT[0] else noted
            if self._commit_at and noted < len(STATUS_AT) and waited > STATUS_AT[noted]:
                noted += 1
                self.statuses.append(Status(time.monotonic(), waited, await self._status_text()))
            await asyncio.sleep(POLL)

    async def _status_text(self) -> str:
        views = await self._views()
        texts = [f"{name} says:\n{show_group(view, width=WIDTH)}" for name, view in sorted(views.items())]
        silent = sorted(set(self._names) - set(views))
        return "\n".join([*texts, *([f"no answer from {', '.join(silent)}"] if silent else [])])


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it was declared lost, and killed
            os.kill(pid, number)
