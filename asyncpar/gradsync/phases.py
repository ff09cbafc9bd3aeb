"""The phases that a bucket goes through, but for the collectives in between: plain functions over its buffers.

pack, encode, (exchange,) sum_owned, (exchange,) decode, unpack.  A summable codec needs pack and unpack only.

A codec whose encoded form cannot be summed is reduced by owners.  Each rank encodes every shard for its owner; the
owner decodes and adds them in float32 in the order of ranks, and encodes the sum; everyone, the owner too, takes the
decoded sum, so all ranks hold the same bits.  What the first encoding loses goes into the residual of the rank that
lost it, and what the second loses into the residual of the owner, who adds it to the same sum in the next step.  So one
residual per parameter and rank is all the state there is, whichever bucket or shard a parameter is in.

A rank that fails still tells the others: it spoils what it has not sent yet, so that nobody takes it for gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import NonFiniteValue, PeerCancelled
from asyncpar.gradsync.buffers import STATUS_BYTES, BucketBuffers

_FINE = 0
_NON_FINITE = 1
_GIVEN_UP = 2


class HasGradient(Protocol):
    """Anything with a name and a gradient array, such as ``nn.Parameter``."""

    @property
    def name(self) -> str: ...

    @property
    def grad(self) -> NDArray[np.floating[Any]]: ...


Parameters = Mapping[str, HasGradient]


def pack(buffers: BucketBuffers, parameters: Parameters) -> None:
    """Copy the gradients into the bucket."""
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, and is found by encode
        for slot in buffers.bucket.slots:
            gradient = parameters[slot.name].grad
            np.copyto(buffers.flat[slot.start : slot.stop].reshape(gradient.shape), gradient, casting="same_kind")


def encode(buffers: BucketBuffers) -> None:
    """Fill the outgoing rows.  Values that are not finite make a row that says so, for every rank alike."""
    try:
        for rank in range(buffers.size):
            _encode_shard(buffers, rank)
    except NonFiniteValue:
        _set_status(buffers.outgoing, _NON_FINITE)
    else:
        _set_status(buffers.outgoing, _FINE)


def pack_and_encode(buffers: BucketBuffers, parameters: Parameters) -> None:
    """Do both, which is all that comes before the first exchange."""
    pack(buffers, parameters)
    encode(buffers)


def _encode_shard(buffers: BucketBuffers, rank: int) -> None:
    residual, lost = buffers.residual, buffers.lost
    buffers.codec.encode(
        buffers.shard(buffers.flat, rank),
        buffers.body(buffers.outgoing[rank]),
        residual=None if residual is None else buffers.shard(residual, rank),
        lost=None if lost is None else buffers.shard(lost, rank),
    )


def sum_owned(buffers: BucketBuffers, rank: int) -> None:
    """Add the incoming rows in the order of ranks and encode the sum.

    Raises ``NonFiniteValue`` that names the ranks whose gradients are not finite.  Every rank raises it, as a rank's
    rows for all owners have the same status.
    """
    _check_status(buffers)
    buffers.codec.decode(buffers.body(buffers.incoming[0]), buffers.total)
    for row in buffers.incoming[1:]:
        buffers.codec.decode(buffers.body(row), buffers.scratch)
        with np.errstate(over="ignore", invalid="ignore"):  # found when the sum is encoded
            buffers.total += buffers.scratch
    lost = None if buffers.lost is None else buffers.scratch
    try:
        buffers.codec.encode(buffers.total, buffers.body(buffers.reduced), lost=lost)
    except NonFiniteValue:  # the sum of finite values overflowed; all ranks learn it from the status
        _set_status(buffers.reduced[np.newaxis], _NON_FINITE)
        return
    _set_status(buffers.reduced[np.newaxis], _FINE)
    if buffers.lost is not None:
        owned = buffers.shard(buffers.lost, rank)
        owned += buffers.scratch


def decode(buffers: BucketBuffers) -> None:
    """Write the sums of all owners, which are in the incoming rows, into the bucket; nothing is lost after that."""
    _check_status(buffers)
    for rank in range(buffers.size):
        buffers.codec.decode(buffers.body(buffers.incoming[rank]), buffers.shard(buffers.flat, rank))
    buffers.measure_lost()


def check_finite(buffers: BucketBuffers) -> None:
    """Raise ``NonFiniteValue`` that names the parameters, if the reduced bucket holds NaN or infinity.

    All ranks hold the same bits, so all raise or none.
    """
    payload = buffers.payload
    if np.isfinite(payload.min()) and np.isfinite(payload.max()):
        return
    names = [slot.name for slot in buffers.bucket.slots if not np.isfinite(payload[slot.start : slot.stop]).all()]
    raise NonFiniteValue(f"gradients: expected finite means over ranks, got NaN or infinity in {', '.join(names)}")


def unpack(buffers: BucketBuffers, parameters: Parameters, *, factor: float) -> None:
    """Write the bucket times ``factor`` back into the gradients."""
    for slot in buffers.bucket.slots:
        gradient = parameters[slot.name].grad
        reduced = buffers.flat[slot.start : slot.stop].reshape(gradient.shape)
        if factor == 1.0:
            np.copyto(gradient, reduced, casting="same_kind")
        else:
            np.multiply(reduced, np.asarray(factor, reduced.dtype), out=gradient, casting="same_kind")


def spoil(buffers: BucketBuffers) -> None:
    """Make sure that what this bucket would send cannot pass for gradients."""
    buffers.payload.fill(np.nan)
    if not buffers.codec.is_summable:
        _set_status(buffers.outgoing, _GIVEN_UP)
        _set_status(buffers.reduced[np.newaxis], _GIVEN_UP)


def _set_status(rows: NDArray[np.uint8], status: int) -> None:
    rows[:, :STATUS_BYTES] = 0
    rows[:, 0] = status


def _check_status(buffers: BucketBuffers) -> None:
    bucket = buffers.bucket
    where = f"bucket {bucket.index} ({bucket.slots[0].name} to {bucket.slots[-1].name})"
    statuses = buffers.incoming[:, 0].tolist()
    if _GIVEN_UP in statuses:
        culprit = statuses.index(_GIVEN_UP)
        raise PeerCancelled(f"rank {culprit} gave up the step before it sent {where}", rank=culprit)
    culprits = [rank for rank, status in enumerate(statuses) if status != _FINE]
    if culprits:
        who = ", ".join(f"rank {rank}" for rank in culprits)
        raise NonFiniteValue(f"gradients: expected finite numbers, got NaN or infinity from {who} in {where}")
