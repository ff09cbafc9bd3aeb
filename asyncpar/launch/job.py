"""One job on one host: its settings, its secret and its certificates."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn

from asyncpar.core.config.secret import Secret
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.host_placement import HostPlacement
from asyncpar.launch.options import LaunchOptions
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.vitals import SilenceLimits
from asyncpar.net.membership.credentials import (
    certified_ranks,
    create_secret,
    load_certificates,
    read_secret,
    write_secret,
)
from asyncpar.net.membership.private_directory import private_directory
from asyncpar.net.security.certificates import AUTHORITY_FILE, SECRET_FILE, Certificates, host_directory, list_roles
from asyncpar.net.security.identity import COORDINATOR, RoleKind, agent_role


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The secret of a job, and the file from which the ranks of this host read it.

    ``rendezvous_path`` is the file from which other agents on this machine read the secret until all have arrived.  An
    agent that timed out leaves it: others may still be waiting with the same secret.
    """

    secret: Secret
    path: Path
    rendezvous_path: Path | None = None

    def clear_rendezvous_path(self) -> None:
        """Remove the shared file: all agents have read it, and the next job of that name makes another secret."""
        if self.rendezvous_path is not None:
            self.rendezvous_path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"JobSecret(<secret>, {self.path})"


def check_secret_options(options: LaunchOptions, placement: HostPlacement) -> None:
    """Raise ``UsageError`` if this job needs a secret file and has none, or an unusable one."""
    if options.secret_file is not None:
        read_secret(options.secret_file)
    elif options.nnodes > 1 and not placement.is_private:
        raise UsageError(
            "--secret-file: needed when agents meet over a network; make one with "
            "(umask 077; head -c 32 /dev/urandom > secret) and copy it to every host, or use `asyncpar certs init` "
            "and --certs, which encrypts, too"
        )


def obtain_secret(
    options: LaunchOptions, placement: HostPlacement, reaper: ReaperClient, stack: ExitStack
) -> JobSecret:
    """Return the secret of this job; the private file for the ranks is removed when ``stack`` closes, or by ``reaper``.

    The secret is the content of the secret file, if there is one.  A job on this machine alone gets a new one; agents
    that meet on loopback share one through a directory that only this user can enter.
    """
    if options.secret_file is not None:
        return JobSecret(read_secret(options.secret_file), Path(options.secret_file).absolute())
    try:
        return _make_files(options, placement, reaper, stack)
    except OSError as error:
        raise LaunchError(f"the file with the job's secret cannot be made: {error}") from error


def _make_files(options: LaunchOptions, placement: HostPlacement, reaper: ReaperClient, stack: ExitStack) -> JobSecret:
    directory = Path(tempfile.mkdtemp(prefix="asyncpar-"))  # mode 0700
    reaper.add_path(directory)
    stack.callback(directory.rmdir)
    path = directory / "secret"
    if options.nnodes == 1:
        secret, rendezvous_path = create_secret(path), None
    else:
        rendezvous_path = private_directory() / _shared_name(placement)
        secret = _share(rendezvous_path)
        write_secret(path, secret)
    stack.callback(path.unlink, missing_ok=True)
    return JobSecret(secret, path, rendezvous_path)


def _shared_name(placement: HostPlacement) -> str:
    return hashlib.sha256(f"{placement.coordinator} {placement.job}".encode()).hexdigest()[:32]


def _share(path: Path) -> Secret:
    """Read the secret at ``path``, or create it if this agent is the first."""
    try:
        return create_secret(path)
    except FileExistsError:
        return read_secret(path)


_SOON = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCertificates:
    """The certificates of the agent, and of the coordinator if it is served here; ranks read theirs from ``directory``.

    ``ranks`` are the ranks that have one.
    """

    directory: Path
    agent: Certificates
    coordinator: Certificates | None
    ranks: tuple[int, ...]

    def warning(self, now: datetime) -> str | None:
        """Return a warning if they expire soon: existing connections live on then, but no new one can be made."""
        left = self.agent.expires - now
        if left > _SOON:
            return None
        return f"the certificates expire in {left / timedelta(hours=1):.1f} hours; `asyncpar certs init` makes new ones"

    def check_ranks(self, *, nnodes: int, nproc: int) -> None:
        """Raise ``UsageError`` unless there can be a certificate for each of this host's ``nproc`` ranks."""
        if nnodes > 1 or set(self.ranks).issuperset(range(nproc)):
            self.check_slots(nproc)
        else:
            self._refuse(nproc)

    def check_slots(self, nproc: int) -> None:
        """Raise ``UsageError`` unless there are ``nproc`` certificates of ranks, with any numbers."""
        if len(self.ranks) < nproc:
            self._refuse(nproc)

    def _refuse(self, nproc: int) -> NoReturn:
        raise UsageError(
            f"--certs: {self.directory} has certificates for {len(self.ranks)} ranks, this host runs {nproc}; make "
            "new ones with `asyncpar certs init`, which has to know the ranks of each host"
        )


