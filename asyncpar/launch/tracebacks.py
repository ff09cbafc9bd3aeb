"""Tracebacks in the output of ranks: find them, shorten them to what their author needs, and hold them back.  Pure.

A Python program that fails prints its traceback and ends.  The launcher shows the one that explains the job's end,
shortened, when all is over.  So output of a rank that looks like a traceback is held for a moment, and dropped if it
was the rank's last output: its first line is in the summary.  A program that goes on after it (it has logged an error)
loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

HOLD_SECONDS: Final = 1.0
"""Seconds that lines from a traceback on may wait for the end of their process."""

REPORTED_HOLD_SECONDS: Final = 30.0
"""The same for a process that has reported the exception which ends it: on a busy host its last steps take seconds."""

_HELD_BYTES: Final = 1 << 16
_REMEMBERED_LINES: Final = 512
_USER_FRAMES: Final = 3
"""Frames of the program that are shown: the outermost one, and the innermost ones."""

_LONGEST_LINE: Final = 160
_HEADER: Final = re.compile(r"^(Traceback \(most recent call last\):|  \+ Exception Group Traceback )")
_BARE: Final = re.compile(r'^  File "[^"]+", line \d+$')  # a SyntaxError of the program has no header
_FRAME: Final = re.compile(r'^([ |]*)  File "([^"]+)", line (\d+)(, in .*)?$')
_LAST: Final = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_LINKS: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_INTERNAL: Final = tuple(
    str(Path(place)) + os.sep for place in (Path(__file__).parents[1], Path(asyncio.__file__).parent)
)
_INTERNAL_FILES: Final = frozenset({runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"})
_MODULES: Final = re.compile(r"[/\\]concurrent[/\\]futures[/\\]|^<frozen |^uvloop[/\\]")


class ParsedFailure(NamedTuple):
    """The exception at the end of a traceback; ``module`` is "" for built-in ones."""

    module: str
    type_name: str
    message: str
    traceback: str


def find_traceback(text: str) -> ParsedFailure | None:
    """Return the last traceback in ``text`` with its linked ones; None if the text does not end with one."""
    lines = text.splitlines()
    start = _last_start(lines)
    if start is None:
        return None
    for number in range(len(lines) - 1, start, -1):
        found = _LAST.match(lines[number])
        if found and (lines[number - 1].startswith(" ") or not lines[number - 1]):
            module, _, type_name = found["kind"].rpartition(".")
            message = "\n".join([found["message"] or "", *lines[number + 1 :]]).rstrip()
            return ParsedFailure(module, type_name, message, "\n".join(lines[start:]))
    return None


def _last_start(lines: Sequence[str]) -> int | None:
    """Return the index at which the last traceback, with its linked ones, begins."""
    start = None
    for number, line in enumerate(lines):
        is_bare = bool(_BARE.match(line)) and (start is None or not lines[number - 1].startswith("  "))
        if (_HEADER.match(line) or is_bare) and (start is None or not _is_linked(lines, number)):
            start = number
    return start


def _is_linked(lines: Sequence[str], number: int) -> bool:
    before = [line for line in lines[max(0, number - 3) : number] if line.strip()]
    return bool(before) and before[-1].startswith(_LINKS)


def is_internal(file: str) -> bool:
    """Return whether ``file`` is that of a frame that is of no use to the author of a program."""
    return file.startswith(_INTERNAL) or file in _INTERNAL_FILES or _MODULES.search(file) is not None


def shorten(traceback: str) -> str:
    """Shorten ``traceback`` to its last exception, the program's own frames, and a note of omissions.

    Text that has no such frames is returned unchanged.
    """
    lines = traceback.rstrip().splitlines()
    begin = max((number for number, line in enumerate(lines) if line.startswith(_LINKS)), default=-1) + 1
    every = _frames(lines[begin:])
    frames = [frame for frame in every if not frame.is_internal]
    if not frames:
        return traceback
    if len(frames) > 1 and frames[0] is every[0] and every[1].is_internal:
        del frames[0]  # the call of ``asyncpar.run(main)``
    hidden = len(_frames(lines)) - len(frames)
    shown = frames if len(frames) <= _USER_FRAMES else [frames[0], *frames[1 - _USER_FRAMES :]]
    hidden += len(frames) - len(shown)
    kept = [line for frame in shown for line in frame.lines]
    if hidden:
        kept.append(f"({hidden} more frame{'s are' if hidden > 1 else ' is'} shown by --full-traceback)")
    return "\n".join(kept)


class _Frame(NamedTuple):
    lines: list[str]
    is_internal: bool


def _frames(lines: Sequence[str]) -> list[_Frame]:
    """Return the frames in ``lines``: two lines each, without the marks of members of exception groups."""
    frames: list[_Frame] = []
    for number, line in enumerate(lines):
        found = _FRAME.match(line)
        if found is None:
            continue
        lead, file, line_number, function = found.groups()
        source = lines[number + 1] if number + 1 < len(lines) else ""
        text = [f'File "{_relative(file)}", line {line_number}{function or ""}']
        if source.startswith(f"{lead}    ") and not _FRAME.match(source):
            text.append(f"  {_cut(source[len(lead) :].strip())}")
        frames.append(_Frame(text, is_internal(file)))
    return frames


def _relative(file: str) -> str:
    """Return ``file`` as seen from here, where that is shorter."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 3] + "..."


class TracebackHold:
    """Holds back the lines of one stream from a traceback on.

    ``take`` returns the lines to be shown now; ``is_holding``: call ``release`` ``HOLD_SECONDS`` after that has begun,
    or ``end`` when the process has ended.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._bytes = 0
        self._released: list[bytes] = []

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def take(self, lines: list[bytes]) -> list[bytes]:
        """Take the next lines of the stream."""
        if not self._held:
            start = next((number for number, line in enumerate(lines) if _begins(line)), len(lines))
            shown, lines = lines[:start], lines[start:]
        else:
            shown = []
        self._held += lines
        self._bytes += sum(map(len, lines))
        return shown + self.release() if self._bytes > _HELD_BYTES else shown

    def release(self) -> list[bytes]:
        """Return the held lines: the process goes on."""
        held, self._held, self._bytes = self._held, [], 0
        self._released = (self._released + held)[-_REMEMBERED_LINES:]
        return held

    def has_shown(self, traceback: str) -> bool:
        """Return whether ``traceback`` was shown before its process ended."""
        lines = traceback.rstrip().encode()
        return bool(lines) and lines in b"\n".join(self._released)

    def end(self, *, has_failed: bool) -> list[bytes]:
        """Return the held lines that are to be shown when the process has ended.

        Its last traceback is not among them if it has failed, or was interrupted before its program began.
        """
        lines = [line.decode(errors="replace") for line in self._held]
        start = _last_start(lines)
        if start is None or not (has_failed or _is_interrupted_import(lines[start:])):
            return self.release()
        held, self._held, self._bytes = self._held, [], 0
        return held[:start]


def _is_interrupted_import(traceback: Sequence[str]) -> bool:
    """Return whether Ctrl-C came while the program imported modules: none of its own code had run."""
    begin = next((number for number, line in enumerate(traceback) if _FRAME.match(line)), None)
    if begin is None or not traceback[-1].startswith("KeyboardInterrupt"):
        return False
    frame, source = traceback[begin], traceback[begin + 1].strip()
    return frame.endswith(", in <module>") and source.startswith(("import ", "from "))


def _begins(line: bytes) -> bool:
    if not line.startswith((b"Traceback ", b"  + Exception", b"  File ")):
        return False
    text = line.decode(errors="replace")
    return bool(_HEADER.match(text) or _BARE.match(text))
