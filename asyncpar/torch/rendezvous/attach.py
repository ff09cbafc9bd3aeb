"""Attach a node to the world of the ranks that rendezvous through a store of torch."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

import asyncpar
from asyncpar.actors.runtime.gateway import ActorGateway
from asyncpar.bootstrap import (
    PIN,
    Attach,
    WorldBootstrap,
    arena_settings,
    describe_settings,
    open_agent_line,
    read_pin,
    serve_links,
)
from asyncpar.core.addresses import loopback, resolve, route_to, spell_host
from asyncpar.core.concurrency.worker import call_in_daemon_thread
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.secret import SECRET_BYTES
from asyncpar.core.observe.agent_line import AgentLine
from asyncpar.core.observe.loop_watch import BLOCKED_AFTER
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, PeerLost, PeerTimeout, UsageError
from asyncpar.net.membership.credentials import load_certificates, read_credentials, read_secret
from asyncpar.net.membership.host import host_id, host_name
from asyncpar.net.security.identity import rank_role
from asyncpar.net.transport.lane_kinds import parse_transport
from asyncpar.net.transport.rpc import Credentials
from asyncpar.torch.rendezvous.messages import Participants, RankHello, WorldIdentity, found_world
from asyncpar.torch.rendezvous.rendezvous import RendezvousAbandoned, StoreRendezvous
from asyncpar.torch.rendezvous.store import share_server, store_lease
from asyncpar.torch.signatures import CUDA_VARIABLE, cuda_path_name

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BIND = "ASYNCPAR_BIND"
_TRANSPORT = "ASYNCPAR_TRANSPORT"
_ATTEMPTS = ("TORCHELASTIC_RESTART_COUNT", "ASYNCPAR_RESTART_COUNT")
_STORE_THREAD = "asyncpar store"
_STORE_MARGIN = 10.0
"""Seconds that a store may take to answer beyond the time of the rendezvous."""

_NOTICE_SECONDS = 2.0
"""Seconds for which a failed rank tries to notify the others."""

_END_CHECKS, _END_PAUSE = 10, 0.02
"""How often, and at what intervals in seconds, a rank whose store fails checks whether another one has ended."""

_lines: weakref.WeakSet[AgentLine] = weakref.WeakSet()
"""The lines to the agent of this process, of which one at a time can be open."""


_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_CERTS = "ASYNCPAR_CERTS"
_FINGERPRINT_BYTES = 4


def attach_store(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    timeout: float,
    environment: Mapping[str, str] = os.environ,
) -> Attach:
    """Attach to the world of the ``size`` ranks that join through ``store`` within ``timeout`` seconds.

    All ranks call this with the same store, which may be used for one world after another.  Calls of the store block in
    separate threads, so ranks of one process do not wait for each other.

    Ranks authenticate to each other with the secret, and the certificates, of `asyncpar launch`, or else with the
    secret in the file that ``ASYNCPAR_SECRET_FILE`` names.  Without either, rank 0 generates a secret and distributes
    it through the store: then the world is only as secure as the store, and torch's stores are open to everybody who
    can reach them.

    Servers bind to ``ASYNCPAR_BIND``; without it to loopback if all ranks are on one host, else to the address by which
    this host reaches the host of the store.

    Raises, on every rank that has arrived, ``PeerTimeout`` naming missing ranks; ``UsageError`` if ranks differ in
    settings that must be equal, naming both, or if a rank is present twice; ``PeerLost`` if a rank has failed, with its
    message, or if the agent of `asyncpar launch` reports a rank of the job as lost.  Raises ``LaunchError`` if the
    store failed.
    """
    if size < 1:
        raise UsageError(f"world_size: expected at least 1, got {size}")
    if not 0 <= rank < size:
        raise UsageError(f"rank: expected 0..{size - 1}, got {rank}")
    if not 0.0 < timeout < math.inf:
        raise UsageError(f"timeout: expected a positive number of seconds, got {timeout}")

    async def attach(stack: AsyncExitStack) -> WorldBootstrap:
        attempt = _read_attempt(environment)
        rendezvous = StoreRendezvous(store, rank=rank, size=size, timeout=timeout, attempt=attempt)
        member = _RendezvousRank(rendezvous=rendezvous, store=store, environment=environment, rank=rank, size=size)
        if rank == 0:
            await _lease_store(stack, store, environment, timeout)
        try:
            async with asyncio.timeout(timeout + _STORE_MARGIN):
                return await member.attach(stack)
        except asyncio.CancelledError as error:
            rendezvous.stop()
            _refuse_in_thread(rendezvous, rank, error)
            raise
        except TimeoutError as error:
            rendezvous.stop()
            if isinstance(error, PeerTimeout):
                raise
            raise LaunchError(f"rank {rank}: the store has not answered for {timeout:.1f} s") from error
        except PeerLost:  # the agents notify the other ranks, or the rendezvous has done so
            rendezvous.stop()
            raise
        except Exception as error:
            await _notify(rendezvous, rank, error)
            raise

    return attach


@dataclass(frozen=True, slots=True, kw_only=True)
class _RendezvousRank:
    """The role of one rank."""

    rendezvous: StoreRendezvous
    store: Any
    environment: Mapping[str, str]
    rank: int
    size: int

    async def attach(self, stack: AsyncExitStack) -> WorldBootstrap:
        """Return the bootstrap to the world; ``stack`` stops its servers."""
        while True:
            async with AsyncExitStack() as servers:
                with suppress(RendezvousAbandoned):
                    bootstrap = await self._meet(servers)
                    stack.push_async_callback(servers.pop_all().aclose)
                    return bootstrap

    async def _meet(self, stack: AsyncExitStack) -> WorldBootstrap:
        environment = self.environment
        await self._ask(partial(self.rendezvous.enter, f"process {os.getpid()} on {host_name()}"))
        launched = LaunchEnvironment.from_mapping(environment) if LaunchEnvironment.is_in(environment) else None
        line = _open_line(stack, launched, self.rank, self.size)
        joining = self._join(stack, launched, line)
        return await (joining if line is None else line.unless_lost(joining, "the rendezvous"))

    async def _join(
        self, stack: AsyncExitStack, launched: LaunchEnvironment | None, line: AgentLine | None
    ) -> WorldBootstrap:
        """Join the world of the ranks of the rendezvous, which this rank has entered."""
        rendezvous, environment = self.rendezvous, self.environment
        transport = parse_transport(environment.get(_TRANSPORT))
        arena = arena_settings(environment, transport)
        own = read_rank_credentials(environment, launched, self.rank)
        hello = self._hello(launched, {"settings": describe_settings(transport, arena), **own.terms})
        participants = await self._ask(partial(rendezvous.wait_for_ranks, hello, own.identity()))
        credentials, gateway = own.credentials_for(participants), ActorGateway()
        bind = await call_in_daemon_thread(
            partial(choose_bind, participants, environment, self.store, self.rank), _STORE_THREAD
        )
        server, connector = await serve_links(stack, credentials, bind=bind, transport=transport, gateway=gateway)
        addresses = await self._ask(partial(rendezvous.exchange, participants, server.address))
        return WorldBootstrap(
            world=found_world(participants, addresses),
            rank=self.rank,
            connector=connector,
            join=connector.join,
            server=server,
            pin=read_pin(environment),
            lane=transport,
            secret=credentials.secret,
            arena=arena,
            gateway=gateway,
            blocked_after=BLOCKED_AFTER,
            line=line if participants.has_ranks_of_job else None,
        )

    async def _ask(self, step: Callable[[], T]) -> T:
        """Run a step of the rendezvous.  Raises ``LaunchError`` if the store fails."""
        try:
            return await call_in_daemon_thread(step, _STORE_THREAD)
        except RuntimeError as error:
            self.rendezvous.is_over = True
            lost = await _end_behind(self.rendezvous)
            if lost is not None:
                raise lost from error
            raise LaunchError(
                f"rank {self.rank}: the store that the {self.size} ranks meet through failed: {error} "
                '(if rank 0 held it and gave up waiting, init_method="asyncpar://" names the missing ranks)'
            ) from error

    def _hello(self, launched: LaunchEnvironment | None, settings: Mapping[str, str]) -> RankHello:
        name = host_name()
        terms = {
            "world_size": str(self.size),
            "version of asyncpar": asyncpar.__version__,
            "algorithms (ASYNCPAR_ALGORITHM)": self.environment.get(PIN) or "none",
            f"path of CUDA tensors ({CUDA_VARIABLE})": cuda_path_name(self.environment),
            **settings,
        }
        return RankHello(
            rank=self.rank,
            host=name if launched is None else launched.host,
            host_id=host_id(name) if launched is None else launched.host_id,
            terms=terms,
            job_rank=None if launched is None else launched.rank,
        )


async def _end_behind(rendezvous: StoreRendezvous) -> PeerLost | None:
    """Return the error for the rank that held the store, if its process ends shortly after its sockets."""
    for _ in range(_END_CHECKS):
        lost = rendezvous.find_ended()
        if lost is not None:
            return lost
        await asyncio.sleep(_END_PAUSE)
    return None


def _open_line(stack: AsyncExitStack, launched: LaunchEnvironment | None, rank: int, size: int) -> AgentLine | None:
    """Return the line to the agent if the world comprises the whole job; ``stack`` closes it.

    Return None for a world of some ranks, beside another world, and in a process that a rank has started with its
    environment.
    """
    if launched is None or (rank, size) != (launched.rank, launched.world_size):
        return None
    if not all(line.is_closed for line in _lines):
        return None
    try:
        line = open_agent_line(stack, launched)
    except UsageError as error:
        _log.debug("rank %d does not listen to the agent: %s", rank, error)
        return None
    _lines.add(line)
    return line


async def _lease_store(stack: AsyncExitStack, store: Any, environment: Mapping[str, str], seconds: float) -> None:
    """Keep the server of ``store``, if this process serves it, until no rank waits for the next world any more."""
    lease = store_lease()
    client = await call_in_daemon_thread(partial(share_server, _innermost(store), environment), _STORE_THREAD)
    if client is not None:
        lease.keep(client)
        stack.callback(partial(lease.release, client, after=seconds))


def _read_attempt(environment: Mapping[str, str]) -> int:
    """Return how often our launcher, or torch's, has restarted these ranks."""
    for name in _ATTEMPTS:
        text = environment.get(name, "")
        if text.isascii() and text.isdecimal():
            return int(text)
    return 0


