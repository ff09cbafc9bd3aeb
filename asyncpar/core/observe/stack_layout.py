"""The locations of an interpreter's stacks in memory, so that another process can read them.

Theory of operation.  A rank that is stopped, or in a C call that holds its interpreter lock, cannot report where it is.
A signal that asks for it would interrupt waiting system calls (``sleep``, ``poll``), whatever the flags of its handler:
an inspection must not change what it inspects.  So the agent reads the stacks from outside, as debuggers do.  The
offsets of the parts of a frame differ between versions of Python, but no table of versions is kept: while it is
healthy, the process finds them in its own memory, by a thread whose stack is known (``find_layout``), and passes the
offsets to its agent (``StackLayout``).  If that fails (an interpreter that keeps its frames elsewhere), there is no
layout, and nothing is read.

All reads go through a function that fails for unmapped addresses, here and in the agent, and all data read is checked.
``read_stacks`` reads twice, and returns nothing if the two differ: then the process runs, and can answer itself.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Final, NamedTuple

import msgspec

Read = Callable[[int, int], bytes]
"""Returns the given number of bytes at an address.  Raises ``OSError`` if there are none."""

_WORD: Final = struct.Struct("@Q")
_TYPE: Final = 8
_SIZE: Final = 16
_TAG: Final = 3
"""Bits of a pointer that newer interpreters use for themselves."""

_THREAD_BYTES: Final = 512
_FRAME_BYTES: Final = 128
_CODE_BYTES: Final = 256
_MOST_FRAMES: Final = 256
_MOST_THREADS: Final = 256
_LONGEST: Final = 1 << 16
_TRIES: Final = 3
_PLAIN: Final = "aa"
_WIDE: Final = "éé"
_ENCODINGS: Final = ((4, "utf-32-le", 0x10000), (2, "utf-16-le", 0x100))


class StackLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets in bytes.  ``thread`` is the address of the main thread's state, and ``code_type`` that of code's type.

    ``frame`` leads from the state of a thread to its innermost frame: each item is the offset of a pointer.  ``plain``
    is where strings store their characters if all are ASCII, ``wide`` where others store them.
    """

    thread: int
    code_type: int
    frame: tuple[int, ...]
    following: int
    preceding: int
    native: int
    code: int
    previous: int
    instruction: int
    file: int
    name: int
    table: int
    first: int
    bytecode: int
    content: int
    plain: int
    wide: int


class ReadFrame(NamedTuple):
    """A frame of another process."""

    file: str
    line: int
    function: str


class _NotFoundError(Exception):
    """Something is not at the expected location, or is not of the expected kind."""


# -- finding it, in the process itself --------------------------------------------------------------------------------


def find_layout(read: Read) -> StackLayout | None:
    """Find the layout of this interpreter's stacks; None if it cannot be found.  ``read`` reads this process."""
    known = _KnownThread()
    known.start()
    known.is_there.wait()
    try:
        layout = _find(read, known)
        _, mine = _read_thread(read, layout, known.state)
        expected = [
            ReadFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname) for frame in known.frames
        ]
        return layout if mine[: len(expected)] == expected else None
    except (OSError, _NotFoundError, ValueError, AttributeError, struct.error):
        return None
    finally:
        known.may_go.release()
        known.join()


class _KnownThread(threading.Thread):
    """A thread that waits in C at the end of a known stack."""

    def __init__(self) -> None:
        super().__init__(name="asyncpar stack layout", daemon=True)
        self.is_there = threading.Event()
        self.may_go = threading.Lock()
        self.may_go.acquire()
        self.state = 0
        self.frames: list[FrameType] = []
        """Innermost first."""

    def run(self) -> None:
        self._go_down(2)

    def _go_down(self, depth: int) -> None:
        if depth:
            self._go_down(depth - 1)
        else:
            self._stay()

    def _stay(self) -> None:
        self.state = _call("PyThreadState_Get")
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self.frames.append(frame)
            frame = frame.f_back
        self.is_there.set()
        self.may_go.acquire()


def _call(name: str, *arguments: int) -> int:
    """Return the pointer that a function of Python's C interface returns."""
    function = getattr(ctypes.pythonapi, name)
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p] * len(arguments)
    return int(function(*arguments) or 0)


