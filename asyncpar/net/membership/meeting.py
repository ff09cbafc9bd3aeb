"""The meeting of ranks started by another launcher: rank 0 serves the rendezvous, and announces its address.

It does so in a *note*: a file that only this user can read, in a directory that all ranks see.  Its name is made from
the job's name and the address; its content is the job's secret.  Nothing has to be chosen beforehand, so no two jobs of
a host compete for a port.  A note left by a killed job has an address where nobody answers: ranks wait until rank 0
replaces it.  If ranks share no directory, ``ASYNCPAR_SECRET_FILE`` and ``MASTER_ADDR`` (and ``MASTER_PORT``) provide
the same information.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.addresses import (
    check_reaches_itself,
    join_address,
    loopback,
    resolve,
    route_out,
    route_to,
    spell_host,
    split_address,
)
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.rank_place import ForeignPlace
from asyncpar.core.config.secret import SECRET_BYTES, Secret
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, UsageError
from asyncpar.net.membership.credentials import read_secret, write_secret
from asyncpar.net.membership.host import host_id, host_name
from asyncpar.net.membership.private_directory import make_private, private_directory
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer

_log = logging.getLogger(__name__)
_DEFAULT_PORT = "29400"
_DEFAULT_TIMEOUT = "300"
_DIRECTORY = "ASYNCPAR_MEETING_DIR"
_BIND = "ASYNCPAR_BIND"
_ANY_PORT = 9
_TRIED_HOSTS = 3
_LOOK_EVERY = 0.05
_LOOK_LATER = 0.5
_CONNECT_SECONDS = 5.0
_REPORT_AFTER = 10.0
_NO_ROUTE = "192.0.2.1"
"""An address reserved for documentation: the way there is the default route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """The launched world that was found; ``note`` is the file of rank 0, to be removed once all ranks are there."""

    environment: LaunchEnvironment
    note: Path | None = None

    def close(self) -> None:
        """Remove the note: all have read it."""
        if self.note is not None:
            self.note.unlink(missing_ok=True)


async def meet(
    stack: AsyncExitStack, place: ForeignPlace, environment: Mapping[str, str], *, serial: int = 0
) -> MeetingPoint:
    """Return the point at which the rank at ``place`` joins its world; rank 0 serves it until ``stack`` closes.

    ``serial`` numbers the worlds that this process makes one after another.  Raises ``UsageError`` for unusable
    settings, and ``LaunchError`` if rank 0 has not announced its address within ``ASYNCPAR_RENDEZVOUS_TIMEOUT``
    seconds.
    """
    if environment.get("ASYNCPAR_CERTS"):
        raise UsageError(f"ASYNCPAR_CERTS: certificates need `asyncpar launch`; {place.launcher} has started this rank")
    if place.local_world_size > 1 and not environment.get(_BIND):
        check_reaches_itself(loopback(), what=f"rank {place.rank}")
    timeout = _seconds(environment.get("ASYNCPAR_RENDEZVOUS_TIMEOUT") or _DEFAULT_TIMEOUT)
    job = f"{environment.get('ASYNCPAR_JOB') or place.job or _mark_of_parents(place)}-{serial}"
    path, address = environment.get("ASYNCPAR_SECRET_FILE"), environment.get("MASTER_ADDR")
    finish = _Finish(place, environment, job, timeout)
    if path and address:
        at = join_address(address, _port(environment.get("MASTER_PORT") or _DEFAULT_PORT))
        bind = await _find_bind(place, environment, towards=at)
        if place.rank == 0:
            server = await _serve(stack, place, job, Credentials(read_secret(path)), bind, split_address(at)[1])
            at = server.address
        return MeetingPoint(environment=finish(at, path, bind))
    directory = _directory(place, environment)
    if place.rank == 0:
        return await _call_others(stack, place, environment, directory, finish)
    note, at = await _find_note(directory, finish)
    return MeetingPoint(environment=finish(at, str(note), await _find_bind(place, environment, towards=at)))


@dataclass(frozen=True, slots=True)
class _Finish:
    """Combines the launcher's information with that of the meeting."""

    place: ForeignPlace
    environment: Mapping[str, str]
    job: str
    timeout: float

    def __call__(self, rendezvous: str, secret_file: str, bind: str) -> LaunchEnvironment:
        place, host = self.place, self.place.host or host_name()
        name, port = split_address(rendezvous)
        return LaunchEnvironment(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            group_rank=place.group_rank,
            group_world_size=place.group_world_size,
            master_addr=name,
            master_port=port,
            rendezvous=rendezvous,
            secret_file=secret_file,
            job=self.job,
            generation=place.generation,
            restart_count=place.restart_count,
            host=host,
            host_id=host_id(host),
            bind=bind,
            timeout=self.timeout,
            transport=self.environment.get("ASYNCPAR_TRANSPORT") or None,
        )


