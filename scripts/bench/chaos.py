"""Train under faults, and compare every bit with the run without: what ranks of an elastic job lose when others go.

    python scripts/bench/chaos.py --faults 60 --seed 1
    python scripts/bench/chaos.py --faults 20 --seed 1 --megabytes 100 --compute 0.05 --kinds kill
    python scripts/bench/chaos.py --faults 20 --mode zero3
    python scripts/bench/chaos.py --faults 0 --megabytes 100
    python scripts/bench/chaos.py --agents 4 --faults 8 --every 150 --seed 1
    python scripts/bench/chaos.py --agents 4 --namespaces --faults 60 --every 150 --seed 1
    python scripts/bench/chaos.py --faults 1 --kinds join --joiners 4 --megabytes 100 --every 16
    python scripts/bench/chaos.py --agents 1 --namespaces --rate 100000000 --kinds join --faults 2 --compute 0.1
    python scripts/bench/chaos.py --faults 8 --every 60 --kinds kill --mode zero3 --victims each

Ranks are processes of this host.  Every few steps one is killed (SIGKILL), stopped (SIGSTOP, and woken later), drained,
asked to end (SIGTERM, which drains it), or a new one is started, as the seed says.  With ``--agents`` each pretended
host has a real agent, and faults are those of agents: the leader's is killed, or another one, stopped or drained; each
comes back.  With ``--namespaces``, which needs root, hosts are network namespaces on one bridge: then links go down and
up (``cut``), what a host sends or hears gets lost without a word (``mute``, ``deaf``), ranks are killed, stopped or
asked to end, and another host comes (``join``); with ``--rate`` their wires have a speed, and what share of it a copy
of the state uses is a figure; where steps are quicker than updates are on the wire, the others wait for who comes.
With ``--victims each`` rank 0 is the first victim, then rank 1, and so on; before each fault there are all ranks again.
The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from asyncpar.net.membership.world_director import FormWorld
from asyncpar.testing.elastic_processes import ProcessWorlds
from scripts.bench.chaos_agents import HOST_KINDS, NETWORK_KINDS, measure_hosts
from scripts.bench.chaos_judge import Logs, Verdict, judge
from scripts.bench.elastic_rank import MODES

RANK = Path(__file__).with_name("elastic_rank.py")
KINDS = ("kill", "stop", "join", "drain", "term")
LEAVING = ("drain", "term")
"""Kinds after which a rank leaves in good order."""

VICTIMS = ("drawn", "each")
LEAST_RANKS = 2
WOKEN_AFTER = 4.0
LONGEST_STALL = 60.0


@dataclass
class Fault:
    """What was done to whom, and when ranks went on."""

    kind: str
    member: str
    time: float
    step: int
    generation: int
    rank: int | None = None
    """Which rank it was; None of a join."""
    recovered: float | None = None
    """Seconds until the next commit in a later world; of a join: from the start of its process to its world."""


def parse_arguments() -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=8, help="steps from one fault to the next")
    parser.add_argument("--kinds", default=None, help="which faults, separated by commas")
    parser.add_argument("--agents", type=int, default=0, help="so many hosts with agents; faults are those of agents")
    parser.add_argument("--namespaces", action="store_true", help="with --agents: hosts are namespaces; cuts, too")
    parser.add_argument("--rate", type=int, help="with --namespaces: bits per second of the wire of each host")
    parser.add_argument("--joiners", type=int, default=1, help="so many newcomers come at once")
    parser.add_argument("--victims", choices=VICTIMS, default="drawn", help="who: as the seed says, or each in turn")
    parser.add_argument("--portions", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--compute", type=float, default=0.01, help="seconds that a portion takes")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--mode", choices=MODES, default="plain", help="what is sharded, or encoded")
    parser.add_argument("--out", type=Path, help="keep the logs there")
    return parser.parse_args()


def arguments_of(options: argparse.Namespace, log: Path, *, compute: float) -> list[str]:
    """Return the command line of a rank."""
    steps = (options.faults + 2) * options.every
    settings = [
        f"--steps={steps}",
        f"--portions={options.portions}",
        f"--megabytes={options.megabytes}",
        f"--compute={compute}",
        f"--mode={options.mode}",
    ]
    return [str(RANK), *settings, *(["--adam"] if options.adam else []), f"--log={log}"]


async def run_alone(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run without faults in one process, as fast as it can, and return what comes out."""
    log = folder / "alone.log"
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments_of(options, log, compute=0.0))
    if await process.wait() != 0:
        raise SystemExit("chaos: the run without faults has failed")
    return next(line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "result")


