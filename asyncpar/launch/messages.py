"""Between what agents and the coordinator tell each other and protobuf."""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, Protocol, TypeVar

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.reporting import Phase
from asyncpar.launch import agent_machine
from asyncpar.launch.coordinator_events import GiveUpRank, StopRanks
from asyncpar.launch.failure import FailureReport, RankFailure
from asyncpar.launch.plan import AgentAssignment, AgentHello, JobOutcome
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.launch.worker_group import RankEnd

_LONGEST_TEXT = 64_000


def encode_hello(hello: AgentHello) -> pb.AgentEvent:
    message = pb.Hello(
        job=hello.job, nnodes=hello.nnodes, nproc=hello.nproc, node_rank=hello.node_rank, host=hello.host
    )
    return pb.AgentEvent(hello=message)


def decode_hello(message: pb.Hello) -> AgentHello:
    return AgentHello(
        job=message.job,
        nnodes=message.nnodes,
        nproc=message.nproc,
        node_rank=message.node_rank if message.HasField("node_rank") else None,
        host=message.host,
    )


def encode_rank_end(end: RankEnd, *, now: float) -> pb.AgentEvent:
    """``now`` is the wall clock: what travels is the age, since clocks of hosts differ."""
    message = pb.RankEnded(
        generation=end.generation,
        rank=end.rank,
        local_rank=end.local_rank,
        pid=end.pid,
        returncode=end.returncode,
        age_seconds=max(0.0, now - end.at),
        stderr_tail=end.stderr_tail,
    )
    if end.report is not None:
        message.report.CopyFrom(
            pb.FailureReport(
                type_name=end.report.type_name,
                message=end.report.message[:_LONGEST_TEXT],
                traceback=end.report.traceback[-_LONGEST_TEXT:],
                is_peer_error=end.report.is_peer_error,
                blames=end.report.blames if end.report.blames is not None and end.report.blames >= 0 else None,
            )
        )
    return pb.AgentEvent(rank_ended=message)


def decode_failure(message: pb.RankEnded, *, host: str, now: float) -> RankFailure | None:
    """Return the failure in ``message``, on the clock that says ``now``; None for a rank that ended well."""
    if message.returncode == 0:
        return None
    report = None
    if message.HasField("report"):
        report = FailureReport(
            type_name=message.report.type_name,
            message=message.report.message,
            traceback=message.report.traceback,
            is_peer_error=message.report.is_peer_error,
            blames=message.report.blames if message.report.HasField("blames") else None,
        )
    return RankFailure(
        rank=message.rank,
        local_rank=message.local_rank,
        host=host,
        pid=message.pid,
        returncode=message.returncode,
        at=now - message.age_seconds,
        report=report,
        stderr_tail=message.stderr_tail,
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
}


def encode_state(state: RankState) -> pb.AgentEvent:
    message = pb.RankState(
        generation=state.generation,
        rank=state.rank,
        phase=_PHASES[state.phase],
        condition=_CONDITIONS[state.condition],
        seconds=state.seconds,
    )
    return pb.AgentEvent(state=message)


def decode_state(message: pb.RankState) -> RankState:
    return RankState(
        generation=message.generation,
        rank=message.rank,
        phase=next((phase for phase, number in _PHASES.items() if number == message.phase), None),
        condition=next((kind for kind, number in _CONDITIONS.items() if number == message.condition), Condition.WELL),
        seconds=message.seconds if math.isfinite(message.seconds) else 0.0,
    )


def encode_assignment(assignment: AgentAssignment) -> pb.AgentCommand:
    message = pb.Assign(
        generation=assignment.generation,
        restart_count=assignment.restart_count,
        group_rank=assignment.group_rank,
        group_world_size=assignment.group_world_size,
        rank_offset=assignment.rank_offset,
        world_size=assignment.world_size,
        master_addr=assignment.master_addr,
        master_port=assignment.master_port,
    )
    return pb.AgentCommand(assign=message)


def encode_stop(stop: StopRanks) -> pb.AgentCommand:
    loss = stop.loss
    message = pb.Stop(
        generation=stop.generation,
        signal_number=stop.signal_number,
        reason=stop.reason,
        rank=None if loss is None else loss.rank,
        host="" if loss is None else loss.host,
        how="" if loss is None else loss.how,
    )
    return pb.AgentCommand(stop=message)


def encode_give_up(condemn: GiveUpRank) -> pb.AgentCommand:
    loss = condemn.loss
    message = pb.Condemn(generation=condemn.generation, rank=loss.rank, host=loss.host, how=loss.how)
    return pb.AgentCommand(condemn=message)


def encode_finish(outcome: JobOutcome) -> pb.AgentCommand:
    return pb.AgentCommand(finish=pb.Finish(exit_code=outcome.exit_code, message=outcome.message))


def decode_command(message: pb.AgentCommand) -> agent_machine.Event | None:
    """Return the event for the agent's machine; None for what a newer coordinator may say."""
    match message.WhichOneof("command"):
        case "assign":
            return agent_machine.Assigned(_decode_assignment(message.assign))
        case "stop":
            stop = message.stop
            loss = Loss(stop.rank, stop.host, stop.how) if stop.HasField("rank") else None
            return agent_machine.StopOrdered(stop.generation, stop.signal_number, stop.reason, loss)
        case "condemn":
            told = message.condemn
            return agent_machine.RankGivenUp(told.generation, Loss(told.rank, told.host, told.how))
        case "finish":
            return agent_machine.Finished(JobOutcome(message.finish.exit_code, message.finish.message))
    return None


def _decode_assignment(message: pb.Assign) -> AgentAssignment:
    return AgentAssignment(
        generation=message.generation,
        restart_count=message.restart_count,
        group_rank=message.group_rank,
        group_world_size=message.group_world_size,
        rank_offset=message.rank_offset,
        world_size=message.world_size,
        master_addr=message.master_addr,
        master_port=message.master_port,
    )


class Numbered(Protocol):
    """A message with room for its number, and for how far its sender has received."""

    number: int
    received: int


Outgoing = TypeVar("Outgoing", bound=Numbered)


class ResumableStream(Generic[Outgoing]):
    """One end of an agent's stream, over all its connections.

    Each end numbers its messages and keeps them until the other end acknowledges them, which every message carries.
    After a connection has broken, unacknowledged messages are sent again, and duplicates are dropped by their number:
    every message is taken once, in order."""

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
        """Drop what ``message`` acknowledges; return whether it is new."""
        while self.unacknowledged and self.unacknowledged[0].number <= message.received:
            self.unacknowledged.popleft()
        if message.number <= self.received:  # it has none, or comes again
            return False
        self.received = message.number
        return True
