"""Settings of the arena, and their environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncpar.errors import UsageError

DEFAULT_BYTES = 8 << 20
LEAST_BYTES = 256 << 10
MOST_BYTES = 16 << 30

_BYTES = "ASYNCPAR_ARENA_BYTES"
_WAIT = "ASYNCPAR_ARENA_WAIT"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,18})\s*([KMG]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_STRONGLY_ORDERED = ("x86_64", "amd64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSettings:
    """Settings of the memory that the ranks of one host share.  ``bytes`` and ``polls`` must be equal on all of them.

    ``bytes`` is the size of each rank's bounded part (0: there is no arena).  ``polls`` allows polling progress words
    in memory; otherwise progress counts when its doorbell message was read, which is correct on every processor.
    ``required`` makes the lack of an arena an error.  ``seconds`` bounds the wait for the other ranks.
    """

    bytes: int = DEFAULT_BYTES
    polls: bool
    required: bool = False
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.bytes != 0 and not LEAST_BYTES <= self.bytes <= MOST_BYTES:
            raise UsageError(
                f"{_BYTES}: expected {LEAST_BYTES >> 10}K to {MOST_BYTES >> 30}G, or off, got {self.bytes} bytes"
            )
        if not 0.0 < self.seconds <= 3600.0:
            raise UsageError(f"seconds: expected more than 0 and at most 3600, got {self.seconds}")

    @classmethod
    def from_mapping(
        cls, environment: Mapping[str, str], *, machine: str, required: bool = False, seconds: float = 10.0
    ) -> ArenaSettings:
        """Read ``environment`` (such as ``os.environ``); ``machine`` names the processor (``platform.machine()``).

        Raises ``UsageError`` naming the variable that is wrong.
        """
        return cls(
            bytes=_parse_bytes(environment.get(_BYTES, "")),
            polls=_parse_wait(environment.get(_WAIT, ""), machine),
            required=required,
            seconds=seconds,
        )

    @property
    def is_off(self) -> bool:
        """Whether there is to be no arena."""
        return self.bytes == 0

    @property
    def terms(self) -> str:
        """The settings that must be equal on all ranks, as text to compare and to quote."""
        return "arena=off" if self.is_off else f"arena={self.bytes} wait={'poll' if self.polls else 'doorbell'}"


def _parse_bytes(text: str) -> int:
    if not text:
        return DEFAULT_BYTES
    if text.lower() == "off":
        return 0
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{_BYTES}: expected a size such as 8M or 512K, or off, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def _parse_wait(text: str, machine: str) -> bool:
    can_poll = machine.lower() in _STRONGLY_ORDERED
    if text not in ("", "poll", "doorbell"):
        raise UsageError(f"{_WAIT}: expected poll or doorbell, got {text!r}")
    if text == "poll" and not can_poll:
        raise UsageError(
            f"{_WAIT}: poll needs a processor that keeps stores in order (x86-64), this one is {machine}; use doorbell"
        )
    return can_poll and text != "doorbell"