def choose_bind(participants: Participants, environment: Mapping[str, str], store: dist.Store, rank: int) -> str:
    """Return the address for servers of ``rank``.  Blocks while a host name is looked up.

    Raises ``UsageError`` if the address by which other hosts reach this one is unknown.
    """
    chosen = environment.get(_BIND)
    if chosen:
        return spell_host(chosen)
    if participants.is_one_host:
        return loopback()
    known = _store_host(store) or environment.get("MASTER_ADDR")
    own = participants.hellos[rank]
    if not known:
        other = next(hello for hello in participants.hellos if hello.host_id != own.host_id)
        raise UsageError(
            f"{_BIND}: expected the address by which other hosts reach {own.host}, since rank {rank} is there and "
            f"rank {other.rank} on {other.host}, and neither the store nor MASTER_ADDR gives one"
        )
    try:
        return route_to(resolve(known))
    except OSError as error:
        raise UsageError(
            f"{_BIND}: rank {rank} on {own.host} finds no route to {known}, where ranks of other hosts are "
            f"({os_reason(error)}); set it to the address by which other hosts reach {own.host}"
        ) from error


def _store_host(store: Any) -> str | None:
    """Return the host that holds ``store``; None if no host does."""
    innermost = _innermost(store)
    return innermost.host if isinstance(innermost, dist.TCPStore) else None


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


