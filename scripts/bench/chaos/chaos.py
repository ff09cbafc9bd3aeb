"""Train under faults, and compare every bit with the run without: what ranks of an elastic job lose when others go.

    scripts/bench/run chaos --faults 60 --seed 1
    scripts/bench/run chaos --faults 20 --seed 1 --megabytes 100 --compute 0.05 --kinds kill
    scripts/bench/run chaos --faults 20 --mode zero3
    scripts/bench/run chaos --faults 0 --megabytes 100
    scripts/bench/run chaos --agents 4 --faults 8 --every 150 --seed 1
    scripts/bench/run chaos --agents 4 --namespaces --faults 60 --every 150 --seed 1
    scripts/bench/run chaos --faults 1 --kinds join --joiners 4 --megabytes 100 --every 16
    scripts/bench/run chaos --agents 1 --namespaces --rate 100000000 --kinds join --faults 2 --compute 0.1
    scripts/bench/run chaos --faults 8 --kinds kill --mode zero3 --victims each

Each rank is the only one of a pretended host of its own, whose agent starts it again.  Every few steps one is killed
(SIGKILL), stopped (SIGSTOP) or asked to end (SIGTERM, which lets it leave after its step), its host is drained, or
another host comes, as the seed says.  With ``--agents`` faults are those of agents: the leader's is killed, or another
one, stopped or drained; each comes back.  With ``--namespaces``, which needs root, hosts are network namespaces on one
bridge: then links go down and up (``cut``), what a host sends or hears gets lost without a word (``mute``, ``deaf``),
ranks are killed, stopped or asked to end, and another host comes (``join``); with ``--rate`` their wires have a speed,
and what share of it a copy of the state uses is a figure; where steps are quicker than updates are on the wire, the
others wait for who comes.  With ``--victims each`` rank 0 is the first victim, then rank 1, and so on; before each
fault there are all ranks again.  The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.launch.agents.views import GroupView, RankView
from scripts.bench.chaos.chaos_agents import HOST_KINDS, NETWORK_KINDS, Agents, measure_hosts, placed_ranks
from scripts.bench.chaos.chaos_judge import Logs, Verdict, judge
from scripts.bench.chaos.chaos_worlds import World, causes_of, crashes_in, ended_by_drains, read_agents, worlds_in
from scripts.bench.chaos.elastic_rank import MODES

RANK = Path(__file__).with_name("elastic_rank.py")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
KINDS = ("kill", "stop", "join", "drain", "term")
LEAVING = ("drain", "term")
"""Kinds after which a rank leaves in good order."""

VICTIMS = ("drawn", "each")
LEAST_RANKS = 2
START_SECONDS = 6.0
"""What the start of a newcomer takes at most, on a host with few processors."""
COPY_MEGABYTES = 20
"""So many megabytes of the state it fetches in a second, at least."""
LAST_CALL = 5
"""Seconds for which the first world waits for all hosts, where more may come later."""
LONGEST_STALL = 60.0


@dataclass
class Fault:
    """What was done to whom, a host or one of its slots, and when ranks went on."""

    kind: str
    member: str
    time: float
    step: int
    generation: int
    rank: int | None = None
    """Which rank it was; None of a join."""
    recovered: float | None = None
    """Seconds until the next commit in a later world; None of a join."""


def parse_arguments() -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=8, help="steps from one fault to the next, at least")
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


def distance_of(options: argparse.Namespace) -> int:
    """Return the steps from one fault to the next: in them agents start again who is lost, two at a time."""
    step: float = max(options.compute, 0.001) * options.portions / max(options.ranks, 1)
    seconds: float = START_SECONDS + options.megabytes / COPY_MEGABYTES
    return max(int(options.every), math.ceil(seconds / step / 2))


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
        self._agents = Agents(folder)
        self._folder = folder
        self._steps = (options.faults + 2) * options.every
        self.logs = Logs(folder)
        self.faults: list[Fault] = []

    async def run(self) -> int:
        """Run to the end, and return the exit code of the job."""
        options = self._options
        try:
            launcher = await self._launch()
            await self._until(lambda: self.logs.position >= options.every, "the first steps")
            for number in range(options.faults):
                await self._until(
                    lambda number=number: self.logs.position >= (number + 1) * options.every,  # type: ignore[misc]
                    f"fault {number}",
                )
                if options.victims == "each":
                    await self._fill()
                await self._fault()
            await self._until(lambda: self.logs.position >= self._steps, "the end")
            return await asyncio.wait_for(launcher.wait(), LONGEST_STALL)
        finally:
            await self._agents.close()
            self.logs.refresh()

    @property
    def lines(self) -> list[str]:
        """The lines that the agents have printed."""
        return read_agents(self._folder)

    async def _launch(self) -> asyncio.subprocess.Process:
        options, agents = self._options, self._agents
        names = [await self._start() for _ in range(options.ranks)]
        for name in names:
            await self._until(lambda name=name: self._sees(name), f"the agent of {name}")  # type: ignore[misc]
        more = options.faults * options.joiners if "join" in options.kinds.split(",") else 0
        last_call = LAST_CALL if more else LONGEST_STALL
        job = ["--nnodes", f"1:{options.ranks + more}", "--nproc-per-node", "1", "--elastic", "ranks"]
        job += ["--max-restarts", "1000", "--last-call", f"{last_call:g}", "--rdzv-endpoint", agents.any_address()]
        program = arguments_of(options, self._folder / "rank-{pid}.jsonl", compute=options.compute)
        launcher = await agents.asyncpar("launch", *job, *agents.proof, *program, log="launch.log")
        await self._until(lambda: self._has_ranks(options.ranks), "all ranks")
        return launcher

    async def _start(self) -> str:
        """Start the agent of another host, and return its name; the first one founds the group."""
        name = f"m{len(self._agents.addresses):03d}"
        await self._agents.start(name)
        if len(self._agents.addresses) == 1:
            await self._until(lambda: self._sees(name), "the first agent")
        return name

    async def _sees(self, name: str) -> bool:
        view = await self._agents.view()
        return view is not None and name in [host.name for host in view.hosts]

    async def _has_ranks(self, count: int) -> bool:
        view = await self._agents.view()
        return view is not None and len(placed_ranks(view)) >= count

    async def _view(self) -> GroupView:
        """Return the view of an agent, which may take a while to answer."""
        while (view := await self._agents.view()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return view

    async def _until(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        before, changed = -1, time.monotonic()
        while True:
            self.logs.refresh()
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            if self.logs.position != before:
                before, changed = self.logs.position, time.monotonic()
            if time.monotonic() - changed > LONGEST_STALL:
                raise SystemExit(f"chaos: nothing was committed for {LONGEST_STALL:g} s before {what}")
            await asyncio.sleep(0.01)

    async def _fault(self) -> None:
        kinds, running = self._options.kinds.split(","), len(self._agents.running)
        kind = self._random.choice(kinds)
        if kind == "join" and running >= self._options.ranks + max(2, self._options.joiners):
            kind = next((other for other in kinds if other != "join"), "join")
        if kind == "join" or running <= LEAST_RANKS:
            await self._join(self._options.joiners)
            return
        await self._until_ranks(LEAST_RANKS + 1)  # the others have to go on
        view = await self._view()
        await self._strike(view, kind, *self._choose_victim(placed_ranks(view)))

    async def _fill(self) -> None:
        """Return when there are all ranks again: agents start those that are lost."""
        missing = self._options.ranks - len(self._agents.running)
        if missing > 0:
            await self._join(missing)
        await self._until_ranks(self._options.ranks)

    async def _until_ranks(self, count: int) -> None:
        """Return when so many ranks are in the world.  Ends the program when the job is over before."""

        async def is_so() -> bool:
            return self.logs.position >= self._steps or await self._has_ranks(count)

        await self._until(is_so, "newcomers")
        if self.logs.position >= self._steps:
            raise SystemExit("chaos: the job was over before newcomers counted; give a larger --every")

    def _choose_victim(self, present: Sequence[tuple[str, RankView]]) -> tuple[str, RankView]:
        if self._options.victims == "each":
            return present[len(self._struck) % len(present)]
        return self._random.choice(present)

    @property
    def _struck(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind != "join"]

    async def _join(self, count: int) -> None:
        """Start so many newcomers at once."""
        generation = generation_of(await self._view())
        for _ in range(count):
            now, position = time.monotonic(), self.logs.position
            self.faults.append(Fault("join", await self._start(), now, position, generation))

    async def _strike(self, view: GroupView, kind: str, host: str, rank: RankView) -> None:
        """Do a fault to a rank, or its host, and return when the others have gone on."""
        assert rank.pid is not None, "it runs"
        fault = Fault(kind, host, time.monotonic(), self.logs.position, generation_of(view), rank.rank)
        self.faults.append(fault)
        if kind == "drain":
            await self._agents.drain(host)
        else:
            os.kill(rank.pid, SIGNALS[kind])
        await self._until(lambda: self._has_recovered(fault), f"the recovery of {kind} {host}")

    def _has_recovered(self, fault: Fault) -> bool:
        for commit in self.logs.commits:
            if commit["time"] > fault.time and commit["generation"] > fault.generation:
                fault.recovered = commit["time"] - fault.time
                return True
        return False


def generation_of(view: GroupView) -> int:
    """Return the generation of the current world, -1 if there is none."""
    return -1 if view.generation is None else view.generation


def step_seconds(logs: Logs) -> list[float]:
    """Return the times between commits of successive steps, as first seen."""
    first: dict[int, float] = {}
    for line in logs.commits:
        first.setdefault(line["step"], line["time"])
    times = [first[step] for step in sorted(first)]
    return [later - earlier for earlier, later in pairwise(times)]


def join_stalls(logs: Logs, worlds: Sequence[World]) -> list[float]:
    """Return by how much the first commit after each join, without another fault, was later than is usual there.

    That is the median of the other steps of that world: with more ranks on the same processors all steps are longer.
    """
    first: dict[int, dict[str, Any]] = {}
    for line in logs.commits:
        first.setdefault(line["step"], line)
    gaps = {step: line["time"] - first[step - 1]["time"] for step, line in first.items() if step - 1 in first}
    stalls = []
    for world in worlds:
        steps = [step for step in sorted(gaps) if first[step]["generation"] == world.generation]
        if world.generation > 0 and world.joined and not world.left and len(steps) > 1:
            stalls.append(gaps[steps[0]] - statistics.median(gaps[step] for step in steps[1:]))
    return stalls


def healing_seconds(logs: Logs) -> list[float | None]:
    """Return the seconds from the start of each newcomer's process to its first step in a world.

    None of those that came when all was over, or were lost before.
    """
    found: list[float | None] = []
    for lines in logs.lines.values():
        started = next((line for line in lines if line["kind"] == "started"), None)
        own = [line for line in lines if line["kind"] in ("begun", "committed") and not line.get("replay")]
        if started is not None and (not own or own[0]["generation"] > 0):
            found.append(own[0]["time"] - started["time"] + started["age"] if own else None)
    return found


def quantile(values: Sequence[float], part: float) -> float | None:
    """Return a quantile, None of nothing."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else None