def adopt_certificates(options: LaunchOptions) -> tuple[LaunchOptions, JobCertificates | None]:
    """Read and check this host's certificates, and return the options with the settings that they determine.

    They name the job and the host's place, so that ``--rdzv-id`` and ``--node-rank`` may be left out but not differ;
    the secret beside them is the job's, unless another is given.  Raises ``UsageError``.
    """
    if options.certs is None:
        return options, None
    directory = _host_directory(Path(options.certs).absolute(), options.node_rank, nnodes=options.nnodes)
    node_rank = _node_rank(directory, options)
    agent = load_certificates(directory, agent_role(node_rank))
    job = agent.identity.job
    if options.job not in (None, job):
        raise UsageError(
            f"--rdzv-id: expected {job!r}, the job of the certificates in {directory}, got {options.job!r}"
        )
    certificates = JobCertificates(
        directory=directory,
        agent=agent,
        coordinator=load_certificates(directory, COORDINATOR) if node_rank == 0 else None,
        ranks=certified_ranks(directory),
    )
    secret = directory / SECRET_FILE
    secret_file = options.secret_file or (str(secret) if secret.exists() else None)
    return replace(options, job=job, node_rank=node_rank, secret_file=secret_file), certificates


def read_host_certificates(certs: str, *, node_rank: int | None = None) -> JobCertificates:
    """Return the certificates of this host's agent in a group of agents, where it serves.  Raises ``UsageError``.

    ``certs`` is the directory of this host, or of all hosts, of which this is number ``node_rank``.
    """
    from asyncpar.net.security.reading import check_agent

    directory = _host_directory(Path(certs).absolute(), node_rank, nnodes=2)
    agent = load_certificates(directory, agent_role(_certified_host(directory, node_rank)))
    check_agent(agent)
    return JobCertificates(directory=directory, agent=agent, coordinator=None, ranks=certified_ranks(directory))


def _host_directory(directory: Path, node_rank: int | None, *, nnodes: int) -> Path:
    """Return the directory with this host's files: ``directory`` itself, or the host's own one below it."""
    if not directory.is_dir():
        raise UsageError(f"--certs: {directory} is not a directory; make it with `asyncpar certs init`")
    if (directory / AUTHORITY_FILE).exists():
        return directory
    if not (directory / host_directory(0)).exists():
        raise UsageError(f"--certs: {directory} holds no certificates ({AUTHORITY_FILE} is missing)")
    if node_rank is None and nnodes > 1:
        raise UsageError(
            f"--certs: {directory} is for several hosts; name the directory of this one in it, or give --node-rank"
        )
    home = directory / host_directory(node_rank or 0)
    if not home.is_dir():
        raise UsageError(f"--certs: {directory} has nothing for host {node_rank or 0}")
    return home


def _node_rank(directory: Path, options: LaunchOptions) -> int:
    """Return the place of the host to which ``directory`` belongs."""
    host = _certified_host(directory, options.node_rank)
    if host >= options.nnodes:
        raise UsageError(f"--certs: {directory} is for host {host}, and --nnodes is {options.nnodes}")
    return host


def _certified_host(directory: Path, node_rank: int | None) -> int:
    """Return the number of the host to which ``directory`` belongs; it is ``node_rank`` if that is given."""
    hosts = [role.number for role in list_roles(directory) if role.kind is RoleKind.AGENT]
    if len(hosts) != 1 or hosts[0] is None:
        raise UsageError(f"--certs: expected the certificate of one agent in {directory}, got {len(hosts)}")
    host = hosts[0]
    if node_rank not in (None, host):
        raise UsageError(f"--node-rank: expected {host}, the host of the certificates in {directory}, got {node_rank}")
    return host


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """Settings of an agent; ``environment`` is inherited by its ranks.

    ``certificates`` None: traffic between hosts is authenticated by the secret, but not encrypted.
    """

    options: LaunchOptions
    placement: HostPlacement
    command: tuple[str, ...]
    log_directory: Path | None
    environment: Mapping[str, str]
    certificates: JobCertificates | None = None

    @property
    def silence(self) -> SilenceLimits:
        """When ranks that give no sign of life are given up."""
        given = self.options
        return SilenceLimits(silent=given.silent_after, stopped=given.stopped_after, busy=given.busy_after)
