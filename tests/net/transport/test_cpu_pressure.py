"""Whether processor time may be burnt: looked at now and then, with longer and longer rests while it harms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpar.net.transport import busy_poll as module
from asyncpar.net.transport.busy_poll import (
    LEAST_REST_SECONDS,
    LOOK_SECONDS,
    MOST_LOOK_SECONDS,
    MOST_REST_SECONDS,
    CpuPressure,
    read_waiting,
)


class Host:
    """A host on which somebody waits for a processor a given share of the time."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0
        self.share = 0.0
        self.looks = 0
        self.contention = CpuPressure(self.read)

    def read(self) -> float:
        self.looks += 1
        return self.waited

    def burn(self, seconds: float, *, step: float = 0.001) -> list[bool]:
        """Ask all the time, and say what came."""
        answers = []
        until = self.now + seconds
        while self.now < until:
            answers.append(self.contention.has_to_rest(self.now))
            self.now += step
            self.waited += step * self.share
        return answers


def rests(answers: list[bool]) -> Iterator[int]:
    """Yield how many answers in a row were yes."""
    count = 0
    for answer in [*answers, False]:
        if not answer and count:
            yield count
        count = count + 1 if answer else 0


def test_where_nobody_waits_nobody_rests_and_it_is_looked_rarely() -> None:
    host = Host()
    host.share = 0.1
    assert not any(host.burn(2.0))
    assert host.looks <= 2.0 / LOOK_SECONDS + 1


def test_where_others_wait_it_rests_for_longer_each_time_but_never_gives_up() -> None:
    host = Host()
    host.share = 0.9
    lengths = list(rests(host.burn(20.0)))
    assert lengths[0] == pytest.approx(LEAST_REST_SECONDS * 1000, abs=5)
    assert lengths[1] == pytest.approx(2 * lengths[0], rel=0.05)
    assert max(lengths) == pytest.approx(MOST_REST_SECONDS * 1000, rel=0.01)
    assert len(lengths) > 5


def test_it_recovers_when_the_others_are_gone() -> None:
    host = Host()
    host.share = 0.9
    host.burn(10.0)
    host.share = 0.0
    host.burn(MOST_REST_SECONDS + 0.1)
    assert not any(host.burn(5.0))
    host.share = 0.9
    assert next(rests(host.burn(1.0))) == pytest.approx(LEAST_REST_SECONDS * 1000, abs=25)


def test_what_happened_while_nothing_was_burnt_is_not_blamed_on_it() -> None:
    host = Host()
    host.share = 1.0
    assert not any(host.burn(5.0, step=MOST_LOOK_SECONDS * 1.1))


def test_where_the_system_does_not_count_nobody_rests() -> None:
    contention = CpuPressure(lambda: None)
    assert not any(contention.has_to_rest(turn / 50) for turn in range(100))


def test_the_counter_of_linux_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu"
    monkeypatch.setattr(module, "_PRESSURE", path)
    assert read_waiting() is None
    path.write_text("some avg10=1.25 avg60=2.26 avg300=3.72 total=7399856111\nfull avg10=0.00 total=5\n")
    assert read_waiting() == 7399.856111
    path.write_text("nothing of the kind")
    assert read_waiting() is None