class Chaos:
    """One run under faults."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self.logs = Logs(folder)
        self.faults: list[Fault] = []
        self._count = 0
        self._folder = folder
        self._waking: set[asyncio.Task[None]] = set()

    @property
    def victims(self) -> set[str]:
        """Who was killed or stopped."""
        return {fault.member for fault in self.faults if fault.kind in ("kill", "stop")}

    @property
    def drained(self) -> set[str]:
        """Who was asked to leave, and nothing else."""
        return {fault.member for fault in self.faults if fault.kind in LEAVING} - self.victims

    async def run(self) -> ProcessWorlds:
        """Run to the end, and return the worlds that there were."""
        async with ProcessWorlds(self._options.ranks) as worlds:
            for _ in range(self._options.ranks):
                await self._start(worlds)
            await self._until(lambda: self.logs.position >= self._options.every, "the first steps")
            for number in range(self._options.faults):
                await self._until(
                    lambda number=number: self.logs.position >= (number + 1) * self._options.every,  # type: ignore[misc]
                    f"fault {number}",
                )
                if self._options.victims == "each":
                    await self._fill(worlds)
                await self._fault(worlds)
            steps = (self._options.faults + 2) * self._options.every
            await self._until(lambda: self.logs.position >= steps, "the end")
            for name in worlds.running:
                await asyncio.wait_for(worlds.wait(name), LONGEST_STALL)
            if self._waking:
                await asyncio.wait(self._waking)
        self.logs.refresh()
        return worlds

    async def _start(self, worlds: ProcessWorlds) -> str:
        name = f"m{self._count:03d}"
        self._count += 1
        log = self._folder / f"{name}.jsonl"
        await worlds.start(name, arguments_of(self._options, log, compute=self._options.compute))
        return name

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        waited = 0.0
        before = -1
        while True:
            self.logs.refresh()
            if condition():
                return
            waited = 0.0 if self.logs.position != before else waited + 0.01
            before = self.logs.position
            if waited > LONGEST_STALL:
                raise SystemExit(f"chaos: nothing was committed for {LONGEST_STALL:g} s before {what}")
            await asyncio.sleep(0.01)

    async def _fault(self, worlds: ProcessWorlds) -> None:
        present, kinds = worlds.present, self._options.kinds.split(",")
        kind = self._random.choice(kinds)
        if len(present) <= LEAST_RANKS:
            kind = "join"
        elif kind == "join" and len(worlds.running) >= self._options.ranks + max(2, self._options.joiners):
            kind = next((other for other in kinds if other != "join"), "join")
        if kind == "join":
            await self._join(worlds, self._options.joiners)
        else:
            await self._strike(worlds, kind, self._choose_victim(present))

    async def _fill(self, worlds: ProcessWorlds) -> None:
        """Let newcomers take the places of those that have gone, and return when they count."""
        missing = self._options.ranks - len(worlds.present)
        if missing > 0:
            await self._join(worlds, missing)
        steps = (self._options.faults + 2) * self._options.every
        await self._until(
            lambda: len(worlds.present) >= self._options.ranks or self.logs.position >= steps, "newcomers"
        )
        if len(worlds.present) < self._options.ranks:
            raise SystemExit("chaos: the job was over before newcomers counted; give a larger --every")

    def _choose_victim(self, present: Sequence[str]) -> str:
        if self._options.victims == "each":
            return present[len(self._struck) % len(present)]
        return self._random.choice(present)

    @property
    def _struck(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind != "join"]

    async def _join(self, worlds: ProcessWorlds, count: int) -> None:
        """Start so many newcomers at once."""
        generation = worlds.director.generation
        for _ in range(count):
            begun = asyncio.get_running_loop().time()
            member = await self._start(worlds)
            self.faults.append(Fault("join", member, begun, self.logs.position, generation))

    async def _strike(self, worlds: ProcessWorlds, kind: str, member: str) -> None:
        """Do a fault to a member, and return when the others have gone on."""
        now, generation = asyncio.get_running_loop().time(), worlds.director.generation
        rank = worlds.director.members.index(member)
        fault = Fault(kind, member, now, self.logs.position, generation, rank)
        self.faults.append(fault)
        match kind:
            case "kill":
                worlds.signal(member, signal.SIGKILL)
            case "stop":
                worlds.signal(member, signal.SIGSTOP)
                waking = asyncio.create_task(self._wake(worlds, member))
                self._waking.add(waking)
            case "drain":
                worlds.drain(member)
            case "term":
                worlds.signal(member, signal.SIGTERM)
        await self._until(lambda: self._has_recovered(fault), f"the recovery of {kind} {member}")

    def _has_recovered(self, fault: Fault) -> bool:
        for commit in self.logs.commits:
            if commit["time"] > fault.time and commit["generation"] > fault.generation:
                fault.recovered = commit["time"] - fault.time
                return True
        return False

    async def _wake(self, worlds: ProcessWorlds, member: str) -> None:
        await asyncio.sleep(WOKEN_AFTER)
        worlds.signal(member, signal.SIGCONT)


def ended_by_drains(worlds: Sequence[tuple[float, FormWorld]], drained: Collection[str]) -> set[int]:
    """Return the generations after which members left that were ``drained``, and no others."""
    return {
        before.generation
        for (_, before), (_, after) in pairwise(worlds)
        if after.change.left and drained and set(after.change.left) <= set(drained)
    }


def step_seconds(logs: Logs) -> list[float]:
    """Return the times between commits of successive steps, as first seen."""
    first: dict[int, float] = {}
    for line in logs.commits:
        first.setdefault(line["step"], line["time"])
    times = [first[step] for step in sorted(first)]
    return [later - earlier for earlier, later in pairwise(times)]


def join_stalls(logs: Logs, worlds: ProcessWorlds) -> list[float]:
    """Return by how much the first commit after each join, without another fault, was later than is usual there.

    That is the median of the other steps of that world: with more ranks on the same processors all steps are longer.
    """
    first: dict[int, dict[str, Any]] = {}
    for line in logs.commits:
        first.setdefault(line["step"], line)
    gaps = {step: line["time"] - first[step - 1]["time"] for step, line in first.items() if step - 1 in first}
    stalls = []
    for _, formed in worlds.worlds[1:]:
        step = formed.lineage.step
        own = [one for one in gaps if first[one]["generation"] == formed.generation and one != step]
        if formed.change.joined and not formed.change.left and step in gaps and own:
            stalls.append(gaps[step] - statistics.median(gaps[one] for one in own))
    return stalls


def healing_seconds(faults: Sequence[Fault], worlds: ProcessWorlds) -> list[float]:
    """Return the seconds from the start of each newcomer's process to its world."""
    entered = {name: time for time, formed in worlds.worlds for name in formed.change.joined}
    return [entered[fault.member] - fault.time for fault in faults if fault.kind == "join" and fault.member in entered]


