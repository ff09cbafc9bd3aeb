"""Summaries: ranks, hosts and jobs as they tell of themselves once a second; plain values, as msgpack and JSON.  Pure.

A rank makes a ``RankSummary`` (about 2 kB); its agent adds what only it sees (is the process stopped?) in a
``RankReport``; the launcher of a job puts the reports of all hosts together in a ``JobSummary``.
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
"""Operations that a summary names; those that have waited longest come first."""

STALE_SECONDS: Final = 3.0
"""A summary that is older says when it was told; ranks are asked once a second."""

MOST_LINKS: Final = 64
MOST_MAILBOXES: Final = 16
MOST_LETTERS: Final = 4
MOST_SERVED: Final = 32
MOST_FIGURES: Final = 8
"""Figures of each kind of event that a summary has."""

MOST_VALUES: Final = 32
MOST_PAST: Final = 16
"""Generations that a job's summary lists, the last ones."""


class OperationSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operation that has begun and is not over.

    ``label`` is its name in messages (``all_reduce #7``), ``text`` describes it with dtype and size, ``seconds`` is the
    time since its last progress.  ``waits_for`` are the ranks that it waits for, the one that it needs next first, and
    ``culprit`` the rank that holds it up as far as other ranks have told.  ``site`` is where the program called it
    (``train.py:57``), "" if that is not known.  ``is_awaited`` False: it was called, and is not awaited yet.
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
    """A call of an actor that waits for its answer; ``rank`` is where the actor lives.

    ``site`` is where the program called it, ``told`` what its rank has told of it, having inquired what the actor does
    (None: nothing so far).  ``is_stream``: it takes items, and may do so for ever.  ``call`` is its number at its
    caller, ``caller`` the actor that calls ("": the program), and ``serves`` the call that this one works for: rank and
    number.  ``is_holding``: the actor that calls takes no other message meanwhile.
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
    """Code that has blocked the event loop for ``seconds``: whose it is, and where it is now."""

    what: str
    where: str
    seconds: float


class MailboxSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An actor with messages that wait."""

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

    ``rate`` is how many bytes/s it carried lately while it had to carry any, which was a ``share`` of the time;
    ``is_full``: the link allows no more, else it may be faster.
    """

    peer: int
    lane: str = ""
    bytes: int = 0
    rtt: float | None = None
    rate: float | None = None
    is_full: bool = False
    share: float = 0.0


class ProgressSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress that the program has reported last, and the ``fields`` beside it."""

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
    """Microseconds that events took lately: ``what`` they are (``collective``, ``span``), sizes up to ``bytes``.

    Of collectives ``rate`` is the bus bandwidth in bytes/s at ``p50``, and ``expected`` are the microseconds that the
    cost model estimates; 0: not known.
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
    """How long the operations ``name`` took so far, ``seconds`` in all; ``counts`` are those of each bucket."""

    name: str
    counts: tuple[int, ...]
    seconds: float


class GradientSummary(msgspec.Struct, frozen=True, array_like=True):
    """How gradients were synchronized so far.

    ``hidden`` is the part of the time of communication behind the rank's own work, ``ratio`` how many times fewer bytes
    were sent than without a codec.
    """

    hidden: float
    ratio: float


class RankSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank tells about itself.  ``time`` is on its own wall clock; sizes are in bytes, times in seconds.

    ``loop_lag`` is how long the event loop took to answer, ``blocked`` what holds it.  ``cpu`` is processor time used
    so far, ``stolen`` how long threads waited for a processor, ``gc`` the time in garbage collections.  ``operations``
    are those under way, ``operations_done`` and ``bytes_moved`` count by kind of lane (``arena``, ``messages``).
    ``user_site`` is where the program's own code is in the main thread or in the task that waits, and ``doing`` what it
    does there, in the words in which the rank answers others (``sleeps at train.py:57``).  ``rounds`` are the
    last ones of the world's group, ``figures`` those of its last events, ``durations`` those of all its operations
    (see ``durations.py``), ``gradients`` those of the synchronizer that
    took the last step.  ``serving`` are calls whose endpoints run, by the rank and the number of their callers.
    ``dead_letters`` counts messages that no actor handled, and ``letters`` are the last ones, the newest first.
    ``dropped`` counts what was not told, because nobody took it.
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
    """A rank as its agent sees it.

    ``condition`` is ``well``, ``stopped`` (SIGSTOP, a debugger), ``hung`` (no Python code runs), ``busy`` (no Python
    code runs, but it computes), ``uninterruptible`` (in the kernel), or ``ended``, for ``seconds``.  ``summary`` is
    what it told last, ``age`` seconds ago; None: it has told nothing (it does not use asyncpar, or has not yet come so
    far).
    ``place`` is where its program is, as its agent reads it from outside while the rank does not answer, and ``doing``
    what it does there, in the words of ``RankSummary.doing``.
    ``restarts`` counts the processes of this rank before this one, that failed, or began again as others had failed.
    ``ending`` says how it ended, ``blames`` is the rank that it has named as the cause then, and ``call`` what it had
    called where others called something else.
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
        """Return it that many seconds later: a condition lasts as long as no other one is reported."""
        lasts = 0.0 if self.condition == "well" else seconds
        return msgspec.structs.replace(self, age=self.age + seconds, seconds=self.seconds + lasts)

    @property
    def is_stale(self) -> bool:
        """Is what it told last no picture of what it does now?"""
        return self.age > STALE_SECONDS or self.condition == "ended"


class PastGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of ranks that ended for ``reason``, after which they began again at ``time``.

    It is all ranks of a job, or one process under an agent.
    """

    generation: int
    time: float
    reason: str


class MemorySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limit of a host's ranks that is nearest: ``used`` of ``limit`` bytes, of a control group or of the host.

    ``growth`` is by how many bytes/s ``used`` has grown in the last seconds.
    """

    used: int
    limit: int
    is_group: bool = False
    growth: float = 0.0

    @property
    def seconds_left(self) -> float:
        """How long it lasts if it goes on growing like that."""
        return max(0, self.limit - self.used) / self.growth if self.growth > 0.0 else math.inf

    @property
    def owner(self) -> str:
        """Whose limit it is."""
        return "its control group" if self.is_group else "the host"


def spell_bytes(count: float) -> str:
    """Return ``1.5 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.4g} {unit}" if count >= 1000 * size else f"{count / size:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


class HostSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host: its ranks, ordered.  ``age`` is how many seconds ago its agent told this.

    ``restarts`` counts processes that took the place of one that had failed, and ``past`` are the last of those.
    ``memory`` is what is used of the memory that its ranks may use.
    """

    host: str
    ranks: tuple[RankReport, ...] = ()
    memory: MemorySummary | None = None
    age: float = 0.0
    restarts: int = 0
    past: tuple[PastGeneration, ...] = ()

    def aged(self, seconds: float) -> HostSummary:
        """Return what is known of the host that many seconds after it told this."""
        return msgspec.structs.replace(self, age=seconds, ranks=tuple(report.aged(seconds) for report in self.ranks))


class JobSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job, as the launcher of its first host sees it.  ``time`` and ``started`` are on that host's wall clock.

    ``restarts`` counts those after failures (``--max-restarts``); ``past`` are the last generations, those that ended
    because hosts joined or left among them, the newest last.
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
        """The reports of all ranks, in the order of ranks."""
        return sorted((report for host in self.hosts for report in host.ranks), key=lambda report: report.rank)

    def renewed(self, answers: Iterable[RankAnswer]) -> JobSummary:
        """Return it with what ranks have answered to ``summary`` since; the others keep what they told last."""
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
    """What a rank has told when it was asked; ``error`` says why there is no ``content``."""

    rank: int
    host: str
    content: bytes = b""
    error: str = ""


Value = TypeVar("Value", bound=msgspec.Struct)


def pack(value: msgspec.Struct) -> bytes:
    """Return ``value`` as msgpack."""
    return msgspec.msgpack.encode(value)


def unpack(content: bytes, kind: type[Value]) -> Value:
    """Return the ``kind`` that ``pack`` encoded.  Raises ``msgspec.DecodeError``."""
    return msgspec.msgpack.decode(content, type=kind)


def to_json(value: msgspec.Struct) -> bytes:
    """Return ``value`` as JSON in one line."""
    return msgspec.json.encode(value)


def from_json(content: bytes, kind: type[Value]) -> Value:
    """Return the ``kind`` that ``to_json`` encoded.  Raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(content, type=kind)
