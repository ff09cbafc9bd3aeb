"""ARCHITECTURE.md names files and classes that exist, and its walks name files that the operations enter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import walks

ROOT = Path(__file__).resolve().parent.parent / "asyncpar"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([\w/]+\.(?:py|md))`")
CLASS = re.compile(r"`([\w/]+\.py)`, `([A-Z]\w+)`")
LEAST_NAMED = 5


def walk_of(name: str) -> list[str]:
    """Return the files that a walk of the page names."""
    _, _, rest = PAGE.partition(f"<!-- walk: {name} -->\n")
    return FILE.findall(rest.partition("\n\n")[0])


def test_every_file_and_folder_is_there() -> None:
    named = {*FILE.findall(PAGE), *re.findall(r"`((?!tests|asyncpar)[a-z_]+(?:/[a-z_]+)*/)`", PAGE)}
    assert len(named) > 40
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_class_is_in_the_file_that_is_named_beside_it() -> None:
    named = CLASS.findall(PAGE)
    assert len(named) > 40
    missing = [
        (file, name)
        for file, name in named
        if not re.search(rf"^class {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []


def test_every_package_belongs_to_a_group() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"_proto", "v1"}
    named = {name.partition("/")[0] for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", PAGE)}
    assert packages - named == set()


def test_every_walk_of_the_script_is_on_the_page() -> None:
    assert sorted(re.findall(r"<!-- walk: (\w+) -->", PAGE)) == sorted(walks.WALKS)
    assert all(len(set(walk_of(name))) >= LEAST_NAMED for name in walks.WALKS)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("names", [("shm",), ("tcp", "ask", "int8", "pipeline"), ("torch",), ("launch",)], ids=" ".join)
def test_operations_enter_the_files_that_their_walks_name(names: tuple[str, ...]) -> None:
    if "torch" in names:
        pytest.importorskip("torch")
    courses = walks.measure(*names, counted=1, warm=4, launched=1)
    missing = {(name, file) for name, course in courses.items() for file in set(walk_of(name)) - set(course.files)}
    assert missing == set()
