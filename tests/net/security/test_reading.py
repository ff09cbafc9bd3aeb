"""Reading one's own certificates: whatever is wrong with them is said before any connection."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.net.security.certificates import list_roles
from asyncpar.net.security.identity import COORDINATOR, PeerIdentity, agent_role, rank_role
from asyncpar.net.security.reading import read_certificates
from tests.net.security.parties import JOB, make_directory

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "certs", now=NOW)


def test_what_was_issued_can_be_read(home: Path) -> None:
    certificates = read_certificates(home, rank_role(1), now=NOW)
    assert certificates.identity == PeerIdentity(JOB, rank_role(1))
    assert certificates.key == (home / "rank-1.key").read_bytes()
    assert certificates.authority == (home / "ca.crt").read_bytes()
    assert certificates.key_path == home / "rank-1.key"
    assert certificates.expires > NOW + timedelta(days=89)
    assert "PRIVATE" not in repr(certificates)


def test_the_parties_of_a_directory_are_listed(home: Path) -> None:
    assert list_roles(home) == [agent_role(0), COORDINATOR, rank_role(0), rank_role(1)]


def test_a_rank_without_a_certificate_learns_which_has_one(home: Path) -> None:
    with pytest.raises(UsageError, match=r"has none for rank 2 \(only for the ranks 0, 1\); .* how many ranks"):
        read_certificates(home, rank_role(2), now=NOW)


def test_a_directory_of_something_else_is_recognized(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has none for rank 0; is it a directory that `asyncpar certs init` made"):
        read_certificates(tmp_path, rank_role(0), now=NOW)
    with pytest.raises(UsageError, match=r"nowhere cannot be read: No such file or directory"):
        read_certificates(tmp_path / "nowhere", rank_role(0), now=NOW)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (timedelta(days=91), r"ca\.crt expired on .* UTC; make new ones with `asyncpar certs init`, for all hosts"),
        (timedelta(days=-1), r"ca\.crt is valid from .*; set the clock of this host"),
    ],
)
def test_certificates_out_of_their_time_are_refused(home: Path, later: timedelta, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_certificates(home, rank_role(0), now=NOW + later)


def test_a_key_that_others_can_read_is_refused(home: Path) -> None:
    (home / "rank-0.key").chmod(0o640)
    with pytest.raises(UsageError, match=r"certificates: .*rank-0\.key is accessible to others \(mode 0640\)"):
        read_certificates(home, rank_role(0), now=NOW)


def test_certificates_of_two_runs_do_not_mix(home: Path, tmp_path: Path) -> None:
    other = make_directory(tmp_path / "other", now=NOW)
    (home / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    with pytest.raises(UsageError, match="two runs of `asyncpar certs init`"):
        read_certificates(home, rank_role(0), now=NOW)


def test_the_certificate_of_another_party_under_this_name_is_refused(home: Path) -> None:
    (home / "rank-0.crt").write_bytes((home / "rank-1.crt").read_bytes())
    with pytest.raises(UsageError, match=r"rank-0\.crt is for rank 1 of job 'demo', not for rank 0"):
        read_certificates(home, rank_role(0), now=NOW)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda home: (home / "rank-0.key").unlink(), r"rank-0\.key cannot be read: No such file"),
        (lambda home: (home / "ca.crt").unlink(), r"ca\.crt cannot be read: No such file"),
        (lambda home: (home / "rank-0.crt").write_text("hello"), r"rank-0\.crt holds no certificate in PEM"),
        (lambda home: (home / "ca.crt").write_bytes(b""), r"ca\.crt holds no certificate in PEM"),
        (lambda home: (home / "rank-0.key").write_bytes(b"\0"), r"rank-0\.key holds no private key"),
        (
            lambda home: (home / "rank-0.key").write_bytes((home / "rank-1.key").read_bytes()),
            r"rank-0\.key is not the key of .*rank-0\.crt",
        ),
        (lambda home: (home / "rank-0.crt").write_bytes((home / "ca.crt").read_bytes()), "is for nobody of ours"),
    ],
)
def test_files_that_are_missing_or_spoilt_are_named(home: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(home)
    with pytest.raises(UsageError, match=message):
        read_certificates(home, rank_role(0), now=NOW)


def test_a_party_without_certificates_does_not_wait_for_the_library_that_reads_them() -> None:
    program = "import sys, asyncpar; print('cryptography' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout == "False\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_directory_that_may_not_be_read_is_named(home: Path) -> None:
    home.chmod(0)
    try:
        with pytest.raises(UsageError, match="Permission denied"):
            list_roles(home)
    finally:
        home.chmod(0o700)