async def _notify(rendezvous: StoreRendezvous, rank: int, error: Exception) -> None:
    """Notify the others of ``error``, if the store answers."""
    try:
        async with asyncio.timeout(_NOTICE_SECONDS):
            await call_in_daemon_thread(partial(rendezvous.refuse, error), _STORE_THREAD)
    except (RuntimeError, TimeoutError) as silence:
        _log_silence(rank, silence)


def _refuse_in_thread(rendezvous: StoreRendezvous, rank: int, error: BaseException) -> None:
    """Notify the others of ``error`` in a daemon thread, without waiting for the store."""

    def refuse() -> None:
        try:
            rendezvous.refuse(error)
        except Exception as silence:  # noqa: BLE001  # logged: nothing waits for the answer
            _log_silence(rank, silence)

    threading.Thread(target=refuse, name=_STORE_THREAD, daemon=True).start()


def _log_silence(rank: int, error: Exception) -> None:
    _log.debug("rank %d could not notify the others of its failure: %s", rank, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCredentials:
    """The credentials of one rank; ``credentials`` is None if the secret is distributed through the store.

    ``job`` is the name of the world that the credentials require, "" for any name.
    """

    credentials: Credentials | None
    job: str
    generation: int

    @property
    def terms(self) -> dict[str, str]:
        """Values that must be equal on all ranks; they reveal nothing of the secret."""
        secret, certificates = "none", "none"
        if self.credentials is not None:
            digest = hmac.digest(self.credentials.secret, b"asyncpar fingerprint", hashlib.sha256)
            secret = f"one with fingerprint {digest[:_FINGERPRINT_BYTES].hex()}"
            certificates = "none" if self.credentials.certificates is None else "some"
        return {f"secret of the job ({_SECRET_FILE})": secret, f"certificates ({_CERTS})": certificates}

    def identity(self) -> WorldIdentity:
        """Return the identity that rank 0 gives the world: a name, and a new secret if ranks have none."""
        return WorldIdentity(
            job=self.job or f"torch-{secrets.token_hex(8)}",
            generation=self.generation,
            secret="" if self.credentials is not None else secrets.token_hex(SECRET_BYTES),
        )

    def credentials_for(self, participants: Participants) -> Credentials:
        """Return the credentials for the world of ``participants``."""
        return self.credentials or Credentials(bytes.fromhex(participants.identity.secret))


def read_rank_credentials(
    environment: Mapping[str, str], launched: LaunchEnvironment | None, rank: int
) -> RankCredentials:
    """Return the credentials of ``rank`` from ``environment``.  Raises ``UsageError`` for unsuitable files."""
    if launched is not None:
        if launched.certs is not None and rank != launched.rank:
            raise UsageError(f"rank: expected {launched.rank}, for which there are certificates, got {rank}")
        return RankCredentials(credentials=read_credentials(launched), job=launched.job, generation=launched.generation)
    path, certs = environment.get(_SECRET_FILE), environment.get(_CERTS)
    if not path:
        if certs:
            raise UsageError(f"{_CERTS}: expected {_SECRET_FILE} beside it, which is not set")
        return RankCredentials(credentials=None, job="", generation=0)
    certificates = load_certificates(certs, rank_role(rank)) if certs else None
    job = "" if certificates is None else certificates.identity.job
    return RankCredentials(credentials=Credentials(read_secret(path), certificates), job=job, generation=0)
