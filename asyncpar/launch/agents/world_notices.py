"""Notices among the hosts of a world: ends, conditions and waits of their ranks.  Pure values."""

from __future__ import annotations

import msgspec

from asyncpar.errors import ProtocolError
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.wait_board import WaitReport


class EndNotice(msgspec.Struct, frozen=True, tag="end"):
    """The process of a rank has ended; ``end.at`` is on the clock of its host."""

    end: RankEnd


class ConditionNotice(msgspec.Struct, frozen=True, tag="condition"):
    """A rank is in a condition that it cannot report itself (``is stopped``); "": it runs."""

    rank: int
    how: str


class WaitsNotice(msgspec.Struct, frozen=True, tag="waits"):
    """A rank reports what it waits for."""

    report: WaitReport


class DoneNotice(msgspec.Struct, frozen=True, tag="done"):
    """All ranks of a host have ended with code 0."""


Notice = EndNotice | ConditionNotice | WaitsNotice | DoneNotice


def name_notice(notice: Notice) -> str:
    """Return the name under which ``notice`` supersedes earlier ones of its member."""
    match notice:
        case EndNotice(end):
            return f"end {end.rank}"
        case ConditionNotice(rank):
            return f"condition {rank}"
        case WaitsNotice(report):
            return f"waits {report.rank}"
        case DoneNotice():
            return "done"


def encode_notice(notice: Notice) -> bytes:
    """Encode ``notice``."""
    return msgspec.msgpack.encode(notice)


def decode_notice(content: bytes) -> Notice:
    """Decode the notice in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        notice: Notice = msgspec.msgpack.decode(content, type=Notice)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a notice of another host cannot be read ({error}); all must be of one version") from error
    return notice
