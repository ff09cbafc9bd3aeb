"""Encode and decode the messages between agents and the coordinator, and resume their stream."""

from __future__ import annotations

import inspect
import math
from collections import deque
from dataclasses import asdict
from typing import Generic, Protocol, TypeVar

import msgspec
from google.protobuf.message import Message

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import FailureReport, Phase
from asyncpar.core.observe.waits import WaitNotice
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.protocol import (
    AgentAssignment,
    AgentHello,
    AnnounceCondition,
    Announcement,
    GiveUpRank,
    JobOutcome,
    Order,
    StopRanks,
)
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.launch.wait_board import WaitReport

_LONGEST_TEXT = 64_000


def encode_hello(hello: AgentHello) -> pb.AgentEvent:
    return pb.AgentEvent(hello=pb.Hello(**asdict(hello)))


def decode_hello(message: pb.Hello) -> AgentHello:
    return _read(AgentHello, message)


def encode_rank_end(end: RankEnd) -> pb.AgentEvent:
    """Encode the end of a rank, with its time on the clock of its host."""
    report = None
    if end.report is not None:
        blames = end.report.blames
        report = pb.FailureReport(
            type_name=end.report.type_name,
            message=end.report.message[:_LONGEST_TEXT],
            traceback=end.report.traceback[-_LONGEST_TEXT:],
            is_peer_error=end.report.is_peer_error,
            blames=None if blames is None or blames < 0 else blames,
            call=end.report.call[:_LONGEST_TEXT],
        )
    message = pb.RankEnded(report=report, **{name: getattr(end, name) for name in _SAME_IN_RANK_END})
    return pb.AgentEvent(rank_ended=message)


def decode_rank_end(message: pb.RankEnded, *, host: str, offset: float) -> RankEnd:
    """Decode the end of a rank on ``host``, whose clock is ``offset`` seconds behind ours, to our clock."""
    fields = {name: getattr(message, name) for name in _SAME_IN_RANK_END}
    fields["at"] = message.at + offset if math.isfinite(message.at) else 0.0
    report = _read(FailureReport, message.report) if message.HasField("report") else None
    return RankEnd(host=host, report=report, **fields)


_SAME_IN_RANK_END = (
    "generation",
    "rank",
    "local_rank",
    "pid",
    "returncode",
    "at",
    "stderr_tail",
    "stderr_file",
    "lost",
)
_PHASES = {
    None: pb.RankState.PHASE_UNSPECIFIED,
    Phase.FORMING: pb.RankState.FORMING,
    Phase.MEMBER: pb.RankState.MEMBER,
    Phase.LEFT: pb.RankState.LEFT,
}
_CONDITIONS = {
    Condition.WELL: pb.RankState.CONDITION_UNSPECIFIED,
    Condition.STOPPED: pb.RankState.STOPPED,
    Condition.HUNG: pb.RankState.HUNG,
    Condition.BUSY: pb.RankState.BUSY,
    Condition.UNINTERRUPTIBLE: pb.RankState.UNINTERRUPTIBLE,
}


def encode_state(state: RankState) -> pb.AgentEvent:
    fields = asdict(state) | {"phase": _PHASES[state.phase], "condition": _CONDITIONS[state.condition]}
    fields["place"] = state.place.encode("utf-8", "backslashreplace").decode()  # file names may be any bytes
    return pb.AgentEvent(state=pb.RankState(**fields))


def decode_state(message: pb.RankState) -> RankState:
    return RankState(
        generation=message.generation,
        rank=message.rank,
        phase=next((phase for phase, number in _PHASES.items() if number == message.phase), None),
        condition=next((kind for kind, number in _CONDITIONS.items() if number == message.condition), Condition.WELL),
        seconds=message.seconds if math.isfinite(message.seconds) else 0.0,
        place=message.place,
    )


