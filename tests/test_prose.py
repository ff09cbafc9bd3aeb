"""Prose is plain English: no phrase of the first days is back, and modules say what they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

PHRASES = re.compile(
    r"\b(what (became|becomes) of|who(m?)ever|waits? for nobody|lest|of one mind|nobody is scolded|"
    r"(?<!as )of now|h(e|o)ld(s|ing)? for lost|"
    r"(the|these|those|such|many|several|few|frequent|thousand|two|between) looks(?! (like|up)))\b",
    re.IGNORECASE,
)

QUESTIONS = ("What ", "How ", "Who ", "Whom ", "Whose ", "Where ", "When ", "Which ")
"""Beginnings of a docstring that names nothing: "What a listener needs" instead of "Settings of a listener"."""

NARRATIONS = re.compile(
    r"(``|(A|An|The|This|That|These|Nothing|It|Somebody|Nobody|Everybody|Time (has|passes)|There|"
    r"Each|Some|Another|No|What|Who|How|When|Where|Bytes|Phase|Be|Behave|As)\b)"
)
"""Beginnings of a docstring that narrates an event: "The lane has ended." instead of "Handle the end of the lane."."""

NAMES_OF_NCCL = {Path("asyncpar/device/fabric.py"), Path("asyncpar/device/nccl.py")}
"""Docstrings there name the function of NCCL or CUDA that is called."""

ASKS = re.compile(r"(Is|Are|Has|Have|Does|Do|Did|Was|Were|May|Can|Must|Should|Will|Who|Whom|What|Which|How)\b[^.]*\?")
"""Beginnings of a docstring that asks: "Is it open?" instead of "Whether it is open" or "Return whether it is open"."""

NAMELESS = re.compile(r"Return (what|who|whom)\b")
"""Beginnings of a docstring that does not name the result: "Return what is bound" instead of "Return the recorder"."""

FORMER_NAMES = re.compile(
    "Office|Courier|Pace|Crew|Guard|Attendance|Site|Door|Household|Birth|Keeper|LayoutKeeper|StoreKeeper|Side|SideLane|"
    "Switchboard|Post|Line|Parcel|Backlog|Seat|BellGate|VisitedLoop|Vigil|Patience|Contention|Crowd|Gathering|Lineup|"
    "TurnGatherer|Agenda|Board|Roll|Roster|Convener|Attendee|Meeting|Passage|Walk|Leg|Owners|Standing|Settlement|"
    "Council|Obligation|Owed|Residence|Attachment"
)
ALLOWED = {"Roster": "net/arena/formation_machine.py", "Meeting": "collectives/device/agree.py"}
"""Other things: a message with the offers of all ranks, and one exchange of records before a launch."""


@cache
def docstrings() -> list[tuple[Path, int, str, str]]:
    """Return the docstrings of the package: file, line, text, and the name of the function, "" for anything else."""
    found: list[tuple[Path, int, str, str]] = []
    for path, text in python_files("asyncpar"):
        for node, parent in statements(ast.parse(text)):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append((path, node.lineno, value.value, function_of(node, parent)))
    return found


def function_of(node: ast.stmt, parent: ast.AST) -> str:
    """Return the name of the function whose docstring ``node`` is; "" if it is another one's, or a property's."""
    if not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) or parent.body[0] is not node:
        return ""
    return "" if any("property" in ast.dump(decorator) for decorator in parent.decorator_list) else parent.name


def statements(node: ast.AST) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Yield the statements in ``node`` with those around them, without a look at expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, node
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


def python_files(*folders: str) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_proto" not in path.parts and path != Path(__file__):
                yield path.relative_to(ROOT), path.read_text()


def test_no_banned_phrase_is_in_code_tests_or_pages() -> None:
    pages = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
    pages += (ROOT / "docs").rglob("*.md")
    pages += (ROOT / "asyncpar").rglob("*.md")
    texts = [*python_files("asyncpar", "tests", "scripts"), *((page, page.read_text()) for page in pages)]
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts
        if PHRASES.search(text.replace("_", " "))
        for number, line in enumerate(text.splitlines(), 1)
        if PHRASES.search(line.replace("_", " "))
    ]
    assert found == []


def test_banned_phrases_are_found_and_others_are_left_alone() -> None:
    for bad in ("the world of now", "it is held for lost", "between two looks", "frequent looks", "of such looks"):
        assert PHRASES.search(bad), bad
    for good in (
        "as of now",
        "power of two looks like its neighbour",
        "it looks whether",
        "the device looks",
        "looks up",
    ):
        assert not PHRASES.search(good), good


def test_docstrings_of_modules_name_what_is_in_them() -> None:
    begins = re.compile(rf"(?:#.*\n|\s)*r?\"\"\"\s*({'|'.join(QUESTIONS)}).*")
    assert begins.match('#!/usr/bin/env python\n"""What a listener needs."""') is not None
    found = [
        f"{path}: {beginning[0]}"
        for path, text in python_files("asyncpar", "tests", "scripts")
        if (beginning := begins.match(text)) is not None
    ]
    assert found == []


def test_docstrings_of_functions_say_what_the_function_does() -> None:
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, line, text, function in docstrings()
        if path not in NAMES_OF_NCCL and function not in ("", "__init__") and NARRATIONS.match(text)
    ]
    assert found == []


def test_no_docstring_asks_or_leaves_its_result_without_a_name() -> None:
    assert ASKS.match("Is the lane, which may be shared, open?  Not for long.") is not None
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, line, text, _ in docstrings()
        if ASKS.match(text) or NAMELESS.match(text)
    ]
    assert found == []


def test_no_class_has_a_former_name() -> None:
    found = [
        f"{path}: {name}"
        for path, text in python_files("asyncpar")
        for name in re.findall(r"^\s*class (\w+)", text, re.MULTILINE)
        if FORMER_NAMES.fullmatch(name) and ALLOWED.get(name) != path.relative_to("asyncpar").as_posix()
    ]
    assert found == []
