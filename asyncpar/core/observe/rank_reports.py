"""Reports of a rank to the agent that started it: JSON objects, one per line, on an inherited pipe.  Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from asyncpar.core.observe.waits import WaitNotice


class Phase(StrEnum):
    """Steps of a rank on its way into its world."""

    FORMING = "forming"
    MEMBER = "member"
    LEFT = "left"


class ProgressRecord(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """The progress that a rank reports."""

    description: str
    completed: float
    total: float | None = None
    fields: dict[str, str] = {}


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, tag="failure", tag_field="kind"):
    """The exception that ended a rank, as it reported it.

    ``time`` is on the monotonic clock of its host; ``blames`` is the rank that a ``PeerError`` names, and ``call`` what
    the rank called where others called something else (``OperationMismatch``; "": that is not what went wrong).
    """

    type_name: str = msgspec.field(name="type")
    message: str
    traceback: str
    time: float = 0.0
    is_peer_error: bool = False
    blames: int | None = None
    call: str = ""


class PhaseRecord(msgspec.Struct, frozen=True, tag="phase", tag_field="kind"):
    """The phase of a rank in joining its world."""

    phase: Phase


class BeatRecord(msgspec.Struct, frozen=True, tag="beat", tag_field="kind"):
    """A heartbeat."""


class WaitRecord(msgspec.Struct, frozen=True, tag="waiting", tag_field="kind"):
    """The rank has waited for long; ``notice`` None: it goes on, or what it waited for ``has_failed``."""

    notice: WaitNotice | None = None
    has_failed: bool = False


class BlockedRecord(msgspec.Struct, frozen=True, tag="blocked", tag_field="kind"):
    """Code blocks the rank's event loop; ``where`` "": it goes on."""

    where: str = ""


Record = ProgressRecord | FailureReport | PhaseRecord | BeatRecord | WaitRecord | BlockedRecord
_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Encode ``record`` as a line; "" if its text has no UTF-8."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:
        return b""


def parse_record(line: bytes) -> Record | None:
    """Return the record in ``line``; None if it is none."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
