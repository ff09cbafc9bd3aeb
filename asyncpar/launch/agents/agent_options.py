"""Options of `asyncpar agent`, `status` and `drain`: frozen and validated, independent of this machine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from asyncpar.core.addresses import join_address, split_address
from asyncpar.errors import UsageError
from asyncpar.launch.agents.requests import AGENTS_PORT
from asyncpar.launch.options import ObserverOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """One `asyncpar agent`.

    ``join`` are addresses (``host:port``) of agents of the group, of which one has to answer; none: this agent founds a
    group.  ``listen`` is where it serves, ``name`` what it is called (None: the host's name), ``certs`` the directory
    with the certificates of this host (None: there are none), ``state_dir`` where its votes are stored (None: a
    temporary directory); ``grace`` are the seconds that its ranks have to leave when it is asked to end.  A ``witness``
    votes, and runs no ranks.  ``post_mortem`` is the directory for what is left of jobs that fail, None for nothing.
    ``observers`` says how jobs are shown while they run.
    """

    join: tuple[str, ...] = ()
    listen: str | None = None
    name: str | None = None
    secret_file: str | None = None
    certs: str | None = None
    state_dir: str | None = None
    grace: float = 30.0
    witness: bool = False
    post_mortem: str | None = None
    observers: ObserverOptions = field(default_factory=ObserverOptions)

    def __post_init__(self) -> None:
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--name: expected letters, digits, '.', '_' and '-', at most 63 of them, got {self.name!r}"
            )
        check_grace(self.grace)


def check_grace(grace: float) -> float:
    """Return ``grace``.  Raises ``UsageError`` if it is no time."""
    if not (math.isfinite(grace) and 0.0 <= grace <= 86_400.0):
        raise UsageError(f"--grace: expected 0 to 86400 seconds, got {grace}")
    return grace


def parse_address(option: str, text: str) -> str:
    """Return ``host:port`` of ``text``, whose port may be missing.  Raises ``UsageError`` that names ``option``."""
    return join_address(*split_address(text, name=option, expected="HOST:PORT", default_port=AGENTS_PORT))


def parse_join(text: str | None) -> tuple[str, ...]:
    """Return the addresses in ``text``, which commas separate.  Raises ``UsageError``."""
    return () if text is None else tuple(parse_address("--join", part) for part in text.split(","))
