"""Batches of text, and a language model with its optimizer: the computation of one process in one step."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError
from asyncpar.gradsync import TuningConfig
from asyncpar.nn import OnGradient, Transformer, TransformerConfig, WarmupCosine, softmax_cross_entropy
from asyncpar.nn.optimizers import AdamW, EarlyStep, Optimizer

Corpus = NDArray[np.uint8]
"""A text, as bytes."""

Windows = NDArray[np.int64]


class Batches:
    """Random windows of ``length + 1`` bytes, ``rows`` per step.

    Inputs are all bytes of a window but the last, targets all but the first.  The batch of a step depends only on
    ``seed`` and the step's number.
    """

    def __init__(self, corpus: Corpus, *, rows: int, length: int, seed: int) -> None:
        if rows < 1 or length < 1:
            raise UsageError(f"batch, seq: expected 1 or more, got {rows}, {length}")
        if corpus.size < length + 1:
            raise UsageError(f"text: expected at least {length + 1} bytes for windows of {length}, got {corpus.size}")
        self.rows = rows
        self.length = length
        self.corpus = corpus
        self._seed = seed

    @property
    def tokens(self) -> int:
        """Number of predictions in one whole batch."""
        return self.rows * self.length

    def windows(self, step: int, rows: slice | None = None) -> Windows:
        """Return the windows of ``step`` (or of some ``rows`` of it), shape (rows, length + 1)."""
        rng = np.random.default_rng((self._seed, step))
        starts = rng.integers(0, self.corpus.size - self.length, self.rows)
        chosen = starts if rows is None else starts[rows]
        windows: Windows = self.corpus[chosen[:, np.newaxis] + np.arange(self.length + 1)].astype(np.int64)
        return windows


def split_rows(rows: int, *, rank: int, size: int) -> slice:
    """Return the rows of ``rank``: contiguous, in the order of ranks, sizes differing by at most one.

    Raises ``UsageError`` if there are not enough rows for every rank.
    """
    if rows < size:
        raise UsageError(f"batch: expected at least one row for each of {size} ranks, got {rows}")
    return slice(rank * rows // size, (rank + 1) * rows // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """All settings that determine the numbers of a run, except the text.

    Gradients are clipped to the global norm ``clip_norm``; None does not clip.  With ``tuning`` ranks search for the
    fastest bucket size, all-reduce and message size during training, in data parallelism alone, which may change the
    last bits of sums.
    """

    model: TransformerConfig
    rule: AdamW
    schedule: WarmupCosine
    steps: int
    rows: int
    clip_norm: float | None = 1.0
    tuning: TuningConfig | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise UsageError(f"clip_norm: expected a positive number or None, got {self.clip_norm}")
        if self.steps < 1 or self.rows < 1:
            raise UsageError(f"steps, batch: expected 1 or more, got {self.steps}, {self.rows}")

    def lasting(self) -> dict[str, Any]:
        """Return the settings common to all runs of one model: all but the length of a run and of its schedule."""
        rule, schedule = asdict(self.rule), asdict(self.schedule)
        return {
            "model": asdict(self.model),
            "rule": {"name": type(self.rule).__name__, **rule},
            "schedule": {name: value for name, value in schedule.items() if name not in ("steps", "warmup")},
            "rows": self.rows,
            "clip_norm": self.clip_norm,
            "tuning": None if self.tuning is None else str(self.tuning),
        }

    @property
    def tokens(self) -> int:
        """Number of predictions in one whole batch."""
        return self.rows * self.model.length


class LanguageModel:
    """A transformer and its AdamW, both according to the configuration.  All methods compute; none waits."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.model = Transformer(config.model)
        self._optimizer = Optimizer(self.model.parameters(), config.rule)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the parameters."""
        return self._optimizer

    def accumulate(self, windows: Windows, *, scale: float, on_gradient: OnGradient | None = None) -> float:
        """Set gradients to ``scale`` times those of the summed loss over ``windows``, and return that sum.

        ``on_gradient`` is called with the name of each parameter whose gradient is final.
        """
        self.model.zero_grad()
        logits, saved = self.model.forward(windows[:, :-1])
        loss, gradient = softmax_cross_entropy(logits, windows[:, 1:], scale=scale)
        self.model.backward(saved, gradient, on_gradient)
        return loss

    def update(self, step: int) -> float:
        """Update the parameters with their gradients; return the norm of the gradients."""
        norm = self._optimizer.clip(self.config.clip_norm)
        self._optimizer.step(self.config.schedule(step))
        return norm

    def begin_update(self, step: int) -> EarlyStep | None:
        """Return the step that updates parameters as gradients become known; None if their norm must be known first."""
        if self.config.clip_norm is not None:
            return None
        return EarlyStep(self._optimizer, self.config.schedule(step))

    def evaluate(self, windows: Windows) -> float:
        """Return the mean loss over ``windows``; gradients are unchanged."""
        logits, _ = self.model.forward(windows[:, :-1])
        total, _ = softmax_cross_entropy(logits, windows[:, 1:], scale=1.0)
        return total / windows[:, 1:].size

    def digest(self) -> str:
        """Return a hash over all bits of all parameters."""
        hasher = hashlib.sha256()
        for parameter in self.model.parameters():
            hasher.update(parameter.value.tobytes())
        return hasher.hexdigest()
