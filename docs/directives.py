"""Directives of the site: ``public-names`` documents names of a package, ``public-summary`` has a table of them,
``public-index`` lists all packages', ``schedule-picture`` draws a pipeline, ``bucket-picture`` a gradient step,
``topology-picture`` hosts and lanes, ``example`` is a card of the gallery, ``example-sources`` shows programs."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from textwrap import indent, shorten
from typing import Any, ClassVar, get_origin

import click
from docutils import nodes
from pictures import draw_buckets, draw_schedule, draw_topology
from public_names import PACKAGES, REFERENCE, Entry, Use, entries, parse, public_names, use_of
from sphinx.util.docutils import SphinxDirective

from asyncpar.launch.cli import main

EXAMPLES = Path(__file__).resolve().parent.parent / "scripts" / "examples"


def foreign_bases(value: type) -> list[str]:
    """Return the names of the bases of ``value`` that are not asyncpar's: torch's, msgspec's, Python's own."""
    return [base.__name__ for base in value.__mro__ if base.__module__.partition(".")[0] != "asyncpar"]


@cache
def documented_classes() -> dict[type, list[str]]:
    """Return the public classes of all packages, each with its names, which begin with the package."""
    found: dict[type, list[str]] = {}
    for package in (package for packages in PACKAGES.values() for package in packages):
        for name in public_names(package):
            value = getattr(importlib.import_module(package), name)
            if inspect.isclass(value) and get_origin(value) is None:
                found.setdefault(value, []).append(f"{package}.{name}")
    return found


def documented_bases(value: type) -> list[type]:
    """Return the public bases of ``value``, whose methods are documented there."""
    return [base for base in value.__mro__[1:] if base in documented_classes()]


def is_documented_by_base(value: type, method: str) -> bool:
    """Return whether ``method`` of ``value`` is one of a public base's, of which ``value`` says nothing else."""
    owner = next((base for base in value.__mro__ if method in vars(base)), value)
    if owner is not value and owner in documented_bases(value):
        return True
    says = getattr(vars(owner).get(method), "__doc__", None)
    return not says and any(hasattr(base, method) for base in documented_bases(value))


def call_as_users_do(name: str, value: type) -> None:
    """Call a class by its public ``name`` (``ap.cluster``): autodoc documents others as an alias, without methods."""
    _, _, last = name.rpartition(".")
    if value.__name__ not in [known.rpartition(".")[2] for known in documented_classes()[value]]:
        value.__name__ = last


def describe(name: str, value: Any, elsewhere: tuple[str, ...] = ()) -> list[str]:
    """Return what documents ``value`` under its public ``name``.

    A class has what it has from bases in asyncpar that are not public themselves; methods ``elsewhere`` are left out.
    """
    if inspect.isclass(value) and get_origin(value) is None:
        call_as_users_do(name, value)
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        bases = documented_bases(value)
        methods = [each for base in bases for each in vars(base) if not each.startswith("_")]
        left_out = sorted({each for each in methods if is_documented_by_base(value, each)} | set(elsewhere))
        lines = [f".. {kind}:: {name}", f"   :inherited-members: {', '.join(foreign_bases(value))}"]
        lines += [f"   :exclude-members: {', '.join(left_out)}"] if left_out else []
        if bases and not issubclass(value, BaseException):
            links = ", ".join(f":py:obj:`~{documented_classes()[base][0]}`" for base in bases)
            lines += ["", f"   Has the methods of {links}, too."]
        return [*lines, ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}", ""]
    return [f".. py:data:: {name}", f"   :value: {shorten(repr(value), 300)}", ""]  # its docstring would be its type's


def describe_method(owner: str, value: type, method: str) -> list[str]:
    """Return what documents a method or a property of the class ``value``, apart from the class."""
    static = inspect.getattr_static(value, method)
    kind = "automethod" if inspect.isroutine(getattr(value, method)) else "autoattribute"
    return [f".. {'autoproperty' if isinstance(static, property) else kind}:: {owner}.{method}", ""]


def first_sentence(value: Any) -> str:
    """Return the first sentence of the documentation of a class or function, or what a constant is."""
    if isinstance(value, str | int | float | tuple | dict):
        return f"``{shorten(repr(value), 60)}``"
    if not (inspect.isclass(value) or inspect.isroutine(value)) or get_origin(value) is not None:
        return "A type, for annotations."
    text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    if text.startswith(f"{value.__name__}("):  # a dataclass without documentation
        return ""
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(":")


def all_commands() -> click.Group:
    """Return ``asyncpar`` with all its commands imported: sphinx-click sees those of a group's table only."""
    context = click.Context(main, info_name="asyncpar")
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    known = {name: command for name, command in commands.items() if command is not None}
    return click.Group("asyncpar", known, params=main.params, help=main.help)


COMMANDS = all_commands()


def __getattr__(name: str) -> click.Command:
    """Return a command by its name in capitals, as pages of the reference have them: ``directives:LAUNCH``."""
    if name.lower() not in COMMANDS.commands:
        raise AttributeError(f"directives has no {name!r}, and asyncpar no such command")
    return COMMANDS.commands[name.lower()]


