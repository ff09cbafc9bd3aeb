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
    """Settings of one `asyncpar agent`.

    ``join`` are addresses (``host:port``) of agents of the group, one of which has to answer; if empty, this agent
    founds a group.  ``listen`` is the address at which it serves, ``name`` its name (None: the host's name), ``certs``
    the directory with the certificates of this host (None: there are none), ``state_dir`` the directory of its votes
    (None: a temporary one); ``grace`` is the time in seconds that its ranks have to leave when it is asked to end.  A
    ``witness`` votes, and runs no ranks.  ``node_rank`` is the place that it asks for in jobs that start again with
    every world (None: any).  ``post_mortem`` is the directory for the remains of jobs that fail; None: nothing is kept.
    ``observers`` are the settings for showing jobs while they run.
    """

    join: tuple[str, ...] = ()
    listen: str | None = None
    name: str | None = None
    node_rank: int | None = None
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
    """Return ``grace``.  Raises ``UsageError`` if it is not a valid time."""
    if not (math.isfinite(grace) and 0.0 <= grace <= 86_400.0):
        raise UsageError(f"--grace: expected 0 to 86400 seconds, got {grace}")
    return grace


def parse_address(option: str, text: str) -> str:
    """Return ``text`` as ``host:port``; its port may be missing.  Raises ``UsageError`` that names ``option``."""
    return join_address(*split_address(text, name=option, expected="HOST:PORT", default_port=AGENTS_PORT))


def parse_join(text: str | None) -> tuple[str, ...]:
    """Split the comma-separated addresses in ``text``.  Raises ``UsageError``."""
    return () if text is None else tuple(parse_address("--join", part) for part in text.split(","))
