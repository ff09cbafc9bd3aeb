"""The reference leaves out no public name, no variable and no page."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from asyncpar import __version__
from asyncpar.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return __import__("public_names")


def test_every_package_with_public_names_is_in_the_reference(known: Any) -> None:
    public = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / "asyncpar").rglob("__init__.py")
        if "__all__" in init.read_text()
    }
    documented = {name for names in known.PACKAGES.values() for name in names}
    assert sorted(public - documented) == sorted(known.INTERNAL_PACKAGES)
    for page, names in known.PACKAGES.items():
        text = (DOCS / "reference" / f"{page}.md").read_text()
        named = re.findall(r"^\.\. public-(?:names|summary):: (\S+)$", text, re.MULTILINE)
        assert sorted(named) == sorted(names)
        parts = sorted(path.stem for path in (DOCS / "reference" / page).glob("*.md"))
        assert sorted(re.findall(rf"^{page}/(\w+)$", text, re.MULTILINE)) == parts
        assert f"\n{page}\n" in (DOCS / "reference" / "index.md").read_text()


def test_every_public_name_is_documented_once(known: Any) -> None:
    packages = [name for names in known.PACKAGES.values() for name in names if name != "asyncpar.torch"]
    expected = [(package, name) for package in packages for name in known.public_names(package)]
    documented = [(one.package, one.name) for one in known.entries() if not one.methods]
    assert sorted(one for one in documented if one[0] != "asyncpar.torch") == sorted(expected)
    apart = [(one.package, one.name, method) for one in known.entries() for method in one.methods]
    assert len(apart) == len(set(apart)) > 50
    owners = [getattr(importlib.import_module(package), name) for package, name, _ in apart]
    assert [one for owner, one in zip(owners, apart, strict=True) if not hasattr(owner, one[2])] == []


def test_names_are_for_programs_or_say_what_else_they_are_for(known: Any) -> None:
    for package, names in [*known.INTERNAL.items(), *known.EXTENSION_POINTS.items(), *known.RETURNED.items()]:
        if package != "asyncpar.torch" and names != "*":
            assert sorted(set(names.split()) - set(known.listed_names(package))) == [], package
    assert known.use_of("asyncpar", "Node") == "programs"
    assert known.use_of("asyncpar.codecs", "register_codec") == "extension point"
    assert known.use_of("asyncpar.gradsync", "StepOutcome") == "returned"
    assert known.use_of("asyncpar.errors", "PeerLost") == "raised"
    assert "Bucket" not in known.public_names("asyncpar.gradsync")


def test_the_reference_has_the_mark_the_fixtures_and_the_setting_of_the_pytest_plugin() -> None:
    plugin = (ROOT / "asyncpar" / "pytest_plugin.py").read_text()
    names = re.findall(r"^@pytest\.fixture\ndef (\w+)", plugin, re.MULTILINE)
    names += re.findall(r'^SETTING: Final = "(\w+)"', plugin, re.MULTILINE) + re.findall(r'"(\w+)\(size, \*', plugin)
    assert len(names) == 5
    page = (DOCS / "reference" / "testing.md").read_text()
    assert [name for name in names if f"\n| `{name}` |" not in page] == []


def test_every_page_is_in_the_contents_of_the_site() -> None:
    listed = re.findall(r"^[\w/]+$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({page.stem for page in DOCS.glob("*.md")} - {"index"} | {"reference/index"})


def test_every_extra_has_its_line() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (DOCS / "start.md").read_text()
    cells = re.findall(r"^\| (`[^|]*`) \|", page.partition("\n## Install\n")[2], re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(named) == sorted(set(extras) - {"test", "docs", "dev"})
    assert "`test`, `docs` and `dev`" in page


def test_every_variable_has_its_line() -> None:
    used = set()
    for source in (ROOT / "asyncpar").rglob("*.py"):
        used |= set(re.findall(r"ASYNCPAR_[A-Z_]*[A-Z]", source.read_text()))
    lines = re.findall(r"^\| `(ASYNCPAR_[A-Z_]+)`", (DOCS / "reference" / "settings.md").read_text(), re.MULTILINE)
    assert sorted(lines) == sorted(set(lines))
    assert sorted(used) == sorted(lines)


def test_one_place_says_how_asyncpar_is_installed() -> None:
    """A release changes it; elsewhere ``pip install "asyncpar[EXTRA]"`` adds an extra to an asyncpar that is there."""
    pages = (ROOT / "README.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md"))
    sources = re.compile(r"(?:pip install|uv add|uv pip install) (?:asyncpar|.*/checkout|.*\.whl)")
    assert {page.name for page in pages if sources.search(page.read_text())} == {"start.md"}
    section = (DOCS / "start.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"asyncpar-([\d.]+)-py3-none-any\.whl", section)) == {__version__}
    assert "docs/start.md#install" in (ROOT / "README.md").read_text()
    assert "(start.md)" in (DOCS / "index.md").read_text()


def test_every_command_is_on_a_page() -> None:
    pages = [path.read_text() for path in sorted((DOCS / "reference" / "commands").glob("*.md"))]
    shown = [
        name.lower() for page in pages for name in re.findall(r"^\.\. click:: directives:(\w+)$", page, re.MULTILINE)
    ]
    assert sorted(shown) == sorted(main.list_commands(click.Context(main)))
