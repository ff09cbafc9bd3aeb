"""Environment variables that `asyncpar launch` sets for its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from asyncpar.errors import UsageError

ELASTIC_PIPE = "ASYNCPAR_ELASTIC_FD"
"""The variable with the number of the inherited socket over which an elastic rank receives its worlds."""

_MARK = "ASYNCPAR_RENDEZVOUS"
_LONGEST_TIMEOUT = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The place of one rank in its job: the variables that the launcher sets and the rank reads.

    ``rendezvous`` is the ``host:port`` to join at, ``secret_file`` holds the secret to authenticate with, ``bind`` is
    the address for servers of this rank.  ``host`` is the name shown in texts; ``host_id`` is equal exactly for ranks
    of one host.  ``certs`` is the directory with the certificates of this host (None: the job has none); ``certified``
    has the numbers in the certificates of the ranks (None: their own), and ``rendezvous_role`` is the label of the role
    in that of the rendezvous (None: the coordinator's).  ``transport`` pins the lane (None: negotiated),
    ``report_descriptor`` is an inherited pipe to the agent, ``notice_descriptor`` one from it; ``timeout`` bounds in
    seconds the wait for the other ranks.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    rendezvous: str
    secret_file: str
    job: str
    generation: int
    restart_count: int
    host: str
    host_id: str
    bind: str
    timeout: float
    certs: str | None = None
    certified: tuple[int, ...] | None = None
    rendezvous_role: str | None = None
    transport: str | None = None
    report_descriptor: int | None = None
    notice_descriptor: int | None = None

    def __post_init__(self) -> None:
        for name, size in (
            ("WORLD_SIZE", self.world_size),
            ("LOCAL_WORLD_SIZE", self.local_world_size),
            ("GROUP_WORLD_SIZE", self.group_world_size),
        ):
            if size < 1:
                raise UsageError(f"{name}: expected at least 1, got {size}")
        _check_range("RANK", self.rank, self.world_size)
        _check_range("LOCAL_RANK", self.local_rank, self.local_world_size)
        _check_range("GROUP_RANK", self.group_rank, self.group_world_size)
        if self.local_world_size > self.world_size:
            raise UsageError(
                f"LOCAL_WORLD_SIZE: expected at most WORLD_SIZE ({self.world_size}), got {self.local_world_size}"
            )
        if self.certified is not None and len(self.certified) != self.world_size:
            raise UsageError(
                f"ASYNCPAR_CERTIFIED: expected WORLD_SIZE ({self.world_size}) numbers, got {len(self.certified)}"
            )
        if not 0 < self.master_port < 65536:
            raise UsageError(f"MASTER_PORT: expected 1..65535, got {self.master_port}")
        if not 0.0 < self.timeout <= _LONGEST_TIMEOUT:
            raise UsageError(f"ASYNCPAR_RENDEZVOUS_TIMEOUT: expected 0..{_LONGEST_TIMEOUT:.0f} s, got {self.timeout}")

    @staticmethod
    def is_in(environment: Mapping[str, str]) -> bool:
        """Whether `asyncpar launch` started the process with this ``environment``."""
        return bool(environment.get(_MARK))

    @classmethod
    def from_mapping(cls, environment: Mapping[str, str]) -> LaunchEnvironment | None:
        """Read ``environment`` (such as ``os.environ``); None when no launcher started this process.

        Raises ``UsageError`` naming the variable that is missing or wrong, and if another launcher made a world of
        several ranks, or worlds come over a pipe: each rank would silently become a world of one.
        """
        if not cls.is_in(environment):
            _refuse_elastic_worlds(environment)
            _refuse_other_launchers(environment)
            return None
        values: dict[str, _Value] = {}
        for field in fields(cls):
            name = _VARIABLES[field.name]
            text = environment.get(name, "")
            if text:
                values[field.name] = _parse(name, text, str(field.type))
            elif field.name not in _OPTIONAL:
                raise UsageError(f"{name}: expected a value, it is not set although {_MARK} is")
        return cls(**values)  # type: ignore[arg-type]  # parsed by the fields' types

    def to_mapping(self) -> dict[str, str]:
        """Return the variables that ``from_mapping`` reads."""
        values = {_VARIABLES[field.name]: getattr(self, field.name) for field in fields(self)}
        return {name: _format(value) for name, value in values.items() if value is not None}


_VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "group_rank": "GROUP_RANK",
    "group_world_size": "GROUP_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "rendezvous": _MARK,
    "secret_file": "ASYNCPAR_SECRET_FILE",
    "job": "ASYNCPAR_JOB",
    "generation": "ASYNCPAR_GENERATION",
    "restart_count": "ASYNCPAR_RESTART_COUNT",
    "host": "ASYNCPAR_HOST",
    "host_id": "ASYNCPAR_HOST_ID",
    "bind": "ASYNCPAR_BIND",
    "timeout": "ASYNCPAR_RENDEZVOUS_TIMEOUT",
    "certs": "ASYNCPAR_CERTS",
    "certified": "ASYNCPAR_CERTIFIED",
    "rendezvous_role": "ASYNCPAR_RENDEZVOUS_ROLE",
    "transport": "ASYNCPAR_TRANSPORT",
    "report_descriptor": "ASYNCPAR_REPORT_FD",
    "notice_descriptor": "ASYNCPAR_NOTICE_FD",
}
_OPTIONAL = frozenset({"certs", "certified", "rendezvous_role", "transport", "report_descriptor", "notice_descriptor"})
_Value = str | int | float | tuple[int, ...]


def _format(value: _Value) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse(name: str, text: str, kind: str) -> _Value:
    if kind.startswith("tuple"):
        return tuple(_parse_whole(name, part) for part in text.split(","))
    if kind.startswith("int"):
        return _parse_whole(name, text)
    if kind == "float":
        try:
            return float(text)
        except ValueError as error:
            raise UsageError(f"{name}: expected a number, got {text!r}") from error
    return text


def _parse_whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}: expected a whole number, got {text!r}")
    return int(text)


def _check_range(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise UsageError(f"{name}: expected 0..{size - 1}, got {value}")


def _refuse_elastic_worlds(environment: Mapping[str, str]) -> None:
    if environment.get(ELASTIC_PIPE):
        raise UsageError(
            f"{ELASTIC_PIPE}: this process was started with --elastic ranks, so its worlds come from ap.elastic(...); "
            "use that, or start the program with --elastic restart"
        )


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    size = environment.get("WORLD_SIZE", "")
    if size not in ("", "1") and environment.get("RANK"):
        raise UsageError(
            f"WORLD_SIZE: it is {size} and RANK is set, but {_MARK} is not; start the ranks with `asyncpar launch`, "
            "or unset both for a world of one"
        )
