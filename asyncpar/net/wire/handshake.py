"""Mutual proof that both ends of a new connection hold the job secret, before anything else is parsed.

A three-pass challenge and response with HMAC-SHA256, after SKID3 (Handbook of Applied Cryptography, 10.17; ISO/IEC
9798-4).  Everything has a fixed size, 212 bytes in total:

    HELLO      dialer to listener   terms, the dialer's nonce, MAC("hello", terms, nonce)
    CHALLENGE  listener to dialer   the listener's nonce, MAC("listener", terms, both nonces)
    PROOF      dialer to listener   MAC("dialer", terms, both nonces)

The terms (job, generation, both ranks, the token that the two ranks agreed on for this link, and which of its
connections this is) are part of every MAC, so a message fits no other connection.  Each pass has its own label, so a
reflected message proves nothing; nonces and the token, which is valid for one link, do the same for a replayed one.
The HELLO carries a MAC too, so that a listener does not send a single byte to a peer without the secret.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

from asyncpar.errors import AuthenticationError

MAGIC = b"apLK"
WIRE_VERSION = 4
"""Version of the protocol between two ranks: the handshake and the frames after it.  Changes of either raise it."""

NONCE_BYTES = 32
TOKEN_BYTES = 16
_MAC_BYTES = hashlib.sha256().digest_size
_TERMS = struct.Struct("<4sBBBB16sIII16s")
_CONNECTION_AT = 5
_MOST_CONNECTIONS = 255
_HELLO_BYTES = _TERMS.size + NONCE_BYTES + _MAC_BYTES
_CHALLENGE_BYTES = NONCE_BYTES + _MAC_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """Terms that two ranks agreed on before connecting, and the number of this one of the link's ``connections``."""

    job: str
    generation: int
    dialer: int
    listener: int
    token: bytes
    connection: int = 0
    connections: int = 1
    checks_payloads: bool = True
    """Whether payloads have checksums on lanes that leave the host unencrypted."""

    def __post_init__(self) -> None:
        assert len(self.token) == TOKEN_BYTES, f"a link token has {TOKEN_BYTES} bytes, got {len(self.token)}"
        assert 0 <= self.connection < self.connections <= _MOST_CONNECTIONS, (
            f"there is no connection {self.connection} of {self.connections}"
        )

    def encode(self) -> bytes:
        """Return the terms in their fixed form; the job appears as a digest."""
        job = hashlib.sha256(self.job.encode()).digest()[:16]
        return _TERMS.pack(
            MAGIC,
            WIRE_VERSION,
            self.connection,
            self.connections,
            self.checks_payloads,
            job,
            self.generation,
            self.dialer,
            self.listener,
            self.token,
        )


def seed_of(terms: LinkTerms, sender: int) -> int:
    """Return the seed of the checksums of the frames that rank ``sender`` sends over this connection."""
    return crc32(terms.encode() + struct.pack("<I", sender))


class _Awaited(enum.Enum):
    HELLO = _HELLO_BYTES
    CHALLENGE = _CHALLENGE_BYTES
    PROOF = _MAC_BYTES


