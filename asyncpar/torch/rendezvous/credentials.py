"""The credentials of ranks that rendezvous through a store."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.secret import SECRET_BYTES
from asyncpar.errors import UsageError
from asyncpar.net.membership.credentials import load_certificates, read_credentials, read_secret
from asyncpar.net.security.identity import rank_role
from asyncpar.net.transport.rpc import Credentials
from asyncpar.torch.rendezvous.messages import Participants, WorldIdentity

_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_CERTS = "ASYNCPAR_CERTS"
_FINGERPRINT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCredentials:
    """The credentials of one rank; ``credentials`` is None if the secret is distributed through the store.

    ``job`` is the name of the world that the credentials require, "" for any name.
    """

    credentials: Credentials | None
    job: str
    generation: int

    @property
    def terms(self) -> dict[str, str]:
        """Values that must be equal on all ranks; they reveal nothing of the secret."""
        secret, certificates = "none", "none"
        if self.credentials is not None:
            digest = hmac.digest(self.credentials.secret, b"asyncpar fingerprint", hashlib.sha256)
            secret = f"one with fingerprint {digest[:_FINGERPRINT_BYTES].hex()}"
            certificates = "none" if self.credentials.certificates is None else "some"
        return {f"secret of the job ({_SECRET_FILE})": secret, f"certificates ({_CERTS})": certificates}

    def identity(self) -> WorldIdentity:
        """Return the identity that rank 0 gives the world: a name, and a new secret if ranks have none."""
        return WorldIdentity(
            job=self.job or f"torch-{secrets.token_hex(8)}",
            generation=self.generation,
            secret="" if self.credentials is not None else secrets.token_hex(SECRET_BYTES),
        )

    def credentials_for(self, participants: Participants) -> Credentials:
        """Return the credentials for the world of ``participants``."""
        return self.credentials or Credentials(bytes.fromhex(participants.identity.secret))


def read_rank_credentials(
    environment: Mapping[str, str], launched: LaunchEnvironment | None, rank: int
) -> RankCredentials:
    """Return the credentials of ``rank`` from ``environment``.  Raises ``UsageError`` for unsuitable files."""
    if launched is not None:
        if launched.certs is not None and rank != launched.rank:
            raise UsageError(f"rank: expected {launched.rank}, for which there are certificates, got {rank}")
        return RankCredentials(credentials=read_credentials(launched), job=launched.job, generation=launched.generation)
    path, certs = environment.get(_SECRET_FILE), environment.get(_CERTS)
    if not path:
        if certs:
            raise UsageError(f"{_CERTS}: expected {_SECRET_FILE} beside it, which is not set")
        return RankCredentials(credentials=None, job="", generation=0)
    certificates = load_certificates(certs, rank_role(rank)) if certs else None
    job = "" if certificates is None else certificates.identity.job
    return RankCredentials(credentials=Credentials(read_secret(path), certificates), job=job, generation=0)
