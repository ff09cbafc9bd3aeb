"""Besiege an elastic job: pause and cut off hosts, leaders above all, one fault every few seconds, and judge the rest.

    scripts/bench/run siege --faults 100 --hosts 3,4,5 --seed 1
    scripts/bench/run siege --faults 20 --hosts 3 --kinds leader-agent,leader-both,pair --out /tmp/siege

Each host is a network namespace with an agent and one rank; needs root.  A fault stops (SIGSTOP) the agent of the
leader or of another host, its rank, or both, for 0.5 to 5 s, takes its link down, or loses without a word what it sends
(``mute``) or what others send to it (``deaf``); a third of those of the leader come with another host's, and a ``pair``
hits two hosts at once.  At least one host that has the state is left alone each time.  Judged are: parameters, losses
and samples are those of the run without faults, step by step; no committed step is repeated, lost, or committed twice
with different digests; no rank ends unless a fault made the others declare it lost; the time without a commit after all
faults have healed.  One JSON line per run goes to stdout, after a table; the exit code is 1 when a judge objects.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.chaos.chaos_judge import Logs
from scripts.bench.chaos.elastic_rank import MODES
from scripts.bench.chaos.siege_judge import MOST_GAP, TRACEBACK, Gap, SiegeVerdict, judge_siege, quiet_gaps
from scripts.bench.chaos.siege_plan import KINDS, draw_faults
from scripts.bench.chaos.siege_run import Siege
from scripts.bench.namespaces import NoNamespacesError, hosts

RANK = Path(__file__).with_name("elastic_rank.py")
ENDLESS = 10_000_000
LEAST_HOSTS = 2
SHOWN = 5
"""So many findings of each judge are printed."""

AROUND = 3
"""Of so many the lines around them, too."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="of each run")
    parser.add_argument("--hosts", default="3,4,5", help="numbers of hosts, a run for each, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which faults, separated by commas")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds from the last heal to the next fault")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds to wait at most until all hosts are back")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a commit that end the run")
    parser.add_argument("--quiet", type=float, default=12.0, help="seconds to watch after the last fault")
    parser.add_argument("--gap", type=float, default=MOST_GAP, help="seconds without a commit that may be")
    parser.add_argument("--limit", type=float, help="seconds that a run may take (by default 60 and 40 per fault)")
    parser.add_argument("--portions", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=0.25)
    parser.add_argument("--compute", type=float, default=0.01, help="seconds that a portion takes")
    parser.add_argument("--mode", choices=[mode for mode in MODES if mode != "diloco"], default="plain")
    parser.add_argument("--out", type=Path, help="keep the logs there, also of runs that pass")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds: expected some of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    counts = options.hosts.split(",")
    if not all(count.isdecimal() and int(count) >= LEAST_HOSTS for count in counts):
        parser.error(f"--hosts: expected numbers of {LEAST_HOSTS} or more, separated by commas, got {options.hosts}")
    options.hosts = [int(count) for count in counts]
    if options.faults < 1 or min(options.every, options.patience) <= 0:
        parser.error("expected 1 fault or more, and times above 0")
    options.limit = 60.0 + 40.0 * options.faults if options.limit is None else options.limit
    return options


def arguments_of(options: argparse.Namespace, log: str, *, steps: int, compute: float) -> list[str]:
    """Return the command line of a rank."""
    settings = [f"--steps={steps}", f"--portions={options.portions}", f"--megabytes={options.megabytes}"]
    return [str(RANK), *settings, f"--compute={compute}", f"--mode={options.mode}", "--lineages", f"--log={log}"]


async def lineages_alone(options: argparse.Namespace, folder: Path, steps: int) -> list[str]:
    """Compute so many steps in one process without faults, and return the lineage of each."""
    log = folder / "alone.log"
    command = arguments_of(options, str(log), steps=steps, compute=0.0)
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    if await process.wait() != 0:
        raise SystemExit("siege: the run without faults has failed")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["lineage"] for line in lines if line["kind"] == "committed"]


async def besiege(options: argparse.Namespace, count: int, folder: Path) -> bool:
    """Run with ``count`` hosts, print what came of it, and return whether all judges are content."""
    names = [f"host{number}" for number in range(count)]
    work = asyncio.current_task()
    assert work is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # namespaces that are left behind stay
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    with ExitStack() as stack:
        try:
            network = stack.enter_context(hosts(names))
        except NoNamespacesError as error:
            raise SystemExit(f"siege: {error}") from error
        siege = Siege(options, names, folder, network)
        arguments = arguments_of(options, str(folder / "rank-{pid}.jsonl"), steps=ENDLESS, compute=options.compute)
        why = await siege.run(arguments, draw_faults(options.seed, options.faults, options.kinds))
    (folder / "hits.txt").write_text("".join(f"{json.dumps(asdict(hit))}\n" for hit in siege.hits))
    verdict = await judge_run(options, siege, folder)
    verdict.ended += [why] if why else []
    gaps = quiet_gaps(siege.logs, siege.hits, until=siege.watched_until)
    _print(options, count, siege, verdict, max(gaps, key=lambda gap: gap.seconds))
    print(json.dumps(figures(options, count, siege, verdict, gaps), default=str), flush=True)
    return not verdict.troubles


