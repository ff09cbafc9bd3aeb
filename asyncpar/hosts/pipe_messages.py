"""Messages on the socket between an agent and a process of an elastic job: JSON objects, one per line.  Pure.

They are separate from the process's end of the socket, so that agents import nothing of training.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from asyncpar.errors import ProtocolError
from asyncpar.hosts.lineage import Decision, Lineage, MemberReport
from asyncpar.hosts.messages import WorldChange

MOST_BYTES: Final = 1 << 20
"""The longest line."""

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class PipeMessage(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """A message of either side."""


# -- of a rank ---------------------------------------------------------------------------------------------------------


class DonorsWanted(PipeMessage, frozen=True):
    """Request the members that serve the state; answered by ``DonorsFound``, or ``Drained``."""


class JoinWorld(PipeMessage, frozen=True):
    """Join with the state of ``lineage``, served at ``address``; answered by ``WorldFormed``, or ``Drained``."""

    lineage: Lineage
    address: str
    settings: tuple[tuple[str, str], ...] = ()


class StateReached(PipeMessage, frozen=True):
    """Report the state reached while waiting for a first world."""

    lineage: Lineage


class Withdraw(PipeMessage, frozen=True):
    """Withdraw the arrival, to fetch the state again; answered by ``Withdrawn``, which voids earlier messages."""


class NotAdmitted(PipeMessage, frozen=True):
    """Report why the training members do not admit this process."""

    why: str


class WorldReport(PipeMessage, frozen=True):
    """Report the state at the end of a world; answered by the next ``WorldFormed``, or ``Drained``."""

    report: MemberReport


class LinksServed(PipeMessage, frozen=True):
    """Report the address at which links of the world of ``generation`` are accepted."""

    generation: int
    address: str


class LeaseWanted(PipeMessage, frozen=True):
    """Request a lease for committing steps; ``steps`` are committed here.  Answered by ``LeaseGranted``."""

    steps: int = -1


class LeaveWanted(PipeMessage, frozen=True):
    """Request to be drained, because this process received SIGTERM; ``LeaveRefused`` if it is not."""


class LeaveJob(PipeMessage, frozen=True):
    """Announce the end of this process, because of ``why`` ("": it is done), in the step ``failed`` if one failed."""

    failed: int | None = None
    why: str = ""


RankMessage = (
    DonorsWanted
    | JoinWorld
    | StateReached
    | Withdraw
    | NotAdmitted
    | WorldReport
    | LinksServed
    | LeaseWanted
    | LeaveWanted
    | LeaveJob
)


# -- of an agent -------------------------------------------------------------------------------------------------------


class DonorsFound(PipeMessage, frozen=True):
    """Name the donors and their addresses, in the order in which to ask them."""

    donors: tuple[tuple[str, str], ...] = ()


class WorldFormed(PipeMessage, frozen=True, kw_only=True):
    """Announce the next world: the place of the rank in it, the hosts of its ranks, and its initial state.

    ``certified`` are the numbers in the certificates of its ranks, None if they have none.
    """

    generation: int
    rank: _Natural
    hosts: tuple[str, ...]
    job: str
    lineage: Lineage
    decision: Decision
    change: WorldChange
    certified: tuple[_Natural, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a place outside the world, and for a wrong number of certificates."""
        size = len(self.hosts)
        if self.rank >= size:
            raise ValueError(f"rank: expected less than {size}, got {self.rank}")
        if self.certified is not None and len(self.certified) != size:
            raise ValueError(f"certified: expected the numbers of {size} certificates, got {self.certified}")


class Withdrawn(PipeMessage, frozen=True):
    """Confirm ``Withdraw``."""


class LeaseGranted(PipeMessage, frozen=True):
    """Allow commits for ``seconds`` from the request on."""

    seconds: float


class Drained(PipeMessage, frozen=True):
    """Announce that there is no further world for this rank: the job is complete, or the rank leaves it."""


class AllServed(PipeMessage, frozen=True):
    """Name the addresses of all ranks of the world of ``generation``: each accepts links."""

    generation: int
    addresses: tuple[str, ...]


class WorldOver(PipeMessage, frozen=True):
    """Announce the end of the world of ``generation``; ``is_planned``: no member of it is lost."""

    generation: int
    why: str
    is_planned: bool


class ChangeWaits(PipeMessage, frozen=True):
    """Announce that the world of ``generation`` changes at the end of the current step."""

    generation: int


class LeaveRefused(PipeMessage, frozen=True):
    """Refuse ``LeaveWanted``: the process ends at once."""


class JobOver(PipeMessage, frozen=True):
    """Announce the end of the job."""

    why: str


AgentMessage = (
    DonorsFound
    | WorldFormed
    | Withdrawn
    | LeaseGranted
    | Drained
    | AllServed
    | WorldOver
    | ChangeWaits
    | LeaveRefused
    | JobOver
)


# -- lines -------------------------------------------------------------------------------------------------------------

_rank_decoder = msgspec.json.Decoder(RankMessage)
_agent_decoder = msgspec.json.Decoder(AgentMessage)


def encode_line(message: PipeMessage) -> bytes:
    """Encode ``message`` as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode_rank_line(line: bytes) -> RankMessage:
    """Decode a line of a rank.  Raises ``ProtocolError`` if ranks send no such message."""
    try:
        return _rank_decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"expected a message that ranks send: {error}") from error


def decode_agent_line(line: bytes) -> AgentMessage:
    """Decode a line of an agent.  Raises ``ProtocolError`` if agents send no such message."""
    try:
        return _agent_decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"expected a message that agents send: {error}") from error
