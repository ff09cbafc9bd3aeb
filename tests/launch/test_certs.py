"""`asyncpar certs`: what it makes, what it says, and what is said about mistakes."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from asyncpar.launch.cli import main
from asyncpar.net.security.issuing import CertificateOrder, issue_certificates


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["certs", *arguments], prog_name="asyncpar")


def test_init_says_what_goes_to_which_host(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    result = invoke("init", str(place), "--ranks", "3", "--hosts", "2,1", "--job", "demo", "--days", "7")
    assert result.exit_code == 0, result.output
    assert "made the certificates of job 'demo' for 3 ranks, 7 days" in result.output
    assert f"host 0: {place}/host-0\nhost 1: {place}/host-1\n" in result.output
    assert "copy each directory to its host and nowhere else" in result.output
    assert (place / "host-1" / "rank-2.key").exists()


def test_init_on_one_host_makes_up_a_name(tmp_path: Path) -> None:
    one, other = (invoke("init", str(tmp_path / name), "--ranks", "1").output.split("'")[1] for name in "ab")
    assert one.startswith("job-")
    assert one != other


def test_show_names_the_holder_the_expiry_and_the_file(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    invoke("init", str(place), "--ranks", "2", "--hosts", "2", "--job", "demo", "--days", "7")
    for directory, whose in ((place, [0, 1]), (place / "host-1", [1])):
        result = invoke("show", str(directory))
        assert result.exit_code == 0, result.output
        for rank in whose:
            (line,) = [line for line in result.output.splitlines() if line.startswith(f"rank {rank} ")]
            assert "  demo  " in line
            assert "  7 days left  " in line
            assert line.endswith(f"host-{rank}/rank-{rank}.crt")
    assert "the coordinator" not in invoke("show", str(place / "host-1")).output


def test_show_fails_when_something_has_expired(tmp_path: Path) -> None:
    order = CertificateOrder(job="demo", ranks_per_host=(1,), days=1)
    issue_certificates(tmp_path / "certs", order, now=datetime.now(UTC) - timedelta(days=2))
    result = invoke("show", str(tmp_path / "certs"))
    assert result.exit_code == 1
    assert "EXPIRED" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("init", "{}/new"), "Missing option '--ranks'"),
        (("init", "{}/new", "--ranks", "0"), "--ranks: expected at least 1, got 0"),
        (("init", "{}/new", "--ranks", "two"), "--ranks: expected a whole number, got 'two'"),
        (("init", "{}/new", "--ranks", "2", "--hosts", "3"), "do not come out even"),
        (("init", "{}/new", "--ranks", "2", "--days", "0"), "--days: expected 1..3650, got 0"),
        (("init", "{}/new", "--ranks", "2", "--job", "My Job"), "--job: expected up to 63 lower-case letters"),
        (("init", "{}", "--ranks", "2"), "it exists, and certificates are never overwritten"),
        (("init", "{}/no/new", "--ranks", "2"), "it cannot be made: No such file or directory"),
        (("init", "/proc/new", "--ranks", "2"), "/proc/new: it cannot be made: "),
        (("show", "{}"), "there are no certificates in it"),
        (("show", "{}/none"), "cannot be read: No such file or directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*(argument.format(tmp_path) for argument in arguments))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        result = invoke("init", str(tmp_path / "new"), "--ranks", "1")
    finally:
        tmp_path.chmod(0o700)
    assert result.exit_code == 2
    assert "it cannot be made: Permission denied" in result.stderr


def test_on_a_terminal_what_has_expired_is_red(tmp_path: Path) -> None:
    order = CertificateOrder(job="demo", ranks_per_host=(1,), days=1)
    issue_certificates(tmp_path / "old", order, now=datetime.now(UTC) - timedelta(days=2))
    result = CliRunner().invoke(main, ["certs", "show", str(tmp_path / "old")], color=True)
    title, *rows = result.output.splitlines()
    assert "\x1b[31m" not in title
    assert len(rows) == 3
    assert all(row.startswith("\x1b[31m") and "EXPIRED" in row for row in rows)


@pytest.mark.parametrize("command", ["init", "show"])
def test_help_fits_in_80_columns(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
