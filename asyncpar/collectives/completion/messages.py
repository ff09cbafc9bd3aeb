"""Messages by which ranks agree on the contributors to an operation.  Pure."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from asyncpar.errors import ProtocolError

_BallotNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]

ContributorBallot: TypeAlias = tuple[_BallotNumber, _BallotNumber]
"""Number of earlier attempts, and the index of the rank that makes this one."""

NO_BALLOT: Final = (-1, -1)

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=2048)]


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of the world that contribute, in the order of the group; ``call`` describes their call."""

    contributors: tuple[int, ...]
    call: _Text


class Here(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """Announcement that the sender has called the operation, described by ``call``, in a group of ``ranks``."""

    ranks: tuple[int, ...]
    call: _Text


class PrepareChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare"):
    """Request to accept nothing with a lower ballot from now on."""

    ranks: tuple[int, ...]
    ballot: ContributorBallot


class PromiseChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="promise"):
    """Promise of the sender; ``accepted`` is the choice that it has accepted last, and ``at`` its ballot."""

    ballot: ContributorBallot
    at: ContributorBallot = NO_BALLOT
    accepted: Chosen | None = None


class AcceptChosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """Request to accept ``chosen``."""

    ranks: tuple[int, ...]
    ballot: ContributorBallot
    chosen: Chosen


class AcceptedChosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
    """Notice that the sender has accepted the choice of this ballot."""

    ballot: ContributorBallot


class Outvoted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="outvoted"):
    """Notice that the sender has promised ``ballot``, which is higher than that of the receiver."""

    ballot: ContributorBallot


class DecideChosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="decide"):
    """Notice of the decision."""

    ranks: tuple[int, ...]
    chosen: Chosen


ContributorMessage: TypeAlias = (
    Here | PrepareChoice | PromiseChoice | AcceptChosen | AcceptedChosen | Outvoted | DecideChosen
)

_decoder = msgspec.msgpack.Decoder(ContributorMessage)


def encode_contributors(message: ContributorMessage) -> bytes:
    """Encode the payload of a CONTRIBUTORS frame."""
    return msgspec.msgpack.encode(message)


def decode_contributors(payload: bytes, *, size: int) -> ContributorMessage:
    """Decode the message of a CONTRIBUTORS frame in a world of ``size`` ranks.

    Raises ``ProtocolError`` for anything else.
    """
    try:
        message: ContributorMessage = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"CONTRIBUTORS frame: {error}") from error
    if not all(0 <= rank < size for rank in _ranks_in(message)):
        raise ProtocolError(f"CONTRIBUTORS frame: expected ranks 0..{size - 1} in {type(message).__name__}")
    return message


def _ranks_in(message: ContributorMessage) -> tuple[int, ...]:
    match message:
        case Here(ranks=ranks) | PrepareChoice(ranks=ranks):
            return ranks
        case AcceptChosen(ranks=ranks, chosen=chosen) | DecideChosen(ranks=ranks, chosen=chosen):
            return (*ranks, *chosen.contributors)
        case PromiseChoice(accepted=accepted) if accepted is not None:
            return accepted.contributors
    return ()
