"""Print the goals of seeing a job, A1 to A10, and what was measured of each; measure some of them anew.

    python scripts/bench/observability.py                       # the table, from scripts/bench/results/goals
    python scripts/bench/observability.py --run "A5" "A9"       # run the commands of these rows first; a quiet machine
    python scripts/bench/observability.py --run all             # about an hour, most of it A10

A figure is stored with the day and the commit that it was measured at, and stays until it is measured again.  A command
that fails leaves its figure as it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "scripts" / "bench" / "results" / "goals" / "observability.json"
NEVER = "not measured"
Read = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Goal:
    """One row: ``read`` makes the figure of what ``command`` prints, ``bound`` says what keeps it from being better."""

    name: str
    wanted: str
    command: str
    read: Read
    bound: str


def lines(pattern: str, shown: str) -> Read:
    """Return what fills ``shown`` with the groups of ``pattern``, wherever that is in the output."""

    def read(output: str) -> str:
        found = re.search(pattern, output, re.DOTALL)
        if found is None:
            raise SystemExit(f"expected {pattern!r} in the output, got {output[-400:]!r}")
        return shown.format(*found.groups())

    return read


def last_object(show: Callable[[dict[str, Any]], str]) -> Read:
    """Return what shows the JSON object in the last line of the output that is one."""

    def read(output: str) -> str:
        text = next((line for line in reversed(output.splitlines()) if line.startswith("{")), None)
        if text is None:
            raise SystemExit(f"expected a JSON object in the last line, got {output[-400:]!r}")
        return show(json.loads(text))

    return read


def _cost(found: dict[str, Any]) -> str:
    return f"{found['percent']:+.1f} % (median of {found['pairs']} pairs)"


def _stragglers(found: dict[str, dict[str, int]]) -> str:
    cases = (f"{case} {seen.get('right', 0)} of {sum(seen.values())}" for case, seen in found.items())
    return f"right looks: {', '.join(cases)}"


def _trace(found: dict[str, Any]) -> str:
    lost = found["messages_without_arrow"] + found["arrows_without_begin"]
    viewer = "not opened" if found["viewer"] is None else "all of it in Perfetto's viewer"
    return (
        f"{found['megabytes']:.1f} MB, {found['arrows']} arrows, {lost} missing, "
        f"{found['arrows_backwards']} backwards, clocks {found['clock_ahead_s']:g} s apart; {viewer}"
    )


GOALS = (
    Goal(
        "A1",
        "a record takes at most 0.8 us",
        "asyncpar launch --nproc-per-node 2 scripts/bench/recorder.py",
        lines(r"records alone: ([\d.]+) us per operation, ([\d.]+) us", "{} us; {} us for one that is over at once"),
        "packing a record and two looks at the clock are half of it, the interpreter most of the rest; native byte "
        "order, fewer names and a table of offsets were tried and save 0.08 us together",
    ),
    Goal(
        "A1, step",
        "at most 1 % of a `train_lm` step",
        "asyncpar launch --nproc-per-node 2 scripts/bench/observe_cost.py --steps 300 --dp 2",
        last_object(_cost),
        "the number of operations in a step",
    ),
    Goal(
        "A1, page",
        "at most 2 % with the dashboard open",
        "asyncpar launch --nproc-per-node 2 --dashboard scripts/bench/observe_cost.py --steps 200 --dp 2",
        last_object(_cost),
        "the launcher paints and serves on the ranks' cores",
    ),
    Goal(
        "A2",
        "`status` names a stopped rank of 4, its operation and place within 2 s",
        "python scripts/bench/look.py --rounds 10",
        lines(r"status names.*?: (median [\d.]+ s, slowest [\d.]+ s)", "{}"),
        "ranks tell what they do once a second; then the start of the command",
    ),
    Goal(
        "A3",
        "12 planted hangs: culprit and cause of each",
        "python scripts/bench/hangs.py",
        lines(r"culprit and cause: (\d+ of \d+)", "{}"),
        "virtual time; what agents see of stopped, dead and blocked ranks is put in",
    ),
    Goal(
        "A4",
        "torch's analyzer on our dumps: nothing false in healthy runs, agrees on four mismatches",
        "scripts/test-backends tests/observe/test_flight.py",
        lines(r"(\d+) passed", "{} tests passed"),
        "torch's format has no roots and no reductions",
    ),
    Goal(
        "A5",
        "4 ranks traced for 10 s: at most 50 MB, every arrow, none backwards, clocks 5 s apart",
        "python scripts/bench/traces.py --seconds 10",
        last_object(_trace),
        "300,000 events; a ring keeps 4,096, looked at twice a second",
    ),
    Goal(
        "A6",
        "stacks of 8 ranks within 1 s, one of them stopped",
        "python scripts/bench/look.py --rounds 10",
        lines(r"stacks of 8.*?: (median [\d.]+ s, slowest [\d.]+ s)", "{}"),
        "the start of the command; a rank has 0.7 s to answer",
    ),
    Goal(
        "A7",
        "a slow rank and its cause within 20 steps; no false alarm",
        "python scripts/bench/stragglers.py --cases none,compute,input,collection,niced,link --seconds 15",
        last_object(_stragglers),
        "a rank that shares its processor may be called slow by computing",
    ),
    Goal(
        "A8",
        "page at most 300 kB; 64 ranks at 1 Hz at most 5 % of a core, memory flat",
        "python scripts/bench/dashboard.py",
        lines(
            r"page_bytes +(\d+).*core_percent +([\d.]+).*after_a_fifth +([\d.]+).*at_the_end +([\d.]+)",
            "{} bytes; {} % of a core; {} MB after a fifth, {} MB at the end",
        ),
        "unpacking what hosts tell, the picture and its encoding",
    ),
    Goal(
        "A9",
        "`doctor`: 10 planted faults, each found within 10 s",
        "python scripts/bench/doctor_faults.py",
        lines(r"(\d+ of \d+), the slowest in ([\d.]+) s", "{}, the slowest in {} s"),
        "hosts that do not answer are waited for",
    ),
    Goal(
        "A10",
        "a post-mortem after SIGKILL of a rank or launcher: 200 of 200",
        "python scripts/bench/post_mortem.py --kills 200 --seed 1",
        last_object(lambda found: f"{found['complete']} of {found['kills']}"),
        "whatever must outlive a death is in files from the start",
    ),
)


def load() -> dict[str, dict[str, str]]:
    """Return by name of goal its ``figure`` and when it was ``measured``."""
    found: dict[str, dict[str, str]] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def table(stored: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of the table, in Markdown."""
    rows = ["| goal | wanted | figure | measured | command | what bounds it |", "| --- | --- | --- | --- | --- | --- |"]
    for goal in GOALS:
        known = stored.get(goal.name, {"figure": "-", "measured": NEVER})
        cells = (goal.name, goal.wanted, known["figure"], known["measured"], f"`{goal.command}`", goal.bound)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def measure(goal: Goal, *, when: str) -> dict[str, str]:
    """Run the command of ``goal``; return its figure."""
    words = shlex.split(goal.command)
    own = {"asyncpar": [sys.executable, "-m", "asyncpar"], "python": [sys.executable]}
    done = subprocess.run(
        [*own.get(words[0], words[:1]), *words[1:]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{goal.command}: exit status {done.returncode}; its figure stays as it was\n{done.stdout}")
    return {"figure": goal.read(done.stdout), "measured": when}


def today_and_commit() -> str:
    """Return the day, and the commit that is checked out."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return f"{day}, {done.stdout.strip()}" if done.returncode == 0 else day


def main(arguments: Sequence[str] | None = None) -> int:
    names = [goal.name for goal in GOALS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], choices=("all", *names), metavar="GOAL", help="measure these")
    chosen = parser.parse_args(arguments).run
    stored = load()
    for goal in GOALS:
        if goal.name in chosen or "all" in chosen:
            stored[goal.name] = measure(goal, when=today_and_commit())
            STORED.write_text(f"{json.dumps(stored, indent=1, ensure_ascii=False)}\n", encoding="utf-8")
    print("\n".join(table(stored)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
