"""Text to train on, and text to judge by that the model has never seen."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.errors import UsageError
from asyncpar.train.batches import Batches
from asyncpar.train.corpus import Corpus
from asyncpar.train.language_model import LanguageModel

EVALUATION_BATCHES = 32
EVALUATION_ROWS = 64
"""Enough that two models which differ by 0.1 % are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What is trained on, and, where text is held out, what the model is evaluated on afterwards."""

    training: Batches
    held_out: Batches | None


def make_texts(corpus: Corpus, *, rows: int, length: int, seed: int, held_out: float) -> Texts:
    """Keep the last part ``held_out`` (0..0.5) of the bytes for evaluation, on windows that depend on ``seed`` alone.

    Raises ``UsageError`` when a part is shorter than a window.
    """
    if not 0.0 <= held_out <= 0.5:
        raise UsageError(f"held-out: expected a part in 0..0.5, got {held_out}")
    start = corpus.size - int(corpus.size * held_out)
    training = Batches(corpus[:start], rows=rows, length=length, seed=seed)
    if not held_out:
        return Texts(training=training, held_out=None)
    return Texts(
        training=training,
        held_out=Batches(corpus[start:], rows=EVALUATION_ROWS, length=length, seed=seed + 1),
    )


def evaluate(model: LanguageModel, batches: Batches, *, count: int = EVALUATION_BATCHES) -> float:
    """Return the mean loss over the first ``count`` batches."""
    losses = [model.evaluate(batches.windows(index)) for index in range(count)]
    return sum(losses) / len(losses)
