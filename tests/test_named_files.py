"""Files that pages, docstrings and comments name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("asyncpar", "tests", "scripts")
PATH = re.compile(r"(?<![\w/.])((?:asyncpar|tests|scripts)/[\w/]+\.(?:py|md))")
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
