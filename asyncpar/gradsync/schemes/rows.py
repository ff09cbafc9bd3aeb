"""Encoded vectors on their way, each behind a status word, so that a rank that cannot encode tells the others so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncpar.codecs import Bytes, Codec
from asyncpar.errors import PeerCancelled, ProtocolError
from asyncpar.gradsync.plan import Bucket

STATUS_BYTES = 4
FINE = 0
NON_FINITE = 1
GIVEN_UP = 2


def body_of(codec: Codec, count: int) -> slice:
    """Return where in a row ``count`` encoded values lie."""
    return slice(STATUS_BYTES, STATUS_BYTES + codec.encoded_bytes(count))


def row_bytes(body: slice) -> int:
    """Return the length of a row, a multiple of four."""
    return -(-int(body.stop) // 4) * 4


def set_status(rows: Bytes, status: int) -> None:
    """Write the status of one row or of several."""
    rows[..., :STATUS_BYTES] = 0
    rows[..., 0] = status


def are_fine(rows: Bytes, bucket: Bucket) -> bool:
    """Are the rows of all ranks fine?  Raises ``PeerCancelled`` when a rank gave up."""
    statuses = rows[:, 0].tolist()
    if GIVEN_UP in statuses:
        culprit = statuses.index(GIVEN_UP)
        raise PeerCancelled(f"rank {culprit} gave up the step before it sent {bucket}", rank=culprit)
    return not any(statuses)


@contextmanager
def decoding(rank: int, bucket: Bucket) -> Iterator[None]:
    """Say whose row it is that cannot be decoded."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{bucket}: what rank {rank} sent cannot be decoded: {error}") from error
