"""The figures of a training run, the limits of a checked run, and plots of loss curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncpar.codecs import CODECS, RoundCodec, parse_codec
from asyncpar.errors import UsageError
from asyncpar.gradsync.config import AUTO
from asyncpar.train.setup import ModeKind, TrainingMode

EXACT_TOLERANCE = 1e-5
"""Largest relative difference of any loss without compression, in float32, when gradients are averaged every step."""

_AUTO_TOLERANCE = 0.02
"""Largest relative difference of a short run's last loss with the codec that is chosen by measurement."""

_UNKNOWN_TOLERANCE = 0.3
"""The same, for a codec that is not registered here."""

_MODE_TOLERANCE = 0.15
"""The same for ranks that exchange parameters only now and then, for which a few dozen rounds cannot compensate."""

_OVERHEAD = 1 / 0.954
"""Frame headers and agreements besides encoded values; with int8 3.8 of 3.98 times remain."""

_SPARSE_OVERHEAD = 1.5
"""The same for codecs that send so little that headers weigh more."""

_SPARSE = 8.0
"""The ratio from which a codec counts as one of these."""


_NUMBERS = dict(enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight"], 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Largest relative difference of losses, of all or only of the last, and the required reduction of traffic."""

    every_loss: float | None = None
    last_loss: float | None = None
    least_ratio: float | None = None


def expect(codec: str, mode: TrainingMode, *, shapes: Sequence[tuple[int, ...]], steps: int) -> Expectation:
    """Return how far a run with these settings may differ from one process; ``shapes`` are those of the parameters."""
    if codec == "none" and mode.kind is ModeKind.SYNC:
        return Expectation(every_loss=EXACT_TOLERANCE)
    name = codec.split(":")[0].split("+")[0]
    tolerance = _tolerance(name) + (0.0 if mode.has_replicas else _MODE_TOLERANCE)
    return Expectation(last_loss=tolerance, least_ratio=_least_ratio(codec, mode, shapes, steps))


def _tolerance(name: str) -> float:
    """Return the tolerance of a codec.

    Error feedback sends what sparse codecs left out, but late: these register a large tolerance.
    """
    if name == AUTO:
        return _AUTO_TOLERANCE
    kind = CODECS.get(name)
    return _UNKNOWN_TOLERANCE if kind is None else kind.tolerance


def _least_ratio(codec: str, mode: TrainingMode, shapes: Sequence[tuple[int, ...]], steps: int) -> float | None:
    """Return the required ratio; None if traffic is not that of an all-reduce at all, or the codec is not known."""
    if codec == AUTO or mode.kind not in (ModeKind.SYNC, ModeKind.LOCAL, ModeKind.DILOCO):
        return None
    ratio = encoded_ratio(codec, shapes) * steps / mode.rounds(steps)
    return ratio / (_OVERHEAD if ratio < _SPARSE else _SPARSE_OVERHEAD)


def encoded_ratio(codec: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Return how many times fewer bytes than float32 the encoded gradients have, without any header."""
    made, count = parse_codec(codec), sum(math.prod(shape) for shape in shapes)
    if isinstance(made, RoundCodec):
        return 4 * count / sum(message.nbytes for message in made.encoder(shapes).messages)
    return 4 * count / made.encoded_bytes(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run; None for those that do not apply.

    Losses are means over the whole batch; ``held_out_loss`` is the final loss on text that was not trained on.
    ``bytes_sent_per_rank`` is the mean over ranks of all bytes, including headers, that a rank sent during training;
    ``compression_ratio`` compares it with uncompressed gradients alone in every step.  ``layout`` describes the layout
    over ranks, if that was not data parallelism alone.  ``residual_norm`` is the norm of what error feedback has not
    sent yet.  ``seconds`` is the time of the distributed part without start-up.
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

    def describe(self) -> str:
        """Return one sentence for people: how the losses compare with one process, or how far the loss has fallen."""
        who = f"{_NUMBERS.get(self.ranks, str(self.ranks))} rank{'s' if self.ranks > 1 else ''}"
        alone, difference = self.single_process_last_loss, self.max_relative_loss_difference
        if alone is None or difference is None:
            steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
            return f"{who}: the loss went from {self.first_loss:.2f} to {self.last_loss:.2f} in {steps}"
        if difference <= EXACT_TOLERANCE:
            return f"{who} and one process agree: losses differ by at most {difference:.1e}"
        return (
            f"{who} and one process: losses differ by at most {difference:.1%}; "
            f"the last ones are {self.last_loss:.4f} and {alone:.4f}"
        )


def compare(summary: Summary, losses: Sequence[float], alone: Sequence[float]) -> Summary:
    """Return ``summary`` with the comparison of ``losses`` with those of one process filled in."""
    differences = [abs(loss - expected) / abs(expected) for loss, expected in zip(losses, alone, strict=True)]
    return replace(summary, single_process_last_loss=alone[-1], max_relative_loss_difference=max(differences))


def find_fault(summary: Summary, expectation: Expectation) -> str | None:
    """Describe the fault in the numbers of a compared run; None if there is none."""
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

    Uncompressed, an all-reduce of least traffic sends ``least_bytes`` in each step; 1 if the run did just that
    (``is_exact``), None for a single rank.
    """
    if ranks == 1:
        return None
    if is_exact:
        return 1.0
    return least_bytes * steps / sent


def plot_losses(
    curves: Mapping[str, Sequence[float]], path: Path, *, title: str, events: Mapping[int, str] | None = None
) -> None:
    """Plot each curve over its steps into the PNG file ``path``; ``events`` are marked at their steps, from 0 on.

    Needs matplotlib; otherwise raises ``UsageError`` with the way to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "asyncpar[plot]"') from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (label, losses) in enumerate(curves.items()):
        axes.plot(range(1, len(losses) + 1), losses, label=label, linestyle="--" if index else "-")
    for number, (step, text) in enumerate((events or {}).items()):
        axes.axvline(step + 1, color=f"C{number + 2}", linestyle=":", label=text)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=90)
