"""Checks of the frames of one connection, derived by both ends from their handshake."""

from __future__ import annotations

from asyncpar.errors import ProtocolError
from asyncpar.net.wire.frame import FrameDamaged, FrameSealer, FrameVerifier
from asyncpar.net.wire.handshake import Handshake, seed_of

DAMAGED = "damaged link"
"""Prefix of the cause of a loss that damage in transit has brought about."""


class Protection:
    """The sealer and verifier for this side of a connection whose handshake is complete.

    ``may_damage``: payloads can be damaged in transit; not so inside a host, nor under TLS, which checks them.
    """

    def __init__(self, handshake: Handshake, *, may_damage: bool) -> None:
        terms = handshake.terms
        own, peer = (terms.dialer, terms.listener) if handshake.is_dialer else (terms.listener, terms.dialer)
        checks = terms.checks_payloads and may_damage
        self.may_damage = may_damage
        self._terms = terms
        self.sealer = FrameSealer(seed_of(terms, own), checks_payloads=checks)
        self.verifier = FrameVerifier(seed_of(terms, peer), checks_payloads=checks)

    def describe(self, error: ProtocolError, kind: str) -> str:
        """Return ``error`` as the cause of a loss, for this connection of a lane of ``kind``, or one of several."""
        if not isinstance(error, FrameDamaged):
            return f"protocol error: {error}"
        count = self._terms.connections
        which = "" if count == 1 else f", connection {self._terms.connection + 1} of {count}"
        return f"{DAMAGED}: {kind} lane{which}: {error}"
