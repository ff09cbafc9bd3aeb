"""Requests of commands to agents; they travel as msgpack, where floats may be infinite, with the sender's version."""

from __future__ import annotations

import msgspec

from asyncpar import __version__
from asyncpar.launch.agents.job_record import SubmittedJob
from asyncpar.launch.agents.views import HostView
from asyncpar.launch.host_watch import HostWatch
from asyncpar.observe.summary import RankAnswer, pack

AGENTS_PORT = 29400
"""The default port of agents."""

_MOST_BYTES = 4 << 20
"""The most bytes of answers in a message, before base64; gRPC takes 8 MiB."""


def program_version() -> str:
    """Return the version of this program, which must be the same for all agents of a group."""
    return __version__


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run a job."""

    record: SubmittedJob


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """The job was submitted and has this number."""

    number: int


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """End job ``number`` with ``exit_code``, because of ``why``."""

    number: int
    exit_code: int
    why: str


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make the ranks of ``host`` leave within ``grace`` seconds."""

    host: str
    grace: float


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a host.

    ``is_idle``: no rank runs there, or is going to.  ``exit_code`` is that of ranks that failed after the job was
    complete.
    """

    view: HostView
    is_idle: bool
    exit_code: int = 0


class HostObserved(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of a host's ranks: ``summary`` is its ``HostSummary`` as msgpack, in which floats may be NaN."""

    summary: bytes = b""
    ranks: tuple[RankAnswer, ...] = ()
    rest: tuple[int, ...] = ()
    """The ranks whose answers did not fit into this message, to be asked for again."""

    @property
    def bounded(self) -> HostObserved:
        """The part of this that fits into a message: the answers of at least one rank."""
        count, size = 0, 0
        for answer in self.ranks:
            size += len(answer.content)
            if size > _MOST_BYTES and count:
                break
            count += 1
        return msgspec.structs.replace(
            self, ranks=self.ranks[:count], rest=tuple(answer.rank for answer in self.ranks[count:])
        )


class ObserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask ``ranks`` (None: all of the host) for their reports of ``kind``; without one, for the host's summary."""

    kind: str = ""
    ranks: tuple[int, ...] | None = None

    async def answer(self, watch: HostWatch) -> HostObserved:
        """Answer from what ``watch`` knows."""
        if not self.kind:
            return HostObserved(summary=pack(watch.summary()))
        return HostObserved(ranks=tuple(await watch.collect(self.kind, self.ranks)))


class Nothing(msgspec.Struct, frozen=True, kw_only=True):
    """An empty message."""
