"""Connection of the lane that two ranks agreed on: the first of the agreed kinds that works.

Failures that occur at once in practice: a rank of the same host in another container has no Unix socket here, so TCP is
used; where TCP does not get through but gRPC does, the gRPC stream is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import grpc.aio

from asyncpar._proto.asyncpar.v1 import link_pb2
from asyncpar.core.addresses import split_address
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import PeerLost
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connection import as_connection
from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.lane_kind import LaneDial, LaneKind
from asyncpar.net.transport.lane_kinds import lane_kind
from asyncpar.net.transport.rpc import Credentials
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.wire.handshake import LinkTerms

_log = logging.getLogger(__name__)


class LaneDialer:
    """Connects lanes, and logs once each kind that does not get through.

    ``carry`` receives every gRPC lane, to run it as long as it lives, and its channel, to close it then.
    """

    def __init__(
        self,
        *,
        credentials: Credentials | None,
        busy_poll: BusyPoll,
        carry: Callable[[GrpcLane, grpc.aio.Channel], None],
        link_timeout: float = LINK_SECONDS,
    ) -> None:
        self._carry = carry
        self._link_timeout = link_timeout
        self._credentials = credentials
        self._secret = b"" if credentials is None else credentials.secret
        self._busy_poll = busy_poll
        self._warned: set[str] = set()

    async def connect(
        self, address: str, terms: LinkTerms, *, kinds: Sequence[str], accepted: link_pb2.OpenReply.Accepted
    ) -> Lane:
        """Return a lane of the first of ``kinds`` that works, not started yet.

        Raises ``PeerLost`` if the last one does not get through either, and ``AuthenticationError`` if the peer cannot
        authenticate itself.
        """
        rank, (host, _) = terms.listener, split_address(address)
        failed: dict[str, str] = {}
        for kind in map(lane_kind, kinds):
            is_last = kind.name == kinds[-1]
            dial = LaneDial(
                host=host,
                server=address,
                place=accepted.addresses.get(kind.name, ""),
                terms=terms,
                secret=self._secret,
                credentials=self._credentials,
                busy_poll=self._busy_poll,
                link_timeout=self._link_timeout,
                carry=self._carry,
            )
            try:
                lane = await (_dial_all(kind, dial) if kind.is_striped else kind.dial(dial))
            except OSError as error:
                failed[kind.name] = cause = kind.describe_attempt(dial, error, describe_failure(error))
                if is_last:
                    raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error
            else:
                self._warn(rank, failed, kind.described)
                return lane
        raise AssertionError("no kind of lane was agreed on")

    def _warn(self, rank: int, failed: Mapping[str, str], instead: str) -> None:
        """Log once for each kind of lane why it is not used; nothing for a rank that none reaches, which has ended."""
        for name, cause in failed.items():
            if name not in self._warned:
                self._warned.add(name)
                _log.warning("rank %d: %s; %s is used instead (reported once)", rank, cause, instead)


async def _dial_all(kind: LaneKind, dial: LaneDial) -> Lane:
    """Return the lane, of as many connections as agreed on.  Raises the error of the first dial that failed."""
    dials: list[asyncio.Task[Lane]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(dial.terms.connections):
                part = replace(dial, terms=replace(dial.terms, connection=index))
                dials.append(tasks.create_task(_connect(kind, part)))
    except BaseException as error:
        for made in dials:
            if made.done() and not made.cancelled() and made.exception() is None:
                made.result().abort(PeerLost("another connection of its lane failed", cause="another failed"))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    lanes = [made.result() for made in dials]
    return lanes[0] if len(lanes) == 1 else StripedLane([as_connection(lane) for lane in lanes])


async def _connect(kind: LaneKind, dial: LaneDial) -> Lane:
    return await kind.dial(dial)


def describe_failure(error: OSError) -> str:
    """Return the reason why there is no connection, as text."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return os_reason(OSError(error.errno, os.strerror(error.errno))) if error.errno else str(error)
