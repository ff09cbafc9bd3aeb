"""The figures of a training run, and whether they are what one process gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

EXACT_TOLERANCE = 1e-5
"""Largest relative difference of any loss without compression, in float32."""

LOSSY_TOLERANCE = 0.02
"""Largest relative difference of the last loss with lossy compression."""

LEAST_COMPRESSION = 3.8
"""How many times int8 must shrink what leaves a rank, frame headers and everything else included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run; None where one does not apply.

    Losses are means over the whole batch.  ``bytes_sent_per_rank`` is the mean over ranks of all bytes, headers too,
    that left a rank while training; ``compression_ratio`` compares it with uncompressed gradients alone.  ``seconds``
    is the time of the distributed part without start-up.
    """

    ranks: int
    steps: int
    first_loss: float
    last_loss: float
    single_process_last_loss: float | None = None
    max_relative_loss_difference: float | None = None
    bytes_sent_per_rank: int
    compression_ratio: float | None
    seconds: float
    tokens_per_second: float


def compare(summary: Summary, losses: Sequence[float], alone: Sequence[float]) -> Summary:
    """Return ``summary`` with the comparison of ``losses`` and those of one process filled in."""
    differences = [abs(loss - expected) / abs(expected) for loss, expected in zip(losses, alone, strict=True)]
    return replace(summary, single_process_last_loss=alone[-1], max_relative_loss_difference=max(differences))


def find_fault(summary: Summary, *, is_lossy: bool) -> str | None:
    """Return what is wrong with the numbers of a run that was compared; None if nothing is."""
    alone, difference = summary.single_process_last_loss, summary.max_relative_loss_difference
    assert alone is not None, "the run was compared"
    assert difference is not None, "the run was compared"
    if not is_lossy:
        if difference <= EXACT_TOLERANCE:
            return None
        return f"losses differ from those of one process by {difference:.2e}, more than {EXACT_TOLERANCE:.0e}"
    final = abs(summary.last_loss - alone) / alone
    if not final <= LOSSY_TOLERANCE:
        return f"the last loss differs from that of one process by {final:.1%}, more than {LOSSY_TOLERANCE:.0%}"
    ratio = summary.compression_ratio
    if ratio is not None and ratio < LEAST_COMPRESSION:
        return f"the bytes on the wire shrank {ratio:.2f} times, less than {LEAST_COMPRESSION}"
    return None


def compression_ratio(*, ranks: int, gradient_bytes: int, steps: int, sent: int, is_lossy: bool) -> float | None:
    """Return how many times less than uncompressed gradients a rank has sent; 1 without a codec, None when alone.

    Uncompressed, an all-reduce of least traffic sends 2 (ranks - 1) / ranks of the gradients in each step.
    """
    if ranks == 1:
        return None
    if not is_lossy:
        return 1.0
    return 2 * (ranks - 1) / ranks * gradient_bytes * steps / sent
