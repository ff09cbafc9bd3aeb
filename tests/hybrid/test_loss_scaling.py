"""Loss scaling as a pure machine."""

from __future__ import annotations

import pytest

from asyncpar.errors import UsageError
from asyncpar.hybrid.loss_scaling import NO_SCALING, LossScaler, LossScaling


def test_an_overflow_halves_the_scale_and_is_counted() -> None:
    scaler = LossScaler(LossScaling(initial=8.0))
    scaler.update(has_overflowed=True)
    assert (scaler.scale, scaler.skipped_steps) == (4.0, 1)


def test_the_scale_never_falls_below_the_least() -> None:
    scaler = LossScaler(LossScaling(initial=4.0, least=2.0))
    for _ in range(5):
        scaler.update(has_overflowed=True)
    assert scaler.scale == 2.0


def test_the_scale_grows_after_so_many_steps_in_a_row_without_overflow() -> None:
    scaler = LossScaler(LossScaling(initial=8.0, interval=3))
    for has_overflowed in (False, False, True, False, False):
        scaler.update(has_overflowed=has_overflowed)
    assert scaler.scale == 4.0
    scaler.update(has_overflowed=False)
    assert scaler.scale == 8.0


def test_a_scale_that_would_become_infinite_stays() -> None:
    scaler = LossScaler(LossScaling(initial=1e308, interval=1))
    for _ in range(3):
        scaler.update(has_overflowed=False)
    assert scaler.scale == 1e308


def test_without_scaling_an_overflow_is_counted_and_nothing_changes() -> None:
    scaler = LossScaler(NO_SCALING)
    scaler.update(has_overflowed=True)
    assert (scaler.scale, scaler.skipped_steps) == (1.0, 1)


def test_a_restored_scaler_goes_on_where_the_other_was() -> None:
    one, other = (LossScaler(LossScaling(initial=8.0, interval=3)) for _ in range(2))
    for has_overflowed in (True, False, False):
        one.update(has_overflowed=has_overflowed)
    other.restore(one.state())
    for scaler in (one, other):
        scaler.update(has_overflowed=False)
    assert one.state() == other.state()
    assert other.scale == 8.0


@pytest.mark.parametrize(
    "settings", [{"initial": 0.0}, {"growth": 0.5}, {"backoff": 1.5}, {"backoff": 0.0}, {"interval": 0}, {"least": 0.0}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(settings))}: expected"):
        LossScaling(**settings)  # type: ignore[arg-type]


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(UsageError, match="state: expected"):
        LossScaler(NO_SCALING).restore({"scale": 1.0})
