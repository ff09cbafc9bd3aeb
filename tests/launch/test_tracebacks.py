"""Tracebacks are found, shortened to the frames of the program, and shown once."""

from __future__ import annotations

import asyncio
import sys
import traceback
from pathlib import Path

import pytest

from asyncpar.errors import PeerLost
from asyncpar.launch.tracebacks import TracebackHold, find_traceback, shorten


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def raised(depth: int = 0) -> Exception:
    """Return an exception with its traceback."""

    def fail(left: int) -> None:
        if left:
            fail(left - 1)
        raise ValueError("bad batch 7\nof shard 3")

    try:
        fail(depth)
    except ValueError as error:
        return error
    raise AssertionError


def linked(*, is_cause: bool) -> Exception:
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            if is_cause:
                raise PeerLost("rank 2 is gone", rank=2) from error
            raise PeerLost("rank 2 is gone", rank=2)  # noqa: B904  # an exception in the handling of another
    except PeerLost as error:
        return error


def test_the_last_traceback_is_found_behind_other_output() -> None:
    found = find_traceback("one\n" + text_of(linked(is_cause=True)) + "two\n" + text_of(raised()))
    assert found is not None
    assert (found.module, found.type_name, found.message) == ("", "ValueError", "bad batch 7\nof shard 3")
    assert "inner" not in found.traceback


@pytest.mark.parametrize("is_cause", [True, False])
def test_linked_tracebacks_are_one(is_cause: bool) -> None:
    found = find_traceback("noise\n" + text_of(linked(is_cause=is_cause)))
    assert found is not None
    assert (found.module, found.type_name, found.message) == ("asyncpar.errors", "PeerLost", "rank 2 is gone")
    assert found.traceback.startswith("Traceback")
    assert "KeyError: 'inner'" in found.traceback


@pytest.mark.parametrize("text", ["", "all is well\n", "Traceback (most recent call last):\n", '  File "a", line 3\n'])
def test_what_is_no_traceback_is_none(text: str) -> None:
    assert find_traceback(text) is None


def test_a_syntax_error_of_the_program_is_one() -> None:
    found = find_traceback('  File "/x/train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n')
    assert found is not None
    assert (found.type_name, found.message) == ("SyntaxError", "invalid syntax")
    assert shorten(found.traceback) == 'File "/x/train.py", line 2\n  def f(:'


def test_frames_of_the_program_are_left() -> None:
    lines = shorten(text_of(raised(20))).splitlines()
    assert lines[0] == f'File "{Path(__file__).relative_to(Path.cwd())}", line {line_of("fail(depth)")}, in raised'
    assert [line for line in lines if line.startswith("  ")][-1] == '  raise ValueError("bad batch 7\\nof shard 3")'
    assert lines[-1] == "(2 more frames are shown by --full-traceback)"
    assert len(lines) == 7


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if code in line)


def test_frames_of_asyncio_and_asyncpar_are_not() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    async def fail() -> None:
        await asyncio.sleep(0)
        find_traceback(3)  # type: ignore[arg-type]

    try:
        asyncio.run(main())
    except ExceptionGroup as error:
        text = text_of(error)
    lines = shorten(text).splitlines()
    assert "taskgroups.py" not in "\n".join(lines)
    assert "launch/tracebacks.py" not in "\n".join(lines)
    assert "  find_traceback(3)  # type: ignore[arg-type]" in lines


def test_a_traceback_without_frames_of_the_program_stays_whole() -> None:
    assert shorten("ValueError: x") == "ValueError: x"


def held(text: str, hold: TracebackHold) -> list[str]:
    return [line.decode() for line in hold.take([line.encode() for line in text.splitlines()])]


def test_the_last_words_of_a_failed_rank_are_not_shown_twice() -> None:
    hold = TracebackHold()
    assert held("one\n" + text_of(raised()), hold) == ["one"]
    assert held("sys:1: RuntimeWarning", hold) == []
    assert hold.end(has_failed=True) == []


def test_a_rank_that_goes_on_loses_nothing() -> None:
    for has_failed in (True, False):
        hold = TracebackHold()
        text = text_of(raised())
        held(text, hold)
        held("going on", hold)
        shown = hold.release() if has_failed else hold.end(has_failed=False)
        assert b"\n".join(shown).decode() == text + "going on"
        assert not hold.is_holding
        assert hold.has_shown(text)
        assert not hold.has_shown(text_of(raised(2)))


def test_an_earlier_traceback_is_shown_when_the_last_one_is_not() -> None:
    hold = TracebackHold()
    first = text_of(linked(is_cause=False))
    held(first + "logged\n" + text_of(raised()), hold)
    assert b"\n".join(hold.end(has_failed=True)).decode() == first + "logged"


def test_what_is_held_is_bounded() -> None:
    hold = TracebackHold()
    held("Traceback (most recent call last):", hold)
    shown = sum(len(held("x" * 1000, hold)) for _ in range(200))
    assert shown >= 100
    assert sys.getsizeof(hold) < 1000


def test_an_interrupt_while_modules_are_imported_is_not_shown() -> None:
    importing = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    from numpy import (
  File "/env/lazy_loader/__init__.py", line 12, in __getattr__
  File "<frozen importlib._bootstrap>", line 1176, in _find_and_load
  File "/env/numpy/__init__.py", line 112, in <module>
    from show import config
  File "/env/numpy/show.py", line 9, in find
    return cached(*args)
  File "<string>", line 0, in <module>
KeyboardInterrupt
"""
    hold = TracebackHold()
    hold.take([line.encode() for line in ("ready\n" + importing).splitlines()])
    assert hold.end(has_failed=False) == []


@pytest.mark.parametrize(
    "frames",
    [
        ["train.py", 9, "<module>", "main()", "train.py", 7, "main", "wait()"],
        ["train.py", 9, "<module>", "import_all()"],
        ["train.py", 9, "main", "import lazily"],
    ],
)
def test_an_interrupt_of_a_program_is_shown(frames: list[object]) -> None:
    places = zip(*[iter(frames)] * 4, strict=True)
    shown = [f'  File "/home/me/{file}", line {line}, in {name}\n    {code}' for file, line, name, code in places]
    text = "\n".join(["Traceback (most recent call last):", *shown, "KeyboardInterrupt"])
    hold = TracebackHold()
    hold.take([line.encode() for line in text.splitlines()])
    assert b"\n".join(hold.end(has_failed=False)).decode() == text
