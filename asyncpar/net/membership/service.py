"""The rendezvous service over gRPC: the machine decides, this module carries requests and answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.config.world import Member, World
from asyncpar.errors import AuthenticationError
from asyncpar.net.membership.machine import (
    Close,
    Command,
    DeadlineTick,
    Event,
    Exited,
    Join,
    Leave,
    Open,
    RefusalKind,
    RefuseRank,
    RendezvousMachine,
    Welcome,
)
from asyncpar.net.security.identity import ANY_RANK, certified_role
from asyncpar.net.transport.tls import check_caller

_log = logging.getLogger(__name__)
_KINDS: dict[RefusalKind, pb.JoinRefusal.Kind] = {
    RefusalKind.USAGE: pb.JoinRefusal.KIND_USAGE,
    RefusalKind.STALE: pb.JoinRefusal.KIND_STALE,
    RefusalKind.TIMEOUT: pb.JoinRefusal.KIND_TIMEOUT,
    RefusalKind.LOST: pb.JoinRefusal.KIND_LOST,
    RefusalKind.CLOSED: pb.JoinRefusal.KIND_CLOSED,
}
_LONGEST_WAIT = 24 * 3600.0


class RendezvousService(membership_pb2_grpc.RendezvousServicer):
    """The `Rendezvous` servicer.  Create it on the event loop that serves it.

    Each generation has to be opened (``open``) before its ranks get an answer, unless ``world_size`` is given.
    """

    def __init__(
        self,
        *,
        job: str,
        world_size: int | None = None,
        generation: int = 0,
        certified: Sequence[int] | None = None,
    ) -> None:
        """``certified``: see ``open``; if it is empty and there are certificates, nobody is admitted before that."""
        self._generation = generation
        self._certified = certified
        self._machine = RendezvousMachine(job=job, world_size=world_size, generation=generation)
        self._answers: dict[int, asyncio.Future[pb.JoinReply]] = {}
        self._calls = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of calls that wait for an answer."""
        return len(self._answers)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks for which others wait."""
        return self._machine.missing

    def open(self, *, generation: int, world_size: int, job: str = "", certified: Sequence[int] | None = None) -> None:
        """Put ``generation`` (of ``job``, if it is a new one) in force; older ranks that wait are notified.

        ``certified`` are the numbers in the certificates that its ranks have to show, None: their own.
        """
        if generation >= self._generation:
            self._generation, self._certified = generation, certified
        self._feed(Open(generation, world_size, job))

    def exited(self, *, generation: int, rank: int, how: str) -> None:
        """Report the end of the process of ``rank``, so that no rank waits for it."""
        self._feed(Exited(generation, rank, how))

    def close(self, reason: str) -> None:
        """Refuse all waiting and all later ranks."""
        self._feed(Close(reason))

    async def Join(  # noqa: N802  # the name in the proto
        self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.JoinReply:
        """Answer once the world is complete or cannot become so.  gRPC cancels this if the caller disconnects.

        With certificates, a caller can join only as the rank whose certificate it shows.
        """
        try:
            self._check(context, request)
        except AuthenticationError as error:
            _log.warning("a rank was refused: %s", error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        loop = asyncio.get_running_loop()
        call = next(self._calls)
        answer: asyncio.Future[pb.JoinReply] = loop.create_future()
        self._answers[call] = answer
        try:
            self._feed(_join_event(request, call=call, now=loop.time()))
            return await answer
        finally:
            if self._answers.pop(call, None) is not None:
                self._feed(Leave(call))

    def _check(self, context: grpc.aio.ServicerContext[Any, Any], request: pb.JoinRequest) -> None:
        """Raise ``AuthenticationError`` unless the caller may act as the rank that it names.

        The certificates of an older generation's ranks are no longer known: those ranks are notified that it is over.
        """
        rank, certified = request.member.rank, self._certified
        if certified is None:
            check_caller(context, request.job, certified_role(rank, None))
            return
        if request.generation < self._generation:
            check_caller(context, request.job, ANY_RANK)
            return
        place = f"rank {rank} of generation {request.generation}"
        if not 0 <= rank < len(certified):
            raise AuthenticationError(f"{place}: there is no such rank in the world that is open here")
        try:
            check_caller(context, request.job, certified_role(rank, certified))
        except AuthenticationError as error:
            raise AuthenticationError(f"{place} has the certificate rank-{certified[rank]}: {error}") from error

    def _feed(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        for command in self._machine.handle(event, now=loop.time()):
            self._obey(command)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.next_deadline
        self._timer = None if deadline is None else loop.call_at(deadline, self._feed, DeadlineTick())

    def _obey(self, command: Command) -> None:
        answer = self._answers.pop(command.call, None)
        if answer is None or answer.done():
            return
        match command:
            case Welcome(_, world):
                answer.set_result(pb.JoinReply(world=_world_message(world)))
            case RefuseRank(_, refusal):
                message = pb.JoinRefusal(kind=_KINDS[refusal.kind], message=refusal.message, ranks=list(refusal.ranks))
                answer.set_result(pb.JoinReply(refusal=message))


def _join_event(request: pb.JoinRequest, *, call: int, now: float) -> Join:
    timeout = request.timeout_seconds
    bounded = timeout if 0.0 <= timeout <= _LONGEST_WAIT else _LONGEST_WAIT
    return Join(
        call=call,
        job=request.job,
        generation=request.generation,
        world_size=request.world_size,
        member=Member(
            rank=request.member.rank,
            host=request.member.host,
            host_id=request.member.host_id,
            local_rank=request.member.local_rank,
            address=request.member.address,
        ),
        settings=request.settings,
        deadline=now + bounded,
        session=request.session,
    )


def _world_message(world: World) -> pb.JoinedWorld:
    members = [
        pb.Member(
            rank=member.rank,
            host=member.host,
            host_id=member.host_id,
            local_rank=member.local_rank,
            address=member.address,
        )
        for member in world.members
    ]
    return pb.JoinedWorld(job=world.job, generation=world.generation, members=members)
