"""Soak banks of an elastic job: money is moved for an hour while ranks are killed two at once, stopped, and join.

    scripts/bench/run bank --minutes 60 --seed 1
    scripts/bench/run bank --minutes 2 --hosts 5 --out /tmp/bank

Each of four pretended hosts on loopback has an agent and a rank; three banks, elastic actors with ``save_every=1`` and
``mirrors=2``, have accounts, and all ranks move money between them, beside their steps and within.  Faults: two ranks
get SIGKILL, at once or one soon after the other; one or two are stopped for 0.5 to 5 s; one is stopped and another one
killed; another host comes, or is drained.  The next one waits until all hosts have ranks again, which have committed a
step: no more is lost at once than two mirrors can bear.  In every second eighth of the time one host is spared, so that
its rank gets old enough to show whether it grows.

Judged are: the total of each bank never changes; no transfer is done twice, or by half; what was answered is kept; who
gets no answer is notified; steps are neither repeated nor lost; the time without a commit; memory, descriptors and
children of agents, launcher and ranks; the exit code, and that no process is left.  The last line on stdout is one JSON
object; the exit code is 1 when a judge objects.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.chaos.bank_judge import BankVerdict, Sample, judge_bank, largest_growth
from scripts.bench.chaos.bank_rank import HURRY, PORTIONS
from scripts.bench.chaos.chaos_agents import GUEST, Agents
from scripts.bench.chaos.chaos_judge import Logs
from scripts.bench.chaos.siege_judge import MOST_GAP, Hit, quiet_gaps
from scripts.bench.chaos.siege_run import AgentLogs, SiegeError

RANK = Path(__file__).with_name("bank_rank.py")
KINDS = ("double", "double", "double", "stop", "stops", "stop-kill", "guest")
LEAST_STOP, MOST_STOP = 0.5, 5.0
PACE, PARTS, SAMPLE_SECONDS = 0.25, 8, 10.0
SETTLED = 0.5
"""Seconds after a fault for which agents may not know of it, and ranks may log a commit of before."""

SHOWN = 10


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._names = [f"host{number}" for number in range(options.hosts)]
        self._folder = folder
        self._agents = Agents(folder)
        self._dice, self._deck = random.Random(options.seed), list[str]()
        self._began = 0.0
        self.logs = Logs(folder)
        self.lines = AgentLogs(folder)
        self.hits: list[Hit] = []
        self.kinds: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.exit_code: int | None = None
        self.leftover: list[str] = []
        self.watched_until = 0.0

    async def run(self) -> str:
        """Run to the end, and return why it has not come there, "" if it has."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for name in self._names:
                await self._agents.start(name)
                await self._until(self._are_up, "all agents")
            launcher = await self._launch()
            tasks += [asyncio.create_task(work) for work in (self._watch(), self._sample(launcher))]
            tasks.append(asyncio.create_task(self._soak(launcher)))
            for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()
        except SiegeError as error:
            return str(error)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await self._agents.close()
            self.logs.refresh()
            self.lines.refresh()
            self.leftover = [text for text in map(_command, psutil.process_iter()) if str(self._folder) in text]
        return ""

    async def _launch(self) -> asyncio.subprocess.Process:
        job = ["--nnodes", f"1:{len(self._names) + 1}", "--elastic", "ranks", "--max-restarts", "100000"]
        job += ["--restart-window", "20", "--rdzv-endpoint", self._agents.any_address(), *self._agents.proof]
        steps = int(self._options.minutes * 60 / PACE)
        program = [str(RANK), f"--steps={steps}", f"--pace={PACE}", f"--log={self._folder / 'rank-{pid}.jsonl'}"]
        return await self._agents.asyncpar("launch", *job, *program, log="launch.log")

    async def _soak(self, launcher: asyncio.subprocess.Process) -> None:
        self._began = time.monotonic()
        until = self._began + self._options.minutes * 60
        while time.monotonic() < until:
            await self._until(self._is_whole, "all hosts with a commit")
            await asyncio.sleep(self._dice.uniform(0.5, 1.5) * self._options.every)
            if launcher.returncode is not None:
                raise SiegeError(f"the launcher has ended with exit code {launcher.returncode}")
            await self._fault()
        await self._until(self._is_whole, "all hosts at the end")
        self.watched_until = time.monotonic()
        (self._folder / HURRY).touch()
        patience = max(self._options.patience, 10.0 * self._options.minutes)  # for the steps that are left
        try:
            self.exit_code = await asyncio.wait_for(launcher.wait(), patience)
        except TimeoutError as error:
            raise SiegeError(f"the job did not end within {patience:g} s") from error

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _fault(self) -> None:
        if not self._deck:
            self._deck = list(KINDS)
            self._dice.shuffle(self._deck)
        kind, dice = self._deck.pop(), self._dice
        self.kinds[kind] += 1
        if kind == "guest":
            await (self._agents.drain(GUEST) if GUEST in self._agents.running else self._agents.start(GUEST))
            return
        part = int((time.monotonic() - self._began) / (self._options.minutes * 60) * PARTS)
        spared = self._names[part // 2 % len(self._names)] if part % 2 else None
        first, second = dice.sample([name for name in self._agents.running if name != spared], 2)
        later = dice.choice([0.0, 0.0, dice.uniform(0.0, 1.5)])
        match kind:
            case "double":
                pids = await self._pids(first), await self._pids(second)  # before: both are to go at once
                await asyncio.gather(self._kill(first, pids[0], 0.0), self._kill(second, pids[1], later))
            case "stop":
                await self._stop(first)
            case "stops":
                await asyncio.gather(self._stop(first), self._stop(second))
            case _:
                pids = [], await self._pids(second)
                await asyncio.gather(self._stop(first), self._kill(second, pids[1], later))

    async def _kill(self, host: str, pids: Sequence[int], after: float) -> None:
        await asyncio.sleep(after)
        now = time.monotonic()
        _signal(pids, signal.SIGKILL)
        self.hits.append(Hit(self.kinds.total(), host, "kill", now, now))

    async def _stop(self, host: str) -> None:
        pids = await self._pids(host)
        hit = Hit(self.kinds.total(), host, "stop", time.monotonic(), float("inf"))
        self.hits.append(hit)
        _signal(pids, signal.SIGSTOP)
        await asyncio.sleep(self._dice.uniform(LEAST_STOP, MOST_STOP))
        _signal(pids, signal.SIGCONT)
        hit.healed = time.monotonic()

    async def _pids(self, host: str) -> list[int]:
        view = await self._agents.view()
        hosts = [] if view is None else view.hosts
        return [rank.pid for one in hosts if one.name == host for rank in one.ranks if rank.pid is not None]

    # -- what there is -------------------------------------------------------------------------------------------------

    async def _are_up(self) -> bool:
        view = await self._agents.view()
        return view is not None and {one.name for one in view.hosts if one.state == "up"} == set(self._agents.running)

    async def _is_whole(self) -> bool:
        """Have ranks of all hosts committed a step in one world?  Then all snapshots are where they belong."""
        view = await self._agents.view()
        if view is None or view.generation is None or view.world_size != len(self._agents.running):
            return False
        after = max((hit.healed for hit in self.hits), default=0.0) + SETTLED
        last = [line for lines in self.logs.lines.values() for line in lines[-20:] if line["kind"] == "committed"]
        return any(line["generation"] == view.generation and line["time"] > after for line in last)

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline = time.monotonic() + self._options.patience
        while not await condition():
            if time.monotonic() > deadline:
                raise SiegeError(f"{what} did not come for {self._options.patience:g} s")
            await asyncio.sleep(0.2)

    async def _watch(self) -> None:
        while True:
            self.logs.refresh()
            self.lines.refresh()
            await asyncio.sleep(0.25)

    async def _sample(self, launcher: asyncio.subprocess.Process) -> None:
        """Note what all processes use; also in a file, which shows it while they run."""
        with (self._folder / "samples.txt").open("w") as file:
            while True:
                agents = {f"agent {name}": self._agents.processes[name].pid for name in self._agents.running}
                roles = {"launcher": launcher.pid, **agents}
                found = [sample for role, pid in roles.items() for sample in take_samples(role, pid)]
                self.samples += found
                print("\n".join(json.dumps(asdict(sample)) for sample in found), file=file, flush=True)
                await asyncio.sleep(SAMPLE_SECONDS)


def take_samples(role: str, pid: int) -> list[Sample]:
    """Return what a process and its children, which are ranks, use now."""
    found: list[Sample] = []
    with suppress(psutil.Error):
        children = psutil.Process(pid).children()
        for one, name in [(psutil.Process(pid), role), *((child, f"child of {role}") for child in children)]:
            with suppress(psutil.Error):
                megabytes, count = one.memory_info().rss / (1 << 20), len(one.children())
                found.append(Sample(time.monotonic(), name, one.pid, megabytes, one.num_fds(), count))
    return found


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        own = [os.getpid(), *(parent.pid for parent in psutil.Process().parents())]
        return "" if process.pid in own else " ".join(process.cmdline())
    return ""


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it was declared lost, and killed
            os.kill(pid, number)


def figures(options: argparse.Namespace, soak: Soak, verdict: BankVerdict) -> dict[str, Any]:
    """Return what the run came to, for programs."""
    counts = Counter(line["kind"] for lines in soak.logs.lines.values() for line in lines)
    refused = Counter(line["error"] for _, line in soak.logs.of("refused"))
    gaps = sorted(gap.seconds for gap in quiet_gaps(soak.logs, soak.hits, until=soak.watched_until))
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "faults": dict(soak.kinds),
        "steps": soak.logs.position,
        "generations": len({line["generation"] for _, line in soak.logs.of("committed")}),
        "asked": counts["asked"],
        "answered": counts["answered"],
        "refused": dict(refused),
        "reads": counts["read"],
        "gaps": {"p50": round(gaps[len(gaps) // 2], 2), "most": round(gaps[-1], 2)},
        "growth": largest_growth(soak.samples),
        "exit_code": soak.exit_code,
        "findings": {name: len(found) for name, found in verdict.troubles.items()},
    }


async def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Run, print what came of it, and return whether all judges are content."""
    soak = Soak(options, folder)
    why = await soak.run()
    until = soak.watched_until or time.monotonic()
    found = soak.logs, soak.hits, soak.samples, soak.lines.lines
    verdict = judge_bank(*found, portions=PORTIONS, until=until, most_gap=options.gap)
    verdict.ended += [why] if why else []
    verdict.ended += [] if soak.exit_code == 0 else [f"the launcher ended with exit code {soak.exit_code}"]
    verdict.leaks += [f"left behind: {text}" for text in soak.leftover]
    (folder / "hits.txt").write_text("".join(f"{json.dumps(asdict(hit))}\n" for hit in soak.hits))
    for name, troubles in verdict.troubles.items():
        for text in troubles[:SHOWN]:
            print(f"  {name}: {text}")
    print(json.dumps(figures(options, soak, verdict)), flush=True)
    return not verdict.troubles


def main() -> None:
    """Soak, and exit with 1 if a judge objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds from whole to the next fault")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for anything at most")
    parser.add_argument("--gap", type=float, default=MOST_GAP, help="seconds without a commit that may be")
    parser.add_argument("--out", type=Path, help="keep the logs there")
    options = parser.parse_args()
    if options.minutes <= 0 or options.hosts < 4 or min(options.every, options.patience) <= 0:
        parser.error("expected 4 hosts or more, and times above 0")
    folder = (options.out or Path(tempfile.mkdtemp(prefix="asyncpar-bank-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    is_well = asyncio.run(measure(options, folder))
    print(f"bank: the logs are in {folder}", file=sys.stderr)
    raise SystemExit(0 if is_well else 1)


if __name__ == "__main__":
    main()
