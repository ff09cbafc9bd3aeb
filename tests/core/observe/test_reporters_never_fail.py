"""Reports on a program never fail: hostile values through every reporter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import pytest

from asyncpar.actors.runtime.failure import brief, describe_error
from asyncpar.collectives.causes import reason_of
from asyncpar.core.observe.loop_watch import Blocked, LoopWatch, Sleeper, format_frames
from asyncpar.core.observe.rank_reports import FailureReport, Phase, ProgressRecord, parse_record
from asyncpar.core.observe.reporting import Reporter, find_peer_error, record_failures
from asyncpar.errors import PeerLost
from asyncpar.launch.display import LineSplitter
from asyncpar.launch.failure import RankEnd, describe
from asyncpar.observe.progress_line import drawn_line, plain_line

HUGE = 10**6


class Hostile:
    """Raises whenever it is looked at."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> NoReturn:
        raise self.error

    __repr__ = __str__


class HostileError(Exception):
    def __str__(self) -> NoReturn:
        raise ValueError("no text")

    __repr__ = __str__


class HostileNotesError(Exception):
    @property
    def __notes__(self) -> NoReturn:  # type: ignore[override]
        raise OSError("no notes")


class EndlessError(Exception):
    def __str__(self) -> str:
        return str(self)


def _circle() -> BaseException:
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    one.__context__, two.__context__ = two, one
    return one


def _chain() -> BaseException:
    error: BaseException = ValueError("first")
    for number in range(3 * sys.getrecursionlimit()):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following
    return error


def _nested() -> BaseException:
    error: Exception = PeerLost("gone", rank=1)
    for _ in range(200):
        error = ExceptionGroup("group", [error, ValueError("x")])
    return error


def _raised() -> BaseException:
    scope: dict[str, Any] = {}
    code = compile("\n" * 3 + "def fail():\n    raise ValueError('x')", "no\udcffsuch file", "exec")
    exec(code.replace(co_linetable=b""), scope)
    try:
        scope["fail"]()
    except ValueError as error:
        return error
    raise AssertionError


def _nameless() -> BaseException:
    kind: type[Exception] = type("\x1b[31m\n" + "N" * HUGE, (Exception,), {})
    return kind("x")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "text raises": HostileError,
    "notes raise": HostileNotesError,
    "text never ends": EndlessError,
    "argument raises": lambda: ValueError(Hostile(RuntimeError("no"))),
    "argument exits": lambda: ValueError(Hostile(SystemExit(3))),
    "circle of causes": _circle,
    "long chain": _chain,
    "nested groups": _nested,
    "no lines, no file": _raised,
    "huge": lambda: ValueError("x" * HUGE),
    "surrogates": lambda: ValueError("\udcff\ud800\x00"),
    "a huge name": _nameless,
    "exit": lambda: SystemExit(Hostile(ValueError("no"))),
}

VALUES: dict[str, Any] = {
    "raises": Hostile(ValueError("no")),
    "exits": Hostile(SystemExit(1)),
    "recursion": Hostile(RecursionError()),
    "huge": "x" * HUGE,
    "surrogates": "\udcff\ud800",
    "controls": "\x1b[2J\r\n\x00",
    "none": None,
    "nan": float("nan"),
    "infinite": float("inf"),
    "large": 10**400,
}


@pytest.fixture
def pipe() -> Iterator[tuple[Reporter, Callable[[], list[bytes]]]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)

    def read() -> list[bytes]:
        try:
            return os.read(reading, 1 << 16).splitlines()
        except BlockingIOError:
            return []

    yield Reporter(writing), read
    os.close(reading)
    os.close(writing)


Pipe = tuple[Reporter, Callable[[], list[bytes]]]


@pytest.mark.parametrize("kind", ERRORS)
def test_any_exception_is_reported(kind: str, pipe: Pipe) -> None:
    reporter, read = pipe
    reporter.failure(ERRORS[kind]())
    line = b"\n".join(read())
    record = parse_record(line)
    assert isinstance(record, FailureReport)
    failure = RankEnd(
        generation=0,
        rank=0,
        local_rank=0,
        host="\udcff",
        pid=1,
        returncode=-99,
        at=0.0,
        report=record,
        stderr_tail="\0",
    )
    assert "rank 0 failed first" in describe([failure] * 20)


