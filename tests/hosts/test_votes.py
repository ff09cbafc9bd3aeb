from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.hosts.consensus_messages import Acceptance, DurableState, Entry, Term
from asyncpar.hosts.votes import VoteFile, VoteFileError


def state(generation: int = 3) -> DurableState:
    entry = Entry(generation=generation, voters=("a", "b"), nodes=("a", "b", "c"), content=b"\x00world")
    following = Entry(generation=generation + 1, voters=("b",), nodes=("b",))
    return DurableState(decided=entry, promised=Term(9, "b"), accepted=Acceptance(Term(8, "a"), following))


def test_what_was_stored_is_read_again(tmp_path: Path) -> None:
    file = VoteFile(tmp_path / "votes", job="job")
    assert file.read() is None
    for generation in (1, 2):
        file.write(state(generation))
        assert VoteFile(tmp_path / "votes", job="job").read() == state(generation)
    assert stat.S_IMODE((tmp_path / "votes").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["votes"]


def test_any_damage_is_noticed(tmp_path: Path) -> None:
    file = VoteFile(tmp_path / "votes", job="job")
    file.write(state())
    content = file.path.read_bytes()
    for at in range(len(content)):
        file.path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(VoteFileError, match="votes: "):
            file.read()
        file.path.write_bytes(content[:at])
        with pytest.raises(VoteFileError, match="votes: "):
            file.read()


def test_votes_of_another_job_are_refused(tmp_path: Path) -> None:
    VoteFile(tmp_path / "votes", job="other").write(state())
    with pytest.raises(UsageError, match="holds votes of job 'other', not of 'job'"):
        VoteFile(tmp_path / "votes", job="job").read()


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_what_was_stored_before(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = VoteFile(tmp_path / "votes", job="job")
    file.write(state(1))

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(VoteFileError, match="cannot be stored: No space left on device"):
            file.write(state(2))
    assert file.read() == state(1)
    file.write(state(2))
    assert file.read() == state(2)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    file = VoteFile(tmp_path / "votes", job="job")
    file.write(state())
    assert file.read() == state()


def test_what_is_no_file_of_votes_is_named(tmp_path: Path) -> None:
    (tmp_path / "votes").mkdir()
    with pytest.raises(VoteFileError, match="votes: the votes cannot be read: Is a directory"):
        VoteFile(tmp_path / "votes", job="job").read()
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 30)
    with pytest.raises(VoteFileError, match="too large for a file of votes"):
        VoteFile(tmp_path / "large", job="job").read()
