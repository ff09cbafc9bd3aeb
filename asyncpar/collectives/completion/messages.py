"""Messages by which ranks agree on who contributes to an operation.  Pure."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from asyncpar.errors import ProtocolError

_BallotNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]

ContributorBallot: TypeAlias = tuple[_BallotNumber, _BallotNumber]
"""How many attempts came before it, and the place of the rank that makes it."""

NO_BALLOT: Final = (-1, -1)

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=2048)]


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of the world that contribute, in the order of the group; ``call`` describes what they have called."""

    contributors: tuple[int, ...]
    call: _Text


class Here(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """The sender has called the operation, as ``call`` says, in a group of ``ranks``."""

    ranks: tuple[int, ...]
    call: _Text


class PrepareChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepare"):
    """Accept nothing with a lower ballot from now on."""

    ranks: tuple[int, ...]
    ballot: ContributorBallot


class PromiseChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="promise"):
    """The sender has promised that; ``accepted`` is what it has accepted last, and ``at`` the ballot of that."""

    ballot: ContributorBallot
    at: ContributorBallot = NO_BALLOT
    accepted: Chosen | None = None


class AcceptChosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """Accept ``chosen``."""

    ranks: tuple[int, ...]
    ballot: ContributorBallot
    chosen: Chosen


class AcceptedChosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
    """The sender has accepted what this ballot is for."""

    ballot: ContributorBallot


class Outvoted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="outvoted"):
    """The sender has promised ``ballot``, which is higher than that of the receiver."""

    ballot: ContributorBallot


class DecideChosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="decide"):
    """It is decided."""

    ranks: tuple[int, ...]
    chosen: Chosen


ContributorMessage: TypeAlias = (
    Here | PrepareChoice | PromiseChoice | AcceptChosen | AcceptedChosen | Outvoted | DecideChosen
)

_decoder = msgspec.msgpack.Decoder(ContributorMessage)


def encode_contributors(message: ContributorMessage) -> bytes:
    """Return the payload of a CONTRIBUTORS frame."""
    return msgspec.msgpack.encode(message)


def decode_contributors(payload: bytes, *, size: int) -> ContributorMessage:
    """Return the message of a CONTRIBUTORS frame in a world of ``size`` ranks.

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
