"""What actor systems say to each other: one payload per message, a tagged union of structs in its envelope.

Structs travel as arrays that begin with their tag.  A newer version may add tags, and fields (with defaults) at the
end: whoever does not know them ignores the fields and refuses the tags.  Arguments and results stay encoded
(``msgspec.Raw``) until it is known which types they must have.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.wire.array import Buffer
from asyncpar.wire.payload import PayloadDecoder

CallId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Amount: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=1 << 62)]

USAGE: Final = "usage"
"""The call was wrong: no such actor or endpoint, or the arguments do not fit."""
RAISED: Final = "raised"
"""The endpoint raised, or its result cannot be sent."""
STOPPED: Final = "stopped"
"""The actor was stopped before it answered."""
CLOSED: Final = "closed"
"""The node was closed before it answered."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Ask ``endpoint`` of ``actor``; answered by one ``Reply`` or ``Failure`` with the same ``call``."""

    call: CallId
    actor: str
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]


class Tell(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Like ``Call``, never answered."""

    actor: str
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The endpoint returned ``value``."""

    call: CallId
    value: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """There is no result.  ``reason`` is one of the constants above; an unknown one counts as ``RAISED``."""

    call: CallId
    reason: str
    text: str
    type_name: str = ""
    traceback: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The caller does not want the answer any more; there will be none."""

    call: CallId


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """``actor`` took messages that cost ``amount`` from its mailbox (see ``window``)."""

    actor: str
    amount: Amount


Message: TypeAlias = Call | Tell | Reply | Failure | Cancel | Credit


class MessageDecoder:
    """Decodes envelopes.  Make it once per system."""

    def __init__(self) -> None:
        self._decoder = PayloadDecoder[Message](Message)

    def decode(self, payload: Buffer) -> Message:
        """Return the message in ``payload``.  Raises ``ProtocolError`` if there is none."""
        try:
            return self._decoder.decode(payload, what="actor message")
        except UsageError as error:
            raise ProtocolError(str(error)) from error
