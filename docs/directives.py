"""Directives of the site: ``public-names`` documents a package's names, ``public-index`` lists all of them,
``schedule-picture`` draws a pipeline, ``bucket-picture`` a gradient step, ``topology-picture`` hosts and lanes."""

from __future__ import annotations

import importlib
import inspect
from textwrap import shorten
from typing import Any, ClassVar, get_origin

import click
from docutils import nodes
from pictures import draw_buckets, draw_schedule, draw_topology
from public_names import PACKAGES, public_names
from sphinx.util.docutils import SphinxDirective

from asyncpar.launch.cli import main


def foreign_bases(value: type) -> list[str]:
    """Return the names of the bases of ``value`` that are not asyncpar's: torch's, msgspec's, Python's own."""
    return [base.__name__ for base in value.__mro__ if base.__module__.partition(".")[0] != "asyncpar"]


def call_as_users_do(name: str, value: type) -> None:
    """Call a class by its public ``name`` (``ap.cluster``): autodoc documents others as an alias, without methods."""
    _, _, last = name.rpartition(".")
    if value.__name__ not in _documented_names(value):
        value.__name__ = last


def _documented_names(value: type) -> list[str]:
    return [
        name
        for packages in PACKAGES.values()
        for package in packages
        for name in public_names(package)
        if getattr(importlib.import_module(package), name) is value
    ]


def describe(name: str, value: Any) -> list[str]:
    """Return what documents ``value`` under its public ``name``, a class with what it has from bases in asyncpar."""
    if inspect.isclass(value) and get_origin(value) is None:
        call_as_users_do(name, value)
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return [f".. {kind}:: {name}", f"   :inherited-members: {', '.join(foreign_bases(value))}", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}", ""]
    return [f".. py:data:: {name}", f"   :value: {shorten(repr(value), 300)}", ""]  # its docstring would be its type's


def all_commands() -> click.Group:
    """Return ``asyncpar`` with all its commands imported: sphinx-click sees those of a group's table only."""
    context = click.Context(main, info_name="asyncpar")
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    known = {name: command for name, command in commands.items() if command is not None}
    return click.Group("asyncpar", known, params=main.params, help=main.help)


COMMANDS = all_commands()


class PublicNames(SphinxDirective):
    """``public-names:: PACKAGE``: the documentation of every public name of the package."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        module = importlib.import_module(package)
        lines: list[str] = []
        for name in public_names(package):
            lines += describe(f"{package}.{name}", getattr(module, name))
        return self.parse_text_to_nodes("\n".join(lines))


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
    """``public-index::``: the names of every page of the reference, as links."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for page, packages in PACKAGES.items():
            for package in packages:
                links = " · ".join(f":py:obj:`~{package}.{name}`" for name in public_names(package))
                lines += [f":doc:`{page}` (``{package}``)", f"   {links}", ""]
        return self.parse_text_to_nodes("\n".join(lines))