class Handshake:
    """One side of the handshake; made by ``dial`` or ``listen``.  Sans-I/O.

    Send ``opening``, put received bytes into ``buffer``, and send the result of ``advance``.  Never requests a byte
    beyond the handshake, so the bytes after it belong to frames.  ``AuthenticationError`` ends it: close silently.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        nonce: bytes,
        terms: LinkTerms | None,
        find_terms: Callable[[bytes], LinkTerms | None] | None,
    ) -> None:
        assert len(nonce) == NONCE_BYTES, f"a nonce has {NONCE_BYTES} bytes, got {len(nonce)}"
        self._secret = secret
        self._nonce = nonce
        self._find_terms = find_terms
        self._terms = terms
        self._peer_nonce = b""
        self._awaited: _Awaited | None = _Awaited.HELLO if terms is None else _Awaited.CHALLENGE
        self._received = bytearray(self._awaited.value)
        self._count = 0

    @classmethod
    def dial(cls, terms: LinkTerms, *, secret: bytes, nonce: bytes) -> Handshake:
        """Return the side that opened the connection.  ``nonce`` must be new and random."""
        return cls(secret=secret, nonce=nonce, terms=terms, find_terms=None)

    @classmethod
    def listen(cls, find_terms: Callable[[bytes], LinkTerms | None], *, secret: bytes, nonce: bytes) -> Handshake:
        """Return the side that accepted the connection.

        ``find_terms`` returns the terms agreed on under a token that is not proved yet (None: there are none).  The
        dialer states which of the agreed connections it is.
        """
        return cls(secret=secret, nonce=nonce, terms=None, find_terms=find_terms)

    @property
    def is_complete(self) -> bool:
        """Whether both sides have authenticated themselves, as far as this side knows."""
        return self._awaited is None

    @property
    def is_dialer(self) -> bool:
        """Whether this side opened the connection."""
        return self._find_terms is None

    @property
    def is_trusted(self) -> bool:
        """Whether the peer has shown that it holds the secret.  (A listener may then be more patient.)"""
        return bool(self._peer_nonce)

    @property
    def terms(self) -> LinkTerms:
        """The terms of the link; known to a listener once the HELLO was verified."""
        assert self._terms is not None, "the terms are not known before the peer's HELLO"
        return self._terms

    @property
    def opening(self) -> bytes:
        """The bytes to send at once: the HELLO of a dialer, none of a listener."""
        if self._find_terms is not None:
            return b""
        terms = self.terms.encode()
        return terms + self._nonce + self._mac(b"hello", terms, self._nonce)

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes: exactly as many as are missing of the message that is due."""
        return memoryview(self._received)[self._count :]

    def advance(self, count: int) -> bytes:
        """Process the first ``count`` bytes of ``buffer`` and return the bytes to send now (often none)."""
        self._count += count
        if self._awaited is _Awaited.HELLO:
            self._check_opening()
        if self._awaited is None or self._count < self._awaited.value:
            return b""
        message = bytes(self._received)
        match self._awaited:
            case _Awaited.HELLO:
                return self._answer_hello(message)
            case _Awaited.CHALLENGE:
                return self._answer_challenge(message)
            case _Awaited.PROOF:
                self._check(message, self._mac(b"dialer", *self._both()))
                self._expect(None)
        return b""

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_opening(self) -> None:
        """Refuse strangers at their first wrong byte: they may never send the rest of a HELLO."""
        known = (MAGIC + bytes([WIRE_VERSION]))[: self._count]
        shown = bytes(self._received[: len(known)])
        if shown[: len(MAGIC)] != known[: len(MAGIC)]:
            raise AuthenticationError(f"handshake: expected {MAGIC!r}, the peer began with {shown!r}")
        if shown != known:
            raise AuthenticationError(f"handshake version: this side speaks {WIRE_VERSION}, the peer {shown[-1]}")

    def _answer_hello(self, message: bytes) -> bytes:
        assert self._find_terms is not None
        shown, nonce, mac = message[: _TERMS.size], message[_TERMS.size : -_MAC_BYTES], message[-_MAC_BYTES:]
        self._check(mac, self._mac(b"hello", shown, nonce))
        terms = self._find_terms(shown[-TOKEN_BYTES:])
        if terms is None:
            raise AuthenticationError("the token of the link is unknown here: used before, expired, or of another node")
        terms = replace(terms, connection=min(shown[_CONNECTION_AT], terms.connections - 1))
        if terms.encode() != shown:
            raise AuthenticationError(
                f"link terms: this side agreed on {_describe(terms.encode())}, got {_describe(shown)}"
            )
        self._terms, self._peer_nonce = terms, nonce
        self._expect(_Awaited.PROOF)
        return self._nonce + self._mac(b"listener", *self._both())

    def _answer_challenge(self, message: bytes) -> bytes:
        self._peer_nonce = message[:NONCE_BYTES]
        expected = self._mac(b"listener", *self._both())
        if not hmac.compare_digest(message[NONCE_BYTES:], expected):
            self._peer_nonce = b""
            raise AuthenticationError(_WRONG_SECRET)
        self._expect(None)
        return self._mac(b"dialer", *self._both())

    def _both(self) -> tuple[bytes, bytes, bytes]:
        """Return terms, the dialer's nonce and the listener's."""
        nonces = (self._peer_nonce, self._nonce) if self._find_terms is not None else (self._nonce, self._peer_nonce)
        return self.terms.encode(), *nonces

    def _expect(self, awaited: _Awaited | None) -> None:
        self._awaited = awaited
        self._received = bytearray(0 if awaited is None else awaited.value)
        self._count = 0

    def _mac(self, label: bytes, *parts: bytes) -> bytes:
        """Compute the MAC.  All parts have fixed sizes, so joining them is unambiguous."""
        return hmac.digest(self._secret, b"asyncpar link " + label + b"\0" + b"".join(parts), "sha256")

    def _check(self, shown: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(shown, expected):
            raise AuthenticationError(_WRONG_SECRET)


_WRONG_SECRET = "the peer could not prove that it holds the secret of this job"


def _describe(encoded: bytes) -> str:
    _, _, connection, connections, checks, job, generation, dialer, listener, _ = _TERMS.unpack(encoded)
    return (
        f"job {job.hex()[:8]}, generation {generation}, rank {dialer} dialing rank {listener}, "
        f"connection {connection} of {connections}, {'with' if checks else 'no'} checksums of payloads"
    )
