"""Train for minutes under faults: throughput kept, false deaths, and every bit compared as it goes (goals G9 and G11).

    scripts/bench/run endurance --minutes 30                                   # G9: a fault every 15 s
    scripts/bench/run endurance --minutes 30 --spares 1                        # one waits, ready, to step in
    scripts/bench/run endurance --minutes 30 --mode diloco --every 29          # G9: rounds of DiLoCo
    scripts/bench/run endurance --minutes 30 --kinds hold,hog                  # G11: nobody may be declared lost

Ranks run under ``asyncpar launch --elastic ranks`` on this host.  First they train undisturbed for ``--calibrate``
seconds, which says how many steps make so many minutes; then one process computes those alone, and then all of it
happens again under faults: a rank is killed, stopped (SIGSTOP) or drained (SIGTERM), and its launcher starts another;
or it holds the GIL for 4 s, or the processors are busy for as long.  A table is printed every ``--report`` seconds, and
when the run is cut (Ctrl-C, SIGTERM) or stalls.  The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.launch.agents.views import RankView
from scripts.bench.chaos.chaos import LONGEST_STALL, RANK, Fault, drain_rows, generation_of, show
from scripts.bench.chaos.chaos_agents import Agents, placed_ranks
from scripts.bench.chaos.chaos_judge import Logs, Verdict, judge
from scripts.bench.chaos.chaos_worlds import (
    World,
    causes_of,
    crashes_in,
    ended_by_drains,
    false_deaths,
    read_agents,
    worlds_in,
)
from scripts.bench.chaos.elastic_rank import HOLD_SECONDS, MODES

KINDS = ("kill", "stop", "drain", "hold", "hog")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "drain": signal.SIGTERM, "hold": signal.SIGUSR1}
LOSING = ("kill", "stop", "drain")
"""Kinds after which the rank is lost, and another one starts."""

HOST = "host"
RESTART_WINDOW = 60
"""Seconds for which a crash counts: the next start of its slot waits the longer, the more there were."""

HOGS = 4
WARM_STEPS = 5
LAST_STEPS = 2
"""In so many steps at the end there are no faults."""
GOALS = {"plain": 0.95, "diloco": 0.98}


def parse_arguments() -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--every", type=float, default=15.0, help="seconds from one fault to the next")
    parser.add_argument("--kinds", default=",".join(LOSING), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--portions", type=int, default=32)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--compute", type=float, default=0.05, help="seconds that a portion takes")
    parser.add_argument("--spares", type=int, default=0, help="processes that wait for the place of one that is lost")
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--calibrate", type=float, default=30.0, help="seconds of the undisturbed run")
    parser.add_argument("--report", type=float, default=300.0, help="seconds from one table to the next")
    options = parser.parse_args()
    options.kinds = options.kinds.split(",")
    unknown = set(options.kinds) - set(KINDS)
    if unknown or options.ranks < 2 or options.minutes <= 0 or options.every <= 0:
        parser.error(f"expected kinds among {', '.join(KINDS)}, 2 ranks or more, and times above 0")
    return options


def arguments_of(options: argparse.Namespace, log: Path, *, steps: int, compute: float) -> list[str]:
    """Return the command line of a rank."""
    settings = [f"--steps={steps}", f"--portions={options.portions}", f"--megabytes={options.megabytes}"]
    return [str(RANK), *settings, f"--compute={compute}", f"--mode={options.mode}", "--lineages", f"--log={log}"]


class Ranks:
    """The ranks of one run, and what they log: ``async with Ranks(options, folder, steps) as ranks``."""

    def __init__(self, options: argparse.Namespace, folder: Path, steps: int) -> None:
        self._options = options
        self._folder = folder
        self._steps = steps
        self._agents = Agents(folder)
        self._launcher: asyncio.subprocess.Process | None = None
        self.logs = Logs(folder)

    async def __aenter__(self) -> Self:
        options = self._options
        log = self._folder / "rank-{pid}.jsonl"
        program = arguments_of(options, log, steps=self._steps, compute=options.compute)
        slots = ("--nproc-per-node", str(options.ranks), "--spares", str(options.spares))
        restarts = ("--max-restarts", "1000000", "--restart-window", str(RESTART_WINDOW))
        self._launcher = await self._agents.launch_alone(HOST, *slots, *restarts, *program)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._launcher is not None
        try:
            if self._launcher.returncode is None:
                self._launcher.terminate()  # which lets its ranks leave
                await asyncio.wait_for(self._launcher.wait(), LONGEST_STALL)
        finally:
            await self._agents.close()

    async def placed(self) -> tuple[int, list[RankView]]:
        """Return the generation of the current world, and its ranks."""
        view = await self._agents.view()
        return (-1, []) if view is None else (generation_of(view), [rank for _, rank in placed_ranks(view)])

    async def end(self) -> int:
        """Return the exit code of the job."""
        assert self._launcher is not None
        return await asyncio.wait_for(self._launcher.wait(), LONGEST_STALL)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job, None while it runs."""
        return None if self._launcher is None else self._launcher.returncode

    @property
    def lines(self) -> list[str]:
        """The lines that their agent has printed."""
        return read_agents(self._folder)

    async def reach(self, condition: Callable[[], bool], what: str) -> None:
        """Return when ``condition`` holds.  Ends the program when nothing is committed for too long."""
        position, changed = -1, time.monotonic()
        while True:
            self.logs.refresh()
            if condition():
                return
            if self.logs.position != position:
                position, changed = self.logs.position, time.monotonic()
            if time.monotonic() - changed > LONGEST_STALL:
                raise SystemExit(f"endurance: nothing was committed for {LONGEST_STALL:g} s before {what}")
            await asyncio.sleep(0.05)


