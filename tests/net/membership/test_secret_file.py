"""Secret files: who may read them, and what they must hold."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asyncpar.core.config.secret import Secret, check_secret_file
from asyncpar.errors import UsageError
from asyncpar.net.membership.credentials import create_secret, read_secret


def test_a_created_secret_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = create_secret(path)
    assert len(secret) == 32
    assert read_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        create_secret(tmp_path / "secret")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    os.chmod(path, mode)
    with pytest.raises(UsageError, match=rf"accessible to others .*chmod 600 {path}"):
        read_secret(path)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 31)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=r"at least 32 bytes .* got 31"):
        read_secret(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(UsageError, match="secret file"):
        read_secret(tmp_path)


def test_a_file_of_another_user_is_refused() -> None:
    with pytest.raises(UsageError, match="belongs to user 7; expected user 5 or root"):
        check_secret_file("secret", mode=stat.S_IFREG | 0o600, owner=7, user=5, content=Secret(32))
    assert check_secret_file("secret", mode=stat.S_IFREG | 0o400, owner=0, user=5, content=Secret(32)) == bytes(32)
