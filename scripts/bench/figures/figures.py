"""Write scripts/bench/FIGURES.md, and the picture of the README, from stored results; run cases to renew these.

    scripts/bench/run figures                       # write the pages from scripts/bench/results/*.json
    scripts/bench/run figures --run codecs actors   # run the commands of these cases first and store their output
    scripts/bench/run figures --run all             # run every case; this takes more than an hour
    scripts/bench/run figures --list                # the cases, their commands and the dates of their results

A result holds the command, the date, the machine and the output of one case.  Running a case replaces all of these and
drops the notes, which are about the old figures.  A command that fails leaves its result as it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.figures.all_reduce_picture import draw, read_timings
from scripts.bench.programs import own_command

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "scripts" / "bench" / "results"
PAGE = ROOT / "scripts" / "bench" / "FIGURES.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "all_reduce.svg"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"

ORDER = (
    "all_reduce",
    "operations",
    "tcp",
    "link",
    "codecs",
    "convergence",
    "overlap",
    "parallel",
    "torch",
    "device",
    "responsiveness",
    "many",
    "actors",
    "serve",
    "strangers",
    "observability",
    "elasticity",
    "engines",
    "steps",
)
"""The cases in the order of the page."""

LEAST_COLUMNS = ("size", "asyncpar (us)", "Gloo (us)", "best MPI / asyncpar")

_HEAD = """# Figures

`scripts/bench/run figures` writes this page from the results in `scripts/bench/results/`; do not edit it.
`scripts/bench/run figures --run NAME` runs a case again and stores its result.

Ranks are real processes, unless a section says otherwise; times are medians of interleaved rounds, so that a slow spell
of the machine affects all sides. Ratios above 1 say that asyncpar is faster. `scripts/bench/run compare --install`
installs the peers (Gloo in torch 2.13.0, and mpi4py with MPICH 5.0.2, Open MPI 5.0.11 and Intel MPI 2021.18) into
environments of their own.

Limits of these figures: up to 1 MB, C libraries that poll without a pause are faster. When other programs use
the same cores, all sides get slower, and asyncpar more than libraries that never sleep (2 ranks, 4 B: 8 us on an idle
machine, 100 to 200 us on a busy one). `asyncpar bench` measures on your machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one case: ``output`` is Markdown or plain lines of the command, ``notes`` are remarks on it."""

    title: str
    about: str
    command: str
    date: str
    machine: str
    output: tuple[str, ...]
    notes: tuple[str, ...] = ()


def load(name: str) -> Result:
    """Return the stored result of the case ``name``."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return Result(**{**content, "output": tuple(content["output"]), "notes": tuple(content["notes"])})


def store(name: str, result: Result) -> None:
    """Replace the stored result of the case ``name``."""
    text = json.dumps(asdict(result), indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def renew(result: Result, *, machine: str, today: str) -> Result:
    """Run the command of ``result`` and return what it prints.  Exits with the command's status if it fails."""
    done = subprocess.run(own_command(result.command), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout)
        raise SystemExit(f"{result.command}: exit status {done.returncode}; its result stays as it was")
    return replace(result, date=today, machine=machine, output=tuple(done.stdout.strip("\n").splitlines()), notes=())


def describe_machine() -> str:
    """Return the cores, the processor and the Python of this machine."""
    processor = platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    if found is not None:
        processor = found[1].strip()
    return f"{os.cpu_count()} cores, {processor}, {platform.system()}, Python {platform.python_version()}"


def section(result: Result) -> list[str]:
    """Return the lines of the page about one case; output without a table is shown as it was printed."""
    lines = [f"## {result.title}", ""]
    if result.about:
        lines += [result.about, ""]
    lines += [f"`{result.command}`, {result.date}, {result.machine}", ""]
    if result.output:
        is_table = any(line.startswith("|") for line in result.output)
        lines += [*result.output, ""] if is_table else ["```", *result.output, "```", ""]
    for note in result.notes:
        lines += [note, ""]
    return lines


def page(results: Sequence[Result]) -> str:
    """Return the page of all figures."""
    return "\n".join([_HEAD, *(line for result in results for line in section(result))]).rstrip("\n") + "\n"


def picture(result: Result) -> str:
    """Return the picture of the README as SVG, of the tables of ``result``."""
    titles = next((line for line in result.output if line.startswith("|")), "")
    missing = [title for title in LEAST_COLUMNS if title not in [cell.strip() for cell in titles.split("|")]]
    if missing:
        raise SystemExit(f"{result.command}: expected a table with columns {', '.join(missing)}; compare all peers")
    return draw(read_timings(result.output))


def comparison(result: Result) -> str:
    """Return the lines of the README that show the picture of ``result`` and say where it comes from."""
    path = PICTURE.relative_to(ROOT)
    about = "Time of all_reduce over the size of the array, for asyncpar, Gloo and the best of three MPI libraries"
    return f"![{about}]({path})\n\n`{result.command}`, {result.date}, {result.machine}.\n"


def with_comparison(readme: str, shown: str) -> str:
    """Return ``readme`` with ``shown`` between the two marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md: expected the marks {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{shown}\n{end}{after}"


def main() -> int:
    """Run what is asked for, then write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], choices=("all", *ORDER), metavar="NAME", help="run these cases")
    parser.add_argument("--list", action="store_true", help="show the cases and end")
    options = parser.parse_args()
    if options.list:
        for name in ORDER:
            result = load(name)
            print(f"{name:16}{result.date}  {result.command}")
        return 0
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for name in ORDER if "all" in options.run else options.run:
        store(name, renew(load(name), machine=describe_machine(), today=today))
    PAGE.write_text(page([load(name) for name in ORDER]), encoding="utf-8")
    shown = load("all_reduce")
    PICTURE.write_text(picture(shown), encoding="utf-8")
    README.write_text(with_comparison(README.read_text(encoding="utf-8"), comparison(shown)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