async def calibrate(options: argparse.Namespace, folder: Path) -> float:
    """Return the steps per second of an undisturbed run."""
    folder.mkdir()
    async with Ranks(options, folder, steps=1_000_000) as ranks:
        await ranks.reach(lambda: ranks.logs.position >= WARM_STEPS, "the first steps")
        begin, first = time.monotonic(), ranks.logs.position
        await asyncio.sleep(options.calibrate)
        ranks.logs.refresh()
        return (ranks.logs.position - first) / (time.monotonic() - begin)


async def compute_alone(options: argparse.Namespace, folder: Path, steps: int) -> tuple[dict[str, Any], list[str]]:
    """Compute all steps in one process, and return what comes out, and the lineage of every step."""
    log = folder / "alone.log"
    command = arguments_of(options, log, steps=steps, compute=0.0)
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        if await process.wait() != 0:
            raise SystemExit("endurance: the run without faults has failed")
    finally:
        if process.returncode is None:
            process.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lineages = [line["lineage"] for line in lines if line["kind"] == "committed"]
    return next(line for line in lines if line["kind"] == "result"), lineages


def other_lineages(logs: Logs, lineages: Sequence[str]) -> list[str]:
    """Return who has committed a step, and come to something else than the run without faults."""
    committed = logs.of("committed")
    return [f"{name}: step {line['step']}" for name, line in committed if line["lineage"] != lineages[line["step"]]]


