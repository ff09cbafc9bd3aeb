"""The page as one self-contained HTML document, live or with its data inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from asyncpar.harmless import harmless_values

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """A document, and the policy that lets a browser run its own scripts and nothing else."""

    html: str
    policy: str


def _part(name: str) -> str:
    return files("asyncpar.dashboard").joinpath("page", name).read_text("utf-8")


@cache
def live_page() -> Page:
    """Return the page that requests pictures from its server."""
    return _assemble("null")


def report_page(document: dict[str, Any]) -> str:
    """Return the page with ``document`` (a picture, and lines of logs) inside, for a file."""
    text = json.dumps(harmless_values(document), separators=(",", ":"), allow_nan=False)
    return _assemble(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")).html


def _assemble(document: str) -> Page:
    html = _part("page.html")
    for marker, content in (
        ("/*LICENSE*/", _part("vendor/uPlot.LICENSE")),
        ("/*UPLOT-STYLE*/", _part("vendor/uPlot.min.css")),
        ("/*STYLE*/", _part("page.css")),
        ("/*UPLOT*/", _part("vendor/uPlot.iife.min.js")),
        ("/*PARTS*/", _part("charts.js") + _part("tables.js")),
        ("/*SCRIPT*/", _part("page.js")),
        ("/*DOCUMENT*/", document),
    ):
        html = html.replace(marker, content, 1)
    scripts, styles = _hashes(_SCRIPT, html), _hashes(_STYLE, html)
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Page(html.replace("%POLICY%", policy, 1), policy + "; frame-ancestors 'none'")


def _hashes(pattern: re.Pattern[str], html: str) -> str:
    digests = (hashlib.sha256(part.encode()).digest() for part in pattern.findall(html))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
