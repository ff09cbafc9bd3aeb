"""Where the ranks of one host meet, and under which terms they prove themselves there.  Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from asyncpar.config.world import World
from asyncpar.wire.handshake import TOKEN_BYTES, LinkTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The meeting of ``ranks``, ascending, which are those of one host; the first convenes it.

    The address is an abstract Unix socket: it is no file, it vanishes with its socket, and it holds a MAC, so that
    nobody without the secret can be there first.
    """

    job: str
    generation: int
    host_id: str
    ranks: tuple[int, ...]
    secret: bytes = field(repr=False)
    servers: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Where each rank has its gRPC server; not for those that have none."""

    @classmethod
    def of(cls, world: World, rank: int, *, secret: bytes) -> Meeting:
        """Return the meeting that ``rank`` belongs to."""
        host_id = world.members[rank].host_id
        ranks = tuple(member.rank for member in world.members if member.host_id == host_id)
        return cls(
            job=world.job,
            generation=world.generation,
            host_id=host_id,
            ranks=ranks,
            secret=secret,
            servers={rank: world.members[rank].address for rank in ranks},
        )

    @property
    def convener(self) -> int:
        return self.ranks[0]

    @property
    def address(self) -> bytes:
        """Where the convener listens, in this network namespace."""
        return b"\0asyncpar-" + self._mac("address").hex().encode()

    def terms(self, dialer: int) -> LinkTerms:
        """Return what ``dialer`` and the convener prove to each other."""
        token = self._mac("token", dialer)[:TOKEN_BYTES]
        return LinkTerms(job=self.job, generation=self.generation, dialer=dialer, listener=self.convener, token=token)

    def find_terms(self, token: bytes) -> LinkTerms | None:
        """Return the terms that go with ``token``."""
        candidates = (self.terms(rank) for rank in self.ranks[1:])
        return next((terms for terms in candidates if hmac.compare_digest(terms.token, token)), None)

    def _mac(self, *label: object) -> bytes:
        content = msgspec.msgpack.encode((label, self.job, self.generation, self.host_id, self.ranks))
        return hmac.digest(self.secret, b"asyncpar arena\0" + content, hashlib.sha256)
