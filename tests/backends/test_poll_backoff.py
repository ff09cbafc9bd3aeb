"""MPI is asked for messages at the right intervals."""

from __future__ import annotations

import pytest

from asyncpar.backends.mpi.progress import LONGEST_NAP, SPIN_SECONDS, PollBackoff


def test_while_messages_move_there_is_no_nap() -> None:
    backoff = PollBackoff(0.0)
    for millisecond in range(100):
        now = millisecond / 1000
        backoff.moved(now)
        assert backoff.nap(now + SPIN_SECONDS / 2) == 0.0


def test_a_nap_is_an_eighth_of_the_time_that_nothing_moved() -> None:
    assert PollBackoff(1.0).nap(1.008) == pytest.approx(0.001)


def test_who_waits_for_nothing_looks_200_times_a_second() -> None:
    backoff = PollBackoff(0.0)
    assert backoff.nap(3600.0) == LONGEST_NAP == 0.005


def test_a_message_ends_the_naps() -> None:
    backoff = PollBackoff(0.0)
    assert backoff.nap(1.0) > 0
    backoff.moved(1.0)
    assert backoff.nap(1.001) == 0.0
