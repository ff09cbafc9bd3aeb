"""The programs on the pages of the documentation, and how tests run them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.surroundings import SURROUNDINGS, Surroundings
from tests.program_host import PATIENCE, ProgramHost
from tests.soak import is_soak

ROOT = Path(__file__).resolve().parents[2]
REPLACES_A_PART = re.compile(r"^(?:ap|asyncpar)(?:\.\w+)+ = ", re.MULTILINE)
CHANGES_ITS_PROCESS = re.compile(rf"torch|{REPLACES_A_PART.pattern}", re.MULTILINE)
"""What a program has that nothing may run after: the only process group of torch, or a part of the package replaced."""

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True, slots=True)
class Shown:
    """A block of Python on a page."""

    page: str
    number: int
    text: str

    @property
    def is_program(self) -> bool:
        return "ap.run(main)" in self.text or "if __name__ ==" in self.text

    @property
    def is_test(self) -> bool:
        return re.search(r"^(async )?def test_", self.text, re.MULTILINE) is not None

    @property
    def surroundings(self) -> Surroundings | None:
        found = [
            value for (page, begin), value in SURROUNDINGS.items() if page == self.page and self.text.startswith(begin)
        ]
        assert len(found) <= 1, f"{self}: several surroundings fit"
        return found[0] if found else None

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


SHOWN = [
    Shown(page.relative_to(ROOT).as_posix(), number, text)
    for page in PAGES
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


def shows(page: str, program: str) -> bool:
    """Decide whether ``page`` has ``program``, whatever its comments and breaks of lines."""
    return any(_meaning(shown.text) == _meaning(program) is not None for shown in SHOWN if shown.page == page)


def _meaning(program: str) -> str | None:
    try:
        return ast.dump(ast.parse(program))
    except SyntaxError:  # a piece of a program
        return None


def run(*command: str | Path, home: Path, status: int = 0) -> str:
    """Run Python as in another folder, with the tests' own modules at hand; its output, if it ends with ``status``."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}


def run_piece(
    shown: Shown, home: Path, host: ProgramHost | None = None, *, alone: re.Pattern[str] = CHANGES_ITS_PROCESS
) -> None:
    """Run a program, or a piece of one within its surroundings, in ``host`` unless ``alone`` is found in it."""
    around, text = shown.surroundings, shown.text
    if around is not None:
        for long, short in around.shorter.items():
            assert long in text, f"{shown}: {long!r} is not there"
            text = text.replace(long, short)
        assert around.program.count("BLOCK") == 1
        text = around.program.replace("BLOCK", text)
    (home / "program.py").write_text(text)
    if host is None or is_soak() or alone.search(text):
        run("program.py", home=home)
    else:
        done = host.run("program.py", home=home, environment=environment(home))
        assert done.returncode == 0, done.stdout + done.stderr


PIECES = [shown for shown in SHOWN if not shown.is_program and not shown.is_test]


def pieces_that_need(what: str | None) -> list[Shown]:
    """Return the pieces that need ``what``, or nothing."""
    return [shown for shown in PIECES if (shown.surroundings.needs if shown.surroundings else None) == what]
