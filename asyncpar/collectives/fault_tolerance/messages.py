"""Messages and outcomes of an agreement among survivors.  Pure."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from asyncpar.errors import ProtocolError

AgreementKind: TypeAlias = Literal["agree", "shrink"]

AgreementFault: TypeAlias = Literal["timeout", "mismatch", "expelled"]
"""Reason for the lack of a result: a live rank did not call, ranks called different operations, or the others have
declared this rank lost."""

AgreementBallot: TypeAlias = tuple[int, int]
"""Index of the leader in the group, and number of its earlier proposals."""

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=2048)]


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outcome of an agreement: the AND of all ``flag`` values, and the ``lost`` ranks; or a fault, with its culprit."""

    flag: int
    lost: tuple[int, ...]
    fault: AgreementFault | None = None
    culprit: int | None = None
    text: _Text = ""


class AcceptedOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The proposal that a rank has accepted last."""

    ballot: AgreementBallot
    outcome: Outcome


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="contribution"):
    """The sender's knowledge, for the leader: its flag (and None for ``kind`` if it has not called yet), and losses.

    ``timeout`` is the seconds that it waits: a leader that has not called waits no longer for others.
    """

    ranks: tuple[int, ...]
    kind: AgreementKind | None
    flag: int
    lost: tuple[int, ...]
    accepted: AcceptedOutcome | None = None
    timeout: float | None = None


class ProposeOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """Request of the leader to accept ``outcome``."""

    ranks: tuple[int, ...]
    ballot: AgreementBallot
    outcome: Outcome


class AcceptOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """Notice that the sender has accepted the proposal with this ballot."""

    ballot: AgreementBallot
    lost: tuple[int, ...]


class DecideOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="decide"):
    """Decision: all survivors have accepted ``outcome``."""

    outcome: Outcome


class AskMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    """Question of a waiting sender, which the receiver answers with its contribution, or with the decision."""

    ranks: tuple[int, ...]
    lost: tuple[int, ...]


AgreementMessage: TypeAlias = Contribution | ProposeOutcome | AcceptOutcome | DecideOutcome | AskMember

_decoder = msgspec.msgpack.Decoder(AgreementMessage)


def encode_agreement(message: AgreementMessage) -> bytes:
    """Encode the payload of an AGREE frame."""
    return msgspec.msgpack.encode(message)


def decode_agreement(payload: bytes, *, size: int) -> AgreementMessage:
    """Decode the message of an AGREE frame in a world of ``size`` ranks.

    Raises ``ProtocolError`` for anything else.
    """
    try:
        message: AgreementMessage = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"AGREE frame: {error}") from error
    if not all(0 <= rank < size for rank in _ranks_in(message)):
        raise ProtocolError(f"AGREE frame: expected ranks 0..{size - 1} in {type(message).__name__}")
    return message


def _ranks_in(message: AgreementMessage) -> tuple[int, ...]:
    match message:
        case Contribution(ranks=ranks, lost=lost, accepted=accepted):
            return (*ranks, *lost, *(() if accepted is None else _named_in(accepted.outcome)))
        case ProposeOutcome(ranks=ranks, outcome=outcome):
            return (*ranks, *_named_in(outcome))
        case AcceptOutcome(lost=lost):
            return lost
        case DecideOutcome(outcome=outcome):
            return _named_in(outcome)
        case AskMember(ranks=ranks, lost=lost):
            return (*ranks, *lost)


def _named_in(outcome: Outcome) -> tuple[int, ...]:
    return outcome.lost if outcome.culprit is None else (*outcome.lost, outcome.culprit)