def show(value: float | None, unit: str = "s") -> str:
    """Return a figure as text."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if unit == "ms" else f"{value:.2f} s"


def table(verdict: Verdict, chaos: Chaos, worlds: Sequence[World]) -> list[tuple[str, str, str, str]]:
    """Return the rows of measured against goal."""
    gaps = step_seconds(chaos.logs)
    usual = statistics.median(gaps) if gaps else 0.0
    after = {
        kind: [fault.recovered - usual for fault in chaos.faults if fault.kind == kind and fault.recovered is not None]
        for kind in KINDS
    }
    stalls = join_stalls(chaos.logs, worlds)
    leaving = [seconds for kind in LEAVING for seconds in after[kind]]
    return [
        ("G1", "parameters, losses, sample log", "bit-equal" if verdict.is_equal else "DIFFERENT", "bit-equal"),
        ("G2", "committed steps lost or repeated", str(len(verdict.repeated)), "0"),
        ("G3", "SIGKILL to the next commit, less a step, p50", show(quantile(after["kill"], 0.5)), "0.3 s"),
        ("G3", "the same, p99", show(quantile(after["kill"], 0.99)), "1 s"),
        ("G4", "SIGSTOP to the next commit, p99", show(quantile(after["stop"], 0.99)), "5 s"),
        ("G5", "survivors' stall per join, p50", show(quantile(stalls, 0.5), "ms"), "150 ms"),
        ("G5", "the same, largest", show(max(stalls, default=None), "ms"), "150 ms"),
        *join_rows(healing_seconds(chaos.logs)),
        *drain_rows(verdict),
        ("G16", "drain to the next commit, less a step, p50", show(quantile(leaving, 0.5), "ms"), "-"),
        *victim_rows(chaos.faults, usual),
        ("", "a step, median", show(usual, "ms"), "-"),
    ]


def join_rows(newcomers: Sequence[float | None]) -> list[tuple[str, str, str, str]]:
    """Return the rows of how long newcomers took; those that came into no world do not count."""
    healed = [seconds for seconds in newcomers if seconds is not None]
    return [
        ("G6", "process start to counted member, p50", show(quantile(healed, 0.5)), "3 s"),
        ("G6", "the same, largest", show(max(healed, default=None)), "3 s"),
        ("G6", "newcomers that counted", f"{len(healed)} of {len(newcomers)}", "all"),
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
    code, steps = await chaos.run(), (options.faults + 2) * options.every
    worlds = worlds_in(chaos.lines)
    struck = [(fault.generation, f"{fault.member}/0", fault.kind) for fault in chaos.faults if fault.kind != "join"]
    drained = ended_by_drains(worlds, causes_of(worlds, struck), LEAVING)
    verdict = judge(chaos.logs, wanted, {"launch": code}, steps=steps, portions=options.portions, drained=drained)
    verdict.failed += crashes_in(chaos.lines)
    rows = table(verdict, chaos, worlds)
    for number, what, measured, goal in rows:
        print(f"{number:4} {what:46} {measured:>12}   goal {goal}")
    for text in verdict.troubles[:20]:
        print(f"  {text}")
    counts = {kind: sum(fault.kind == kind for fault in chaos.faults) for kind in KINDS}
    print(f"faults: {counts}, worlds: {len(worlds)}")
    figures = {"rows": rows, "faults": [asdict(fault) for fault in chaos.faults], "settings": vars(options)}
    print(json.dumps(figures, default=str), flush=True)
    return 1 if verdict.troubles else 0


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
    if not options.agents:
        options.every = distance_of(options)
    if options.out is not None:
        options.out = options.out.resolve()
        options.out.mkdir(parents=True, exist_ok=True)
        if any(options.out.iterdir()):
            raise SystemExit(f"chaos: {options.out} is not empty, and ranks would add to the logs of an earlier run")
        raise SystemExit(asyncio.run(measure(options, options.out)))
    with tempfile.TemporaryDirectory(prefix="asyncpar-chaos-") as folder:
        raise SystemExit(asyncio.run(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
