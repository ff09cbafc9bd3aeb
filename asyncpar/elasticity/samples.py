"""The samples and random streams of a portion: functions of (seed, step, portion), never of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.checks import check_count
from asyncpar.errors import UsageError

_EPOCH_STREAM = 0xE9
_PORTION_STREAM = 0x90
_STAGE_STREAM = 0x57


def portion_rng(seed: int, step: int, portion: int) -> np.random.Generator:
    """Return the random stream of one portion in one step: the same bits on every rank and in every repetition."""
    sequence = np.random.SeedSequence([_PORTION_STREAM, *(_word(*pair) for pair in _named(seed, step, portion))])
    return np.random.Generator(np.random.PCG64(sequence))


def stage_rng_state(seed: int, step: int, portion: int, stage: int, place: int) -> Mapping[str, Any]:
    """Return the state of generator ``place`` of a pipeline stage in one portion: the same on every rank."""
    sequence = np.random.SeedSequence([_STAGE_STREAM, seed, step, portion, stage, place])
    return np.random.PCG64(sequence).state


def _named(seed: int, step: int, portion: int) -> tuple[tuple[str, int], ...]:
    return ("seed", seed), ("step", step), ("portion", portion)


def _word(name: str, value: int) -> int:
    return check_count(name, value, least=0)


class PortionSampler:
    """The order of ``samples`` samples in steps of ``batch``, each cut into ``portions`` portions.

    Each epoch is a permutation of its own, which depends on ``seed`` and the epoch; a batch may begin in one epoch and
    end in the next, so every sample occurs once in each.  Portions of a step differ in length by at most one.
    """

    def __init__(self, *, samples: int, batch: int, portions: int, seed: int) -> None:
        self.samples = check_count("samples", samples, least=1)
        self.batch = check_count("batch", batch, least=1)
        self.portions = check_count("portions", portions, least=1)
        self.seed = check_count("seed", seed, least=0)
        if batch < portions:
            raise UsageError(f"batch: expected at least one sample for each of {portions} portions, got {batch}")
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def indices(self, step: int, portion: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of ``portion`` in ``step``."""
        if not 0 <= portion < self.portions:
            raise UsageError(f"portion: expected 0..{self.portions - 1}, got {portion}")
        start = check_count("step", step, least=0) * self.batch
        first = start + portion * self.batch // self.portions
        last = start + (portion + 1) * self.batch // self.portions
        return np.concatenate(list(self._pieces(first, last)))

    def _pieces(self, first: int, last: int) -> Iterator[NDArray[np.int64]]:
        while first < last:
            epoch, place = divmod(first, self.samples)
            count = min(last - first, self.samples - place)
            yield self._permutation(epoch)[place : place + count]
            first += count

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_EPOCH_STREAM, self.seed, epoch])))
            self._order, self._epoch = rng.permutation(self.samples), epoch
        return self._order


class SampleLog:
    """Checks that every portion of every step is consumed once, in the order of the steps."""

    def __init__(self, portions: int) -> None:
        self._portions = portions
        self._steps: dict[int, list[int]] = {}

    def note(self, step: int, portions: range) -> None:
        """Record the portions that a rank consumed in a committed step."""
        self._steps.setdefault(step, []).extend(portions)

    def faults(self, until: int) -> list[str]:
        """Return the missing and repeated portions in the steps below ``until``, empty if there are none."""
        wanted, found = list(range(self._portions)), []
        for step in range(until):
            got = sorted(self._steps.get(step, []))
            if got != wanted:
                missing = sorted(set(wanted) - set(got))
                twice = sorted({portion for portion in got if got.count(portion) > 1})
                found.append(f"step {step}: missing {missing}, more than once {twice}")
        return found
