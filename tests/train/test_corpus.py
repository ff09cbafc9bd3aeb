"""Text comes in a fixed order, and what cannot be read is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.train import read_corpus, standard_library_text


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first ")
    assert read_corpus([tmp_path / "b", tmp_path / "a"], least=1).tobytes() == b"secondfirst "


def test_folders_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    for name in ("z/inner", "b", "a"):
        (tmp_path / name).write_bytes(name.encode())
    assert read_corpus([tmp_path], least=1).tobytes() == b"abz/inner"


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    assert read_corpus([tmp_path / "a", tmp_path / "a"], least=1, most=12).tobytes() == b"012345678901"


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"text: .*nowhere does not exist"):
        read_corpus([tmp_path / "nowhere"], least=1)


def test_a_text_that_is_too_short_is_refused_with_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(UsageError, match=r"text: expected at least 10 bytes, got 3 from .*a$"):
        read_corpus([tmp_path / "a"], least=10)


def test_an_empty_folder_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected at least 1 bytes, got 0"):
        read_corpus([tmp_path], least=1)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    link = tmp_path / "loop"
    folder = tmp_path / "folder"
    folder.mkdir()
    link.symlink_to(link)
    with pytest.raises(UsageError, match="loop"):
        read_corpus([link], least=1)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"text: .*pipe is neither a file nor a folder"):
        read_corpus([tmp_path / "pipe"], least=1)


def test_the_standard_library_has_megabytes_of_text_and_no_tests() -> None:
    files = standard_library_text()
    assert sum(file.stat().st_size for file in files) > 3 << 20
    assert "test" not in {part for file in files for part in file.parts[-2:-1]}
    assert standard_library_text() == files
