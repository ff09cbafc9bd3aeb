"""Every link of the site leads somewhere, and every public name is two clicks away."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from functools import cache

import click

from asyncpar.launch.cli import main
from tests.site.pages import ROOT, SITE, pages, read

sys.path.insert(0, str(ROOT / "docs"))
counts = importlib.import_module("coverage_of_names").counts
PACKAGES = importlib.import_module("public_names").PACKAGES
public_names = importlib.import_module("public_names").public_names
page_of = importlib.import_module("public_names").page_of
entries = importlib.import_module("public_names").entries


def test_every_link_leads_to_a_page_and_a_place_in_it() -> None:
    broken = []
    for page in pages():
        for path, place in read(page).targets():
            if path.is_dir():
                path = path / "index.html"
            if not path.is_file() or (place and path.suffix == ".html" and place not in read(path).anchors):
                broken.append(f"{page.relative_to(SITE)}: {path}#{place}")
    assert sorted(set(broken)) == []


def test_links_to_other_sites_are_encrypted() -> None:
    plain = [link for page in pages() for link in read(page).links if link.startswith("http://")]
    assert [link for link in plain if "127.0.0.1" not in link] == []


def test_a_reader_finds_any_public_name_in_two_clicks() -> None:
    reference = (SITE / "reference" / "index.html").resolve()
    for page in pages():
        assert (reference, "") in read(page).targets(), f"{page}: the first click"
    second = set(read(reference).targets())
    names = [
        (page_of(package, name), f"{package}.{name}")
        for packages in PACKAGES.values()
        for package in packages
        for name in public_names(package)
    ]
    assert len(names) > 350
    for page, name in names:
        path = SITE / "reference" / f"{page}.html"
        assert (path, name) in second, f"{name}: the second click"
        assert name in read(path).anchors


@cache
def public_classes() -> set[type]:
    """Return the classes that the reference documents."""
    values = [
        getattr(importlib.import_module(package), name)
        for packages in PACKAGES.values()
        for package in packages
        for name in public_names(package)
    ]
    return {value for value in values if isinstance(value, type)}


def bases(kind: type) -> list[type]:
    """Return the bases of ``kind`` that the reference documents."""
    return [base for base in kind.__mro__[1:] if base in public_classes()]


def methods(kind: type) -> set[str]:
    """Return the public methods that ``kind`` has from asyncpar, those of bases that are not public included."""
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "asyncpar"]
    ours = [base for base in ours if base is kind or base not in public_classes()]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    return {name for name in names if inspect.isroutine(getattr(kind, name, None))}


def test_the_reference_has_every_method_of_every_public_class() -> None:
    found, missing = set(), []
    for package in (package for packages in PACKAGES.values() for package in packages):
        for name in public_names(package):
            kind = getattr(importlib.import_module(package), name)
            pages = {each.page for each in entries() if (each.package, each.name) == (package, name)}
            anchors = set().union(*(read(SITE / "reference" / f"{page}.html").anchors for page in pages))
            # what a public base has is documented there, unless the class says more of it
            expected = {
                f"{package}.{name}.{method}"
                for method in (methods(kind) if inspect.isclass(kind) else ())
                if getattr(kind, method).__doc__ or not any(hasattr(base, method) for base in bases(kind))
            }
            # what differs from an error of another name only in that name is documented as its alias
            if getattr(kind, "__name__", name) == name or not issubclass(kind, BaseException):
                missing += sorted(expected - anchors)
                found |= expected
    assert missing == []
    for group in ("asyncpar.Communicator", "asyncpar.blocking.Communicator"):
        assert {f"{group}.{name}" for name in ("all_reduce", "all_gather", "broadcast", "barrier", "send")} <= found
    assert {"asyncpar.cluster.run", "asyncpar.cluster.launch"} <= found


def test_the_pages_of_commands_have_every_command_with_its_options() -> None:
    pages = [SITE / "reference" / "commands.html", *sorted((SITE / "reference" / "commands").glob("*.html"))]
    anchors = set().union(*(read(page).anchors for page in pages))
    missing = []

    def look(command: click.Command, path: str) -> None:
        expected = {path}
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                expected |= {f"cmdoption-{path}-{option.lstrip('-')}" for option in parameter.opts}
        missing.extend(sorted(expected - anchors))
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                look(subcommand, f"{path}-{name}")

    look(main, "asyncpar")
    assert missing == []


def test_the_search_index_has_every_public_name() -> None:
    text = (SITE / "searchindex.js").read_text()
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", text, re.DOTALL)[1])  # type: ignore[index]
    known = {f"{prefix}.{entry[4]}" for prefix, entries in index["objects"].items() for entry in entries}
    missing = [
        f"{package}.{name}"
        for packages in PACKAGES.values()
        for package in packages
        for name in public_names(package)
        if f"{package}.{name}" not in known
    ]
    assert missing == []


def test_names_are_shown_in_programs_and_options_are_documented() -> None:
    """See ``docs/coverage_of_names.py``; ``scripts/docs`` prints the counts."""
    programs, _, options = counts()
    assert programs.missing == []
    assert options.missing == []
