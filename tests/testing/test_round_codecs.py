"""The conformance suite of codecs in rounds catches those that break their promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from asyncpar.codecs import RoundCodec, RoundEncoder, Values
from asyncpar.codecs.powersgd import PowerSgdEncoder
from asyncpar.errors import NonFiniteValue
from asyncpar.testing.round_codecs import RoundCodecConformance


class Codec(RoundCodec):
    """Makes the encoders that it is given."""

    name = "broken"

    def __init__(self, make: Callable[..., RoundEncoder]) -> None:
        self._make = make

    def encoder(self, shapes: Sequence[tuple[int, ...]]) -> RoundEncoder:
        return self._make(shapes, rank=2, seed=0)


class Forgetful(PowerSgdEncoder):
    """Never sends what it owed."""

    def start(self, values: Values, *, residual: Values | None = None) -> None:
        super().start(values)


class Hasty(PowerSgdEncoder):
    """Keeps its state before it is ordered to."""

    def finish(self, out: Values, *, lost: Values | None = None) -> None:
        super().finish(out, lost=lost)
        self.commit()


class Cold(PowerSgdEncoder):
    """Restores nothing."""

    def restore(self, state: Sequence[Values | None]) -> None:
        """Take no notice."""


class Selfish(PowerSgdEncoder):
    """Comes to what its own values are instead of the mean."""

    def finish(self, out: Values, *, lost: Values | None = None) -> None:
        own = None if self._values is None else self._values.copy()
        super().finish(out, lost=lost)
        if own is not None:
            out[:] = own


class Greedy(PowerSgdEncoder):
    """Loses more than it has."""

    def finish(self, out: Values, *, lost: Values | None = None) -> None:
        super().finish(out, lost=lost)
        if lost is not None:
            lost += np.float32(1.0)


class Blind(PowerSgdEncoder):
    """Sends what is not finite."""

    def start(self, values: Values, *, residual: Values | None = None) -> None:
        try:
            super().start(values, residual=residual)
        except NonFiniteValue:
            super().start(np.zeros_like(values))


@pytest.mark.parametrize(
    ("make", "test"),
    [
        (Forgetful, "test_error_feedback_makes_sums_over_time_right"),
        (Hasty, "test_what_is_not_committed_is_not_kept"),
        (Cold, "test_it_goes_on_from_a_saved_state_bit_by_bit"),
        (Selfish, "test_all_ranks_come_to_the_same_bits"),
        (Greedy, "test_what_is_lost_and_what_came_out_are_together_what_went_in"),
        (Blind, "test_values_that_are_not_finite_are_refused_and_the_next_step_is_well"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_promise_is_found(make: Callable[..., RoundEncoder], test: str) -> None:
    class Suite(RoundCodecConformance):
        def make(self) -> RoundCodec:
            return Codec(make)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()
