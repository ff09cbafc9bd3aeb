"""How often MPI is asked for messages."""

from __future__ import annotations

import pytest

from asyncpar.backends.mpi.pace import LONGEST_NAP, SPIN_SECONDS, Pace


def test_while_messages_move_there_is_no_nap() -> None:
    pace = Pace(0.0)
    for millisecond in range(100):
        now = millisecond / 1000
        pace.moved(now)
        assert pace.nap(now + SPIN_SECONDS / 2) == 0.0


def test_a_nap_is_an_eighth_of_the_time_that_nothing_moved() -> None:
    assert Pace(1.0).nap(1.008) == pytest.approx(0.001)


def test_who_waits_for_nothing_looks_200_times_a_second() -> None:
    pace = Pace(0.0)
    assert pace.nap(3600.0) == LONGEST_NAP == 0.005


def test_a_message_ends_the_naps() -> None:
    pace = Pace(0.0)
    assert pace.nap(1.0) > 0
    pace.moved(1.0)
    assert pace.nap(1.001) == 0.0