async def _call_others(
    stack: AsyncExitStack, place: ForeignPlace, environment: Mapping[str, str], directory: Path, finish: _Finish
) -> MeetingPoint:
    """Serve the rendezvous and write the note with its address."""
    bind = await _find_bind(place, environment, towards=None)
    secret = Secret(secrets.token_bytes(SECRET_BYTES))
    server = await _serve(stack, place, finish.job, Credentials(secret), bind, 0)
    note = directory / f"{_stem(finish.job)}{server.address}"
    try:
        for old in _notes(directory, finish.job):
            old.unlink(missing_ok=True)
        write_secret(note, secret)
    except OSError as error:
        raise LaunchError(f"rank 0 cannot write its address to {note}: {os_reason(error)}") from error
    stack.callback(note.unlink, missing_ok=True)
    return MeetingPoint(environment=finish(server.address, str(note), bind), note=note)


async def _serve(
    stack: AsyncExitStack, place: ForeignPlace, job: str, credentials: Credentials, bind: str, port: int
) -> RpcServer:
    server = RpcServer(credentials, bind=bind, port=port)
    service = RendezvousService(job=job, world_size=place.world_size)
    membership_pb2_grpc.add_RendezvousServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    stack.push_async_callback(server.stop)
    return server


async def _find_note(directory: Path, finish: _Finish) -> tuple[Path, str]:
    """Wait for the note of a rank 0 that answers; return it and the address."""
    loop = asyncio.get_running_loop()
    begun, is_reported, trouble = loop.time(), False, "there is none"
    place = finish.place
    while (waited := loop.time() - begun) < finish.timeout:
        for note in _notes(directory, finish.job):
            address = note.name.removeprefix(_stem(finish.job))
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(*split_address(address))
            except (OSError, TimeoutError) as error:
                trouble = f"{address}, which is in it, does not answer ({str(error) or 'in time'})"
                continue
            await close_stream(writer)
            return note, address
        if waited > _REPORT_AFTER and not is_reported:
            is_reported = True
            _log.warning(
                "rank %d has waited %.0f s for the note of rank 0 in %s: %s", place.rank, waited, directory, trouble
            )
        await asyncio.sleep(_LOOK_EVERY if waited < _REPORT_AFTER else _LOOK_LATER)
    raise LaunchError(
        f"rank {place.rank}: rank 0 did not publish its address in {directory} for {finish.timeout:g} s: {trouble}; is "
        f"the directory the same on all hosts? Name one that is in {_DIRECTORY}, or set ASYNCPAR_SECRET_FILE and "
        "MASTER_ADDR"
    )


def _stem(job: str) -> str:
    return f"{hashlib.sha256(job.encode()).hexdigest()[:32]}@"


def _notes(directory: Path, job: str) -> list[Path]:
    """Return the notes of the job, except one that is still being written (its name is longer).

    Listing makes an NFS client query its server, which opening a file may not.
    """
    stem = _stem(job)
    return [
        directory / name
        for name in os.listdir(directory)
        if name.startswith(stem) and name.rpartition(":")[2].isdecimal()
    ]


def _directory(place: ForeignPlace, environment: Mapping[str, str]) -> Path:
    """Return the directory of notes: on one host this user's own, else one below the home, which hosts often share."""
    named = environment.get(_DIRECTORY)
    if named:
        return make_private(Path(named), _DIRECTORY)
    if place.local_world_size == place.world_size:
        return private_directory()
    return make_private(Path(environment.get("HOME") or "~").expanduser() / ".asyncpar" / "meetings", _DIRECTORY)


async def _find_bind(place: ForeignPlace, environment: Mapping[str, str], *, towards: str | None) -> str:
    """Return the address by which other hosts reach this one; loopback if there is no other.

    ``towards`` is an address of the job, if one is known; otherwise the route to the other hosts decides, by their
    names.
    """
    chosen = environment.get(_BIND)
    if chosen:
        return spell_host(chosen)
    if place.local_world_size == place.world_size:
        return loopback()
    known = [split_address(towards)[0]] if towards else [name for name in place.hosts if name != place.host]
    for name in known[:_TRIED_HOSTS]:
        with contextlib.suppress(OSError):
            return route_to(await asyncio.to_thread(resolve, name))
    with contextlib.suppress(OSError):
        return route_out()
    raise UsageError(
        f"{_BIND}: rank {place.rank} finds no way to the other hosts ({', '.join(known[:_TRIED_HOSTS]) or 'unknown'}); "
        "set it to the address by which they reach this one"
    )


def _mark_of_parents(place: ForeignPlace) -> str:
    """Return the name of a Hydra job, from the command line of the proxy that starts the ranks of this host.

    It contains the address of ``mpiexec`` itself, which is the same on all hosts.
    """
    process = os.getppid()
    while process > 1:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
        if "--control-port" in words[:-1]:
            local = f"-{process}" if place.local_world_size == place.world_size else ""
            return f"hydra-{words[words.index('--control-port') + 1]}{local}"
        process = parent
    raise UsageError(
        f"ASYNCPAR_JOB: {place.launcher} gives the job no name; set it to one that is the same on all ranks, and that "
        "no other job has"
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"ASYNCPAR_RENDEZVOUS_TIMEOUT: expected a number of seconds, got {text!r}") from error


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        raise UsageError(f"MASTER_PORT: expected 1..65535, got {text!r}")
    return int(text)
