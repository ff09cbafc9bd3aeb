"""Mutual TLS over real sockets: who gets in, and what those who do not are told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar.errors import AuthenticationError
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import COORDINATOR, Role, agent_role, rank_role
from asyncpar.net.security.issuing import Authority
from asyncpar.net.transport import tls_probe
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel
from asyncpar.net.transport.tls_probe import check_tls
from tests.net.security.parties import authority_now, authority_of_the_future, authority_of_the_past, certify

SECRET = bytes(range(32))


class Parties:
    """Gives out credentials, by default all of one authority."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.authority = authority_now()

    def certificates(self, role: Role, authority: Authority | None = None) -> Certificates:
        self._count += 1
        return certify(authority or self.authority, role, self._directory / str(self._count))

    def credentials(self, role: Role, authority: Authority | None = None) -> Credentials:
        return Credentials(SECRET, self.certificates(role, authority))


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


@asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[str]:
    server = RpcServer(credentials)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace=0)


async def check_health(address: str, credentials: Credentials, peer: Role) -> grpc.StatusCode:
    async with open_channel(address, credentials, peer=peer) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_parties_of_one_job_talk_and_nothing_is_wrong_with_that(parties: Parties) -> None:
    own = parties.credentials(rank_role(0))
    async with serving(parties.credentials(rank_role(2))) as address:
        assert await check_health(address, own, rank_role(2)) is grpc.StatusCode.OK
        await check_tls(address, own, rank_role(2))


async def test_a_certificate_does_not_stand_in_for_the_token(parties: Parties) -> None:
    thief = Credentials(os.urandom(32), parties.certificates(rank_role(1)))
    async with serving(parties.credentials(rank_role(0))) as address:
        assert await check_health(address, thief, rank_role(0)) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("claimed", "shown"), [(rank_role(3), rank_role(2)), (COORDINATOR, agent_role(0))])
async def test_a_server_cannot_pass_for_another(parties: Parties, claimed: Role, shown: Role) -> None:
    own = parties.credentials(rank_role(0))
    async with serving(parties.credentials(shown)) as address:
        assert await check_health(address, own, claimed) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(AuthenticationError) as caught:
            await check_tls(address, own, claimed)
    if shown == rank_role(2):  # an agent's certificate is not even one for servers
        assert f"{claimed} at {address} shows the certificate of {shown} of job 'demo', not of {claimed}" in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("authority", "message"),
    [
        (authority_now, "is not of this side's authority"),
        (authority_of_the_past, "has expired; make new ones"),
        (authority_of_the_future, "is not valid yet; set the clocks"),
    ],
    ids=["another authority", "expired", "not yet valid"],
)
async def test_a_server_whose_certificate_will_not_do_is_named_with_the_reason(
    parties: Parties, authority: Callable[[], Authority], message: str
) -> None:
    other = authority()
    server = parties.credentials(rank_role(2), other)
    own = parties.credentials(rank_role(0), None if authority is authority_now else other)
    async with serving(server) as address:
        assert await check_health(address, own, rank_role(2)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(AuthenticationError, match=f"rank 2 at {address} shows a certificate that {message}"):
            await check_tls(address, own, rank_role(2))


async def test_a_client_whose_certificate_will_not_do_learns_that_it_is_refused(parties: Parties) -> None:
    """It trusts the server, which does not trust it: only its own certificate is of another authority."""
    stranger = parties.certificates(rank_role(0), authority_now())
    own = Credentials(SECRET, replace(stranger, authority=parties.authority.certificate))
    async with serving(parties.credentials(rank_role(2))) as address:
        assert await check_health(address, own, rank_role(2)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(AuthenticationError, match="did not accept our certificate, of rank 0 of job 'demo'"):
            await check_tls(address, own, rank_role(2))


async def test_a_client_without_certificates_is_advised_to_get_some(parties: Parties) -> None:
    own = Credentials(SECRET)
    async with serving(parties.credentials(rank_role(2))) as address:
        assert await check_health(address, own, rank_role(2)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(AuthenticationError, match="wants certificates, and this side has none; give all hosts --c"):
            await check_tls(address, own, rank_role(2))


async def test_a_server_without_certificates_is_recognized(parties: Parties) -> None:
    own = parties.credentials(rank_role(0))
    async with serving(Credentials(SECRET)) as address:
        assert await check_health(address, own, rank_role(2)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(AuthenticationError, match="does not answer in TLS"):
            await check_tls(address, own, rank_role(2))


@pytest.mark.parametrize("has_certificates", [True, False])
async def test_a_server_that_is_not_there_is_no_matter_of_certificates(
    parties: Parties, has_certificates: bool
) -> None:
    own = parties.credentials(rank_role(0)) if has_certificates else Credentials(SECRET)
    async with serving(Credentials(SECRET)) as address:
        pass
    await check_tls(address, own, rank_role(2))


async def test_a_server_that_says_nothing_is_not_waited_for(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_probe, "PROBE_SECONDS", 0.1)
    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: silent.append(writer), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        await check_tls(f"{host}:{port}", parties.credentials(rank_role(0)), rank_role(2))
        for writer in silent:
            writer.transport.abort()


async def test_a_server_without_certificates_that_is_in_trouble_is_no_matter_of_certificates() -> None:
    async with serving(Credentials(SECRET)) as address:
        await check_tls(address, Credentials(SECRET), rank_role(2))
