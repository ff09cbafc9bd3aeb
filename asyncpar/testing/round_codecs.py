"""The conformance suite of codecs in rounds.  Subclass it in a test module and name the codec to test::

class TestMyRoundCodec(RoundCodecConformance):
    def make(self) -> RoundCodec:
        return MyRoundCodec()

Ranks are simulated in one process, and means are exact but for one rounding.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import numpy as np

from asyncpar.codecs import RoundCodec, RoundEncoder, Values
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.testing.codec_samples import expect, norm

SHAPES: tuple[tuple[int, ...], ...] = ((40, 30), (7,), (), (0, 5), (33, 2, 9), (3, 3), (1, 100), (50, 1), (4, 0), (0,))
"""Matrices and special shapes: of one row, of one column, empty ones."""

_SIZE = sum(map(prod, SHAPES))
_RANKS = 3
_STEPS = 100


class Ranks:
    """Ranks that take their steps together."""

    def __init__(self, codec: RoundCodec, shapes: Sequence[tuple[int, ...]] = SHAPES, count: int = _RANKS) -> None:
        self.encoders: list[RoundEncoder] = [codec.encoder(shapes) for _ in range(count)]

    def step(self, values: Sequence[Values], residuals: Sequence[Values] | None = None) -> list[Values]:
        """Take a step up to its commit and return the result of each rank; ``residuals`` receive the losses."""
        self.begin(values, residuals)
        for index in range(len(self.encoders[0].messages)):
            self.advance(index)
        outs = [np.full_like(mine, np.nan) for mine in values]
        for rank, encoder in enumerate(self.encoders):
            encoder.finish(outs[rank], lost=None if residuals is None else residuals[rank])
            encoder.commit()
        return outs

    def begin(self, values: Sequence[Values], residuals: Sequence[Values] | None = None) -> None:
        for rank, encoder in enumerate(self.encoders):
            encoder.start(values[rank], residual=None if residuals is None else residuals[rank])

    def advance(self, index: int) -> None:
        messages = [encoder.messages[index] for encoder in self.encoders]
        mean = np.mean(messages, axis=0, dtype=np.float64).astype(np.float32)
        for encoder, message in zip(self.encoders, messages, strict=True):
            message[:] = mean
            encoder.advance(index)


class RoundCodecConformance(ABC):
    """The promises of every codec in rounds.  All values are drawn from fixed seeds."""

    @abstractmethod
    def make(self) -> RoundCodec:
        """Return the codec under test."""

    def test_it_has_a_name_that_can_be_written_in_an_option(self) -> None:
        assert re.fullmatch(r"[a-z0-9_]+(:[0-9.e-]+)*", self.make().name)

    def test_messages_are_fixed_equally_long_on_all_ranks_and_together_no_longer_than_the_values(self) -> None:
        one, other = Ranks(self.make(), count=2).encoders
        kept = one.messages
        assert [message.size for message in one.messages] == [message.size for message in other.messages]
        assert all(message.dtype == np.float32 and message.ndim == 1 for message in one.messages)
        assert sum(message.size for message in one.messages) <= _SIZE
        one.start(_draw(0))
        assert all(message is before for message, before in zip(one.messages, kept, strict=True))

    def test_all_ranks_come_to_the_same_bits(self) -> None:
        ranks = Ranks(self.make())
        residuals = _zeros()
        for step in range(4):
            outs = ranks.step(_gradients(step), residuals)
            assert len({out.tobytes() for out in outs}) == 1
            assert np.isfinite(outs[0]).all()
            states = [encoder.state() for encoder in ranks.encoders]
            assert all(_same(states[0], state) for state in states[1:])

    def test_a_rank_of_its_own_has_means_too(self) -> None:
        values = _draw(0)
        (out,) = Ranks(self.make(), count=1).step([values])
        assert norm(out - values) < norm(values)

    def test_what_is_lost_and_what_came_out_are_together_what_went_in(self) -> None:
        ranks = Ranks(self.make())
        values, residuals = _gradients(1), _gradients(2)
        went_in = np.mean(np.add(values, residuals), axis=0, dtype=np.float64)
        outs = ranks.step(values, residuals)
        np.testing.assert_allclose(np.mean(residuals, axis=0) + outs[0], went_in, rtol=1e-5, atol=1e-5)

    def test_no_rank_lost_more_than_it_had(self) -> None:
        ranks, residuals = Ranks(self.make()), _zeros()
        ranks.step(_gradients(1), residuals)
        assert all(norm(lost) <= norm(mine) * (1.0 + 1e-5) for lost, mine in zip(residuals, _gradients(1), strict=True))

    def test_values_and_residuals_stay_alone_if_lost_goes_elsewhere(self) -> None:
        encoder = self.make().encoder(SHAPES)
        values, residual, lost, out = _draw(1), _draw(2), _draw(3), _draw(4)
        encoder.start(values, residual=residual)
        for index in range(len(encoder.messages)):
            encoder.advance(index)
        encoder.finish(out, lost=lost)
        np.testing.assert_array_equal(values, _draw(1))
        np.testing.assert_array_equal(residual, _draw(2))
        np.testing.assert_allclose(lost + out, values + residual, rtol=1e-5, atol=1e-5)

    def test_the_result_may_replace_the_values(self) -> None:
        for residual in (None, _draw(2)):
            one, other = self.make().encoder(SHAPES), self.make().encoder(SHAPES)
            values, expected, (lost, lost_apart) = _draw(1), _draw(5), np.zeros((2, _SIZE), np.float32)
            for encoder in (one, other):
                encoder.start(values, residual=residual)
                for index in range(len(encoder.messages)):
                    encoder.advance(index)
            other.finish(expected, lost=lost_apart)
            one.finish(values, lost=lost)
            np.testing.assert_array_equal(values, expected)
            np.testing.assert_array_equal(lost, lost_apart)

    def test_error_feedback_makes_sums_over_time_right(self) -> None:
        ranks, residuals = Ranks(self.make()), _zeros()
        values = _gradients(1)
        mean = np.mean(values, axis=0, dtype=np.float64)
        sent, behind = np.zeros(_SIZE), []
        for step in range(1, 2 * _STEPS + 1):
            sent += ranks.step(values, residuals)[0]
            missing = step * mean - sent
            owed = np.mean(residuals, axis=0, dtype=np.float64)
            np.testing.assert_allclose(owed, missing, rtol=1e-3, atol=1e-3)
            behind.append(norm(missing))
        assert max(behind[_STEPS:]) <= 1.05 * max(behind[:_STEPS]) + 1e-3, "what is not sent yet grows without end"

    def test_it_goes_on_from_a_saved_state_bit_by_bit(self) -> None:
        ranks = Ranks(self.make())
        for step in range(3):
            ranks.step(_gradients(step))
        saved = ranks.encoders[0].state()
        kept = [None if array is None else array.copy() for array in saved]
        expected = [ranks.step(_gradients(step)) for step in (3, 4)]
        assert _same(saved, kept), "state() is no copy"
        resumed = Ranks(self.make())
        for encoder in resumed.encoders:
            encoder.restore(saved)
        for step, outs in zip((3, 4), expected, strict=True):
            np.testing.assert_array_equal(resumed.step(_gradients(step)), outs)

    def test_a_state_that_does_not_fit_is_a_fresh_start(self) -> None:
        fresh = Ranks(self.make()).step(_gradients(9))
        for state in ([None] * len(SHAPES), [np.ones(1, np.float32)] * len(SHAPES)):
            ranks = Ranks(self.make())
            ranks.step(_gradients(1))
            for encoder in ranks.encoders:
                encoder.restore(state)
            np.testing.assert_array_equal(ranks.step(_gradients(9)), fresh)

    def test_a_state_of_other_arrays_or_with_nan_is_refused_and_changes_nothing(self) -> None:
        encoder = self.make().encoder(SHAPES)
        before = encoder.state()
        wrong = [None if array is None else np.full_like(array, np.nan) for array in before]
        expect(UsageError, lambda: encoder.restore(before[1:]))
        if any(array is not None for array in before):
            expect(UsageError, lambda: encoder.restore(wrong))
        assert _same(before, encoder.state())

    def test_a_step_that_is_given_up_leaves_no_trace(self) -> None:
        rounds = len(self.make().encoder(SHAPES).messages)
        for given_up_after in range(rounds + 1):
            calm, troubled = Ranks(self.make()), Ranks(self.make())
            for ranks in (calm, troubled):
                ranks.step(_gradients(1))
            residuals = _gradients(7)
            troubled.begin(_gradients(8), residuals)
            for index in range(given_up_after):
                troubled.advance(index)
            for encoder in troubled.encoders:
                encoder.commit()  # there is nothing to keep
            np.testing.assert_array_equal(residuals, _gradients(7))
            np.testing.assert_array_equal(calm.step(_gradients(2)), troubled.step(_gradients(2)))

    def test_what_is_not_committed_is_not_kept(self) -> None:
        encoder = self.make().encoder(SHAPES)
        before = encoder.state()
        encoder.start(_draw(1))
        for index in range(len(encoder.messages)):
            encoder.advance(index)
        encoder.finish(_draw(2))
        assert _same(before, encoder.state())

    def test_values_that_are_not_finite_are_refused_and_the_next_step_is_well(self) -> None:
        encoder = self.make().encoder(SHAPES)
        for bad in (np.nan, np.inf, -np.inf):
            for place in (0, 1234, _SIZE - 1):
                values = _draw(1)
                values[place] = bad
                expect(NonFiniteValue, lambda values=values: encoder.start(values))  # type: ignore[misc]
                expect(NonFiniteValue, lambda values=values: encoder.start(_draw(1), residual=values))  # type: ignore[misc]
        largest = np.full(_SIZE, np.finfo(np.float32).max)
        expect(NonFiniteValue, lambda: encoder.start(largest, residual=largest))
        encoder.start(_draw(1))
        assert all(np.isfinite(message).all() for message in encoder.messages)

    def test_zeros_stay_zeros_and_cost_later_steps_nothing(self) -> None:
        ranks = Ranks(self.make())
        for _ in range(2):
            for out in ranks.step(_zeros()):
                np.testing.assert_array_equal(out, 0.0)
        values = _gradients(1)
        mean = np.mean(values, axis=0, dtype=np.float64)
        fresh = norm(mean - Ranks(self.make()).step(values)[0])
        assert norm(mean - ranks.step(values)[0]) <= 1.5 * fresh + 1e-3

    def test_there_may_be_no_arrays_or_none_with_values(self) -> None:
        for shapes in ((), ((0,),), ((0, 3), (3, 0))):
            ranks = Ranks(self.make(), shapes)
            nothing = [np.zeros(0, np.float32)] * _RANKS
            assert [out.size for out in ranks.step(nothing, nothing)] == [0] * _RANKS

    def test_arrays_that_do_not_fit_are_refused(self) -> None:
        encoder = self.make().encoder(SHAPES)
        values = _draw(0)
        wide = values.astype(np.float64)
        expect(UsageError, lambda: encoder.start(wide))  # type: ignore[arg-type]
        expect(UsageError, lambda: encoder.start(values[1:]))
        expect(UsageError, lambda: encoder.start(values, residual=values[1:]))
        encoder.start(values)
        for index in range(len(encoder.messages)):
            encoder.advance(index)
        expect(UsageError, lambda: encoder.finish(values[1:]))
        expect(UsageError, lambda: encoder.finish(_draw(1), lost=values[1:]))


def _draw(seed: int) -> Values:
    return np.random.default_rng(seed).normal(0.0, 1.0, _SIZE).astype(np.float32)


def _gradients(step: int) -> list[Values]:
    """Return the ranks' gradients of a step, which share a common part."""
    return [_draw(100 + step) + _draw(1000 * (rank + 1) + step) for rank in range(_RANKS)]


def _zeros() -> list[Values]:
    return [np.zeros(_SIZE, np.float32) for _ in range(_RANKS)]


def _same(one: Sequence[Values | None], other: Sequence[Values | None]) -> bool:
    return [None if array is None else array.tobytes() for array in one] == [
        None if array is None else array.tobytes() for array in other
    ]
