"""The files that tests look for in /dev/shm are those that their own processes have left."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared_files import left_behind, shared_files


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path("/dev/shm") / f"test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def test_a_file_that_nobody_has_is_left_behind(path: Path) -> None:
    before = shared_files()
    path.write_bytes(b"left")
    assert path.name in left_behind(before, seconds=0.0)
    assert path.name not in left_behind(shared_files(), seconds=0.0)


def test_a_file_that_a_process_has_open_or_mapped_is_not(path: Path) -> None:
    before = shared_files()
    with path.open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        assert path.name not in left_behind(before, seconds=0.0)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    assert path.name not in left_behind(before, seconds=0.0)
    mapped.close()
    assert path.name in left_behind(before, seconds=0.0)


def test_folders_of_other_tests_do_not_count(path: Path) -> None:
    before = shared_files()
    os.mkdir(path)
    try:
        assert path.name not in left_behind(before, seconds=0.0)
    finally:
        path.rmdir()
