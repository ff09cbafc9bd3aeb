"""Random numbers that depend on the step, and not on what was drawn before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.nn.stage import Stage

_DRAWS_PER_STEP = 1 << 64


class StepRandomness:
    """Sets the generators of ``stages`` to a place of their own at the beginning of each step.

    So a run that goes on from a checkpoint draws what it would have drawn, without any state in it.
    """

    def __init__(self, stages: Sequence[Stage[Any]]) -> None:
        self._generators = [generator for stage in stages for generator in stage.generators()]
        for generator in self._generators:
            if not isinstance(generator.bit_generator, np.random.PCG64):
                raise UsageError(
                    f"generators: expected PCG64, as of numpy.random.default_rng, got {generator.bit_generator}"
                )
        self._initial: list[Any] = [generator.bit_generator.state for generator in self._generators]

    def begin(self, step: int) -> None:
        """Begin ``step``, counted from 0."""
        for generator, initial in zip(self._generators, self._initial, strict=True):
            source = generator.bit_generator
            assert isinstance(source, np.random.PCG64), "looked at in the beginning"
            source.state = initial
            source.advance(step * _DRAWS_PER_STEP)
