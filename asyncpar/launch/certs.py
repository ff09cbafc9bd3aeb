"""`asyncpar certs`: make the certificates of a job, and list those in a directory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from asyncpar.errors import UsageError
from asyncpar.launch.command_line import OneLineCommand, UncutGroup, exit_with, option, print_line
from asyncpar.launch.options import parse_count
from asyncpar.net.security.certificates import certificate_file, list_roles


@click.group(cls=UncutGroup)
def certs() -> None:
    """Certificates, for encrypted traffic between hosts."""


@certs.command(cls=OneLineCommand)
@click.argument("directory", metavar="DIR")
@option("--ranks", metavar="N", required=True, help="Ranks of the job, on all hosts together.")
@option("--hosts", metavar="H", default=None, help="Number of hosts, or the ranks of each: 4,2.  [1]")
@option("--job", metavar="NAME", default=None, help="Name of the job, in every certificate.  [random]")
@option("--days", metavar="D", default="90", help="How long they are valid.  [90]")
def init(directory: str, ranks: str, hosts: str | None, job: str | None, days: str) -> None:
    """Make DIR with a secret and certificates for a job.

    One certificate for each rank, for the agent of each host and for the
    coordinator, signed by an authority whose key is not kept: no one can
    make more of them.  For more ranks, or after a theft, make a new DIR.

    On one host, DIR is for `asyncpar launch --certs DIR`.  On several, copy
    DIR/host-K to host K and to no other, over a channel that you trust (scp),
    and delete it here:

    \b
    asyncpar certs init certs --ranks 8 --hosts 2
    scp -rp certs/host-1 second-host:certs
    asyncpar launch --nnodes 2 --certs certs/host-0 ...    # on the first
    asyncpar launch --nnodes 2 --certs certs ...           # on the second
    """
    exit_with("certs init", lambda: _init(Path(directory), ranks, hosts, job, days))


@certs.command(cls=OneLineCommand)
@click.argument("directory", metavar="DIR")
def show(directory: str) -> None:
    """Tell whose certificates are in DIR, and until when they are valid.

    Exits with code 1 if one of them has expired.
    """
    exit_with("certs show", lambda: _show(Path(directory)))


def _init(directory: Path, ranks: str, hosts: str | None, job: str | None, days: str) -> int:
    from asyncpar.net.security.issuing import CertificateOrder, issue_certificates, share_ranks

    order = CertificateOrder(
        job=f"job-{secrets.token_hex(4)}" if job is None else job,
        ranks_per_host=share_ranks(parse_count("--ranks", ranks), hosts),
        days=parse_count("--days", days),
    )
    homes = issue_certificates(directory, order, now=datetime.now(UTC))
    print_line(f"made the certificates of job {order.job!r} for {sum(order.ranks_per_host)} ranks, {order.days} days")
    for host, home in enumerate(homes):
        print_line(f"host {host}: {home}")
    if len(homes) > 1:
        print_line("copy each directory to its host and nowhere else; it holds private keys and the job's secret")
    return 0


@dataclass(frozen=True, slots=True)
class _CertificateRow:
    who: str
    job: str
    expires: datetime
    path: Path

    def cells(self, now: datetime) -> tuple[str, str, str, str, str]:
        days = (self.expires - now).total_seconds() / 86_400
        left = "EXPIRED" if days <= 0 else f"{days:.0f} days left" if days >= 1 else "less than a day left"
        return self.who, self.job, f"{self.expires:%Y-%m-%d %H:%M} UTC", left, str(self.path)


def _show(directory: Path) -> int:
    now = datetime.now(UTC)
    rows = [row for home in _homes(directory) for row in _rows(home)]
    if not rows:
        raise UsageError(f"{directory}: there are no certificates in it")
    cells = [("who", "job", "valid until", "", "file"), *(row.cells(now) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print_line(line, color="red" if row[3] == "EXPIRED" else None)
    return 1 if any(row.expires <= now for row in rows) else 0


def _homes(directory: Path) -> list[Path]:
    """Return the directories with certificates: this one, or one for each host in it."""
    if list_roles(directory):
        return [directory]
    return sorted((path for path in directory.glob("host-*") if path.is_dir()), key=lambda path: (len(path.name), path))


def _rows(home: Path) -> list[_CertificateRow]:
    from asyncpar.net.security.reading import identity_of, read_certificate

    rows = []
    for role in list_roles(home):
        path = home / certificate_file(role)
        certificate = read_certificate(path)
        identity = identity_of(certificate)
        who, job = ("nobody of ours", "?") if identity is None else (str(identity.role), identity.job)
        rows.append(_CertificateRow(who, job, certificate.not_valid_after_utc, path))
    return rows
