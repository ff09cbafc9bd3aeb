"""A goal: a row of a table with a command, and what reads its figure out of what the command prints."""

from __future__ import annotations

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


def stored_at(title: str) -> Path:
    """Return the file with the figures of the table ``title``."""
    return RESULTS / f"{title}.json"


def load(title: str) -> dict[str, dict[str, str]]:
    """Return, by goal of the table ``title``, its ``figure`` and when it was ``measured``; nothing if none was."""
    stored = stored_at(title)
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


def measure(title: str, goals: Sequence[Goal], names: Sequence[str]) -> None:
    """Run the commands of ``goals`` that ``names`` has; store the figures that they show of the table ``title``."""
    chosen = [goal for goal in goals if goal.name in names]
    for command in dict.fromkeys(goal.command for goal in chosen):
        output, when = run(command), today_and_commit()
        known = load(title)
        read = [goal for goal in goals if goal.command == command]  # of the others that it shows, too
        known |= {goal.name: {"figure": goal.read(output), "measured": when} for goal in read}
        ordered = {goal.name: known[goal.name] for goal in goals if goal.name in known}
        stored_at(title).write_text(f"{json.dumps(ordered, indent=1, ensure_ascii=False)}\n", encoding="utf-8")
