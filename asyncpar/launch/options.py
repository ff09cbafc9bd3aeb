"""Options of `asyncpar launch`: frozen and validated, independent of this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum

from asyncpar.core.addresses import split_address
from asyncpar.core.config.transport import TRANSPORTS, split_lane_reference
from asyncpar.errors import UsageError

BACKENDS = ("asyncpar", "c10d", "static")
_CONF_TIMEOUTS = ("timeout", "join_timeout")
_CONF_IGNORED = ("last_call_timeout", "close_timeout", "read_timeout", "rank", "is_host", "store_type", "use_libuv")


_LIMITS = ("--silent-after", "--stopped-after", "--busy-after")
ELASTIC_MODES = ("restart", "ranks")
ON_TOTAL_LOSS = ("checkpoint", "restart", "fail")


class ProgramKind(StrEnum):
    """The kind of program to run."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


def parse_kind(*, is_module: bool, is_executed: bool) -> ProgramKind:
    """Return the kind chosen by ``--module`` and ``--no-python``.  Raises ``UsageError`` if both were given."""
    if is_module and is_executed:
        raise UsageError("--module: expected alone, got --no-python too")
    return ProgramKind.MODULE if is_module else ProgramKind.PROGRAM if is_executed else ProgramKind.SCRIPT


class Streams(IntFlag):
    """A choice of a rank's streams, in torchrun's numbers."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoice:
    """Streams for each local rank: ``everywhere``, except where ``by_rank`` overrides it."""

    everywhere: Streams = Streams.NONE
    by_rank: dict[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        return self.by_rank.get(local_rank, self.everywhere if not self.by_rank else Streams.NONE)

    @property
    def is_empty(self) -> bool:
        return self.everywhere == Streams.NONE and not any(self.by_rank.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverOptions:
    """Settings for showing a job while it runs.

    ``dashboard`` and ``metrics`` are the addresses where those are served (None: nowhere), ``dashboard_names`` the
    names of proxies before the page, ``sinks`` the names of sinks.
    """

    dashboard: str | None = None
    dashboard_names: tuple[str, ...] = ()
    metrics: str | None = None
    sinks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, address in (("--dashboard", self.dashboard), ("--metrics", self.metrics)):
            if address is not None:
                split_address(address, name=name, expected="ADDRESS:PORT, such as 127.0.0.1:8787")
        if self.dashboard_names and self.dashboard is None:
            raise UsageError("--dashboard-names: expected with --dashboard")

    @property
    def shows_job(self) -> bool:
        """Whether the whole job is shown to users."""
        return self.dashboard is not None or bool(self.sinks)

    @property
    def of_host(self) -> ObserverOptions:
        """The part that is served for one host, where another one shows the whole job."""
        return ObserverOptions(metrics=self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of one `asyncpar launch`.

    ``nnodes`` hosts run the job; where hosts may come and go, ``least_nnodes`` (None: all) suffice after ``last_call``.
    ``nproc`` None stands for one rank per core; ``endpoint`` is the ``host:port`` where the agents of several hosts
    meet; ``node_rank`` None for any free place; ``certs`` is the directory with certificates; ``silent_after``,
    ``stopped_after`` and ``busy_after`` limit how long ranks may give no sign of life (None: not given; infinity: off).
    ``elastic`` chooses the treatment of ranks when hosts come or go: ``restart``, or ``ranks``, which live on, with
    ``spares`` per host that wait to step in, and which end or begin anew, by ``on_total_loss`` (None: ``checkpoint``),
    when all are lost; restarts within ``restart_window`` count (None: all; an hour for ``ranks``).
    ``host_name`` is the name of this host where hosts come and go (None: its own).  ``full_traceback`` shows all
    frames of a failure.  Times are in seconds.
    """

    program: str
    arguments: tuple[str, ...] = ()
    kind: ProgramKind = ProgramKind.SCRIPT
    nnodes: int = 1
    least_nnodes: int | None = None
    last_call: float = 5.0
    node_rank: int | None = None
    nproc: int | None = 1
    endpoint: str | None = None
    job: str | None = None
    timeout: float = 300.0
    max_restarts: int = 0
    grace: float = 10.0
    silent_after: float | None = None
    stopped_after: float | None = None
    busy_after: float | None = None
    reconnect: float = 5.0
    log_dir: str | None = None
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    local_addr: str | None = None
    transport: str | None = None
    secret_file: str | None = None
    certs: str | None = None
    elastic: str = "restart"
    restart_window: float | None = None
    spares: int = 0
    on_total_loss: str | None = None
    host_name: str | None = None
    full_traceback: bool = False
    post_mortem: str | None = None
    observers: ObserverOptions = ObserverOptions()

    @property
    def is_for_agents(self) -> bool:
        """Whether agents run the job, since hosts may come and go: those that run already, or the launchers."""
        return self.elastic == "ranks" or self.least_nnodes is not None

    def check_endpoint(self) -> None:
        """Raise ``UsageError`` unless launchers of several hosts know where to meet."""
        if self.nnodes > 1 and self.endpoint is None:
            raise UsageError("--rdzv-endpoint: expected host:port of the first host, needed with --nnodes > 1")

    def _check_total_loss(self) -> None:
        how = self.on_total_loss
        if how is not None and (how not in ON_TOTAL_LOSS or self.elastic != "ranks"):
            raise UsageError(
                f"--on-total-loss: expected {' or '.join(ON_TOTAL_LOSS)}, with --elastic ranks, got {how!r}"
            )

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise UsageError(f"--nnodes: expected at least 1, got {self.nnodes}")
        if self.least_nnodes is not None and not 1 <= self.least_nnodes <= self.nnodes:
            raise UsageError(f"--nnodes: expected MIN:MAX with 1 <= MIN <= MAX, got {self.least_nnodes}:{self.nnodes}")
        if self.elastic not in ELASTIC_MODES:
            raise UsageError(f"--elastic: expected {' or '.join(ELASTIC_MODES)}, got {self.elastic!r}")
        if self.host_name is not None and not self.is_for_agents:
            raise UsageError(
                "--host-name: expected with --nnodes MIN:MAX or --elastic ranks; otherwise hosts have their own names"
            )
        self._check_total_loss()
        if self.spares < 0 or (self.spares and self.elastic != "ranks"):
            raise UsageError(f"--spares: expected with --elastic ranks, and at least 0, got {self.spares}")
        if self.restart_window is not None and not self.restart_window > 0.0:
            raise UsageError(f"--restart-window: expected more than 0 seconds, got {self.restart_window}")
        if self.nproc is not None and self.nproc < 1:
            raise UsageError(f"--nproc-per-node: expected at least 1, got {self.nproc}")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise UsageError(
                f"--node-rank: expected 0..{self.nnodes - 1} (--nnodes {self.nnodes}), got {self.node_rank}"
            )
        if self.nnodes > 1 and not self.is_for_agents:
            self.check_endpoint()
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts: expected at least 0, got {self.max_restarts}")
        _check_seconds("--rdzv-timeout", self.timeout, least=0.001)
        _check_seconds("--last-call", self.last_call, least=0.0)
        _check_seconds("--grace-period", self.grace, least=0.0)
        _check_seconds("--reconnect-within", self.reconnect, least=0.0)
        for option in _LIMITS:
            limit = getattr(self, option[2:].replace("-", "_"))
            _check_seconds(option, 1.0 if limit is None or limit == math.inf else limit, least=1.0)
        check_transport(self.transport)


