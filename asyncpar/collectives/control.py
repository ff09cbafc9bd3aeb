"""Control frames between ranks about operations: msgpack of checked structs.  Pure."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from asyncpar.collectives.description import Description
from asyncpar.errors import ProtocolError

_TEXT_LIMIT = 4096
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_TEXT_LIMIT)]

Reason = Literal["cancelled", "failed", "refused", "mismatch", "lost", "timeout"]


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation ended in failure at the sender.

    ``text`` says why.  A mismatch that the sender has found comes with its own ``operation``, and the receiver answers
    with its own (``is_answer``, which is not answered again); third ranks get the whole ``text`` and no operation.
    ``rank`` is the one that is lost, or that the sender has waited for in vain.
    """

    reason: Reason
    text: _Text = ""
    operation: Description | None = None
    is_answer: bool = False
    rank: int | None = None


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender waits for the receiver in ``operation``."""

    operation: Description


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a probe: ``text`` says where the sender is, like ``in all_reduce #811``.

    ``culprit`` is the rank that the sender holds responsible, which has not answered for ``silent_for`` seconds (None:
    it does answer).  It is sent again when the sender learns of another culprit.
    """

    text: _Text
    culprit: int | None = None
    silent_for: float | None = None


Message = TypeVar("Message", Abort, Probe, Status)

_encode = msgspec.msgpack.Encoder().encode


def encode_control(message: Abort | Probe | Status) -> bytes:
    """Return the payload of the control frame for ``message``."""
    return _encode(message)


def decode_control(payload: bytes, kind: type[Message]) -> Message:
    """Return the message of a control frame.  Raises ``ProtocolError`` for anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"{kind.__name__} frame: {error}") from error


def shortened(text: str) -> str:
    """Return ``text``, cut to what fits a control frame."""
    return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 3] + "..."
