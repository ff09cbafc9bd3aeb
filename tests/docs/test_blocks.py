"""Blocks on the pages of the documentation say what they are, and fit a page of 1280 pixels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.programs import PAGES, ROOT

LANGUAGES = {"bash", "console", "ini", "json", "python", "text", "toml", "yaml"}
WIDTH = 96  # characters that a block of the site shows at 1280 pixels without scrolling
WRAPPED = {"text"}  # output: the site wraps its lines
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[tuple[str, str]]:
    return [(words, block) for words, block in _FENCE.findall(text) if not words.startswith("{")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_has_a_language_and_lines_that_fit(page: Path) -> None:
    text = page.read_text()
    assert [block for words, block in blocks(text) if words not in LANGUAGES] == []
    lines = [line for words, block in blocks(text) if words not in WRAPPED for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_blocks_are_found_whatever_they_hold() -> None:
    text = "```\nplain\n```\n\n```{toctree}\nstart\n```\n\n```bash\nasyncpar top\n```\n"
    assert blocks(text) == [("", "plain\n"), ("bash", "asyncpar top\n")]
    assert len(PAGES) == len(list((ROOT / "docs").glob("*.md"))) + 1