def _find(read: Read, known: _KnownThread) -> StackLayout:
    states = [_call("PyInterpreterState_ThreadHead", _call("PyInterpreterState_Get"))]
    while following := _call("PyThreadState_Next", states[-1]):
        states.append(following)
    inner, outer = known.frames[0].f_code, known.frames[1].f_code
    path, code = _find_frame(read, known.state, inner)
    frame = _follow(read, known.state, path)
    previous = _find_previous(read, frame, code, outer)
    basic = CodeType.__basicsize__
    native = _find_word(read, known.state, known.native_id or 0, _THREAD_BYTES)
    following, preceding = _find_neighbours(read, states)
    mains = [state for state in states if _word(read, state + native) == threading.main_thread().native_id]
    return StackLayout(
        thread=mains[0] if mains else known.state,
        code_type=id(CodeType),
        frame=path,
        following=following,
        preceding=preceding,
        native=native,
        code=code,
        previous=previous,
        instruction=_find_instruction(read, frame, inner, basic),
        file=_find_word(read, id(inner), id(inner.co_filename), _CODE_BYTES),
        name=_find_word(read, id(inner), id(inner.co_qualname), _CODE_BYTES),
        table=_find_word(read, id(inner), id(inner.co_linetable), _CODE_BYTES),
        first=_find_first_line(read),
        bytecode=basic,
        content=bytes.__basicsize__ - 1,
        plain=sys.getsizeof(_PLAIN) - len(_PLAIN) - 1,
        wide=sys.getsizeof(_WIDE) - len(_WIDE) - 1,
    )


def _find_frame(read: Read, state: int, code: CodeType) -> tuple[tuple[int, ...], int]:
    """Return the path to the innermost frame of a thread, and the offset in it of the pointer to its ``code``."""
    for first, address in _pointers(read, state, _THREAD_BYTES):
        for offset, found in _pointers(read, address, _FRAME_BYTES):
            if found & ~_TAG == id(code):
                return (first,), offset
    for first, address in _pointers(read, state, _THREAD_BYTES):
        for second, frame in _pointers(read, address, 32):
            for offset, found in _pointers(read, frame, _FRAME_BYTES):
                if found & ~_TAG == id(code):
                    return (first, second), offset
    raise _NotFoundError("frame")


def _find_previous(read: Read, frame: int, code: int, outer: CodeType) -> int:
    for offset, address in _pointers(read, frame, _FRAME_BYTES):
        if offset != code and _try_word(read, address + code) & ~_TAG == id(outer):
            return offset
    raise _NotFoundError("previous frame")


def _find_instruction(read: Read, frame: int, code: CodeType, basic: int) -> int:
    begin = id(code) + basic
    for offset, address in _pointers(read, frame, _FRAME_BYTES):
        if begin <= address < begin + len(code.co_code):
            return offset
    raise _NotFoundError("instruction")


def _find_neighbours(read: Read, states: list[int]) -> tuple[int, int]:
    """Return the offsets in a thread's state of the pointers to the following and the preceding one."""
    if len(states) < 2:
        raise _NotFoundError("threads")
    following = [offset for offset, found in _pointers(read, states[0], 64) if found == states[1]]
    preceding = [offset for offset, found in _pointers(read, states[1], 64) if found == states[0]]
    if not following or not preceding:
        raise _NotFoundError("neighbours")
    return following[0], preceding[0]


def _find_first_line(read: Read) -> int:
    """Return the offset of the first line in a code object: the number that all of these have there."""
    codes = (find_layout, _find, _find_frame, _walk_threads, _read_string, line_at)
    for offset in range(_TYPE, CodeType.__basicsize__ - 3, 4):
        found = [struct.unpack("@i", read(id(each.__code__) + offset, 4))[0] for each in codes]
        if found == [each.__code__.co_firstlineno for each in codes]:
            return offset
    raise _NotFoundError("first line")


def _find_word(read: Read, address: int, wanted: int, count: int) -> int:
    for offset, found in _pointers(read, address, count):
        if found == wanted:
            return offset
    raise _NotFoundError(f"word {wanted:#x}")


