"""Two directives of the reference: ``public-names`` documents a package's names, ``public-index`` lists all of them."""

from __future__ import annotations

import importlib
import inspect
from textwrap import shorten
from typing import Any, ClassVar, get_origin

from docutils import nodes
from public_names import PACKAGES, public_names
from sphinx.util.docutils import SphinxDirective


def describe(name: str, value: Any) -> list[str]:
    """Return what documents ``value`` under its public ``name``."""
    if inspect.isclass(value) and get_origin(value) is None:
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return [f".. {kind}:: {name}", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}", ""]
    return [f".. py:data:: {name}", f"   :value: {shorten(repr(value), 300)}", ""]  # its docstring would be its type's


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


class PublicIndex(SphinxDirective):
    """``public-index::``: the names of every page of the reference, as links."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for page, packages in PACKAGES.items():
            for package in packages:
                links = " · ".join(f":py:obj:`~{package}.{name}`" for name in public_names(package))
                lines += [f":doc:`{page}` (``{package}``)", f"   {links}", ""]
        return self.parse_text_to_nodes("\n".join(lines))
