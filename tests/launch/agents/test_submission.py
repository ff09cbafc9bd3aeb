"""Launchers that have places wait for the first one's agent."""

from __future__ import annotations

from typing import cast

import pytest

import asyncpar as ap
from asyncpar.launch.agents import submission
from asyncpar.launch.agents.control_client import ControlClient, NoAgent
from asyncpar.launch.agents.submission import find_group
from asyncpar.launch.agents.views import GroupView
from asyncpar.launch.options import LaunchOptions


class LateAgent:
    """Answers from the call number ``first`` on."""

    def __init__(self, first: int) -> None:
        self.address = "127.0.0.1:1"
        self.calls = 0
        self._first = first

    async def status(self) -> GroupView:
        self.calls += 1
        if self.calls < self._first:
            raise NoAgent("no agent answers")
        return cast("GroupView", "the group")


def test_an_agent_that_comes_late_is_waited_for_and_that_is_reported_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    late = LateAgent(400)  # its name resolves after 40 seconds, say
    found = ap.testing.run_virtual(find_group(cast("ControlClient", late), patience=60.0))
    assert str(found) == "the group"
    assert late.calls == 400
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2, "after 3 and after 33 seconds"
    assert printed[0].startswith("asyncpar launch: nobody answers at 127.0.0.1:1 yet; waiting up to 60 s")


def test_an_agent_that_comes_soon_is_waited_for_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    ap.testing.run_virtual(find_group(cast("ControlClient", LateAgent(20)), patience=60.0))
    assert capsys.readouterr().err == ""


def test_an_agent_that_never_comes_is_reported_after_the_time() -> None:
    with pytest.raises(NoAgent):
        ap.testing.run_virtual(find_group(cast("ControlClient", LateAgent(10**9)), patience=60.0))


@pytest.mark.parametrize(
    ("local_addr", "founds", "expected"),
    [
        (None, True, "10.0.0.1:5"),
        (None, False, None),
        ("10.0.0.2", False, "10.0.0.2:29400"),
        ("127.0.0.1", False, "127.0.0.1:0"),
        ("::1", False, "[::1]:0"),
    ],
)
def test_a_launcher_serves_at_the_endpoint_if_it_founds_and_else_at_its_own_address(
    local_addr: str | None, founds: bool, expected: str | None
) -> None:
    options = LaunchOptions(program="x", nnodes=2, least_nnodes=1, endpoint="10.0.0.1:5", local_addr=local_addr)
    assert submission._own_address(options, "10.0.0.1:5", founds=founds) == expected  # noqa: SLF001


def test_without_a_place_nobody_waits() -> None:
    late = LateAgent(2)
    with pytest.raises(NoAgent):
        ap.testing.run_virtual(find_group(cast("ControlClient", late), patience=0.0))
    assert late.calls == 1
