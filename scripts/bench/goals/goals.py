"""Tables of goals and what was measured of each: observability, elasticity and others print theirs by it.

A figure is stored with the day and the commit that it was measured at, and stays until it is measured again.  A command
that fails leaves its figures as they were.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.programs import own_command

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "scripts" / "bench" / "results" / "goals"
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


def load(stored: Path) -> dict[str, dict[str, str]]:
    """Return by name of goal its ``figure`` and when it was ``measured``; nothing if none was."""
    found: dict[str, dict[str, str]] = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    return found


def table(goals: Sequence[Goal], known: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of the table, in Markdown."""
    rows = ["| goal | wanted | figure | measured | command | what bounds it |", "| --- | --- | --- | --- | --- | --- |"]
    for goal in goals:
        row = known.get(goal.name, {"figure": "-", "measured": NEVER})
        cells = (goal.name, goal.wanted, row["figure"], row["measured"], f"`{goal.command}`", goal.bound)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def run(command: str) -> str:
    """Run a command of a goal; return what it prints on both streams.  Exits with what it printed if it fails."""
    done = subprocess.run(
        own_command(command),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit status {done.returncode}; its figures stay as they were\n{done.stdout}")
    return done.stdout


def today_and_commit() -> str:
    """Return the day, and the commit that is checked out."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return f"{day}, {done.stdout.strip()}" if done.returncode == 0 else day


def main(description: str | None, goals: Sequence[Goal], stored: Path, arguments: Sequence[str] | None = None) -> int:
    """Measure the goals that ``--run`` names, and those that the same commands show, and print the table of all."""
    names = [goal.name for goal in goals]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], choices=("all", *names), metavar="GOAL", help="measure these")
    asked = parser.parse_args(arguments).run
    chosen = [goal for goal in goals if goal.name in asked or "all" in asked]
    for command in dict.fromkeys(goal.command for goal in chosen):
        output, when = run(command), today_and_commit()
        known = load(stored)
        read = [goal for goal in goals if goal.command == command]  # of the others that it shows, too
        known |= {goal.name: {"figure": goal.read(output), "measured": when} for goal in read}
        ordered = {name: known[name] for name in names if name in known}
        stored.write_text(f"{json.dumps(ordered, indent=1, ensure_ascii=False)}\n", encoding="utf-8")
    print("\n".join(table(goals, load(stored))))
    return 0