async def judge_run(options: argparse.Namespace, siege: Siege, folder: Path) -> SiegeVerdict:
    """Compute what the run has committed without faults, and compare."""
    steps = 1 + max((line["step"] for _, line in siege.logs.of("committed")), default=-1)
    lineages = await lineages_alone(options, folder, steps) if steps else []
    return judge_siege(
        siege.logs,
        siege.lines.lines,
        siege.hits,
        lineages=lineages,
        portions=options.portions,
        until=siege.watched_until,
        most_gap=options.gap,
    )


def figures(
    options: argparse.Namespace, count: int, siege: Siege, verdict: SiegeVerdict, gaps: list[Gap]
) -> dict[str, Any]:
    """Return what the run came to, for programs."""
    lasting = max(gaps, key=lambda gap: gap.seconds)
    return {
        "hosts": count,
        "seed": options.seed,
        "faults": siege.faults,
        "hits": dict(Counter(hit.what for hit in siege.hits)),
        "steps": siege.logs.position,
        "generations": generations(siege.logs),
        "largest_gap": round(lasting.seconds, 2),
        "largest_gap_after_fault": lasting.fault,
        "whole_after": [round(seconds, 1) for seconds in siege.whole_after],
        "findings": {name: len(found) for name, found in verdict.troubles.items()},
        "first": {name: found[0] for name, found in verdict.troubles.items()},
    }


def generations(logs: Logs) -> int:
    """Return in how many worlds steps were committed."""
    return len({line["generation"] for _, line in logs.of("committed")})


def _print(options: argparse.Namespace, count: int, siege: Siege, verdict: SiegeVerdict, lasting: Gap) -> None:
    """Print a table for a person, and the surroundings of what was found."""
    rows = [
        ("faults", f"{siege.faults} of {options.faults}"),
        ("steps committed, in worlds", f"{siege.logs.position}, {generations(siege.logs)}"),
        ("parameters, losses, samples that differ", len(verdict.different)),
        ("committed steps repeated or lost", len(verdict.repeated)),
        ("steps with different digests", len(verdict.split)),
        ("ranks that crashed; tracebacks", f"{len(verdict.crashes)}; {len(verdict.tracebacks)}"),
        ("ranks declared lost, and not hit", len(verdict.unaccounted)),
        ("longest without a commit after a heal", f"{lasting.seconds:.1f} s"),
        ("all hosts back, at most", f"{max(siege.whole_after, default=0.0):.1f} s"),
    ]
    print(f"{count} hosts, seed {options.seed}")
    for what, measured in rows:
        print(f"  {what:42} {measured!s:>14}")
    for name, found in verdict.troubles.items():
        for text in found[:SHOWN]:
            print(f"  {name}: {text}")
        if len(found) > SHOWN:
            print(f"  {name}: and {len(found) - SHOWN} more")
    ends = [line for line in verdict.lines if TRACEBACK not in line.text]  # which have their tracebacks before them
    for line in (ends or verdict.lines)[:AROUND]:
        print("  --")
        for text in siege.lines.around(line):
            print(f"  {text}")
    said = [one for one in siege.statuses if lasting.began <= one.time <= lasting.began + lasting.seconds + 1.0]
    for status in said[-1:]:
        print(f"  -- after {status.seconds:.1f} s without a commit, of {lasting.seconds:.1f} s, agents said:")
        print("\n".join(f"  {text}" for text in status.text.splitlines()))


def main() -> None:
    """Run for each number of hosts, and exit with 1 if a judge objects."""
    options = parse_arguments()
    is_well = True
    for count in options.hosts:
        if options.out is not None:
            folder = options.out / f"hosts{count}-seed{options.seed}"
            folder.mkdir(parents=True)
        else:
            folder = Path(tempfile.mkdtemp(prefix="asyncpar-siege-"))
        try:
            passes = asyncio.run(besiege(options, count, folder))
        except asyncio.CancelledError as error:
            raise SystemExit(f"siege: it was asked to end; the logs are in {folder}") from error
        is_well = is_well and passes
        if passes and options.out is None:
            shutil.rmtree(folder)
        else:
            print(f"siege: the logs are in {folder}", file=sys.stderr)
    raise SystemExit(0 if is_well else 1)


if __name__ == "__main__":
    main()
