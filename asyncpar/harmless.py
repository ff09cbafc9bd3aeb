"""Sanitized text from other processes: nothing in it controls a terminal or a page.

Ranks print, exceptions carry and other hosts send arbitrary characters.  Some of them control a terminal: they move the
cursor, erase lines, set the title, write to the clipboard, or reorder words.  Everything that is shown goes through
``harmless``.  Whole sequences (CSI, OSC, DCS and the like) are removed; each remaining control character becomes
U+FFFD, so an unterminated sequence hides nothing, and characters without UTF-8 (a byte of a file name) are spelt out.
Line feeds and tabs stay.

Colours (SGR) may stay in the output of ranks if a terminal shows it; they end with their line.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, Final, TypeVar

REPLACEMENT: Final = "\ufffd"
RESET: Final = "\x1b[0m"

_ORDERS: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""C0 and C1 controls, line separators, direction overrides, and characters without UTF-8."""

_SUSPECT: Final = re.compile(f"[{_ORDERS}]")
_SUSPECT_JSON: Final = re.compile(rf"[{_ORDERS}]|\\[bfnru]")
_UNSAFE: Final = re.compile(
    r"(?P<color>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ\\`-~]"  # character sets, and one-letter controls
    rf"|(?P<order>[{_ORDERS}])"
)
_UNFINISHED: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x00-\x1f\x7f-\x9f]*\x1b?\Z"
    r"|\x1b[ -/]*\Z|\r\Z"
)
_MOST_HELD: Final = 4096
Value = TypeVar("Value")


def harmless(text: str, *, colors: bool = False) -> str:
    """Return ``text`` without terminal controls; with ``colors`` those of colour stay, up to the end of their line."""
    if _SUSPECT.search(text) is None:
        return text
    if not colors:
        return _UNSAFE.sub(_drop, text)
    return "\n".join(_end_color(_UNSAFE.sub(_keep_color, line)) for line in text.split("\n"))


def harmless_line(text: str) -> str:
    """Return ``text``, such as a name, sanitized as by ``harmless`` and joined into one line."""
    return harmless(" ".join(text.splitlines()) if "\n" in text or "\r" in text else text)


def harmless_bytes(text: bytes, *, colors: bool = False) -> bytes:
    """Return ``text`` sanitized as by ``harmless``; bytes that are not UTF-8 become U+FFFD, too."""
    return harmless(text.decode(errors="replace"), colors=colors).encode()


def harmless_json(content: bytes) -> bytes:
    """Return an equivalent JSON document in which control characters are escaped."""
    text = content.decode(errors="replace")
    return re.sub(f"[{_ORDERS}]", lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def harmless_values(value: Value) -> Value:
    """Return ``value``, made of plain values and structs, with each text sanitized as by ``harmless_line``.

    It is copied only if something must change, which a quick encoding to JSON shows.
    """
    import msgspec  # not needed by commands that only show errors

    clean: Value = value if _SUSPECT_JSON.search(msgspec.json.encode(value).decode()) is None else _clean(value)
    return clean


def _clean(value: Any) -> Any:
    match value:
        case str():
            return harmless_line(value)
        case dict():
            return {_clean(key): _clean(each) for key, each in value.items()}
        case list():
            return [_clean(each) for each in value]
        case tuple():
            return tuple(_clean(each) for each in value)
    names = getattr(value, "__struct_fields__", None)
    if names is None:
        return value
    from msgspec.structs import replace

    return replace(value, **{name: _clean(getattr(value, name)) for name in names})


class HarmlessStream:
    """Sanitizes a stream of bytes incrementally; a carriage return ends a line, as a line feed does.

    Only an unfinished sequence is held back, up to 4096 characters.
    """

    def __init__(self, *, colors: bool) -> None:
        self._colors = colors
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._is_colored = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can be shown now; a ``chunk`` of ``b""`` ends the stream."""
        text = self._held + self._decoder.decode(chunk, final=not chunk)
        self._held = ""
        found = _UNFINISHED.search(text) if chunk else None
        if found is not None and len(text) - found.start() <= _MOST_HELD:
            text, self._held = text[: found.start()], text[found.start() :]
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        shown = [self._show(line) + (RESET if self._take_color() else "") + "\n" for line in lines]
        return "".join([*shown, self._show(rest)]).encode()

    def _show(self, text: str) -> str:
        shown = _UNSAFE.sub(_keep_color if self._colors else _drop, text)
        if "\x1b" in shown:
            self._is_colored = not shown.endswith(RESET)
        return shown

    def _take_color(self) -> bool:
        colored, self._is_colored = self._is_colored, False
        return colored


def _drop(found: re.Match[str]) -> str:
    order = found["order"]
    if order is None:
        return ""
    return f"\\u{ord(order):04x}" if "\ud800" <= order <= "\udfff" else REPLACEMENT


def _keep_color(found: re.Match[str]) -> str:
    return found["color"] or _drop(found)


def _end_color(line: str) -> str:
    return line + RESET if "\x1b" in line and not line.endswith(RESET) else line
