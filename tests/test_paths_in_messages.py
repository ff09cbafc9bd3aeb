"""An error that names a file names one that is there, or says that it is not: a case of each class of files.

What launchers and commands say of files that they made is tested with real ones in ``launch/test_named_paths.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from asyncpar.checkpoint.loading import LoadRequest, find_contents
from asyncpar.checkpoint.manifest import MARKER
from asyncpar.checkpoint.threads import WorkProgress
from asyncpar.dashboard.run_file import RUN_FILE, read_run
from asyncpar.errors import AsyncparError
from asyncpar.hosts.votes import VoteFile
from asyncpar.launch.doctor import host_checks
from asyncpar.launch.job import read_host_certificates
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.net.membership.credentials import load_certificates, read_secret
from asyncpar.net.security.certificates import AUTHORITY_FILE
from asyncpar.net.security.identity import rank_role
from asyncpar.net.security.issuing import CertificateOrder, issue_certificates
from asyncpar.observe.dump_folder import read_dumps
from asyncpar.pipeline.custom import load_schedule
from asyncpar.train.texts import read_corpus

Case = Callable[[Path], object]
MISSING = re.compile(
    r"cannot be (read|made|written)|cannot (read|look into)|no such|is not a|does not exist|expected a"
)
"""What a sentence must say of a file that is not there."""


def make(path: Path, content: bytes = b"", mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def load(folder: Path, step: int | None = None) -> object:
    return find_contents(LoadRequest(folder=folder, wanted=(), model={}, step=step), WorkProgress())


def certified(folder: Path) -> Path:
    issue_certificates(folder, CertificateOrder(job="j", ranks_per_host=(1,)), now=datetime.now(UTC))
    return folder


def foreign_authority(at: Path) -> object:
    mine, other = certified(at / "mine"), certified(at / "other")
    shutil.copy(other / AUTHORITY_FILE, mine / AUTHORITY_FILE)
    return load_certificates(mine, rank_role(0))


def foreign_key(at: Path) -> object:
    mine, other = certified(at / "mine"), certified(at / "other")
    shutil.copy(other / "rank-0.key", mine / "rank-0.key")
    return load_certificates(mine, rank_role(0))


def open_post_mortem(directory: Path) -> object:
    return PostMortem.open(str(directory), job="j", host="h", command=(), environment={})


CASES: dict[str, Case] = {
    "a secret that is not there": lambda at: read_secret(at / "secret"),
    "a secret that others can read": lambda at: read_secret(make(at / "secret", b"x" * 32, 0o644)),
    "a secret that is short": lambda at: read_secret(make(at / "secret", b"x")),
    "a secret that is a folder": read_secret,
    "votes of another version": lambda at: VoteFile(make(at / "votes", b"other"), job="j").read(),
    "a folder of votes": lambda at: VoteFile(make(at / "votes" / "x").parent, job="j").read(),
    "certificates that are not there": lambda at: load_certificates(at, rank_role(0)),
    "certificates of a rank that has none": lambda at: load_certificates(certified(at / "certs"), rank_role(7)),
    "certificates of another authority": foreign_authority,
    "a key of another certificate": foreign_key,
    "a directory of certificates that is not there": lambda at: read_host_certificates(str(at / "certs")),
    "a directory without certificates": lambda at: read_host_certificates(str(at)),
    "no checkpoints": load,
    "no folder of checkpoints": lambda at: load(at / "checkpoints"),
    "no checkpoint of this step": lambda at: load(at, step=3),
    "a checkpoint that was not finished": lambda at: load(make(at / "step_000000003" / "x").parent.parent, step=3),
    "a checkpoint whose marker is torn": lambda at: load(make(at / "step_00000003" / MARKER, b"{").parent),
    "a run that is not there": read_run,
    "a run that is torn": lambda at: read_run(make(at / RUN_FILE, b"{")),
    "dumps that are not there": lambda at: read_dumps(at / "dump"),
    "a folder without dumps": read_dumps,
    "a folder with a torn dump": lambda at: read_dumps(make(at / "rank_0.ring", b"x").parent),
    "a post mortem that cannot be made": lambda at: open_post_mortem(make(at / "file") / "remains"),
    "a schedule that is not there": lambda at: load_schedule(at / "schedule.txt"),
    "a schedule that is no text": lambda at: load_schedule(make(at / "schedule.txt", b"\xff\xfe")),
    "a text that is not there": lambda at: read_corpus([at / "text"], least=1),
}


def named_in(text: str, folder: Path) -> list[Path]:
    return [Path(found) for found in re.findall(rf"{re.escape(str(folder))}(?:/[\w./-]*\w)?", text)]


def check_paths(text: str, folder: Path) -> None:
    """Check each sentence by itself: what it names is there, or it says that it is not."""
    for sentence in re.split(r"; | \(", text):
        missing = [path for path in named_in(sentence, folder) if not path.exists()]
        assert not missing or MISSING.search(sentence), text


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_an_error_names_is_there_or_is_said_to_be_missing(case: str, tmp_path: Path) -> None:
    with pytest.raises(AsyncparError) as caught:
        CASES[case](tmp_path)
    text = str(caught.value)
    assert named_in(text, tmp_path), f"it names no file: {text}"
    check_paths(text, tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_advice_names_no_directory_that_cannot_be_removed_as_it_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    place = tmp_path / "tmp" if is_there else make(tmp_path / "tmp")
    place.mkdir() if is_there else None
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(place))
    if is_there:
        (place / f"asyncpar-{os.geteuid()}").mkdir(mode=0o777)
        (place / f"asyncpar-{os.geteuid()}").chmod(0o777)
    finding = host_checks.check_temporary({})
    assert "no private directory" in finding.found
    check_paths(finding.advice, tmp_path)
    assert ("remove" in finding.advice) == is_there
