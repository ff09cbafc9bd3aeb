"""Names of modes."""

from __future__ import annotations

import pytest

from asyncpar.errors import UsageError
from asyncpar.parallel import SynchronizationMode


def test_a_bound_of_zero_is_synchronous() -> None:
    assert SynchronizationMode.BOUNDED_STALENESS(0) == SynchronizationMode.SYNCHRONOUS
    assert SynchronizationMode.SYNCHRONOUS.is_synchronous
    assert not SynchronizationMode.ASYNCHRONOUS.is_synchronous
    assert not SynchronizationMode.BOUNDED_STALENESS(1).is_synchronous


def test_modes_say_what_they_are() -> None:
    modes = (
        SynchronizationMode.SYNCHRONOUS,
        SynchronizationMode.ASYNCHRONOUS,
        SynchronizationMode.BOUNDED_STALENESS(3),
    )
    assert [str(mode) for mode in modes] == ["synchronous", "asynchronous", "bounded staleness 3"]


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(UsageError, match="max_staleness: expected 0 or more steps, or None, got -1"):
        SynchronizationMode.BOUNDED_STALENESS(-1)
