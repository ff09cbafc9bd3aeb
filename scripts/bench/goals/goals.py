"""Print goals and what was measured of each, as tables; measure some of them anew.

    scripts/bench/run goals                                  # every table, from scripts/bench/results/goals
    scripts/bench/run goals elasticity                       # one: observability, elasticity, engines or steps
    scripts/bench/run goals --run G1 G3                      # run the commands of these rows first; a quiet machine
    scripts/bench/run goals engines --run all                # every row of a table

A goal is a row with a command, in the file of its table (``elasticity_goals.py`` and others, which say how long all of
their rows take and what they need).  A figure is stored with the day and the commit that it was measured at, and stays
until it is measured again; a command that fails leaves it as it was.  Rows that a command shows are measured together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.goals import elasticity_goals, engine_goals, observability_goals, step_goals
from scripts.bench.goals.goal import Goal, load, measure, table

TABLES: dict[str, tuple[Goal, ...]] = {
    "observability": observability_goals.GOALS,
    "elasticity": elasticity_goals.GOALS,
    "engines": engine_goals.GOALS,
    "steps": step_goals.GOALS,
}
ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the goals that ``--run`` names, and print the tables that have them, or those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=tuple(TABLES), help="default: all of them, or those of --run")
    parser.add_argument("--run", nargs="+", default=[], metavar="GOAL", help=f"measure these; {ALL}: every one")
    options = parser.parse_args(arguments)
    tables = TABLES if options.table is None else {options.table: TABLES[options.table]}
    known = [goal.name for goals in tables.values() for goal in goals]
    for name in options.run:
        if name not in (ALL, *known):
            parser.error(f"--run: expected {ALL} or some of {', '.join(known)}, got {name!r}")
    if options.run and ALL not in options.run:
        tables = {title: goals for title, goals in tables.items() if any(goal.name in options.run for goal in goals)}
    for title, goals in tables.items():
        measure(title, goals, [goal.name for goal in goals if ALL in options.run or goal.name in options.run])
    for title, goals in tables.items():
        if options.table is None:
            print(f"{title}:\n")
        print("\n".join(table(goals, load(title))), end="\n" if options.table else "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
