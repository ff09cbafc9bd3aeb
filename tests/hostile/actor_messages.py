"""One of each message that actor systems say to each other, whatever these are."""

from __future__ import annotations

from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from asyncpar.actors.runtime.message import Message
from asyncpar.net.wire.payload import PayloadEncoder

TARGET: Final = "target"
ENDPOINT: Final = "poke"

_BY_NAME: Final = {"actor": TARGET, "endpoint": ENDPOINT}
_BY_KIND: Final[dict[type[Any], Any]] = {
    bool: True,
    int: 7,
    float: 1.5,
    str: "some text",
    msgspec.Raw: msgspec.Raw(msgspec.msgpack.encode([1, "two"])),
    list: [msgspec.Raw(b"\x01")],
    dict: {"key": msgspec.Raw(b"\x02")},
    type(None): None,
}


def every_message() -> dict[str, bytes]:
    """Return a payload with each message, its optional fields given as far as they are simple."""
    payloads = {}
    for kind in get_args(Message):
        values = {name: _sample(name, hint) for name, hint in get_type_hints(kind).items()}
        payloads[kind.__name__] = bytes(PayloadEncoder().finish(kind(**values), what="x"))
    return payloads


def _sample(name: str, hint: Any) -> Any:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if get_origin(hint) is list and get_args(hint) == (int,):
        return [0, 1]
    for choice in (hint, get_origin(hint), *get_args(hint)):
        if isinstance(choice, type) and choice in _BY_KIND:
            return _BY_KIND[choice]
    return _sample(name, get_args(hint)[0])