def encode_wait_report(report: WaitReport) -> pb.AgentEvent:
    notice = b"" if report.notice is None else msgspec.json.encode(report.notice)
    message = pb.RankTold(
        generation=report.generation,
        rank=report.rank,
        notice=notice,
        blocked=report.blocked,
        has_failed=report.has_failed,
    )
    return pb.AgentEvent(told=message)


def decode_wait_report(message: pb.RankTold) -> WaitReport:
    """Decode the report of a rank; a notice of an unknown form, perhaps of another version, counts as none."""
    try:
        notice = msgspec.json.decode(message.notice, type=WaitNotice) if message.notice else None
    except msgspec.MsgspecError:
        notice = None
    return WaitReport(message.generation, message.rank, notice, message.blocked, message.has_failed)


def encode_order(order: Order) -> pb.AgentCommand:
    match order:
        case AgentAssignment():
            return pb.AgentCommand(assign=pb.Assign(**asdict(order)))
        case StopRanks(generation, signal_number, reason, loss):
            lost = {} if loss is None else loss._asdict()
            stop = pb.Stop(generation=generation, signal_number=signal_number, reason=reason, **lost)
            return pb.AgentCommand(stop=stop)
        case GiveUpRank(generation, loss):
            return pb.AgentCommand(condemn=pb.Condemn(generation=generation, **loss._asdict()))
        case JobOutcome():
            return pb.AgentCommand(finish=pb.Finish(**asdict(order)))
        case AnnounceCondition():
            return pb.AgentCommand(condition=pb.Condition(**asdict(order)))
        case Announcement(text):
            return pb.AgentCommand(announce=pb.Announce(text=text[:_LONGEST_TEXT]))


def decode_order(message: pb.AgentCommand) -> Order | None:
    """Decode an order; None for unknown ones of a newer coordinator."""
    match message.WhichOneof("command"):
        case "assign":
            return _read(AgentAssignment, message.assign)
        case "stop":
            stop = message.stop
            loss = _read(Loss, stop) if stop.HasField("rank") else None
            return StopRanks(stop.generation, stop.signal_number, stop.reason, loss)
        case "condemn":
            return GiveUpRank(message.condemn.generation, _read(Loss, message.condemn))
        case "finish":
            return _read(JobOutcome, message.finish)
        case "condition":
            return _read(AnnounceCondition, message.condition)
        case "announce":
            return Announcement(message.announce.text)
    return None


Value = TypeVar("Value")


def _read(kind: type[Value], message: Message) -> Value:
    """Return a ``kind`` with those of its fields that ``message`` has; optional ones that are not set are None."""
    known = message.DESCRIPTOR.fields_by_name
    names = [name for name in inspect.signature(kind).parameters if name in known]
    is_set = {name: not known[name].has_presence or message.HasField(name) for name in names}
    return kind(**{name: getattr(message, name) if is_set[name] else None for name in names})


class Numbered(Protocol):
    """A message with fields for its number and for the last number that its sender has received."""

    number: int
    received: int


Outgoing = TypeVar("Outgoing", bound=Numbered)


class ResumableStream(Generic[Outgoing]):
    """One side of an agent's stream, over all its connections.

    Each side numbers its messages and keeps them until the other side acknowledges them; every message carries an
    acknowledgement.  After a connection has broken, unacknowledged messages are sent again, and duplicates are dropped
    by their number: every message is delivered once, in order.
    """

    def __init__(self) -> None:
        self.received = 0
        self.unacknowledged: deque[Outgoing] = deque()
        self._sent = 0

    def send(self, message: Outgoing) -> Outgoing:
        """Number ``message``, keep it, and return it."""
        self._sent += 1
        message.number = self._sent
        self.unacknowledged.append(message)
        return message

    def take(self, message: Numbered) -> bool:
        """Drop the messages that ``message`` acknowledges; return whether it is new."""
        while self.unacknowledged and self.unacknowledged[0].number <= message.received:
            self.unacknowledged.popleft()
        if message.number <= self.received:  # unnumbered, or a duplicate
            return False
        self.received = message.number
        return True
