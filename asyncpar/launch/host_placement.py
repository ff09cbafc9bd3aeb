"""The place of this host in the job: its addresses, whether it serves the coordinator, its log directory."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncpar.core.addresses import (
    check_bindable,
    check_reaches_itself,
    is_loopback,
    is_ours,
    join_address,
    loopback,
    loopback_like,
    resolve,
    route_to,
    spell_host,
    split_address,
)
from asyncpar.core.private_files import make_private_folder
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.harmless import harmless_line
from asyncpar.launch.options import LaunchOptions
from asyncpar.net.arena.limits import count_cores
from asyncpar.net.membership.host import host_id, host_name

_DEFAULT_PORT = 29400
_LOOK_UP_EVERY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlacement:
    """This host in the job.

    ``serve_at``: where to serve the coordinator (host, port), None if another host does; ``may_connect``: if another
    agent serves there already, connect to it.  ``coordinator``: its ``host:port``, "" for the address served here.
    ``bind`` is for the servers of ranks, and ``meets_at`` the address where agents meet, as numbers.
    """

    host: str
    host_id: str
    nproc: int
    serve_at: tuple[str, int] | None
    may_connect: bool
    coordinator: str
    bind: str
    meets_at: str
    master_addr: str
    job: str

    @property
    def is_private(self) -> bool:
        """Whether all agents of the job meet on this machine's loopback."""
        served = () if self.serve_at is None else (self.serve_at[0],)
        return all(is_loopback(address) for address in (self.bind, self.meets_at, *served))


def find_placement(options: LaunchOptions, *, patience: float = 0.0) -> HostPlacement:
    """Return the place of this host.  Raises ``UsageError`` when the options do not fit this machine.

    The name of the first host may take ``patience`` seconds to resolve: in Kubernetes it appears after the pods.
    """
    nproc = options.nproc or count_cores()
    host = host_name()
    job = options.job or ("default" if options.nnodes > 1 else f"job-{os.getpid()}")
    common = {"host": host, "host_id": host_id(host), "job": job}
    own = None if options.local_addr is None else _resolve("--local-addr", spell_host(options.local_addr))
    if own is not None:
        check_bindable(own, 0, what="--local-addr")
    if options.nnodes == 1:
        name, port = _endpoint(options.endpoint) if options.endpoint else (own or loopback(), 0)
        address = _resolve("--rdzv-endpoint", name)
        check_bindable(address, port, what="--rdzv-endpoint" if options.endpoint else "")
        check_reaches_itself(address)
        return HostPlacement(
            nproc=nproc,
            serve_at=(address, port),
            may_connect=False,
            coordinator="",
            bind=own or loopback_like(address),
            meets_at=address,
            master_addr=own or loopback_like(address),
            **common,
        )
    assert options.endpoint is not None
    return _among_several(options, options.endpoint, nproc, common, patience, own)


def _among_several(
    options: LaunchOptions, endpoint: str, nproc: int, common: dict[str, str], patience: float, own: str | None
) -> HostPlacement:
    name, port = _endpoint(endpoint)
    if port == 0:
        raise UsageError("--rdzv-endpoint: expected a port other than 0, since other hosts have to know it")
    address = _resolve("--rdzv-endpoint", name, within=patience)
    is_here = is_ours(address)
    bind = address if is_loopback(address) else own or _route_to(address, port)
    serves = is_here if options.node_rank is None else options.node_rank == 0
    serve_at = (address if is_here else bind, port) if serves else None
    if serve_at is not None and options.node_rank == 0:
        check_bindable(*serve_at, what="--rdzv-endpoint")
    if serve_at is not None:
        check_reaches_itself(serve_at[0])
    return HostPlacement(
        nproc=nproc,
        serve_at=serve_at,
        may_connect=options.node_rank is None,
        # a name that appears late may first resolve to a pod that is gone, so it is looked up again and again
        coordinator=join_address(name if patience and serve_at is None else address, port),
        bind=bind,
        meets_at=address,
        master_addr=name,
        **common,
    )


def make_log_directory(options: LaunchOptions) -> Path | None:
    """Return the writable directory for log files, created if necessary; a private one if needed but not named."""
    if options.log_dir is None and options.redirects.is_empty and options.tee.is_empty:
        return None
    try:
        directory = Path(options.log_dir or tempfile.mkdtemp(prefix="asyncpar-logs-")).absolute()
    except OSError as error:
        raise UsageError(f"--log-dir: a temporary directory cannot be made: {os_reason(error)}; name one") from error
    return usable_directory("--log-dir", directory, access=os.W_OK | os.X_OK)


def usable_directory(option: str, path: str | Path, *, access: int = os.R_OK | os.W_OK | os.X_OK) -> Path:
    """Return the directory ``path`` of ``option``, created if necessary.  Raises ``UsageError``."""
    directory = Path(path)
    try:
        make_private_folder(directory)
    except OSError as error:
        raise UsageError(f"{option}: {directory} cannot be made: {os_reason(error)}") from error
    if not os.access(directory, access):
        raise UsageError(f"{option}: {directory} is not writable")
    return directory


def _endpoint(text: str) -> tuple[str, int]:
    """Split ``host:port``; the port may be missing, as with torchrun."""
    return split_address(text, name="--rdzv-endpoint", default_port=_DEFAULT_PORT)


def _resolve(option: str, name: str, *, within: float = 0.0) -> str:
    try:
        return resolve_within(name, within)
    except OSError as error:
        waited = f", for {within:g} s" if within else ""
        raise UsageError(f"{option}: the host name {name!r} cannot be resolved ({os_reason(error)}){waited}") from error


def resolve_within(
    name: str,
    seconds: float,
    *,
    look_up: Callable[[str], str] = resolve,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return the address of ``name``, which may take ``seconds`` to resolve.  Blocks; raises the last ``OSError``."""
    begun, is_announced = now(), False
    while True:
        try:
            return look_up(name)
        except OSError:
            if now() - begun >= seconds:
                raise
        if not is_announced:
            is_announced = True
            sys.stderr.write(f"asyncpar launch: waiting for the host name {harmless_line(name)}\n")
        sleep(_LOOK_UP_EVERY)


def _route_to(address: str, port: int) -> str:
    """Return the source address of packets from this host to ``address``.  Sends nothing."""
    try:
        return route_to(address, port)
    except OSError as error:
        raise UsageError(f"--rdzv-endpoint: no route to {address} ({os_reason(error)}); give --local-addr") from error
