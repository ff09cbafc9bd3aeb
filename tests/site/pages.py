"""The built site: its pages, what they link to, and what can be linked to in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "out" / "docs"
ADDRESSES = ("href", "src", "poster", "data")


@dataclass
class SitePage(HTMLParser):
    """One page of the site."""

    path: Path
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ADDRESSES and value and tag != "link":
                self.links.append(value)

    def targets(self) -> list[tuple[Path, str]]:
        """Return the files of the site that the page links to, with the place in them."""
        found = []
        for link in self.links:
            if "://" not in link and not link.startswith(("mailto:", "data:", "javascript:")):
                address, place = urldefrag(re.sub(r"\?[^#]*", "", link))
                path = (self.path.parent / unquote(address)).resolve() if address else self.path
                found.append((path, unquote(place)))
        return found


@cache
def read(path: Path) -> SitePage:
    """Return the page at ``path``."""
    return SitePage(path)


def pages() -> list[Path]:
    """Return all pages but the sources of modules."""
    return sorted(path for path in SITE.rglob("*.html") if "_modules" not in path.parts)
