"""Every sentence of the page about actors has a test, and no test carries a sentence that is not there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import asyncpar.actors.runtime

PAGE = Path(asyncpar.actors.runtime.__file__).with_name("semantics.md")
TESTS = Path(__file__).parents[2]


def promises() -> list[str]:
    """Return the names of the sentences."""
    return re.findall(r"^- `([a-z-]+)`: [A-Z`].*[.)]$", PAGE.read_text(), re.MULTILINE)


def carried() -> set[str]:
    """Return the names that tests carry."""
    names = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "pytest.mark.promise" in text else ():
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) and node.name.startswith("test_"):
                names |= {name for decorator in node.decorator_list for name in _names(decorator)}
    return names


def _names(decorator: ast.expr) -> list[str]:
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise"):
        return []
    return [ast.literal_eval(argument) for argument in decorator.args]


def test_every_line_of_the_page_is_a_promise_with_a_name_of_its_own() -> None:
    bullets = [line for line in PAGE.read_text().splitlines() if line.startswith("- ")]
    assert len(bullets) == len(promises()) > 40
    assert [name for name, count in Counter(promises()).items() if count > 1] == []


def test_every_promise_has_a_test_and_every_such_test_a_promise() -> None:
    assert carried() == set(promises())
