"""Snapshots go to ranks of the same job only, and come from the rank that was named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncpar.elasticity.snapshot_service import RemoteDonor, add_snapshot_service
from asyncpar.errors import AuthenticationError, UsageError
from asyncpar.net.membership.credentials import load_certificates, read_elastic_credentials
from asyncpar.net.security.identity import Role, agent_role, rank_role
from asyncpar.net.transport.rpc import Credentials, RpcServer
from tests.net.security.parties import make_homes

SECRET = bytes(range(32))


class Shelf:
    """Has step 7."""

    async def position(self) -> int:
        return 7


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    return make_homes(tmp_path / "certs", hosts=2, ranks=2)


def of(home: Path, role: Role) -> Credentials:
    return Credentials(SECRET, load_certificates(home, role))


@asynccontextmanager
async def donor(credentials: Credentials) -> AsyncIterator[str]:
    server, shelf = RpcServer(credentials), Shelf()
    given: Any = shelf
    add_snapshot_service(server.server, given, credentials.certificates)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace=0.0)


async def position(address: str, credentials: Credentials, role: Role) -> int:
    remote = RemoteDonor("donor", address, credentials, role)
    try:
        return await remote.position()
    finally:
        await remote.close()


async def test_a_newcomer_of_the_job_is_healed_by_the_rank_that_was_named_and_by_no_other(homes: list[Path]) -> None:
    async with donor(of(homes[0], rank_role(1))) as address:
        assert await position(address, of(homes[1], rank_role(2)), rank_role(1)) == 7
        with pytest.raises(AuthenticationError, match=r"shows the certificate of rank 1 of job 'demo', not of rank 0"):
            await position(address, of(homes[1], rank_role(2)), rank_role(0))


async def test_an_agent_a_stranger_and_a_rank_of_another_run_get_nothing(homes: list[Path], tmp_path: Path) -> None:
    others = make_homes(tmp_path / "others", hosts=2)
    async with donor(of(homes[0], rank_role(1))) as address:
        with pytest.raises(AuthenticationError, match="it calls as a rank of job 'demo', but its certificate is for"):
            await position(address, of(homes[1], agent_role(1)), rank_role(1))
        with pytest.raises(AuthenticationError, match="wants certificates, and this side has none"):
            await position(address, Credentials(SECRET), rank_role(1))
        with pytest.raises(AuthenticationError, match="of the same `asyncpar certs init`"):
            await position(address, of(others[1], rank_role(2)), rank_role(1))


def test_an_elastic_rank_proves_itself_with_the_certificate_of_its_slot(homes: list[Path]) -> None:
    environment = {"ASYNCPAR_SECRET_FILE": str(homes[1] / "secret"), "LOCAL_RANK": "1"}
    assert read_elastic_credentials(environment).certificates is None
    environment["ASYNCPAR_CERTS"] = str(homes[1])
    found = read_elastic_credentials(environment).certificates
    assert found is not None
    assert found.identity.role == rank_role(3)
    with pytest.raises(UsageError, match="has certificates of 2 ranks, and this one is number 2 of its host"):
        read_elastic_credentials({**environment, "LOCAL_RANK": "2"})