class Endurance:
    """The run under faults."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, *, steps: int, rate: float, wanted: dict[str, Any]
    ) -> None:
        folder.mkdir()
        self.faults: list[Fault] = []
        self.is_whole = False
        self._options = options
        self._steps = steps
        self._rate = rate
        self._wanted = wanted
        self._random = random.Random(options.seed)
        self._ranks = Ranks(options, folder, steps)
        self._exit_code: int | None = None
        self._hogs: list[asyncio.subprocess.Process] = []

    async def run(self) -> None:
        """Run to the end of the steps."""
        try:
            async with self._ranks as ranks:
                await ranks.reach(lambda: ranks.logs.position > 0, "the first step")
                faults = asyncio.create_task(self._fault_again_and_again())
                try:
                    await ranks.reach(self._is_over, "the end")
                finally:
                    self._exit_code = ranks.exit_code  # before those that are still there are ended
                    faults.cancel()
                    await asyncio.wait({faults})
                self._exit_code = await ranks.end()
                self.is_whole = ranks.logs.position >= self._steps
        finally:
            for hog in self._hogs:
                if hog.returncode is None:
                    hog.kill()
                await hog.wait()
            self._ranks.logs.refresh()

    def _is_over(self) -> bool:
        return self._ranks.logs.position >= self._steps or self._ranks.exit_code is not None

    async def _fault_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._options.every)
            generation, present = await self._ranks.placed()
            if len(present) < 2 or self._ranks.logs.position >= self._steps - LAST_STEPS:
                continue  # somebody has to go on, and to have something to do
            kind, rank = self._random.choice(self._options.kinds), self._random.choice(present)
            slot, position = f"{HOST}/{rank.slot}", self._ranks.logs.position
            self.faults.append(Fault(kind, slot, time.monotonic(), position, generation, rank.rank))
            await self._do(kind, rank)

    async def _do(self, kind: str, rank: RankView) -> None:
        if kind in SIGNALS:
            assert rank.pid is not None, "it runs"
            os.kill(rank.pid, SIGNALS[kind])
            return
        busy = f"import time\nend = time.time() + {HOLD_SECONDS}\nwhile time.time() < end: pass"
        for _ in range(HOGS):
            self._hogs.append(await asyncio.create_subprocess_exec(sys.executable, "-c", busy))

    # -- what it came to, so far ---------------------------------------------------------------------------------------

    @property
    def kept(self) -> float | None:
        """The part of the undisturbed throughput that is kept."""
        first: dict[int, float] = {}
        for line in self._ranks.logs.commits:
            first.setdefault(line["step"], line["time"])
        if len(first) < 2:
            return None
        seconds = max(first.values()) - min(first.values())
        return (len(first) - 1) / self._rate / seconds

    @property
    def costs(self) -> dict[str, tuple[int, float]]:
        """How many faults of each kind there were, and the mean seconds that one costs until the next."""
        first: dict[int, float] = {}
        for line in self._ranks.logs.commits:
            first.setdefault(line["step"], line["time"])
        times, begins = sorted(first.values()), [fault.time for fault in self.faults]
        lost: dict[str, list[float]] = {}
        for fault, end in zip(self.faults, begins[1:], strict=False):
            steps = bisect.bisect(times, end) - bisect.bisect(times, fault.time)
            lost.setdefault(fault.kind, []).append(end - fault.time - steps / self._rate)
        return {kind: (len(seconds), statistics.mean(seconds)) for kind, seconds in lost.items()}

    @property
    def _worlds(self) -> list[World]:
        return worlds_in(self._ranks.lines)

    @property
    def _causes(self) -> dict[str, str]:
        """The faults that have ended ranks, by member; "" of those that nobody had touched."""
        struck = [(fault.generation, fault.member, fault.kind) for fault in self.faults if fault.kind in LOSING]
        return causes_of(self._worlds, struck)

    @property
    def false_deaths(self) -> list[str]:
        """Ranks that were declared lost though nobody had touched them, with the reason."""
        return false_deaths(self._worlds, self._causes)

    def judge(self, lineages: list[str]) -> Verdict:
        """Compare all that is committed so far with the run without faults."""
        self._ranks.logs.refresh()
        exits = {} if self._exit_code is None else {"launch": self._exit_code}
        position = self._ranks.logs.position
        done = position if self.is_whole else max(0, position - 1)
        wanted, portions = self._wanted, self._options.portions
        verdict = judge(
            self._ranks.logs,
            wanted,
            exits,
            steps=done,
            portions=portions,
            is_whole=self.is_whole,
            drained=ended_by_drains(self._worlds, self._causes, ("drain",)),
        )
        verdict.failed += crashes_in(self._ranks.lines)
        verdict.different += other_lineages(self._ranks.logs, lineages)
        return verdict

    def show(self, verdict: Verdict) -> list[tuple[str, str, str, str]]:
        """Print the table of measured against goal, and return its rows."""
        logs, kept, deaths = self._ranks.logs, self.kept, self.false_deaths
        counts = {kind: sum(fault.kind == kind for fault in self.faults) for kind in self._options.kinds}
        first = min((line["time"] for line in logs.commits), default=0.0)
        last = max((line["time"] for line in logs.commits), default=0.0)
        goal, worlds = GOALS.get(self._options.mode), len(self._worlds)
        rows = [
            ("G1", "every committed step", "bit-equal" if verdict.is_equal else "DIFFERENT", "bit-equal"),
            ("G2", "committed steps lost or repeated", str(len(verdict.repeated)), "0"),
            ("G9", "throughput kept", "-" if kept is None else f"{kept:.1%}", "-" if goal is None else f"{goal:.0%}"),
            ("G11", "false deaths", str(len(deaths)), "0"),
            *drain_rows(verdict),
        ]
        print(
            f"after {(last - first) / 60:.1f} min, {'whole' if self.is_whole else 'not whole'}: {logs.position} of "
            f"{self._steps} steps, {worlds} worlds, {counts}, undisturbed step {show(1 / self._rate)}"
        )
        for number, what, measured, aim in rows:
            print(f"{number:4} {what:46} {measured:>12}   goal {aim}")
        for kind, (count, seconds) in sorted(self.costs.items()):
            print(f"     seconds that a {kind} costs, of {count:<24} {seconds:>12.2f}")
        for text in [*deaths, *verdict.troubles][:20]:
            print(f"  {text}")
        sys.stdout.flush()
        return rows


async def report(run: Endurance, lineages: list[str], every: float) -> None:
    """Print a table now and then."""
    while True:
        await asyncio.sleep(every)
        run.show(run.judge(lineages))


async def measure(options: argparse.Namespace, folder: Path) -> int:
    """Calibrate, run alone, run under faults, print the table, and return the exit code."""
    rate = await calibrate(options, folder / "undisturbed")
    steps = max(10, int(options.minutes * 60 * rate))
    print(f"undisturbed: {rate:.2f} steps per second; {steps} steps are {options.minutes:g} minutes", flush=True)
    wanted, lineages = await compute_alone(options, folder, steps)
    run = Endurance(options, folder / "faults", steps=steps, rate=rate, wanted=wanted)
    work = asyncio.create_task(run.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    reports = asyncio.create_task(report(run, lineages, options.report))
    why = ""
    try:
        await work
    except asyncio.CancelledError:
        why = "it was cut"
    except SystemExit as error:
        why = str(error)
    finally:
        reports.cancel()
        await asyncio.wait({reports})
    verdict = run.judge(lineages)
    rows = run.show(verdict)
    if why:
        print(f"  {why}")
    faults = [asdict(fault) for fault in run.faults]
    found = {"rows": rows, "costs": run.costs, "faults": faults, "settings": vars(options), "why": why}
    print(json.dumps(found, default=str), flush=True)
    return 1 if verdict.troubles or run.false_deaths or why else 0


def main() -> None:
    """Measure."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="asyncpar-endurance-") as folder:
        raise SystemExit(asyncio.run(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
