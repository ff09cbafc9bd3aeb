"""The model that ``parallel.py`` trains, its batches, and how its steps are timed: the same for us and for torch.

Also runs in the peers' environments, where asyncpar is not installed: numpy and the standard library only.  The model
is the byte-level transformer of ``scripts/examples/train_lm.py``; its first values come from a file, so that all sides
start with the same and, trained on the same batches, come to the same losses.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

VOCABULARY = 256
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.99)
EPSILON = 1e-5
WARM_UP = 2
"""Steps before those that count."""

_SEED = 20_261_121

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Sizes of the model and of its batches: ``rows`` windows per step over all replicas, each ``length`` tokens."""

    layers: int = 4
    features: int = 128
    heads: int = 4
    length: int = 64
    rows: int = 64
    steps: int = 6

    @property
    def tokens(self) -> int:
        """Number of predictions in one step."""
        return self.rows * self.length

    @property
    def total_steps(self) -> int:
        """Those that warm up included."""
        return WARM_UP + self.steps

    def as_arguments(self) -> list[str]:
        """Return the command-line options that ``from_arguments`` reads."""
        return [f"--{field.name}={getattr(self, field.name)}" for field in fields(self)]

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> tuple[Tokens, Tokens]:
        """Return the tokens and targets of one replica in one step: a walk in which each byte depends on the last."""
        rng = np.random.default_rng((_SEED, step))
        moves = rng.integers(1, 5, (self.rows, self.length + 1))
        windows = (rng.integers(0, VOCABULARY, (self.rows, 1)) + np.cumsum(moves, axis=1)) % VOCABULARY
        own = slice(replica * self.rows // replicas, (replica + 1) * self.rows // replicas)
        return windows[own, :-1], windows[own, 1:]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each size."""
    for field in fields(Rules):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)


def from_arguments(arguments: argparse.Namespace) -> Rules:
    """Return the sizes that the options give."""
    return Rules(**{field.name: getattr(arguments, field.name) for field in fields(Rules)})
