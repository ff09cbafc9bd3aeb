"""Reports of ranks are parsed, not trusted."""

from __future__ import annotations

import pytest

from asyncpar.core.observe.rank_reports import FailureReport, ProgressRecord, parse_record


def test_records_are_recognized() -> None:
    progress = parse_record(b'{"kind":"progress","description":"x","completed":1,"total":null,"fields":{"a":"b"}}')
    assert progress == ProgressRecord(description="x", completed=1.0, fields={"a": "b"})
    failure = parse_record(
        b'{"kind":"failure","time":1.5,"type":"ValueError","message":"m","traceback":"t","is_peer_error":false}'
    )
    assert isinstance(failure, FailureReport)
    assert (failure.type_name, failure.blames) == ("ValueError", None)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"{}",
        b'{"kind":"other"}',
        b'{"kind":"progress"}',
        b'{"kind":"progress","description":"x","completed":"many"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_anything_else_is_nothing(line: bytes) -> None:
    assert parse_record(line) is None
