"""The documentation site: ``scripts/docs`` builds it."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

project = "asyncpar"
author = "The asyncpar authors"
project_copyright = author
release = version = importlib.metadata.version("asyncpar")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = "asyncpar"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg", "sidebar_hide_name": True}
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["asyncpar.css"]
html_show_sphinx = False
html_copy_source = False

# Pages of the site whose text is a file elsewhere in the repository.
PAGES = {
    "architecture": ROOT / "asyncpar" / "ARCHITECTURE.md",
    "actors_contract": ROOT / "asyncpar" / "actors" / "runtime" / "semantics.md",
    "changelog": ROOT / "CHANGELOG.md",
    "figures": ROOT / "scripts" / "bench" / "FIGURES.md",
    "security": ROOT / "SECURITY.md",
}
_NAVIGATION: dict[tuple[Any, ...], str] = {}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def take_in(_app: Any, page: str, source: list[str]) -> None:
    """Fill the pages of ``PAGES`` with their texts, and let links between files of the repository lead to pages."""
    origin = PAGES.get(page, DOCS / f"{page}.md")
    text = origin.read_text() if page in PAGES else source[0]

    def follow(link: re.Match[str]) -> str:
        words, target, anchor = link.group(1), (origin.parent / link.group(2)).resolve(), link.group(3) or ""
        if not target.exists():
            raise FileNotFoundError(f"{origin}: the link to {link.group(2)} leads nowhere")
        names = {path: name for name, path in PAGES.items()}
        if target in names:
            target = DOCS / f"{names[target]}.md"
        if target.is_relative_to(DOCS) and target.suffix == ".md":
            return f"[{words}]({os.path.relpath(target, (DOCS / page).parent)}{anchor})"
        return words  # a file that is no page of the site

    source[0] = _LINK.sub(follow, text)


def keep_methods(_app: Any, what: str, name: str, member: object, _skipped: bool, options: Any) -> bool | None:
    """List also the public methods that have no docstring: their names are their documentation."""
    if name in (options.exclude_members or ()):
        return True
    is_ours = str(getattr(member, "__module__", "")).startswith("asyncpar")
    return False if what == "class" and is_ours and inspect.isroutine(member) and not name.startswith("_") else None


def keep_underscores(_app: Any, _context: Any, lines: list[str]) -> None:
    """Escape the underscores that end words of a command's help: ``torch_rank_`` would be a reference."""
    lines[:] = [re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", line) for line in lines]


def share_navigation(_app: Any, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Compute the tree of the navigation once for all pages of sources at one depth, instead of 200 times.

    None of them is in the tree, so it is the same for all but for the way back to the top.
    """
    if page.startswith("_modules/"):
        compute = context["toctree"]

        def toctree(**options: Any) -> str:
            key = (page.count("/"), *sorted(options.items()))
            if key not in _NAVIGATION:
                _NAVIGATION[key] = compute(**options)
            return _NAVIGATION[key]

        context["toctree"] = toctree


def setup(app: Any) -> None:
    from directives import (
        BucketPicture,
        Example,
        ExampleSources,
        PublicIndex,
        PublicNames,
        PublicSummary,
        SchedulePicture,
        TopologyPicture,
    )

    logging.getLogger("asyncpar").setLevel(logging.WARNING)  # pictures run nodes, which log who joins
    app.add_directive("example", Example)
    app.add_directive("example-sources", ExampleSources)
    app.add_directive("public-names", PublicNames)
    app.add_directive("public-summary", PublicSummary)
    app.add_directive("public-index", PublicIndex)
    app.add_directive("schedule-picture", SchedulePicture)
    app.add_directive("bucket-picture", BucketPicture)
    app.add_directive("topology-picture", TopologyPicture)
    app.connect("source-read", take_in)
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme, which asks for the tree
    app.connect("sphinx-click-process-options", keep_underscores)
    app.connect("autodoc-skip-member", keep_methods)
