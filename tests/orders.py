"""Text that gives orders to a terminal, for tests of all that shows the text of others."""

from __future__ import annotations

import itertools
import re
from typing import Final

STRINGS: Final = {"OSC": "]", "DCS": "P", "SOS": "X", "PM": "^", "APC": "_"}
ENDS: Final = {"BEL": "\x07", "ST": "\x1b\\", "C1 ST": "\x9c", "no end": ""}
EIGHT_BIT: Final = {"OSC": "\x9d", "DCS": "\x90", "SOS": "\x98", "PM": "\x9e", "APC": "\x9f"}

ORDERS: Final[dict[str, str]] = {
    "CSI": "\x1b[2J",
    "CSI with a gap": "\x1b[1 q",
    "CSI, private": "\x1b[?1049h",
    "CSI, 8 bit": "\x9b2J",
    "CSI without an end": "\x1b[38;5",
    "CSI with a control": "\x1b[3\x071m",
    "colour, 8 bit": "\x9b31m",
    "reset": "\x1bc",
    "index": "\x1bM",
    "save": "\x1b7",
    "character set": "\x1b(0",
    "lone escape": "\x1b",
    "two escapes": "\x1b\x1b[2J",
    "nested": "\x1b[\x1b[2J2J",
    "escape in a string": "\x1b]0;\x1b[2Jx\x07",
    **{f"{kind}, {end}": f"\x1b{STRINGS[kind]}0;owned{ENDS[end]}" for kind, end in itertools.product(STRINGS, ENDS)},
    **{
        f"{kind}, 8 bit, {end}": f"{EIGHT_BIT[kind]}52;c;b3duZWQ={ENDS[end]}"
        for kind, end in itertools.product(EIGHT_BIT, ENDS)
    },
    "bell": "\x07",
    "backspace": "\x08\x08\x08",
    "delete": "\x7f",
    "return": "\rasyncpar launch: all is well",
    "vertical tab": "\x0b",
    "form feed": "\x0c",
    "shift out": "\x0e",
    "nul": "\x00",
    "next line": "\x85",
    "line separator": "\u2028",
    "right to left": "\u202eowned\u202c",
    "isolate": "\u2067owned\u2069",
}

COLOR: Final = "\x1b[1;31m"
_OWN: Final = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[2K")
_ORDER: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def planted(order: str) -> str:
    """Return ``order`` between two words that must both be shown."""
    return f"before{order}→after"


def left_in(text: str, *, own: bool = False) -> str:
    """Return the first order in ``text``, "" for none; with ``own`` not colours, and not the erasing of a line."""
    found = _ORDER.search(_OWN.sub("", text) if own else text)
    return "" if found is None else repr(text[max(0, found.start() - 20) : found.end() + 20])


def check_shown(text: str, *, own: bool = False) -> None:
    """Assert that ``planted`` text was shown, and none of its orders."""
    assert "before" in text, text
    assert "after" in text, text
    assert left_in(text, own=own) == ""