@pytest.mark.parametrize("kind", ERRORS)
def test_any_exception_has_a_text(kind: str) -> None:
    error = ERRORS[kind]()
    described = describe_error(error)
    json.dumps(described).encode()
    assert described.traceback
    assert brief(error)
    assert reason_of(error)
    assert find_peer_error(error) is None


@pytest.mark.parametrize("kind", ERRORS)
def test_the_hook_that_was_there_is_called_for_any_exception(
    kind: str, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: seen.append(error))
    record_failures(pipe[0])
    error = ERRORS[kind]()
    sys.excepthook(type(error), error, None)
    assert seen == [error]


@pytest.mark.parametrize("kind", VALUES)
def test_any_progress_is_shown(kind: str, pipe: Pipe) -> None:
    value = VALUES[kind]
    reporter, read = pipe
    for number in (0.0, -1.0, 1e308, float("inf"), float("nan")):
        reporter.progress(description=value, completed=number, total=number, fields={value: value, "x": value})
    for phase in Phase:
        reporter.phase(phase)
    reporter.beat()
    lines = read()
    assert len(lines) == 5 + len(Phase) + 1
    for line in lines:
        record = parse_record(line)
        if isinstance(record, ProgressRecord):
            plain_line(record).encode()
            for width in (1, 20, 200):
                drawn_line(record, width=width).encode()


@pytest.mark.parametrize("state", ["closed", "broken", "full"])
def test_a_reporter_whose_pipe_is_gone_or_full_goes_on(state: str) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    reporter = Reporter(writing)
    if state == "full":
        with suppress(BlockingIOError):
            while os.write(writing, b"x" * 65536):
                pass
    else:
        os.close(reading)
    if state == "closed":
        os.close(writing)
    reporter.progress(description="x", completed=1)
    reporter.beat()
    reporter.failure(ValueError("x"))
    assert reporter.is_connected == (state == "full")
    for descriptor in {"full": (reading, writing), "broken": (writing,), "closed": ()}[state]:
        os.close(descriptor)


LINES = [
    b"",
    b"\xff\xfe\x00",
    b"null",
    b'{"kind": 1}',
    b'{"kind": "progress", "description": "\\ud800", "completed": 1e999}',
    b'{"kind": "progress", "description": "\\udcff", "completed": 1, "fields": {"\\ud800": "\\udfff"}}',
    b'{"kind": "progress", "description": "x", "completed": 1e308, "total": 5e-324}',
    b'{"kind": "beat", "more": ' + b"[" * 200_000,
    b'{"kind": "beat", "more": ' + b'{"x":' * 200_000,
    b'{"kind": "failure", "time": NaN}',
    b"x" * HUGE,
]


@pytest.mark.parametrize("number", range(len(LINES)))
def test_any_line_of_a_rank_is_read_and_shown(number: int) -> None:
    line = LINES[number]
    for whole in LineSplitter(limit=1 << 20).feed(line + b"\n"):
        record = parse_record(whole)
        if isinstance(record, ProgressRecord):
            assert plain_line(record).encode()
            assert drawn_line(record, width=40).encode()


@pytest.mark.parametrize("kind", VALUES)
def test_a_blocked_loop_is_reported_whatever_is_known_of_it(kind: str) -> None:
    value = VALUES[kind]

    def describe_it(_: FrameType) -> str:
        return str(value)

    reported: list[Blocked] = []
    watch = LoopWatch(rank=0, blocked_after=0.1, describe=describe_it)
    watch.subscribe(lambda _: (_ for _ in ()).throw(ValueError(Hostile(ValueError("no")))))
    watch.subscribe(lambda _: Hostile(ValueError("no")).__str__())
    watch.subscribe(reported.append)

    class Gone(Sleeper):
        def __init__(self) -> None:
            pass

        def time(self) -> float:
            return 1.0

        def show(self, describe: Any) -> tuple[str, str]:
            watch._news.clear()  # noqa: SLF001  # the watch's own thread is left out: each step of a report is taken by hand
            return describe(sys._getframe()), format_frames([sys._getframe()])  # noqa: SLF001  # documented in the library reference; a frame of this test is what is reported

    watch._news.wait = lambda timeout=None: True  # type: ignore[method-assign]  # noqa: SLF001  # no time passes: the wait between two inspections is replaced
    watch._report(0.0, Gone())  # noqa: SLF001  # reports once, by hand, a loop that no thread watches
    assert [blocked.is_over for blocked in reported] == [False, True]
    assert all(str(blocked) for blocked in reported)
    assert FailureReport(type_name="x", message="", traceback="").blames is None
