"""Summaries: reports of ranks, hosts and jobs once a second; plain values, as msgpack and JSON.  Pure.

A rank makes a ``RankSummary`` (about 2 kB); its agent adds facts that only it sees (whether the process is stopped) in
a ``RankReport``; the launcher of a job combines the reports of all hosts in a ``JobSummary``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from asyncpar.core.observe.waits import WaitNotice
from asyncpar.harmless import harmless_values

MOST_OPERATIONS: Final = 16
"""Number of operations that a summary names; those that have waited longest come first."""

STALE_SECONDS: Final = 3.0
"""Seconds after which a summary is shown with its age; ranks are asked once a second."""

MOST_LINKS: Final = 64
MOST_MAILBOXES: Final = 16
MOST_LETTERS: Final = 4
MOST_SERVED: Final = 32
MOST_FIGURES: Final = 8
"""Number of figures of each kind of event in a summary."""

MOST_VALUES: Final = 32
MOST_PAST: Final = 16
"""Number of generations that a job's summary lists, the last ones."""


class OperationSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pending operation.

    ``label`` is its name in messages (``all_reduce #7``), ``text`` describes it with dtype and size, ``seconds`` is the
    time since its last progress.  ``waits_for`` are the ranks that it waits for, the one that it needs next first, and
    ``culprit`` the rank that holds it up as reported by other ranks.  ``site`` is where the program called it
    (``train.py:57``), "" if it is not known.  ``is_awaited`` False means that it was called, and is not awaited yet.
    """

    label: str
    kind: str
    group: str
    sequence: int
    text: str = ""
    dtype: str = ""
    bytes: int = 0
    waits_for: tuple[int, ...] = ()
    culprit: int | None = None
    seconds: float = 0.0
    site: str = ""
    is_awaited: bool = True


class AskSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of an actor that waits for its answer; ``rank`` is the actor's rank.

    ``site`` is where the program called it, ``told`` its rank's report of it, after an inquiry about the actor's work
    (None: nothing so far).  ``is_stream``: it takes items, and may do so forever.  ``call`` is its number at its
    caller, ``caller`` the calling actor ("": the program), and ``serves`` the call that this one works for: rank and
    number.  ``is_holding``: the calling actor takes no other message meanwhile.
    """

    rank: int
    actor: str
    endpoint: str
    seconds: float = 0.0
    site: str = ""
    told: WaitNotice | None = None
    is_stream: bool = False
    call: int = 0
    caller: str = ""
    serves: tuple[int, int] | None = None
    is_holding: bool = False


class BlockedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Code that has blocked the event loop for ``seconds``: its owner, and its current place."""

    what: str
    where: str
    seconds: float


class MailboxSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An actor with waiting messages."""

    actor: str
    waiting: int


class LetterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A message to ``actor`` on ``rank`` that was not handled, for ``reason``: see ``DeadLetter``."""

    sender: int
    rank: int
    actor: str
    endpoint: str
    reason: str


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The link to ``peer``: bytes sent over it so far, its lane, and the smallest round trip in seconds.

    ``rate`` is the bytes/s that it carried recently while it had any to carry, which was a ``share`` of the time;
    ``is_full`` means that the link allows no more; otherwise it may be faster.
    """

    peer: int
    lane: str = ""
    bytes: int = 0
    rtt: float | None = None
    rate: float | None = None
    is_full: bool = False
    share: float = 0.0


class ProgressSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last progress that the program has reported, with its ``fields``."""

    description: str
    completed: float
    total: float | None = None
    fields: dict[str, str] = {}


class RoundSummary(msgspec.Struct, frozen=True, array_like=True):
    """A round of a rank (see ``rounds.py``) in microseconds: its own time, the whole round, and parts by cause.

    ``ran`` is the part of its own time in which its busiest thread had a processor.
    """

    number: int
    own: int
    micros: int
    parts: dict[str, int]
    ran: int = 0


class FigureSummary(msgspec.Struct, frozen=True, array_like=True):
    """Microseconds of recent events: ``what`` is their kind (``collective``, ``span``), sizes are up to ``bytes``.

    For collectives, ``rate`` is the bus bandwidth in bytes/s at ``p50``, and ``expected`` are the microseconds that the
    cost model estimates; 0: unknown.
    """

    what: str
    name: str
    algorithm: str
    bytes: int
    count: int
    p50: int
    p99: int
    rate: int = 0
    expected: int = 0


class DurationSummary(msgspec.Struct, frozen=True, array_like=True):
    """Durations of the operations ``name`` so far: ``seconds`` in all; ``counts`` are those of each bucket."""

    name: str
    counts: tuple[int, ...]
    seconds: float


class GradientSummary(msgspec.Struct, frozen=True, array_like=True):
    """Figures of the gradient synchronization so far.

    ``hidden`` is the part of the communication time that overlaps with the rank's own work, ``ratio`` the factor by
    which a codec reduced the sent bytes.
    """

    hidden: float
    ratio: float


class RankSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of a rank about itself.  ``time`` is on its own wall clock; sizes are in bytes, times in seconds.

    ``loop_lag`` is the time that the event loop took to answer, ``blocked`` the code that blocks it.  ``cpu`` is the
    processor time used so far, ``stolen`` the time that threads waited for a processor, ``gc`` the time in garbage
    collections.  ``operations`` are the pending ones, ``operations_done`` and ``bytes_moved`` count by kind of lane
    (``arena``, ``messages``).  ``user_site`` is the place of the program's own code in the main thread or in the task
    that waits, and ``doing`` its work there, in the words in which the rank answers others (``sleeps at
    train.py:57``).  ``rounds`` are the last ones of the world's group, ``figures`` those of its last events,
    ``durations`` those of all its operations (see ``durations.py``), ``gradients`` those of the synchronizer that took
    the last step.  ``serving`` are calls whose endpoints run, by the rank and the number of their callers.
    ``dead_letters`` counts messages that no actor handled, and ``letters`` are the last ones, newest first;
    ``dropped`` counts reports that were not sent, because nobody took them.
    """

    rank: int
    pid: int
    time: float
    host: str = ""
    world_size: int = 0
    generation: int = 0
    phase: str = ""
    loop_lag: float = 0.0
    blocked: BlockedSummary | None = None
    cpu: float = 0.0
    rss: int = 0
    arena: int = 0
    gc: float = 0.0
    stolen: float = 0.0
    operations_done: dict[str, int] = {}
    bytes_moved: dict[str, int] = {}
    operations: tuple[OperationSummary, ...] = ()
    more_operations: int = 0
    asks: tuple[AskSummary, ...] = ()
    user_site: str = ""
    doing: str = ""
    progress: ProgressSummary | None = None
    values: dict[str, float] = {}
    serving: tuple[tuple[int, int], ...] = ()
    mailboxes: tuple[MailboxSummary, ...] = ()
    dead_letters: int = 0
    letters: tuple[LetterSummary, ...] = ()
    links: tuple[LinkSummary, ...] = ()
    rounds: tuple[RoundSummary, ...] = ()
    figures: tuple[FigureSummary, ...] = ()
    durations: tuple[DurationSummary, ...] = ()
    gradients: GradientSummary | None = None
    dropped: int = 0

    @property
    def longest(self) -> OperationSummary | None:
        """The operation that has waited longest, None if there is none."""
        return self.operations[0] if self.operations else None


class RankReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank from the view of its agent.

    ``condition`` is ``well``, ``stopped`` (SIGSTOP, a debugger), ``hung`` (no Python code runs), ``busy`` (no Python
    code runs, but it computes), ``uninterruptible`` (in the kernel), or ``ended``, for ``seconds``.  ``summary`` is its
    last report, ``age`` seconds ago; None: it has not reported (it does not use asyncpar, or has not yet come so far).
    ``place`` is the place of its program, which its agent reads from outside while the rank does not answer, and
    ``doing`` its work there, in the words of ``RankSummary.doing``.  ``restarts`` counts the earlier processes of this
    rank, which failed, or were restarted as others had failed.  ``ending`` describes how it ended, ``blames`` is the
    rank that it then named as the cause, and ``call`` its own call where others called something else.
    """

    rank: int
    host: str
    pid: int
    local_rank: int = 0
    condition: str = "well"
    seconds: float = 0.0
    phase: str = ""
    age: float = 0.0
    summary: RankSummary | None = None
    ending: str = ""
    blames: int | None = None
    call: str = ""
    place: str = ""
    doing: str = ""
    job: str = ""
    restarts: int = 0

    def aged(self, seconds: float) -> RankReport:
        """Return it as of ``seconds`` later: a condition lasts until another one is reported."""
        lasts = 0.0 if self.condition == "well" else seconds
        return msgspec.structs.replace(self, age=self.age + seconds, seconds=self.seconds + lasts)

    @property
    def is_stale(self) -> bool:
        """Whether its last report no longer describes its current state."""
        return self.age > STALE_SECONDS or self.condition == "ended"


class PastGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of ranks that ended for ``reason``, after which they restarted at ``time``.

    It comprises all ranks of a job, or one process under an agent.
    """

    generation: int
    time: float
    reason: str


class MemorySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The nearest memory limit of a host's ranks: ``used`` of ``limit`` bytes, of a control group or of the host.

    ``growth`` is the growth of ``used`` in the last seconds, in bytes/s.
    """

    used: int
    limit: int
    is_group: bool = False
    growth: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds that it lasts at the current growth."""
        return max(0, self.limit - self.used) / self.growth if self.growth > 0.0 else math.inf

    @property
    def owner(self) -> str:
        """The owner of the limit."""
        return "its control group" if self.is_group else "the host"


def spell_bytes(count: float) -> str:
    """Format a number of bytes: ``1.5 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.4g} {unit}" if count >= 1000 * size else f"{count / size:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


class HostSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host: its ranks, ordered.  ``age`` is the seconds since its agent reported this.

    ``restarts`` counts processes that replaced a failed one, and ``past`` are the last of those.  ``memory`` is the use
    of the memory available to its ranks.
    """

    host: str
    ranks: tuple[RankReport, ...] = ()
    memory: MemorySummary | None = None
    age: float = 0.0
    restarts: int = 0
    past: tuple[PastGeneration, ...] = ()

    def aged(self, seconds: float) -> HostSummary:
        """Return the state of the host as of ``seconds`` later."""
        return msgspec.structs.replace(self, age=seconds, ranks=tuple(report.aged(seconds) for report in self.ranks))


class JobSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job, from the view of the launcher of its first host.  ``time`` and ``started`` are on that host's wall clock.

    ``restarts`` counts those after failures (``--max-restarts``); ``past`` are the last generations, including those
    that ended because hosts joined or left, newest last.
    """

    job: str
    pid: int
    time: float
    started: float = 0.0
    phase: str = ""
    command: tuple[str, ...] = ()
    nnodes: int = 1
    world_size: int = 0
    generation: int = 0
    restarts: int = 0
    past: tuple[PastGeneration, ...] = ()
    hosts: tuple[HostSummary, ...] = ()
    log_directory: str = ""
    dashboard: str = ""
    alarms: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[RankReport]:
        """The reports of all ranks, in rank order."""
        return sorted((report for host in self.hosts for report in host.ranks), key=lambda report: report.rank)

    def renewed(self, answers: Iterable[RankAnswer]) -> JobSummary:
        """Return it updated with later answers of ranks to ``summary``; the other ranks keep their last report."""
        renewed: dict[int, RankSummary] = {}
        for answer in answers:
            if not answer.error:
                with suppress(msgspec.DecodeError):
                    renewed[answer.rank] = harmless_values(unpack(answer.content, RankSummary))

        def renew(report: RankReport) -> RankReport:
            summary = renewed.get(report.rank)
            return report if summary is None else msgspec.structs.replace(report, summary=summary, age=0.0)

        hosts = (msgspec.structs.replace(host, ranks=tuple(map(renew, host.ranks))) for host in self.hosts)
        return msgspec.structs.replace(self, hosts=tuple(hosts))


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of a rank to a request; ``error`` explains why there is no ``content``."""

    rank: int
    host: str
    content: bytes = b""
    error: str = ""


Value = TypeVar("Value", bound=msgspec.Struct)


def pack(value: msgspec.Struct) -> bytes:
    """Encode ``value`` as msgpack."""
    return msgspec.msgpack.encode(value)


def unpack(content: bytes, kind: type[Value]) -> Value:
    """Decode a ``kind`` from ``pack``.  Raises ``msgspec.DecodeError``."""
    return msgspec.msgpack.decode(content, type=kind)


def to_json(value: msgspec.Struct) -> bytes:
    """Encode ``value`` as JSON in one line."""
    return msgspec.json.encode(value)


def from_json(content: bytes, kind: type[Value]) -> Value:
    """Decode a ``kind`` from ``to_json``.  Raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(content, type=kind)