def quantile(values: Sequence[float], part: float) -> float | None:
    """Return a quantile, None of nothing."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else None


def show(value: float | None, unit: str = "s") -> str:
    """Return a figure as text."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if unit == "ms" else f"{value:.2f} s"


def table(verdict: Verdict, chaos: Chaos, worlds: ProcessWorlds) -> list[tuple[str, str, str, str]]:
    """Return the rows of measured against goal."""
    gaps = step_seconds(chaos.logs)
    usual = statistics.median(gaps) if gaps else 0.0
    after = {
        kind: [fault.recovered - usual for fault in chaos.faults if fault.kind == kind and fault.recovered is not None]
        for kind in KINDS
    }
    stalls, healed = join_stalls(chaos.logs, worlds), healing_seconds(chaos.faults, worlds)
    leaving = [seconds for kind in LEAVING for seconds in after[kind]]
    return [
        ("G1", "parameters, losses, sample log", "bit-equal" if verdict.is_equal else "DIFFERENT", "bit-equal"),
        ("G2", "committed steps lost or repeated", str(len(verdict.repeated)), "0"),
        ("G3", "SIGKILL to the next commit, less a step, p50", show(quantile(after["kill"], 0.5)), "0.3 s"),
        ("G3", "the same, p99", show(quantile(after["kill"], 0.99)), "1 s"),
        ("G4", "SIGSTOP to the next commit, p99", show(quantile(after["stop"], 0.99)), "5 s"),
        ("G5", "survivors' stall per join, p50", show(quantile(stalls, 0.5), "ms"), "150 ms"),
        ("G5", "the same, largest", show(max(stalls, default=None), "ms"), "150 ms"),
        *join_rows(chaos.faults, healed),
        *drain_rows(verdict),
        ("G16", "drain to the next commit, less a step, p50", show(quantile(leaving, 0.5), "ms"), "-"),
        *victim_rows(chaos.faults, usual),
        ("", "a step, median", show(usual, "ms"), "-"),
    ]


def join_rows(faults: Sequence[Fault], healed: Sequence[float]) -> list[tuple[str, str, str, str]]:
    """Return the rows of how long newcomers took; those that came when all was over do not count."""
    started = sum(fault.kind == "join" for fault in faults)
    return [
        ("G6", "process start to counted member, p50", show(quantile(healed, 0.5)), "3 s"),
        ("G6", "the same, largest", show(max(healed, default=None)), "3 s"),
        ("G6", "newcomers that counted", f"{len(healed)} of {started}", "all"),
    ]


