"""The file of a run, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.run_file import RUN_FILE, read_run, write_run
from asyncpar.errors import UsageError
from asyncpar.testing.jobs import SyntheticJob


def document() -> dict[str, object]:
    (job,) = SyntheticJob(2).summaries(1)
    return {"picture": Painter().paint(job), "lines": []}


def test_what_was_written_is_read_from_the_folder_or_the_file(tmp_path: Path) -> None:
    write_run(tmp_path, document())
    write_run(tmp_path, document())

    assert read_run(tmp_path) == read_run(tmp_path / RUN_FILE) == document()
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_a_folder_without_the_file_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file; `asyncpar launch --log-dir DIR`"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"picture": 1, "lines": []}', b'{"lines": []}'])
def test_a_torn_file_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RUN_FILE).write_bytes(content)

    with pytest.raises(UsageError, match="no file of a run"):
        read_run(tmp_path)


def test_every_beginning_of_a_file_is_refused_or_whole(tmp_path: Path) -> None:
    write_run(tmp_path, document())
    content = (tmp_path / RUN_FILE).read_bytes()

    for end in range(0, len(content), 97):
        (tmp_path / RUN_FILE).write_bytes(content[:end])
        with pytest.raises(UsageError):
            read_run(tmp_path)
