"""No process that may run gRPC is forked: its threads start again in the child, and abort it as descriptors close."""

from __future__ import annotations

import ast
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]


def forked_starts(source: str) -> list[int]:
    """Return the lines of calls that start a process by a plain fork, and run handlers of forks for it.

    ``subprocess`` starts processes by vfork, which runs none, but where it is asked to call something in the child.
    """
    return [
        node.value.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.keyword) and node.arg == "preexec_fn"
        if not (isinstance(node.value, ast.Constant) and node.value.value is None)
    ]


def test_the_look_finds_one() -> None:
    assert forked_starts("run([],\n  preexec_fn=f)") == [2]
    assert forked_starts("run([], start_new_session=True, preexec_fn=None)") == []


def test_nothing_is_started_by_a_fork() -> None:
    found = {
        str(path.relative_to(TOP)): lines
        for folder in ("asyncpar", "scripts", "tests")
        for path in (TOP / folder).rglob("*.py")
        if "preexec_fn" in (source := path.read_text(encoding="utf-8")) and (lines := forked_starts(source))
    }
    assert found == {}
