"""The page about dependencies names those that a package brings, and no others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dependencies.md").read_text()


def test_the_page_has_a_line_for_each_dependency_and_for_asyncpar_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in project["dependencies"]}
    table = PAGE.partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w-]+) \| (\d+\.\d) \|", table, re.MULTILINE)
    assert {name for name, _ in rows} == needed | {"asyncpar"}
    sizes = [float(size) for name, size in rows if name not in ("asyncpar", "grpcio-health-checking", "protobuf")]
    assert len(sizes) == len(needed) - 2
