"""What ranks write into the report channel, parsed.  Ranks are not trusted: anything unknown is None."""

from __future__ import annotations

import msgspec

from asyncpar.core.observe.reporting import Phase
from asyncpar.launch.failure import FailureReport


class ProgressRecord(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """How far a rank says that it is."""

    description: str
    completed: float
    total: float | None = None
    fields: dict[str, str] = {}


class FailureRecord(msgspec.Struct, frozen=True, tag="failure", tag_field="kind"):
    """The exception that a rank says will end it; ``time`` is by the host's clock."""

    time: float
    type: str
    message: str
    traceback: str
    is_peer_error: bool = False
    blames: int | None = None

    def report(self) -> FailureReport:
        return FailureReport(
            type_name=self.type,
            message=self.message,
            traceback=self.traceback,
            is_peer_error=self.is_peer_error,
            blames=self.blames,
        )


class PhaseRecord(msgspec.Struct, frozen=True, tag="phase", tag_field="kind"):
    """How far a rank says that it is on its way into its world."""

    phase: Phase


class BeatRecord(msgspec.Struct, frozen=True, tag="beat", tag_field="kind"):
    """A sign of life."""


Record = ProgressRecord | FailureRecord | PhaseRecord | BeatRecord


def parse_record(line: bytes) -> Record | None:
    """Return the record in ``line``; None if it is none."""
    try:
        record: Record = msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record
