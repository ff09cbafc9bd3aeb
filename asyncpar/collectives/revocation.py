"""The message by which a rank revokes a group, and the ranks that get it.  Pure.

Theory of operation.  Revocation is that of ULFM (Bland et al., "Post-failure recovery of MPI communication capability",
IJHPCA 27:3, 2013): any rank revokes, no rank waits, and all calls and waits of the others in the group end.  The
message must reach every live rank even if the one that revoked dies in the middle, and others are dead: so each rank
that receives it for the first time forwards it before it does anything else.  In a small group each forwards it to
all.  In a large one each forwards it to its neighbours in a binomial graph, those at distances 1, 2, 4, ... on either
side: that connects the survivors as long as fewer ranks are dead than each has neighbours (Angskun, Bosilca, Dongarra,
"Binomial graph: a scalable and fault-tolerant logical network topology", ISPA 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from asyncpar.errors import PeerError, ProtocolError, StaleGeneration, WorldRevoked

_NOTIFIES_ALL: Final = 32
"""Up to this number of ranks, each notifies all others."""

_CAUSE_CHARACTERS: Final = 2048


class Revocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Revocation of the group ``number`` with these ``ranks`` (of the world) by rank ``revoked_by``.

    ``culprit`` is the rank that it blames, ``cause`` the reason.
    """

    number: int
    ranks: tuple[int, ...]
    name: str
    generation: int
    revoked_by: int
    culprit: int
    cause: Annotated[str, msgspec.Meta(max_length=_CAUSE_CHARACTERS)]

    def error(self, what: str) -> WorldRevoked:
        """Return the error of ``what``, an operation or a group."""
        who = f"rank {self.revoked_by} has revoked group {self.name} (generation {self.generation})"
        return WorldRevoked(
            f"{what}: {who}: {self.cause}",
            rank=self.culprit,
            operation=what,
            cause=self.cause,
            revoked_by=self.revoked_by,
            generation=self.generation,
        )

    def stale(self, name: str) -> StaleGeneration:
        """Return the error of the group ``name`` once this rank has left its world."""
        return StaleGeneration(
            f"group {name} belongs to generation {self.generation} of the world, which was revoked and left "
            f"({self.cause}); use the communicator of the world that followed it"
        )


def revocation_of(
    reason: str | BaseException, *, number: int, ranks: tuple[int, ...], name: str, generation: int, me: int
) -> Revocation:
    """Return the revocation by rank ``me`` for ``reason``; if that is the error of a rank, it blames that rank."""
    blamed = reason.rank if isinstance(reason, PeerError) and reason.rank is not None else me
    cause = reason if isinstance(reason, str) else _text(reason)
    return Revocation(
        number=number,
        ranks=ranks,
        name=name[:_CAUSE_CHARACTERS],
        generation=generation,
        revoked_by=me,
        culprit=blamed,
        cause=(cause or "no reason was given")[:_CAUSE_CHARACTERS],
    )


def _text(error: BaseException) -> str:
    cause = error.cause if isinstance(error, PeerError) else None
    if isinstance(error, PeerError) and error.rank is not None and cause:
        return f"rank {error.rank}: {cause}"
    return str(error) or type(error).__name__


def encode_revocation(revocation: Revocation) -> bytes:
    """Encode the payload of a REVOKE frame."""
    return msgspec.msgpack.encode(revocation)


def decode_revocation(payload: bytes, *, number: int, generation: int, size: int) -> Revocation:
    """Decode the revocation of the group ``number`` in a world of ``size`` ranks.

    Raises ``ProtocolError`` for anything else.
    """
    try:
        revocation = msgspec.msgpack.decode(payload, type=Revocation)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"REVOKE frame: {error}") from error
    if (revocation.number, revocation.generation) != (number, generation):
        raise ProtocolError(
            f"REVOKE frame: of group {number:#x} in generation {generation}, but it revokes {revocation.number:#x} "
            f"in generation {revocation.generation}"
        )
    named = (*revocation.ranks, revocation.revoked_by, revocation.culprit)
    if not all(0 <= rank < size for rank in named):
        raise ProtocolError(f"REVOKE frame: expected ranks 0..{size - 1}, got {sorted(set(named))[-3:]}")
    return revocation


def notified_by(rank: int, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that ``rank``, one of ``ranks``, notifies when it learns that their group is revoked."""
    size, place = len(ranks), ranks.index(rank)
    if size <= _NOTIFIES_ALL:
        return [other for other in ranks if other != rank]
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    places = dict.fromkeys((place + sign * distance) % size for distance in distances for sign in (1, -1))
    return [ranks[other] for other in places if other != place]
