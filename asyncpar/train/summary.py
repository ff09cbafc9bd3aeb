"""The figures of a training run, and whether they are what one process gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncpar.train.expectation import Expectation


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run; None where one does not apply.

    Losses are means over the whole batch; ``held_out_loss`` is that of text which was not trained on, at the end.
    ``bytes_sent_per_rank`` is the mean over ranks of all bytes, headers too, that left a rank while training;
    ``layout`` says how the run was spread over ranks, where that was not data parallelism alone.
    ``compression_ratio`` compares it with uncompressed gradients alone in every step.  ``residual_norm`` is what error
    feedback has not sent yet.  ``seconds`` is the time of the distributed part without start-up.
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
    codec: str = "none"
    sync: str = "sync"
    layout: str = ""
    held_out_loss: float | None = None
    residual_norm: float | None = None


def compare(summary: Summary, losses: Sequence[float], alone: Sequence[float]) -> Summary:
    """Return ``summary`` with the comparison of ``losses`` and those of one process filled in."""
    differences = [abs(loss - expected) / abs(expected) for loss, expected in zip(losses, alone, strict=True)]
    return replace(summary, single_process_last_loss=alone[-1], max_relative_loss_difference=max(differences))


def find_fault(summary: Summary, expectation: Expectation) -> str | None:
    """Return what is wrong with the numbers of a run that was compared; None if nothing is."""
    alone, difference = summary.single_process_last_loss, summary.max_relative_loss_difference
    assert alone is not None, "the run was compared"
    assert difference is not None, "the run was compared"
    every, last, least = expectation.every_loss, expectation.last_loss, expectation.least_ratio
    if every is not None and not difference <= every:
        return f"losses differ from those of one process by {difference:.2e}, more than {every:.0e}"
    final = abs(summary.last_loss - alone) / alone
    if last is not None and not final <= last:
        return f"the last loss differs from that of one process by {final:.1%}, more than {last:.0%}"
    ratio = summary.compression_ratio
    if least is not None and ratio is not None and ratio < least:
        return f"the bytes on the wire shrank {ratio:.2f} times, less than {least:.3g}"
    return None


def compression_ratio(*, ranks: int, least_bytes: int, steps: int, sent: int, is_exact: bool) -> float | None:
    """Return how many times less than uncompressed gradients in every step a rank has sent.

    Uncompressed, an all-reduce of least traffic sends ``least_bytes`` in each step; 1 where that is what the run did
    (``is_exact``), None when alone.
    """
    if ranks == 1:
        return None
    if is_exact:
        return 1.0
    return least_bytes * steps / sent
