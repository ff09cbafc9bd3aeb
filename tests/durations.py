"""``--durations-file``: store what each file of tests takes, and show the slowest with what has changed.

    scripts/test --durations-file                 # tests/durations.json
    scripts/test --durations-file=PATH tests/net  # files that were not run keep what is stored

Durations are of the default suite, in seconds of a worker, with fixtures.  Nothing reads them but this.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

FILE: Final = Path(__file__).with_name("durations.json")
SHOWN: Final = 30
SELECTING: Final = {"--quick": "quick", "--soak": "soak", "-k": "keyword", "-m": "markexpr", "--lf": "lf"}
_COMPLETE: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-file",
        nargs="?",
        const=str(FILE),  # text: xdist sends options to its workers
        metavar="PATH",
        help=f"store the durations of files of tests in PATH, by default {FILE.name} beside the tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("durations_file")
    if path is None or hasattr(config, "workerinput"):
        return
    for option, name in SELECTING.items():
        if config.getoption(name, default=None):
            raise pytest.UsageError(f"--durations-file stores what whole files take: leave out {option}")
    config.pluginmanager.register(Durations(Path(path), config.rootpath), "durations-file")


def read(path: Path) -> dict[str, float]:
    """Return the stored seconds by file, none where nothing is stored."""
    stored: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return stored


def changes(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Return a line for each of the slowest files, slowest first, with the difference from before."""
    slowest = sorted(after, key=lambda file: (-after[file], file))[:SHOWN]
    return [
        f"{after[file]:7.1f} s  {f'{after[file] - before[file]:+.1f}' if file in before else 'new':>7}  {file}"
        for file in slowest
    ]


class Durations:
    """Adds up what the tests of a session take, and stores it at its end."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in _COMPLETE:
            self._lines = [f"the session did not end: {self._path} stays as it is"]
            return
        before = read(self._path)
        kept = {file: seconds for file, seconds in before.items() if (self._root / file).exists()}
        after = kept | {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        lines = ",\n".join(f"  {json.dumps(file)}: {after[file]}" for file in sorted(after))
        self._path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        total = sum(self._seconds.values())
        self._lines = [f"{total:7.1f} s in {len(self._seconds)} files, stored in {self._path}; the slowest:"]
        self._lines += changes(before, after)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("durations of files, and what has changed")
        for line in self._lines:
            terminalreporter.write_line(line)
