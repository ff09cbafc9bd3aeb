"""Which certificates a host uses, and what else they settle: the job's name, the host's place, the secret."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from asyncpar.errors import UsageError
from asyncpar.launch.options import LaunchOptions
from asyncpar.net.membership.credentials import load_certificates
from asyncpar.net.security.certificates import AUTHORITY_FILE, SECRET_FILE, Certificates, host_directory, list_roles
from asyncpar.net.security.identity import COORDINATOR, RoleKind, agent_role

_SOON = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCertificates:
    """The certificates of the agent, and of the coordinator if it is served here; ranks read theirs in ``directory``.

    ``ranks`` are those that have one.
    """

    directory: Path
    agent: Certificates
    coordinator: Certificates | None
    ranks: tuple[int, ...]

    def warning(self, now: datetime) -> str | None:
        """Say that they expire soon, if they do: connections live on then, but no new one can be made."""
        left = self.agent.expires - now
        if left > _SOON:
            return None
        return f"the certificates expire in {left / timedelta(hours=1):.1f} hours; `asyncpar certs init` makes new ones"

    def check_ranks(self, *, nnodes: int, nproc: int) -> None:
        """Raise ``UsageError`` unless there can be a certificate for each of this host's ``nproc`` ranks."""
        is_enough = set(self.ranks).issuperset(range(nproc)) if nnodes == 1 else len(self.ranks) >= nproc
        if not is_enough:
            raise UsageError(
                f"--certs: {self.directory} has certificates for {len(self.ranks)} ranks, this host runs {nproc}; make "
                "new ones with `asyncpar certs init`, which has to know the ranks of each host"
            )


def adopt_certificates(options: LaunchOptions) -> tuple[LaunchOptions, JobCertificates | None]:
    """Read and check this host's certificates, and return the options with what they settle.

    They name the job and the host's place, so that ``--rdzv-id`` and ``--node-rank`` may be left out but not differ;
    the secret beside them is the job's, unless another is given.  Raises ``UsageError``.
    """
    if options.certs is None:
        return options, None
    directory = _host_directory(Path(options.certs).absolute(), options)
    node_rank = _node_rank(directory, options)
    agent = load_certificates(directory, agent_role(node_rank))
    job = agent.identity.job
    if options.job not in (None, job):
        raise UsageError(
            f"--rdzv-id: expected {job!r}, the job of the certificates in {directory}, got {options.job!r}"
        )
    ranks = (role.number for role in list_roles(directory) if role.kind is RoleKind.RANK)
    certificates = JobCertificates(
        directory=directory,
        agent=agent,
        coordinator=load_certificates(directory, COORDINATOR) if node_rank == 0 else None,
        ranks=tuple(number for number in ranks if number is not None),
    )
    secret = directory / SECRET_FILE
    secret_file = options.secret_file or (str(secret) if secret.exists() else None)
    return replace(options, job=job, node_rank=node_rank, secret_file=secret_file), certificates


def _host_directory(directory: Path, options: LaunchOptions) -> Path:
    """Return where this host's files are: in ``directory`` itself, or in the one of this host below it."""
    if not directory.is_dir():
        raise UsageError(f"--certs: {directory} is not a directory; make it with `asyncpar certs init`")
    if (directory / AUTHORITY_FILE).exists():
        return directory
    if not (directory / host_directory(0)).exists():
        raise UsageError(f"--certs: {directory} holds no certificates ({AUTHORITY_FILE} is missing)")
    if options.node_rank is None and options.nnodes > 1:
        raise UsageError(
            f"--certs: {directory} is for several hosts; name the directory of this one in it, or give --node-rank"
        )
    home = directory / host_directory(options.node_rank or 0)
    if not home.is_dir():
        raise UsageError(f"--certs: {directory} has nothing for host {options.node_rank or 0}")
    return home


def _node_rank(directory: Path, options: LaunchOptions) -> int:
    """Return the place of the host whose directory it is."""
    hosts = [role.number for role in list_roles(directory) if role.kind is RoleKind.AGENT]
    if len(hosts) != 1 or hosts[0] is None:
        raise UsageError(f"--certs: expected the certificate of one agent in {directory}, got {len(hosts)}")
    host = hosts[0]
    if options.node_rank not in (None, host):
        raise UsageError(
            f"--node-rank: expected {host}, the host of the certificates in {directory}, got {options.node_rank}"
        )
    if host >= options.nnodes:
        raise UsageError(f"--certs: {directory} is for host {host}, and --nnodes is {options.nnodes}")
    return host
