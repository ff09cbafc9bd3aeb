"""The entries, messages, events and commands of ``consensus``.  Pure values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from asyncpar.errors import UsageError

MOST_VOTERS = 5


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """One attempt to lead.  ``node`` is the candidate, so that no two nodes ever lead in one term."""

    number: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One link of the chain.  ``voters`` decide the next one, the first of them breaks ties; ``nodes`` hear of it."""

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
    """``entry`` was accepted in ``term``; it is decided once a quorum has accepted it in one term."""

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
    """Whether ``acknowledged`` are enough of ``voters``: more than half, or half with the first of them.

    Any two quorums have a voter in common.
    """
    first = next(iter(voters))
    there = set(voters) & set(acknowledged)
    return 2 * len(there) > len(voters) or (2 * len(there) == len(voters) and first in there)


@dataclass(frozen=True, slots=True)
class PreVote:
    """Would you vote for me?  ``generation`` here and below is that of the last entry that the sender knows decided."""

    generation: int


@dataclass(frozen=True, slots=True)
class PreVoteGranted:
    """Yes: I hear of no leader.  ``promised`` is my highest term, which yours must exceed."""

    generation: int
    promised: Term | None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Phase 1: promise ``term``, and tell what you have accepted."""

    generation: int
    term: Term


@dataclass(frozen=True, slots=True)
class Promise:
    """I take part in no lower term than ``term``; ``accepted`` is mine of the next entry, if any."""

    generation: int
    term: Term
    accepted: Acceptance | None


@dataclass(frozen=True, slots=True)
class AcceptEntry:
    """Phase 2: accept ``entry`` in ``term``."""

    generation: int
    term: Term
    entry: Entry


@dataclass(frozen=True, slots=True)
class EntryAccepted:
    """I have accepted the next entry in ``term``."""

    generation: int
    term: Term


@dataclass(frozen=True, slots=True)
class Refused:
    """I have promised ``promised``, a higher term than yours."""

    generation: int
    promised: Term


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The leader of ``term`` lives; ``echo`` is the ``at`` of the last acknowledgement that it had of the receiver."""

    generation: int
    term: Term
    echo: float | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """I follow the leader of ``term``, and it is ``at`` by my clock."""

    generation: int
    term: Term
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Behind:
    """Tell me of what was decided after ``generation``."""

    generation: int


@dataclass(frozen=True, slots=True)
class Learn:
    """``entry`` is decided."""

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
    """``message`` came from ``sender``, who has proved to be that node."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """The connection to ``node`` broke.  It may live; if it leads, an election costs nothing."""

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
    """Store ``state`` before any command that comes after this one."""

    state: DurableState


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send ``message`` to ``node``.  It may be lost, doubled and overtaken."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class LearnDecided:
    """``entry`` is decided.  Entries may be left out, if later ones were decided meanwhile; none comes twice."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class BeginLeading:
    """This node leads, knows what was decided, and may propose the next entry."""

    term: Term


@dataclass(frozen=True, slots=True)
class FollowLeader:
    """``leader`` leads; None: no leader is known, and nothing can be decided as far as this node can see."""

    leader: str | None


Command = Persist | SendMessage | LearnDecided | BeginLeading | FollowLeader
