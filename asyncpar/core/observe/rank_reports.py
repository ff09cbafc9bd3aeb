"""Reports from a rank to the agent that started it: JSON objects, one per line, on an inherited pipe.  Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from asyncpar.core.observe.waits import WaitNotice


class Phase(StrEnum):
    """Phases of a rank on its way into its world."""

    FORMING = "forming"
    MEMBER = "member"
    LEFT = "left"


class ProgressRecord(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """A rank's report of its progress."""

    description: str
    completed: float
    total: float | None = None
    fields: dict[str, str] = {}


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, tag="failure", tag_field="kind"):
    """The exception that ended a rank, as it reported it.

    ``time`` is on the monotonic clock of its host; ``blames`` is the rank that a ``PeerError`` names, and ``call`` the
    rank's call where others called something else (``OperationMismatch``; "": the failure was another one).
    """

    type_name: str = msgspec.field(name="type")
    message: str
    traceback: str
    time: float = 0.0
    is_peer_error: bool = False
    blames: int | None = None
    call: str = ""


class PhaseRecord(msgspec.Struct, frozen=True, tag="phase", tag_field="kind"):
    """The phase of a rank that joins its world."""

    phase: Phase


class BeatRecord(msgspec.Struct, frozen=True, tag="beat", tag_field="kind"):
    """A heartbeat."""


class WaitRecord(msgspec.Struct, frozen=True, tag="waiting", tag_field="kind"):
    """A long wait of the rank; ``notice`` None: it goes on, or what it waited for ``has_failed``."""

    notice: WaitNotice | None = None
    has_failed: bool = False


class BlockedRecord(msgspec.Struct, frozen=True, tag="blocked", tag_field="kind"):
    """A blocked event loop of the rank; ``where`` is the code, "": the loop resumes."""

    where: str = ""


Record = ProgressRecord | FailureReport | PhaseRecord | BeatRecord | WaitRecord | BlockedRecord
_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Encode ``record`` as a line; b"" if its text cannot be encoded as UTF-8."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:
        return b""


def parse_record(line: bytes) -> Record | None:
    """Decode the record in ``line``; None if it is invalid."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
