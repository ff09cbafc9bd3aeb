"""An async generator that passes on another one closes it: else the inner one ends when it is freed, if then."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "asyncpar"


def left_open(source: str) -> list[int]:
    """Return the lines of loops that yield from an iterator that only they know."""
    loops = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AsyncFor))
    return [
        loop.lineno
        for loop in loops
        if isinstance(loop.iter, ast.Call) and any(isinstance(node, ast.Yield) for node in ast.walk(loop))
    ]


def test_the_look_finds_one_and_leaves_one_that_is_closed() -> None:
    lines = "async def f():\n    async for x in g():\n        yield x\n"
    assert left_open(lines) == [2]
    closed = "async def f():\n    async with aclosing(g()) as xs:\n        async for x in xs:\n            yield x\n"
    assert left_open(closed) == []


def test_no_generator_of_the_package_leaves_its_inner_one_open() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if "async for" in (source := path.read_text(encoding="utf-8")) and "yield" in source
        if (lines := left_open(source))
    }
    assert found == {}