def victim_rows(faults: Sequence[Fault], usual: float) -> list[tuple[str, str, str, str]]:
    """Return the rows of which ranks were lost, and what the loss of each cost at most, less a step."""
    costs: dict[int, float] = {}
    for fault in faults:
        if fault.rank is not None and fault.recovered is not None:
            costs[fault.rank] = max(costs.get(fault.rank, 0.0), fault.recovered - usual)
    each = ", ".join(f"{rank}: {show(costs[rank])}" for rank in sorted(costs))
    return [("G12", "lost ranks, largest to the next commit", each or "-", "3 s")]


def drain_rows(verdict: Verdict) -> list[tuple[str, str, str, str]]:
    """Return the rows of what drains must not do."""
    return [
        ("G16", "steps done again because of drains", str(len(verdict.again)), "0"),
        ("G16", "peer errors because of drains", str(len(verdict.errors)), "0"),
    ]


async def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run both, print the table, and return the exit code."""
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    if options.agents:
        steps = (options.faults + 2) * options.every
        me = sys.modules[__name__]
        return await measure_hosts(
            options,
            folder,
            chaos=me,
            arguments=lambda log: arguments_of(options, Path(log), compute=options.compute),
            steps=steps,
        )
    wanted = await run_alone(options, folder)
    chaos = Chaos(options, folder)
    worlds = await chaos.run()
    steps = (options.faults + 2) * options.every
    members = {name for _, formed in worlds.worlds for name in formed.members}  # others came when all was over
    untouched = {name: code for name, code in worlds.exits.items() if name in members - chaos.victims}
    drained = ended_by_drains(worlds.worlds, chaos.drained)
    verdict = judge(chaos.logs, wanted, untouched, steps=steps, portions=options.portions, drained=drained)
    rows = table(verdict, chaos, worlds)
    for number, what, measured, goal in rows:
        print(f"{number:4} {what:46} {measured:>12}   goal {goal}")
    for text in verdict.troubles[:20]:
        print(f"  {text}")
    counts = {kind: sum(fault.kind == kind for fault in chaos.faults) for kind in KINDS}
    print(f"faults: {counts}, worlds: {len(worlds.worlds)}, rolled forward: {rolled_forward(worlds)}")
    figures = {"rows": rows, "faults": [asdict(fault) for fault in chaos.faults], "settings": vars(options)}
    print(json.dumps(figures, default=str), flush=True)
    return 1 if verdict.troubles else 0


def rolled_forward(worlds: ProcessWorlds) -> int:
    """Return in how many worlds a step was committed that some had only prepared."""
    return sum(formed.decision == "roll forward" for _, formed in worlds.worlds)


def check_combinations(options: argparse.Namespace) -> None:
    """Raise ``SystemExit`` for options that do nothing with the others."""
    if options.namespaces and not options.agents:
        raise SystemExit("chaos: --namespaces: expected --agents, too: it is their hosts that are namespaces")
    if options.rate is not None and not options.namespaces:
        raise SystemExit("chaos: --rate: expected --namespaces, too: it is their wires that have a speed")
    if options.agents and (options.victims != "drawn" or options.joiners != 1):
        raise SystemExit("chaos: --victims and --joiners: expected no --agents, whose hosts take turns")
    if options.joiners < 1 or (options.rate is not None and options.rate < 1):
        raise SystemExit("chaos: --joiners and --rate: expected 1 or more")


def main() -> None:
    """Measure."""
    options = parse_arguments()
    check_combinations(options)
    kinds = (NETWORK_KINDS if options.namespaces else HOST_KINDS) if options.agents else KINDS
    options.kinds = options.kinds or ",".join(kinds)
    unknown = set(options.kinds.split(",")) - set(kinds)
    least = 1 if options.kinds == "join" else LEAST_RANKS
    if unknown or options.ranks < least or options.faults < 0 or options.every < 1:
        raise SystemExit(
            f"chaos: expected kinds among {', '.join(kinds)}, {least} ranks or more, got {sorted(unknown)}"
        )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        if any(options.out.iterdir()):
            raise SystemExit(f"chaos: {options.out} is not empty, and ranks would add to the logs of an earlier run")
        raise SystemExit(asyncio.run(measure(options, options.out)))
    with tempfile.TemporaryDirectory(prefix="asyncpar-chaos-") as folder:
        raise SystemExit(asyncio.run(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
