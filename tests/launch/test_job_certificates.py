"""Certificates of a host are checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.launch.job import JobCertificates, adopt_certificates
from asyncpar.launch.options import LaunchOptions
from asyncpar.net.security.identity import COORDINATOR, agent_role
from asyncpar.net.security.issuing import CertificateOrder, issue_certificates

NOW = datetime.now(UTC)


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """Return a directory for two hosts with two ranks each."""
    issue_certificates(tmp_path / "certs", CertificateOrder(job="demo", ranks_per_host=(2, 2)), now=NOW)
    return tmp_path / "certs"


def options(certs: Path, **changes: object) -> LaunchOptions:
    whole = LaunchOptions(program="x", nnodes=2, endpoint="h:1", certs=str(certs))
    return replace(whole, **changes)  # type: ignore[arg-type]


def adopt(certs: Path, **changes: object) -> tuple[LaunchOptions, JobCertificates]:
    adopted, certificates = adopt_certificates(options(certs, **changes))
    assert certificates is not None
    return adopted, certificates


def test_without_certificates_nothing_changes() -> None:
    plain = LaunchOptions(program="x")
    assert adopt_certificates(plain) == (plain, None)


def test_the_directory_of_a_host_settles_its_place_the_job_and_the_secret(certs: Path) -> None:
    adopted, certificates = adopt(certs / "host-1")
    assert (adopted.node_rank, adopted.job, adopted.secret_file) == (1, "demo", str(certs / "host-1" / "secret"))
    assert certificates.agent.identity.role == agent_role(1)
    assert certificates.coordinator is None
    assert certificates.ranks == (2, 3)


def test_the_first_host_has_the_coordinators_too(certs: Path) -> None:
    _, certificates = adopt(certs / "host-0")
    assert certificates.coordinator is not None
    assert certificates.coordinator.identity.role == COORDINATOR


def test_in_the_directory_of_all_hosts_the_node_rank_finds_ours(certs: Path) -> None:
    assert adopt(certs, node_rank=1)[1].directory == certs / "host-1"


def test_another_secret_and_equal_names_may_be_given(certs: Path) -> None:
    adopted, _ = adopt(certs / "host-1", secret_file="/s", job="demo", node_rank=1)
    assert adopted.secret_file == "/s"
    (certs / "host-1" / "secret").unlink()
    assert adopt(certs / "host-1")[0].secret_file is None


@pytest.mark.parametrize(
    ("home", "changes", "message"),
    [
        ("nowhere", {}, "--certs: .*nowhere is not a directory; make it with `asyncpar certs init`"),
        (".", {}, "is for several hosts; name the directory of this one in it, or give --node-rank"),
        (".", {"nnodes": 3, "node_rank": 2}, "has nothing for host 2"),
        ("host-1", {"node_rank": 0}, "--node-rank: expected 1, the host of the certificates in .*, got 0"),
        ("host-1", {"nnodes": 1}, "is for host 1, and --nnodes is 1"),
        ("host-0", {"job": "other"}, "--rdzv-id: expected 'demo', the job of the certificates in .*, got 'other'"),
    ],
)
def test_what_does_not_fit_is_named(certs: Path, home: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        adopt_certificates(options(certs / home, **changes))


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no certificates \(ca\.crt is missing\)"):
        adopt_certificates(options(tmp_path))


def test_expired_certificates_are_refused_before_anything_starts(tmp_path: Path) -> None:
    order = CertificateOrder(job="demo", ranks_per_host=(1,), days=1)
    issue_certificates(tmp_path / "old", order, now=NOW - timedelta(days=2))
    with pytest.raises(UsageError, match=r"expired on .*; make new ones with `asyncpar certs init`"):
        adopt_certificates(options(tmp_path / "old", nnodes=1))


@pytest.mark.parametrize(("nnodes", "nproc"), [(2, 3), (1, 3)])
def test_certificates_for_fewer_ranks_than_there_are_are_refused(certs: Path, nnodes: int, nproc: int) -> None:
    _, certificates = adopt(certs / "host-0")
    certificates.check_ranks(nnodes=nnodes, nproc=2)
    with pytest.raises(UsageError, match="has certificates for 2 ranks, this host runs 3"):
        certificates.check_ranks(nnodes=nnodes, nproc=nproc)


def test_certificates_that_expire_soon_are_warned_of(certs: Path) -> None:
    _, certificates = adopt(certs / "host-0")
    assert certificates.warning(NOW) is None
    assert certificates.warning(NOW + timedelta(days=89, hours=21)) == (
        "the certificates expire in 3.0 hours; `asyncpar certs init` makes new ones"
    )


def test_a_directory_with_two_hosts_mixed_is_refused(certs: Path) -> None:
    for name in os.listdir(certs / "host-1"):
        (certs / "host-1" / name).rename(certs / "host-0" / name)
    with pytest.raises(UsageError, match=r"expected the certificate of one agent in .*, got 2"):
        adopt_certificates(options(certs / "host-0"))
