"""The sending half of a link: decide when a payload may travel (see ``inbox`` for the theory of operation)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.errors import OperationMismatch, ProtocolError
from asyncpar.net.transport.inbox import EAGER_LIMIT, EAGER_WINDOW, MAX_PENDING, Referee
from asyncpar.net.wire.header import HEADER_BYTES, MESSAGE_GROUP, FrameHeader, FrameKind, Key


@dataclass(frozen=True, slots=True)
class SendNow:
    """The payload may travel as a frame of this kind."""

    kind: FrameKind


@dataclass(frozen=True, slots=True)
class Wait:
    """A grant must come first; ``ask`` says whether it has to be requested."""

    ask: bool


EAGER_NOW = SendNow(FrameKind.EAGER)
BULK_NOW = SendNow(FrameKind.BULK)


class Outbox:
    """Credit and grants of one direction of a link."""

    def __init__(self, *, referee: Referee) -> None:
        self._referee = referee
        self._credit = EAGER_WINDOW
        self._grants: dict[Key, tuple[int, int]] = {}

    def admit(self, key: Key, length: int) -> SendNow | Wait:
        """Decide how a payload of ``length`` bytes travels.

        Raises ``OperationMismatch`` if the receiver granted another length.
        """
        if self.spend(length):
            return EAGER_NOW
        granted = self._grants.pop(key, None)
        if granted is None:
            return Wait(ask=length <= EAGER_LIMIT or key.group == MESSAGE_GROUP)
        check_grant(key, granted[1], length)
        return BULK_NOW

    def spend(self, length: int) -> bool:
        """Spend credit for a payload of ``length`` bytes; False if it may not travel eagerly."""
        cost = length + HEADER_BYTES
        if length > EAGER_LIMIT or cost > self._credit:
            return False
        self._credit -= cost
        return True

    def credit(self, amount: int) -> None:
        """The receiver consumed ``amount`` bytes."""
        self._credit += amount
        if self._credit > EAGER_WINDOW:
            raise ProtocolError(f"credit: the peer returned {self._credit - EAGER_WINDOW} bytes more than were sent")

    def granted(self, header: FrameHeader, length: int) -> None:
        """Remember a grant that came before its send."""
        if header.group == MESSAGE_GROUP or self._referee.is_stale(header.group, header.sequence):
            return  # nobody waits for it any more
        if len(self._grants) >= MAX_PENDING:
            raise ProtocolError(f"more than {MAX_PENDING} grants wait for a send")
        self._grants[header.key] = (header.fingerprint, length)

    def forget(self, group: int, sequence: int | None = None) -> None:
        """Drop the grants of an operation that is over."""
        over = (group,) if sequence is None else (group, sequence)
        for key in [key for key in self._grants if key[: len(over)] == over]:
            del self._grants[key]

    def grant_fingerprint(self, key: Key) -> int | None:
        """Return the fingerprint of the grant that waits for ``key``, if there is one."""
        grant = self._grants.get(key)
        return None if grant is None else grant[0]


def check_grant(key: Key, granted: int, length: int) -> None:
    """Raise ``OperationMismatch`` unless the receiver granted what the sender has."""
    if granted != length:
        raise OperationMismatch(
            f"group {key.group:#x} operation #{key.sequence} message {key.tag}: "
            f"this rank sends {length} bytes, the peer expects {granted}"
        )
