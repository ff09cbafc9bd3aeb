"""Directives of the site: ``public-names`` documents a package's names, ``public-index`` lists all of them,
``schedule-picture`` draws a pipeline."""

from __future__ import annotations

import importlib
import inspect
from textwrap import shorten
from typing import Any, ClassVar, get_origin

from docutils import nodes
from public_names import PACKAGES, public_names
from sphinx.util.docutils import SphinxDirective

from asyncpar.pipeline import make_schedule, simulate


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


_COLOURS = {"forward": "#2563eb", "backward": "#d97706", "backward_input": "#d97706", "backward_weight": "#65a30d"}
_SCALE, _ROW = 24, 26


def draw_schedule(name: str, num_stages: int, num_microbatches: int) -> str:
    """Return the timeline of a simulated schedule as SVG: a row per rank, a box with its micro-batch per operation."""
    simulated = simulate(make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches))
    width, height = 60 + simulated.makespan * _SCALE, num_stages * _ROW
    parts = []
    for rank, spans in enumerate(simulated.spans):
        parts.append(f'<text x="0" y="{rank * _ROW + 17}" fill="currentColor">rank {rank}</text>')
        for span in spans:
            x, box = 56 + span.start * _SCALE, (span.end - span.start) * _SCALE
            kind = str(span.operation.kind)
            parts.append(
                f'<rect x="{x:g}" y="{rank * _ROW + 2}" width="{box - 1:g}" height="22" fill="{_COLOURS[kind]}">'
                f"<title>{kind} of micro-batch {span.operation.micro_batch}</title></rect>"
                f'<text x="{x + box / 2:g}" y="{rank * _ROW + 17}" fill="#fff" text-anchor="middle">'
                f"{span.operation.micro_batch}</text>"
            )
    title = f"{name}: {simulated.bubble_fraction:.0%} of the time is idle"
    return (
        f'<figure><svg viewBox="0 0 {width:g} {height}" style="max-width: {width:g}px; width: 100%" font-size="12" '
        f'role="img" aria-label="{title}">{"".join(parts)}</svg><figcaption>{title}</figcaption></figure>'
    )


class SchedulePicture(SphinxDirective):
    """``schedule-picture:: NAME STAGES MICRO-BATCHES``: the simulated timeline of a schedule."""

    required_arguments: ClassVar[int] = 3

    def run(self) -> list[nodes.Node]:
        name, stages, micro_batches = self.arguments
        return [nodes.raw("", draw_schedule(name, int(stages), int(micro_batches)), format="html")]


class PublicIndex(SphinxDirective):
    """``public-index::``: the names of every page of the reference, as links."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for page, packages in PACKAGES.items():
            for package in packages:
                links = " · ".join(f":py:obj:`~{package}.{name}`" for name in public_names(package))
                lines += [f":doc:`{page}` (``{package}``)", f"   {links}", ""]
        return self.parse_text_to_nodes("\n".join(lines))
