"""The reference leaves out no public name, no variable and no page."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

from asyncpar import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def packages_by_page() -> dict[str, tuple[str, ...]]:
    spec = importlib.util.spec_from_file_location("public_names", DOCS / "public_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, tuple[str, ...]] = module.PACKAGES
    return pages


def test_every_package_with_public_names_is_in_the_reference() -> None:
    pages = packages_by_page()
    public = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / "asyncpar").rglob("__init__.py")
        if "__all__" in init.read_text()
    }
    assert sorted(public - {name for names in pages.values() for name in names}) == []
    for page, names in pages.items():
        text = (DOCS / "reference" / f"{page}.md").read_text()
        assert re.findall(r"^\.\. public-names:: (\S+)$", text, re.MULTILINE) == list(names)
        assert f"\n{page}\n" in (DOCS / "reference" / "index.md").read_text()


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
