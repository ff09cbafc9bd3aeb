from __future__ import annotations

import pytest

from asyncpar.net.transport.positions import Positions
from asyncpar.net.wire.frame import SEALED_BYTES, FrameDamaged


def tick(
    positions: Positions, now: float, *, sent: int = 0, received: int = 0, in_frame: bool = False, reads: bool = True
) -> bool:
    return positions.tick(now, sent=sent, received=received, is_in_frame=in_frame, is_reading=reads)


def test_bytes_that_the_peer_reports_again_and_again_as_missing_are_lost() -> None:
    positions = Positions(patience=2.0)
    positions.mark(1.0, 500)
    positions.receive(1.5, 400, written=500)
    positions.receive(2.5, 400, written=500)
    with pytest.raises(FrameDamaged, match="of 500 bytes that were sent only 400 have come"):
        positions.receive(3.5, 400, written=500)


def test_bytes_are_lost_although_what_follows_comes_in_their_place() -> None:
    positions = Positions(patience=2.0)
    for second in range(2):
        positions.mark(float(second), 30_000 + 200 * second)
        positions.receive(second + 0.5, 10_000 + 200 * second, written=30_000 + 200 * second)
    with pytest.raises(FrameDamaged, match="of 30000 bytes that were sent only 10400 have come"):
        positions.receive(2.5, 10_400, written=30_400)


def test_bytes_that_come_slowly_are_not_lost() -> None:
    positions = Positions(patience=2.0)
    positions.mark(1.0, 10_000)
    for second in range(2, 1_000):
        positions.receive(float(second), 10 * second, written=10_000 + second)
    positions.receive(1_001.0, 12_000, written=12_000)
    for second in range(1_002, 1_010):
        positions.receive(float(second), 12_000, written=12_000)


def test_a_middleman_that_holds_much_of_a_busy_stream_has_not_lost_it() -> None:
    positions = Positions(patience=2.0)
    for second in range(100):
        positions.mark(float(second), 100_000 * (second + 1))
        positions.receive(second + 0.5, 100_000 * max(0, second - 40), written=100_000 * (second + 1))


def test_bytes_that_have_just_left_may_be_on_their_way() -> None:
    positions = Positions(patience=2.0)
    for second in range(100):
        positions.mark(float(second), 500 + second)
        positions.receive(second + 0.5, 499 + second, written=500 + second)


def test_after_traffic_positions_are_reported_for_a_while_and_two_ends_do_not_keep_each_other_at_it() -> None:
    one, other = Positions(patience=2.0), Positions(patience=2.0)
    received = [0, 0]
    reports = 0
    for second in range(30):
        is_due = [
            tick(one, float(second), sent=100, received=received[0]),
            tick(other, float(second), received=100 + received[1]),
        ]
        for end, place in ((other, 0), (one, 1)):
            if is_due[place]:
                reports += 1
                received[1 - place] += SEALED_BYTES
                end.receive(float(second), 100 if place else 0, written=100 if place else 0)
    assert reports == 10


def test_an_incomplete_frame_is_reported_for_as_long_as_it_takes() -> None:
    positions = Positions(patience=2.0)
    assert all(tick(positions, float(second), received=100, in_frame=True) for second in range(100))


@pytest.mark.parametrize(("step", "reads"), [(1.6, True), (1.0, False)])
def test_an_end_that_is_late_or_does_not_read_says_nothing(step: float, reads: bool) -> None:
    positions = Positions(patience=2.0)
    tick(positions, 0.0)
    assert not any(tick(positions, step * turn, received=turn, in_frame=True, reads=reads) for turn in range(1, 20))


def test_what_is_remembered_is_bounded() -> None:
    positions = Positions(patience=2.0)
    for second in range(1_000):
        positions.mark(float(second), second)
    assert len(positions._marks) <= 64  # noqa: SLF001  # how many marks are kept shows nowhere but in memory


def test_a_piece_that_counts_only_when_it_is_complete_may_take_longer() -> None:
    for backlog, patience in ((10, 2.04), (1_000, 6.0), (50_000, 6.0)):
        positions = Positions(patience=2.0, piece_bytes=1_000, piece_seconds=4.0)
        positions.mark(0.0, backlog)
        positions.receive(0.0, 0, written=backlog)
        positions.receive(patience - 0.01, 0, written=backlog)
        with pytest.raises(FrameDamaged):
            positions.receive(patience, 0, written=backlog)


def test_an_end_that_reads_again_says_so_only_after_a_second_in_which_it_read() -> None:
    positions = Positions(patience=2.0)
    reads = [True, False, True, True, False, False, True, True]
    due = [tick(positions, float(second), in_frame=True, reads=each) for second, each in enumerate(reads)]
    assert due == [True, False, False, True, False, False, False, True]
