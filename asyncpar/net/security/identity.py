"""Names for the parties of a job, in the two forms that a certificate carries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from asyncpar.errors import UsageError

_JOB = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_URI = re.compile(r"asyncpar://([^/]+)/(rank|agent|coordinator)(?:/(0|[1-9][0-9]{0,8}))?")


_NOBODY = -1


class RoleKind(StrEnum):
    """The roles of the parties of a job."""

    RANK = "rank"
    AGENT = "agent"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True, order=True)
class Role:
    """A rank, the agent of a host, or the coordinator with its rendezvous (which has no number).

    A rank or an agent without a number stands for any of them: a certificate names one, a check may accept any.
    """

    kind: RoleKind
    number: int | None = None

    def __post_init__(self) -> None:
        assert self.number is None or self.kind is not RoleKind.COORDINATOR, f"there is no {self.kind} {self.number}"

    def includes(self, other: Role) -> bool:
        """Return whether ``other`` is this role, or one of those that it stands for."""
        return other.kind is self.kind and self.number in (None, other.number)

    @property
    def label(self) -> str:
        """A name for files and DNS labels: ``rank-3``."""
        return self.kind.value if self.number is None else f"{self.kind}-{self.number}"

    def __str__(self) -> str:
        match self.kind:
            case RoleKind.RANK:
                return "a rank" if self.number is None else f"rank {self.number}"
            case RoleKind.AGENT:
                return "an agent" if self.number is None else f"the agent of host {self.number}"
        return "the coordinator"


def rank_role(rank: int) -> Role:
    """Return the role of ``rank``."""
    return Role(RoleKind.RANK, rank)


def certified_role(rank: int, certified: Sequence[int] | None) -> Role:
    """Return the role in the certificate of ``rank`` in a world whose ranks have those numbered ``certified``.

    None: each has that of its own number.  For a rank outside the world it is a role that nobody's certificate names.
    """
    if certified is None:
        return rank_role(rank)
    return rank_role(certified[rank] if 0 <= rank < len(certified) else _NOBODY)


def agent_role(host: int) -> Role:
    """Return the role of the agent of the host number ``host`` (its node rank)."""
    return Role(RoleKind.AGENT, host)


COORDINATOR = Role(RoleKind.COORDINATOR)
ANY_AGENT = Role(RoleKind.AGENT)
ANY_RANK = Role(RoleKind.RANK)


def parse_label(label: str) -> Role | None:
    """Return the role called ``label``, None if there is none."""
    kind, dash, number = label.partition("-")
    if label == RoleKind.COORDINATOR:
        return COORDINATOR
    if not dash or kind not in (RoleKind.RANK, RoleKind.AGENT) or not (number.isascii() and number.isdecimal()):
        return None
    return Role(RoleKind(kind), int(number))


def add_role(name: str, role: Role | None) -> str:
    """Return ``name`` of an agent or of an elastic rank, with the role in its certificate (None: it has none).

    Each start has a new name; the role in it states which certificate to expect there.
    """
    return name if role is None else f"{name}@{role.label}"


def role_in(name: str) -> Role | None:
    """Return the role in ``name`` of ``add_role``, None if there is none."""
    role = parse_label(name.rpartition("@")[2]) if "@" in name else None
    return role if role is not None and name.endswith(f"@{role.label}") else None


class PeerIdentity(msgspec.Struct, frozen=True):
    """One party of one job."""

    job: str
    role: Role

    @property
    def uri(self) -> str:
        """The name in this party's certificate that servers read: ``asyncpar://demo/rank/3``."""
        tail = "" if self.role.number is None else f"/{self.role.number}"
        return f"asyncpar://{self.job}/{self.role.kind}{tail}"

    @property
    def dns_name(self) -> str:
        """The name that clients expect in a server's certificate: ``rank-3.demo.asyncpar``.  It is never resolved."""
        return f"{self.role.label}.{self.job}.asyncpar"

    @classmethod
    def parse(cls, uri: str) -> PeerIdentity | None:
        """Return the identity with this ``uri``, None if it is not one of ours."""
        match = _URI.fullmatch(uri)
        if match is None:
            return None
        job, kind, number = match.groups()
        if (number is None) != (kind == RoleKind.COORDINATOR):  # a certificate is of one party
            return None
        return cls(job, Role(RoleKind(kind), None if number is None else int(number)))

    def __str__(self) -> str:
        return f"{self.role} of job {self.job!r}"


def check_job_name(name: str) -> str:
    """Return ``name`` if it is valid in a certificate, that is, in a DNS name; raise ``UsageError`` if not."""
    if _JOB.fullmatch(name) is None:
        raise UsageError(
            f"--job: expected up to 63 lower-case letters, digits and dashes (none at the ends), got {name!r}"
        )
    return name
