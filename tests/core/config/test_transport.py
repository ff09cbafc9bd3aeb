from __future__ import annotations

import pytest

from asyncpar.core.config.transport import (
    MOST_CONNECTIONS,
    parse_calibrate,
    parse_checksums,
    parse_connections,
    parse_link_timeout,
)
from asyncpar.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count"), [(None, 1), ("", 1), ("1", 1), ("4", 4), (str(MOST_CONNECTIONS), MOST_CONNECTIONS)]
)
def test_a_link_takes_as_many_connections_as_are_set(text: str | None, count: int) -> None:
    assert parse_connections(text) == count


@pytest.mark.parametrize("text", ["0", "17", "-1", "two", "1.5", "٣"])
def test_other_numbers_of_connections_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"ASYNCPAR_CONNECTIONS: expected 1\.\.16, got"):
        parse_connections(text)


@pytest.mark.parametrize(("text", "expected"), [(None, True), ("", True), ("on", True), ("off", False)])
def test_checksums_are_on_unless_they_are_switched_off(text: str | None, expected: bool) -> None:
    assert parse_checksums(text) is expected


def test_another_word_for_checksums_is_refused() -> None:
    with pytest.raises(UsageError, match="ASYNCPAR_CHECKSUMS: expected on or off, got 'no'"):
        parse_checksums("no")


@pytest.mark.parametrize(("text", "expected"), [(None, False), ("", False), ("on", True), ("off", False)])
def test_lanes_are_measured_as_ranks_meet_if_that_is_switched_on(text: str | None, expected: bool) -> None:
    assert parse_calibrate(text) is expected


def test_the_link_timeout_is_five_seconds_or_what_the_setting_says() -> None:
    assert [parse_link_timeout(text) for text in (None, "", "2", "120")] == [5.0, 5.0, 2.0, 120.0]
    for text in ("1", "121", "2.5", "soon"):
        with pytest.raises(UsageError, match=r"ASYNCPAR_LINK_TIMEOUT: expected 2\.\.120 seconds, got"):
            parse_link_timeout(text)