def _pointers(read: Read, address: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield offsets and words at ``address``, as far as memory is mapped."""
    for offset in range(0, count, _WORD.size):
        word = _try_word(read, address + offset)
        if word >= 0:
            yield offset, word


def _try_word(read: Read, address: int) -> int:
    try:
        return _word(read, address)
    except (OSError, _NotFoundError, ValueError):
        return -1


# -- reading it, in any process ---------------------------------------------------------------------------------------


def read_stacks(read: Read, layout: StackLayout) -> list[tuple[int, list[ReadFrame]]]:
    """Return the frames of each thread, outermost first, with its number in the system; the main thread comes first.

    Returns nothing if they cannot be read, or change meanwhile.
    """
    try:
        before = list(_walk_threads(read, layout))
        for _ in range(_TRIES):
            seen = list(_walk_threads(read, layout))
            if seen == before:
                return [(native, frames[::-1]) for native, frames in seen if frames]
            before = seen
    except (OSError, _NotFoundError, ValueError, struct.error):
        pass
    return []


def _walk_threads(read: Read, layout: StackLayout) -> Iterator[tuple[int, list[ReadFrame]]]:
    yield _read_thread(read, layout, layout.thread)
    for link in (layout.preceding, layout.following):
        state = layout.thread
        for _ in range(_MOST_THREADS):
            state = _word(read, state + link)
            if not state or state % _WORD.size or not _word(read, state + layout.native):
                break
            yield _read_thread(read, layout, state)


def _read_thread(read: Read, layout: StackLayout, state: int) -> tuple[int, list[ReadFrame]]:
    frames: list[ReadFrame] = []
    frame = _follow(read, state, layout.frame)
    for _ in range(_MOST_FRAMES):
        if not frame:
            break
        code = _word(read, frame + layout.code) & ~_TAG
        if code and _word(read, code + _TYPE) == layout.code_type:  # others are the interpreter's own
            frames.append(_read_frame(read, layout, frame, code))
        frame = _word(read, frame + layout.previous)
    return _word(read, state + layout.native), frames


def _read_frame(read: Read, layout: StackLayout, frame: int, code: int) -> ReadFrame:
    begin = code + layout.bytecode
    place = max(0, _word(read, frame + layout.instruction) - begin)
    first = struct.unpack("@i", read(code + layout.first, 4))[0]
    table = _read_bytes(read, layout, _word(read, code + layout.table))
    return ReadFrame(
        file=_read_string(read, layout, _word(read, code + layout.file)),
        line=line_at(table, first, place),
        function=_read_string(read, layout, _word(read, code + layout.name)),
    )


def _follow(read: Read, address: int, path: tuple[int, ...]) -> int:
    for offset in path:
        address = _word(read, address + offset)
    return address


def _word(read: Read, address: int) -> int:
    if not 0 < address < 1 << 62:
        raise _NotFoundError(f"address {address:#x}")
    content = read(address, _WORD.size)
    if len(content) < _WORD.size:
        raise _NotFoundError(f"address {address:#x}")
    return int(_WORD.unpack(content)[0])


def _read_bytes(read: Read, layout: StackLayout, address: int) -> bytes:
    size = _word(read, address + _SIZE)
    if size > _LONGEST:
        raise _NotFoundError("bytes")
    return read(address + layout.content, size)


def _read_string(read: Read, layout: StackLayout, address: int) -> str:
    """Return a string; the width of its characters is detected: none of them is 0, but the one after them is."""
    length = _word(read, address + _SIZE)
    if not 0 < length < _LONGEST:
        raise _NotFoundError("string")
    for offset in (layout.plain, layout.wide):
        content = read(address + offset, length + 1)
        if content.find(0) == length and (offset == layout.wide or content.isascii()):
            return content[:-1].decode("latin-1")
    for width, encoding, least in _ENCODINGS:
        try:
            text = read(address + layout.wide, (length + 1) * width).decode(encoding)
        except UnicodeDecodeError:
            continue
        if text.find("\0") == length and ord(max(text)) >= least:
            return text[:-1]
    raise _NotFoundError("string")


def line_at(table: bytes, first: int, place: int) -> int:
    """Return the line of the instruction at byte ``place``; ``first`` is the first line of its code.

    ``table`` is a code object's ``co_linetable`` (``Objects/locations.md`` of CPython).
    """
    line, passed, at = first, 0, 0
    found = first
    while at < len(table):
        head = table[at]
        kind, length = head >> 3 & 15, (head & 7) + 1
        at += 1
        if kind in (13, 14):
            delta, at = _signed(table, at)
            line += delta
        elif 10 <= kind <= 12:
            line += kind - 10
        while at < len(table) and not table[at] & 128:
            at += 1
        if kind != 15:
            found = line
        passed += 2 * length
        if place < passed:
            return found
    return found


def _signed(table: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = table[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            return (-(value >> 1) if value & 1 else value >> 1), at
