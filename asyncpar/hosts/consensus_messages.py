"""The entries, messages, events and commands of ``consensus``.  Pure values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from asyncpar.errors import UsageError

MOST_VOTERS = 5


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """One attempt to lead.  ``node`` is the candidate, so that no two nodes ever lead in the same term."""

    number: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One link of the chain.  ``voters`` decide the next one, the first of them breaks ties; ``nodes`` are notified."""

    generation: int
    voters: tuple[str, ...]
    nodes: tuple[str, ...]
    content: bytes = b""

    def __post_init__(self) -> None:
        if not 1 <= len(set(self.voters)) == len(self.voters) <= MOST_VOTERS:
            raise UsageError(f"voters: expected 1 to {MOST_VOTERS} different nodes, got {self.voters}")
        if not set(self.voters) <= set(self.nodes):
            raise UsageError(f"voters: expected some of the nodes {self.nodes}, got {self.voters}")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The acceptance of ``entry`` in ``term``; it is decided once a quorum has accepted it in one term."""

    term: Term
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableState:
    """The durable state of ``node``: the last decided entry, its promise, and what it accepted after that entry."""

    decided: Entry
    promised: Term | None = None
    accepted: Acceptance | None = None
    node: str = ""


def has_quorum(voters: Collection[str], acknowledged: Iterable[str]) -> bool:
    """Return whether ``acknowledged`` are a quorum of ``voters``: more than half, or half including the first of them.

    Any two quorums have a voter in common.
    """
    first = next(iter(voters))
    there = set(voters) & set(acknowledged)
    return 2 * len(there) > len(voters) or (2 * len(there) == len(voters) and first in there)


@dataclass(frozen=True, slots=True)
class PreVote:
    """Request for a vote in advance.  ``generation``, here and below, is that of the sender's last decided entry."""

    generation: int


@dataclass(frozen=True, slots=True)
class PreVoteGranted:
    """Grant of a ``PreVote`` by a node without a leader.  ``promised`` is its highest term, which must be exceeded."""

    generation: int
    promised: Term | None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Phase 1: request to promise ``term`` and to report the accepted entry."""

    generation: int
    term: Term


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise to take part in no lower term than ``term``; ``accepted`` is the sender's for the next entry, if any."""

    generation: int
    term: Term
    accepted: Acceptance | None


@dataclass(frozen=True, slots=True)
class AcceptEntry:
    """Phase 2: request to accept ``entry`` in ``term``."""

    generation: int
    term: Term
    entry: Entry


@dataclass(frozen=True, slots=True)
class EntryAccepted:
    """The sender has accepted the next entry in ``term``."""

    generation: int
    term: Term


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal: the sender has promised ``promised``, a higher term than the receiver's."""

    generation: int
    promised: Term


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life of the leader of ``term``; ``echo`` is the ``at`` of the receiver's last acknowledgement."""

    generation: int
    term: Term
    echo: float | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Acknowledgement of a follower of the leader of ``term``; ``at`` is the time by its clock."""

    generation: int
    term: Term
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Behind:
    """Request for the decisions after ``generation``."""

    generation: int


@dataclass(frozen=True, slots=True)
class Learn:
    """Notice that ``entry`` is decided."""

    generation: int
    entry: Entry


Message = (
    PreVote
    | PreVoteGranted
    | Prepare
    | Promise
    | AcceptEntry
    | EntryAccepted
    | Refused
    | Heartbeat
    | HeartbeatAck
    | Behind
    | Learn
)


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """``message`` arrived from ``sender``, which has proved to be that node."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """The connection to ``node`` broke.  It may be alive; if it leads, an election costs nothing."""

    node: str


@dataclass(frozen=True, slots=True)
class Propose:
    """Propose ``content`` for the next entry; ignored unless this node leads and nothing is under way."""

    content: bytes
    voters: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsensusTick:
    """Time has passed."""


Event = MessageReceived | NodeUnreachable | Propose | ConsensusTick


@dataclass(frozen=True, slots=True)
class Persist:
    """Store ``state`` before carrying out any later command."""

    state: DurableState


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send ``message`` to ``node``.  It may be lost, duplicated or overtaken."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class LearnDecided:
    """``entry`` is decided.  Entries may be skipped if later ones were decided meanwhile; none comes twice."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class BeginLeading:
    """This node leads, knows all decisions, and may propose the next entry."""

    term: Term


@dataclass(frozen=True, slots=True)
class FollowLeader:
    """``leader`` leads; None: no leader is known, and nothing can be decided as far as this node can see."""

    leader: str | None


Command = Persist | SendMessage | LearnDecided | BeginLeading | FollowLeader
