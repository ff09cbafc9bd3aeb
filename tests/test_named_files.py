"""Files that pages, docstrings and comments name are there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("asyncpar", "tests", "scripts")
PATH = re.compile(r"(?<![\w/.])((?:asyncpar|tests|scripts)/[\w/]+\.(?:py|md))")
TEST = re.compile(r"(?<![\w/.])(tests/[\w/]+\.py(?:::[\w\[\]-]+)?)")
MODULE = re.compile(r"``(\w+)\.py``")


def pages() -> Iterator[Path]:
    yield from (page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md")  # which names files of its time
    yield from ROOT.glob("docs/*.md")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*.md"))
        yield from (path for path in (ROOT / folder).rglob("*.py") if "_proto" not in path.parts)


def test_every_file_that_is_named_is_there() -> None:
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    missing = []
    for page in pages():
        text, where = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        missing += [f"{where}: {named}" for named in PATH.findall(text) if not (ROOT / named).exists()]
        is_guide = page.name == "__init__.py"  # to the files beside it
        known = {path.name for path in page.parent.rglob("*.py")} if is_guide else names
        missing += [f"{where}: {named}.py" for named in MODULE.findall(text) if f"{named}.py" not in known]
    assert set(missing) <= {"scripts/torch_conformance/rank.py: test_distributed_spawn.py"}  # a file of torch's


@pytest.mark.process
def test_every_test_that_a_script_runs_is_there() -> None:
    """Also those that it names by their parameters, which are others with ``--soak``."""
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()] + [ROOT / ".ci" / "run"]
    texts = {path: re.sub(r"^#.*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE) for path in scripts}
    assert sum(len(TEST.findall(text)) for text in texts.values()) > 20
    for path, text in texts.items():
        tests = TEST.findall(text)
        assert not [test for test in tests if not (ROOT / test.partition("::")[0]).is_file()], path
        cases = [test for test in tests if "::" in test]
        if cases:
            soak = ["--soak"] if "--soak" in text else []
            command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, *soak, *cases], cwd=ROOT, capture_output=True, text=True, timeout=55, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
