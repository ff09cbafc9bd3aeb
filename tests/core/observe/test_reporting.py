"""Reports of a rank to its agent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncpar.core.observe.reporting import Reporter, find_peer_error, record_failures
from asyncpar.errors import PeerLost, UsageError


class Channel:
    """The agent's end."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.reporter = Reporter.from_environment({"ASYNCPAR_REPORT_FD": str(self.write_end)})
        os.set_blocking(self.read_end, False)

    def records(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(self.read_end, 1 << 20).splitlines()]
        except BlockingIOError:
            return []


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    yield made
    os.close(made.read_end)
    os.close(made.write_end)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except (LookupError, ValueError, PeerLost, ExceptionGroup) as caught:
        return caught


def test_progress_is_one_short_line_whatever_its_fields(channel: Channel) -> None:
    fields = {f"field {number}": "x" * 500 for number in range(100)}
    channel.reporter.progress(description="d" * 9999, completed=1, total=2, fields=fields)
    channel.reporter.progress(description="two\nlines", completed=np.int64(3), fields={"loss": np.float32(2.34567)})
    first, second = channel.records()
    assert (first["kind"], first["completed"], first["total"]) == ("progress", 1.0, 2.0)
    assert (second["description"], second["total"], second["fields"]) == ("two lines", None, {"loss": "2.346"})


def test_progress_never_waits_for_a_slow_agent(channel: Channel) -> None:
    for step in range(10_000):
        channel.reporter.progress(description="train", completed=step, total=10_000)
    steps = [int(record["completed"]) for record in channel.records()]
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 10_000


def test_a_failure_carries_its_traceback_once(channel: Channel) -> None:
    channel.reporter.failure(raised(LookupError("no such shard")))
    channel.reporter.failure(raised(ValueError("second")))
    (record,) = channel.records()
    assert (record["kind"], record["type"], record["message"]) == ("failure", "LookupError", "no such shard")
    assert "in raised" in record["traceback"]
    assert (record["is_peer_error"], record["blames"]) == (False, None)
    assert record["time"] > 0


def test_a_group_of_one_is_reported_as_what_is_in_it(channel: Channel) -> None:
    channel.reporter.failure(raised(ExceptionGroup("outer", [ExceptionGroup("inner", [LookupError("no shard")])])))
    (record,) = channel.records()
    assert (record["type"], record["message"]) == ("LookupError", "no shard")
    assert "ExceptionGroup: outer" in record["traceback"]


def test_a_peer_error_names_the_rank_it_blames(channel: Channel) -> None:
    channel.reporter.failure(raised(PeerLost("rank 3 is gone", rank=3)))
    (record,) = channel.records()
    assert (record["is_peer_error"], record["blames"]) == (True, 3)


def test_what_a_peer_error_explains_is_found_through_causes_and_groups() -> None:
    lost = PeerLost("gone", rank=1)
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = lost
    assert find_peer_error(wrapped) is lost
    assert find_peer_error(ExceptionGroup("both", [lost, wrapped])) is lost
    assert find_peer_error(ExceptionGroup("mixed", [lost, ValueError("mine")])) is None
    assert find_peer_error(ValueError("mine")) is None


def test_without_an_agent_nothing_happens() -> None:
    reporter = Reporter.from_environment({})
    assert not reporter.is_connected
    reporter.progress(description="x", completed=1)
    reporter.failure(ValueError("x"))


def test_an_agent_that_is_gone_is_no_trouble(channel: Channel) -> None:
    other = Channel()
    os.close(other.read_end)
    other.reporter.progress(description="x", completed=1)
    assert not other.reporter.is_connected
    other.reporter.failure(ValueError("x"))
    os.close(other.write_end)


@pytest.mark.parametrize("value", ["x", "-1", "99999"])
def test_a_variable_that_names_no_descriptor_is_a_usage_error(value: str) -> None:
    with pytest.raises(UsageError, match="ASYNCPAR_REPORT_FD"):
        Reporter.from_environment({"ASYNCPAR_REPORT_FD": value})


def test_a_program_that_inherited_the_variable_from_a_rank_learns_how_to_be_started() -> None:
    with pytest.raises(UsageError, match="is no rank: start it without the ASYNCPAR_ variables"):
        Reporter.from_environment({"ASYNCPAR_REPORT_FD": "99999"})


def test_the_hook_records_and_passes_on(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, where: shown.append(error))
    record_failures(channel.reporter)
    for error in (KeyboardInterrupt(), ValueError("mine")):
        sys.excepthook(type(error), error, None)
    assert [type(error) for error in shown] == [KeyboardInterrupt, ValueError]
    (record,) = channel.records()
    assert record["type"] == "ValueError"
