"""Making the certificates of a job, read back with the library that others would read them with."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from asyncpar.errors import UsageError
from asyncpar.net.security.issuing import CertificateOrder, issue_certificates, share_ranks

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Path:
    order = CertificateOrder(job="demo", ranks_per_host=(2, 1), days=5)
    issue_certificates(tmp_path / "certs", order, now=NOW)
    return tmp_path / "certs"


def test_each_host_gets_what_its_own_parties_need_and_nothing_else(two_hosts: Path) -> None:
    both = {"ca.crt", "secret"}
    first = {"agent-0", "coordinator", "rank-0", "rank-1"}
    second = {"agent-1", "rank-2"}
    for home, labels in (("host-0", first), ("host-1", second)):
        files = {f"{label}.{kind}" for label in labels for kind in ("crt", "key")}
        assert set(os.listdir(two_hosts / home)) == both | files
    for name in both:
        assert (two_hosts / "host-0" / name).read_bytes() == (two_hosts / "host-1" / name).read_bytes()


def test_the_directory_of_one_host_has_no_others_in_it(tmp_path: Path) -> None:
    homes = issue_certificates(tmp_path / "c", CertificateOrder(job="demo", ranks_per_host=(1,)), now=NOW)
    assert homes == [tmp_path / "c"]
    assert (tmp_path / "c" / "rank-0.crt").exists()


def test_keys_and_the_secret_are_for_this_user_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        homes = issue_certificates(tmp_path / "c", CertificateOrder(job="demo", ranks_per_host=(1, 1)), now=NOW)
    finally:
        os.umask(before)
    for home in homes:
        assert (mode(home), mode(home.parent)) == (0o700, 0o700)
        for path in home.iterdir():
            assert mode(path) == (0o644 if path.suffix == ".crt" else 0o600), path


def test_a_certificate_names_its_party_and_is_signed_by_the_job(two_hosts: Path) -> None:
    home = two_hosts / "host-1"
    certificate, authority = load(home / "rank-2.crt"), load(home / "ca.crt")
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["asyncpar://demo/rank/2"]
    assert names.get_values_for_type(x509.DNSName) == ["rank-2.demo.asyncpar"]
    assert certificate.not_valid_after_utc == NOW + timedelta(days=5)
    assert certificate.not_valid_before_utc < NOW, "clocks of hosts differ"
    key = serialization.load_pem_private_key((home / "rank-2.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == certificate.public_key()


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("rank-0", {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        ("agent-0", {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        ("coordinator", {ExtendedKeyUsageOID.SERVER_AUTH}),
    ],
)
def test_a_certificate_is_good_for_what_its_party_does(
    two_hosts: Path, name: str, uses: set[x509.ObjectIdentifier]
) -> None:
    certificate = load(two_hosts / "host-0" / f"{name}.crt")
    assert set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == uses
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_key_of_the_authority_is_nowhere(two_hosts: Path) -> None:
    authority = load(two_hosts / "host-0" / "ca.crt")
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for path in two_hosts.rglob("*.key"):
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        assert key.public_key() != authority.public_key()


def test_an_existing_directory_is_never_written_into(two_hosts: Path) -> None:
    before = (two_hosts / "host-0" / "rank-0.key").read_bytes()
    order = CertificateOrder(job="demo", ranks_per_host=(1,))
    with pytest.raises(UsageError, match="it exists, and certificates are never overwritten"):
        issue_certificates(two_hosts, order, now=NOW)
    assert (two_hosts / "host-0" / "rank-0.key").read_bytes() == before


def test_what_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UsageError, match="it cannot be made: No space left on device"):
        issue_certificates(tmp_path / "c", CertificateOrder(job="demo", ranks_per_host=(1,)), now=NOW)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing/c: it cannot be made: No such file or directory"):
        issue_certificates(tmp_path / "missing" / "c", CertificateOrder(job="d", ranks_per_host=(1,)), now=NOW)


@pytest.mark.parametrize(
    ("ranks", "hosts", "shares"), [(4, None, (4,)), (4, "2", (2, 2)), (6, "4,2", (4, 2)), (3, "3", (1, 1, 1))]
)
def test_ranks_are_shared_among_hosts(ranks: int, hosts: str | None, shares: tuple[int, ...]) -> None:
    assert share_ranks(ranks, hosts) == shares


@pytest.mark.parametrize(
    ("ranks", "hosts", "message"),
    [
        (0, None, "--ranks: expected at least 1, got 0"),
        (4, "3", "--hosts: 4 ranks on 3 hosts do not come out even"),
        (4, "0", "--hosts: expected how many hosts"),
        (4, "two", "--hosts: expected how many hosts"),
        (4, "2,", "--hosts: expected how many hosts"),
        (4, "2,1", "--hosts: expected shares that add up to --ranks 4, got 2,1"),
        (4, "5", "do not come out even"),
    ],
)
def test_shares_that_do_not_fit_are_refused(ranks: int, hosts: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        share_ranks(ranks, hosts)


@pytest.mark.parametrize(("days", "ranks"), [(0, 1), (3651, 1), (1, 70_000)])
def test_orders_out_of_range_are_refused(days: int, ranks: int) -> None:
    with pytest.raises(UsageError, match=r"expected 1\.\."):
        CertificateOrder(job="demo", ranks_per_host=(ranks,), days=days)