class PublicNames(SphinxDirective):
    """``public-names:: PACKAGE``: the documentation of every public name of the package, or of those in the content."""

    required_arguments: ClassVar[int] = 1
    has_content: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        module = importlib.import_module(package)
        lines: list[str] = []
        for entry in parse("", package, list(self.content)):
            value, name = getattr(module, entry.name), f"{package}.{entry.name}"
            apart = [each.methods for each in entries() if (each.package, each.name) == (package, entry.name)]
            if entry.methods:
                for method in entry.methods:
                    lines += describe_method(name, value, method)
            else:
                lines += describe(name, value, tuple(method for methods in apart for method in methods))
        return self.parse_text_to_nodes("\n".join(lines))


class PublicSummary(SphinxDirective):
    """``public-summary:: PACKAGE``: a table of its public names, a sentence each, by the page that documents them."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        own = Path(self.env.docname).relative_to("reference").as_posix()
        pages = [own, *re.findall(rf"^({own}/\w+)$", (REFERENCE / f"{own}.md").read_text(), re.MULTILINE)]
        lines: list[str] = []
        for page in pages:
            on_page = [each for each in entries() if each.page == page and each.package == package]
            if page != own and on_page:
                lines += [f":doc:`/reference/{page}`", ""]
            lines += self.table(package, on_page)
        return self.parse_text_to_nodes("\n".join(lines))

    def table(self, package: str, on_page: list[Entry]) -> list[str]:
        rows: list[str] = []
        for each in on_page:
            value = getattr(importlib.import_module(package), each.name)
            if each.methods:
                links = " ".join(f":py:obj:`~{package}.{each.name}.{method}`" for method in each.methods)
                rows += [f"   * - ``{each.name}``", f"     - {links}"]
            else:
                use = use_of(package, each.name)
                mark = "" if use in (Use.PROGRAM, Use.RAISED) else f" *({use})*"
                rows += [f"   * - :py:obj:`~{package}.{each.name}`", f"     - {first_sentence(value)}{mark}"]
        return [".. list-table::", "   :class: names", "   :widths: auto", "", *rows, ""] if rows else []


class SchedulePicture(SphinxDirective):
    """``schedule-picture:: NAME STAGES MICRO-BATCHES``: the simulated timeline of a schedule."""

    required_arguments: ClassVar[int] = 3

    def run(self) -> list[nodes.Node]:
        name, stages, micro_batches = self.arguments
        return [nodes.raw("", draw_schedule(name, int(stages), int(micro_batches)), format="html")]


class BucketPicture(SphinxDirective):
    """``bucket-picture:: LAYERS BUCKET-MIB RANKS``: the simulated timeline of a gradient step."""

    required_arguments: ClassVar[int] = 3

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", draw_buckets(*map(int, self.arguments)), format="html")]


class TopologyPicture(SphinxDirective):
    """``topology-picture:: RANKS RANKS ...``: hosts with so many ranks each, and the lanes of an all-reduce."""

    required_arguments: ClassVar[int] = 1
    final_argument_whitespace: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", draw_topology(*map(int, self.arguments[0].split())), format="html")]


class PublicIndex(SphinxDirective):
    """``public-index::``: the names of every page of the reference, as links; extension points are in italics."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for page, packages in PACKAGES.items():
            for package in packages:
                links = " · ".join(f":py:obj:`~{package}.{name}`" for name in public_names(package))
                lines += [f":doc:`{page}` (``{package}``)", f"   {links}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Example(SphinxDirective):
    """``example:: PATH``: a card of the gallery: a picture, what it shows, the command, a link to the source."""

    required_arguments: ClassVar[int] = 1
    has_content: ClassVar[bool] = True
    option_spec: ClassVar[dict[str, Any]] = {"picture": str, "command": str}  # type: ignore[misc]  # docutils has none

    def run(self) -> list[nodes.Node]:
        name, command = self.arguments[0], self.options["command"]
        lines = [".. container:: card", "", f"   **{name}**", ""]
        if "picture" in self.options:
            lines += [f"   .. image:: {self.options['picture']}", f"      :alt: What {command} shows", ""]
        lines += [*(f"   {line}" for line in self.content), "", "   .. code-block:: bash", "", f"      {command}", ""]
        if name.endswith(".py"):
            lines += ["   .. raw:: html", "", f'      <p><a href="#{Path(name).stem}">source</a></p>', ""]
        return self.parse_text_to_nodes("\n".join(lines))


class ExampleSources(SphinxDirective):
    """``example-sources:: PATH ...``: the sources of examples, each folded up."""

    required_arguments: ClassVar[int] = 1
    final_argument_whitespace: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name in self.arguments[0].split():
            path = EXAMPLES / name
            self.env.note_dependency(str(path))
            begin = f'<details id="{path.stem}"><summary>{name}</summary>'
            lines += [".. raw:: html", "", f"   {begin}", "", ".. code-block:: python", ""]
            lines += [*indent(path.read_text(), "   ").splitlines(), "", ".. raw:: html", "", "   </details>", ""]
        return self.parse_text_to_nodes("\n".join(lines))