def check_transport(name: str | None) -> None:
    """Raise ``UsageError`` unless ``name`` may be a lane.  The ranks import third-party lanes, not the launcher."""
    if name is not None and name not in TRANSPORTS and split_lane_reference(name) is None:
        raise UsageError(
            f"--transport: expected one of {', '.join(TRANSPORTS)}, got {name!r}; "
            "package.module:NAME names any other LaneKind, which the ranks import"
        )


def _check_seconds(name: str, value: float, *, least: float) -> None:
    if not (math.isfinite(value) and least <= value <= 24 * 3600.0):
        raise UsageError(f"{name}: expected seconds between {least:g} and one day, got {value:g}")


def parse_count(name: str, text: str, *, least: int = 0) -> int:
    """Parse a whole number, such as the value of ``name``."""
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}: expected a whole number, got {text!r}")
    if int(text) < least:
        raise UsageError(f"{name}: expected at least {least}, got {int(text)}")
    return int(text)


def parse_nnodes(text: str, name: str = "--nnodes") -> tuple[int | None, int]:
    """Parse a number, or the range MIN:MAX, of ``name``.  Return MIN, None without a range, and MAX."""
    low, colon, high = text.partition(":")
    least = parse_count(name, low)
    return (least, parse_count(name, high)) if colon else (None, least)


def parse_nproc(text: str) -> int | None:
    """Parse ``--nproc-per-node``: a number, or ``auto``/``cpu`` (None) for one rank per core."""
    if text in ("auto", "cpu"):
        return None
    if text == "gpu":
        raise UsageError("--nproc-per-node: expected a number, 'auto' or 'cpu', got 'gpu'; give the number of GPUs")
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"--nproc-per-node: expected a number, 'auto' or 'cpu', got {text!r}")
    return int(text)


def parse_streams(name: str, text: str) -> StreamChoice:
    """Parse ``--redirects`` or ``--tee``: ``3`` for all local ranks, ``0:1,1:2`` for some."""
    if ":" not in text:
        return StreamChoice(everywhere=_streams(name, text, text))
    by_rank = {}
    for part in text.split(","):
        rank, colon, streams = part.partition(":")
        if not colon or not (rank.isascii() and rank.isdecimal()):
            raise UsageError(f"{name}: expected 0..3 or LOCAL_RANK:0..3,..., got {text!r}")
        by_rank[int(rank)] = _streams(name, streams, text)
    return StreamChoice(by_rank=by_rank)


def _streams(name: str, digit: str, text: str) -> Streams:
    if digit not in ("0", "1", "2", "3"):
        raise UsageError(f"{name}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), got {text!r}")
    return Streams(int(digit))


def parse_conf(text: str) -> float | None:
    """Return the timeout in torchrun's ``--rdzv-conf`` ``key=value,...``, None if there is none."""
    timeout = None
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in _CONF_TIMEOUTS + _CONF_IGNORED:
            raise UsageError(
                f"--rdzv-conf: expected key=value with key one of {', '.join(_CONF_TIMEOUTS)}, got {part!r}"
            )
        if key in _CONF_TIMEOUTS:
            timeout = parse_seconds("--rdzv-conf", value)
    return timeout


def parse_seconds(name: str, text: str) -> float:
    """Parse a number of seconds."""
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{name}: expected a number of seconds, got {text!r}") from error


def parse_limit(name: str, text: str | None) -> float | None:
    """Parse the value of an option that limits silence: seconds, or ``off`` or 0, which mean infinity."""
    if text is None:
        return None
    return math.inf if text == "off" else parse_seconds(name, text) or math.inf
