"""Names that resolve only after a while, as those of pods; on a clock of ours."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from asyncpar.launch import host_placement
from asyncpar.launch.host_placement import find_placement, resolve_within
from asyncpar.launch.options import LaunchOptions


class LateName:
    """The DNS of a cluster, in which the name appears after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.time = 0.0
        self._seconds = seconds

    def look_up(self, name: str) -> str:
        if self.time < self._seconds:
            raise socket.gaierror(socket.EAI_NONAME, f"Name {name} is not known")
        return "10.1.2.3"

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def clock(self) -> dict[str, Any]:
        return {"look_up": self.look_up, "now": lambda: self.time, "sleep": self.sleep}


def test_a_name_that_comes_after_thirty_seconds_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    late = LateName(30.0)
    assert resolve_within("train-0.train", 300.0, **late.clock()) == "10.1.2.3"
    assert 30.0 <= late.time < 31.0
    assert capsys.readouterr().err == "asyncpar launch: waiting for the host name train-0.train\n"


def test_a_name_that_never_comes_is_reported_after_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    late = LateName(1e9)
    with pytest.raises(socket.gaierror):
        resolve_within("train-0.train", 60.0, **late.clock())
    assert 60.0 <= late.time < 61.0
    assert capsys.readouterr().err


def test_outside_of_kubernetes_a_wrong_name_is_reported_at_once() -> None:
    late = LateName(1.0)
    with pytest.raises(socket.gaierror):
        resolve_within("frist-host", 0.0, **late.clock())
    assert late.time == 0.0


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_placement, "resolve_within", lambda _name, _seconds: "127.0.0.1")


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize(("rank", "coordinator"), [(0, "127.0.0.1:29400"), (1, "train-0.train:29400")])
def test_pods_look_the_first_ones_name_up_again_and_again(rank: int, coordinator: str) -> None:
    options = LaunchOptions(program="train.py", nnodes=2, node_rank=rank, endpoint="train-0.train:29400")
    assert find_placement(options, patience=60.0).coordinator == coordinator
    assert find_placement(options).coordinator == "127.0.0.1:29400"
