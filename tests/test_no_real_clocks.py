"""No test compares how long something took on a real clock with a limit: on a busy machine it takes longer.

What has to end is guarded by the limit of the test itself, and by patience that ends in an error; how fast things are
is measured in ``scripts/bench``.  That something took *at least* its time may be asserted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
VIRTUAL = {"testing/simulation/test_loop.py"}
"""Where ``time`` is that of a simulation."""
READS_A_CLOCK = re.compile(rf"\btime\.(?:{'|'.join(CLOCKS)})")
"""What a module that looks at a clock has in it; parsing all modules takes seconds."""


def _is_time(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner, name = node.func.value, node.func.attr.removesuffix("_ns")
    return isinstance(owner, ast.Name) and owner.id == "time" and name in CLOCKS


def _is_duration(node: ast.AST, durations: set[str], instants: set[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        is_since = isinstance(node.right, ast.Name) and node.right.id in instants
        return is_since or any(_is_time(part) for part in ast.walk(node))
    return isinstance(node, ast.Name) and node.id in durations


def _assigned(tree: ast.AST, is_meant: Callable[[ast.AST], bool]) -> set[str]:
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_meant(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _comparisons(source: str) -> Iterator[str]:
    """Yield each assertion that a duration is below something, as its line and its text."""
    if not READS_A_CLOCK.search(source):
        return
    tree = ast.parse(source)
    instants = _assigned(tree, _is_time)
    durations = _assigned(tree, lambda value: _is_duration(value, set(), instants))
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement.test):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                if isinstance(operator, ast.Gt | ast.GtE):
                    left, right = right, left
                has_limit = isinstance(operator, ast.Eq) or not isinstance(right, ast.Name) or right.id.isupper()
                took = [part for part in ast.walk(left) if _is_duration(part, durations, instants)]
                both = any(_is_duration(part, durations, instants) for part in ast.walk(right))
                if took and (has_limit or both):
                    yield f"{statement.lineno}: {ast.unparse(statement.test)}"


def test_no_test_says_how_long_something_may_take() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).as_posix() not in VIRTUAL
        for line in _comparisons(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("assert time.monotonic() - begun < 5.0", True),
        ("assert 0.5 <= time.monotonic() - begun < LIMIT", True),
        ("took = time.perf_counter() - begun\nassert took < 2 * other", True),
        ("first = time.monotonic() - a\nsecond = time.monotonic() - b\nassert first < second", True),
        ("assert 3 > time.time() - begun", True),
        ("killed_at = time.time()\nassert max(ends) - killed_at < PATIENCE", True),
        ("assert time.monotonic() - begun >= 0.5", False),
        ("assert time.monotonic() < deadline", False),
    ],
)
def test_what_counts_as_that(text: str, is_found: bool) -> None:
    assert bool([*_comparisons(text)]) == is_found
