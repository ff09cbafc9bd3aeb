"""The record of a job on every agent: program, settings, and end.  Pure values that travel as msgpack."""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import Any, Final

import msgspec

from asyncpar import __version__
from asyncpar.errors import ProtocolError
from asyncpar.hosts.messages import WorldTerms
from asyncpar.hosts.total_loss import OnTotalLoss
from asyncpar.launch.options import LaunchOptions, ProgramKind, StreamChoice
from asyncpar.launch.vitals import SilenceLimits

_UNBOUNDED = 7 * 24 * 3600.0
"""Seconds that ranks have to report where silent ones are never ended."""
_KILL_SECONDS = 6.0
"""Seconds that killed processes have to disappear, and a margin."""
_FIXED_SECONDS = 15.0
"""The same where no other host could take the place of one that does not report."""


class ElasticMode(StrEnum):
    """The treatment of ranks when the world changes: they live on (``ap.elastic``), or all start again."""

    RANKS = "ranks"
    RESTART = "restart"


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it was submitted.  Times are in seconds; ``slots`` is the number of ranks of each host.

    ``spares`` is the number of further processes on each host, which start and wait for the place of one that is lost.
    """

    version: str
    name: str
    mode: ElasticMode
    program: str
    arguments: tuple[str, ...]
    kind: ProgramKind
    directory: str
    """The working directory of ranks; "": that of each agent."""
    environment: dict[str, str]
    """Variables that were set for this job alone; the others are those of each agent."""
    slots: int
    spares: int = 0
    least_hosts: int
    most_hosts: int
    last_call: float
    max_restarts: int
    restart_window: float
    grace: float
    timeout: float
    reconnect: float = 5.0
    """Seconds for which a launcher that runs ranks itself may be without a quorum, if they start with every world."""
    silent_after: float | None = None
    """None: not given; infinity: off."""
    stopped_after: float | None = None
    busy_after: float | None = None
    transport: str | None = None
    log_directory: str | None = None
    ticket: str = ""
    """A value unique to each launcher, by which agents recognize a job that is submitted again; "": none."""
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    on_total_loss: OnTotalLoss = OnTotalLoss.CHECKPOINT
    full_traceback: bool = False
    is_fixed: bool = False
    """Whether the job ends when any of its hosts is lost, or asked to end."""

    @property
    def silence(self) -> SilenceLimits:
        """When ranks that give no sign of life are given up."""
        return SilenceLimits(silent=self.silent_after, stopped=self.stopped_after, busy=self.busy_after)

    @property
    def terms(self) -> WorldTerms:
        """The facts about the job that the leader needs.

        Ranks that outlive worlds, but are too busy to answer (as when they compile), are declared lost when silent ones
        are; where silent ones never are, they have the time within which ranks must arrive.
        """
        lives_on = self.mode is ElasticMode.RANKS
        return WorldTerms(
            least_hosts=self.least_hosts,
            most_hosts=self.most_hosts,
            members=self.slots if lives_on else 1,
            last_call=self.last_call,
            wait_within=None if lives_on else self.timeout,
            on_total_loss=self.on_total_loss if lives_on else OnTotalLoss.RESTART,
            report_within=min(self.silent_after or self.timeout, _UNBOUNDED)
            if lives_on
            else self.grace + (_FIXED_SECONDS if self.is_fixed else _KILL_SECONDS),
        )


def record_of(options: LaunchOptions, **own: Any) -> SubmittedJob:
    """Return the record of the job of ``options``; ``own`` are the fields that these do not decide."""
    return SubmittedJob(
        version=__version__,
        mode=ElasticMode(options.elastic),
        arguments=options.arguments,
        kind=options.kind,
        spares=options.spares,
        least_hosts=options.least_nnodes or options.nnodes,
        most_hosts=options.nnodes,
        last_call=options.last_call,
        max_restarts=options.max_restarts,
        grace=options.grace,
        timeout=options.timeout,
        reconnect=options.reconnect,
        silent_after=options.silent_after,
        stopped_after=options.stopped_after,
        busy_after=options.busy_after,
        transport=options.transport,
        redirects=options.redirects,
        tee=options.tee,
        on_total_loss=OnTotalLoss(options.on_total_loss or OnTotalLoss.CHECKPOINT),
        full_traceback=options.full_traceback,
        **own,
    )


OPTIONS: Final = (
    {
        "version": "the version of asyncpar",
        "name": "--rdzv-id",
        "mode": "--elastic",
        "kind": "--module or --no-python",
        "program": "the program",
        "arguments": "the arguments of the program",
        "slots": "--nproc-per-node",
        "least_hosts": "--nnodes, the least number of hosts",
        "most_hosts": "--nnodes, the largest number of hosts",
        "grace": "--grace-period",
        "timeout": "--rdzv-timeout",
        "reconnect": "--reconnect-within",
        "is_fixed": "--nnodes",
    }
    | {
        name: f"--{name.replace('_', '-')}"
        for name in (
            "spares",
            "last_call",
            "max_restarts",
            "restart_window",
            "silent_after",
            "stopped_after",
            "busy_after",
        )
    }
    | {name: f"--{name.replace('_', '-')}" for name in ("transport", "redirects", "tee", "on_total_loss")}
)
"""The options that are the fields of a job, in which its launchers must agree."""

OF_ONE_LAUNCHER: Final = frozenset({"environment", "directory", "log_directory", "ticket", "full_traceback"})
"""The fields in which launchers of one job may differ."""


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job: ``message`` is "" for a complete one.

    Ranks that still run when a job ``is_complete`` end by themselves; otherwise their agents end them, with
    ``signal_number`` first.  ``interrupted`` is the host of the launcher that got this signal, "" if none did.
    """

    exit_code: int
    message: str = ""
    signal_number: int = signal.SIGTERM
    interrupted: str = ""

    @property
    def is_complete(self) -> bool:
        return self.exit_code == 0


def encode_record(record: SubmittedJob | JobEnd) -> bytes:
    """Encode ``record``."""
    return msgspec.msgpack.encode(record)


def decode_record(content: bytes) -> SubmittedJob:
    """Decode the job in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        return msgspec.msgpack.decode(content, type=SubmittedJob)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"job: its record cannot be read ({error}); all agents must be of one version") from error


def decode_end(content: bytes) -> JobEnd:
    """Decode the end of a job in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        return msgspec.msgpack.decode(content, type=JobEnd)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"job: its end cannot be read ({error}); all agents must be of one version") from error
