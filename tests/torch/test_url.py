"""``init_method="asyncpar://..."``, and the store that stays a while."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import asyncpar.torch  # noqa: F401  # registers the scheme
from asyncpar.errors import LaunchError, PeerTimeout, UsageError
from asyncpar.torch.rendezvous.store import StoreLease, share_server
from asyncpar.torch.rendezvous.url import StoreEndpoint
from tests.ports import free_port

PLACE = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def open_store(port: int, rank: int, size: int, seconds: float = 10.0) -> Any:
    """Return the store as ``dist.init_process_group`` gets it."""
    url = f"asyncpar://127.0.0.1:{port}"
    store, *place = next(dist.rendezvous(url, rank, size, timeout=timedelta(seconds=seconds)))
    assert place == [rank, size]
    return store


def test_an_address_alone_takes_the_rest_from_the_environment() -> None:
    endpoint = StoreEndpoint.parse("asyncpar://10.0.0.1:4000", PLACE)
    assert endpoint == StoreEndpoint(host="10.0.0.1", port=4000, rank=1, size=4, is_ours=True)


def test_no_address_takes_everything_from_the_environment() -> None:
    endpoint = StoreEndpoint.parse("asyncpar://", PLACE | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert endpoint == StoreEndpoint(host="192.0.2.1", port=29500, rank=1, size=4, is_ours=False)


def test_arguments_win_over_the_environment() -> None:
    endpoint = StoreEndpoint.parse("asyncpar://?rank=0&world_size=2", PLACE)
    assert (endpoint.rank, endpoint.size) == (0, 2)


@pytest.mark.parametrize(
    ("url", "environment", "message"),
    [
        ("asyncpar://", {}, "WORLD_SIZE: expected a value in the environment, it is not set"),
        ("asyncpar://?rank=0&world_size=1", {}, "MASTER_ADDR: expected a value"),
        ("asyncpar://", PLACE | {"RANK": "one"}, "RANK: expected a whole number, got 'one'"),
        ("asyncpar://", PLACE | {"MASTER_PORT": "70000"}, r"MASTER_PORT: expected 1\.\.65535, got 70000"),
        ("asyncpar://10.0.0.1:0", PLACE, r"port: expected 1\.\.65535, got 0"),
        ("asyncpar://", PLACE | {"RANK": "4"}, r"rank: expected 0\.\.3, got 4"),
        ("asyncpar://?rank=x", PLACE, "rank: expected a whole number, got 'x'"),
        ("asyncpar://10.0.0.1", PLACE, "init_method: expected asyncpar://host:port, or asyncpar:// alone"),
        ("asyncpar://10.0.0.1:77777", PLACE, "init_method: expected asyncpar://host:port, got"),
    ],
)
def test_what_is_missing_or_wrong_is_named(url: str, environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StoreEndpoint.parse(url, environment)


def test_rank_0_has_its_store_at_once_and_the_others_find_it() -> None:
    port = free_port()
    first = open_store(port, 0, 3)
    first.set("key", "value")
    assert open_store(port, 1, 3).get("key") == b"value"


def test_if_rank_0_does_not_come_it_is_named() -> None:
    with pytest.raises(PeerTimeout, match=r"rank 1: rank 0 of 2 has not come within 0\.2 s: nobody serves a store"):
        open_store(free_port(), 1, 2, seconds=0.2)


def test_a_port_that_somebody_else_uses_is_named() -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = rf"rank 0: torch could not make a store at 127\.0\.0\.1:{port}; expected an address of this host, and"
        with pytest.raises(LaunchError, match=message) as caught:
            open_store(port, 0, 1, seconds=0.5)
        assert "\n" not in str(caught.value)


def test_torch_gets_its_own_kind_of_error() -> None:
    with pytest.raises(dist.DistBackendError):
        next(dist.rendezvous("asyncpar://127.0.0.1", 0, 1))


def test_a_tenant_keeps_the_server_that_may_be_shared() -> None:
    port = free_port()
    store = open_store(port, 0, 1)
    client = share_server(store, {})
    store.set("key", "value")
    del store
    assert open_store(port, 0, 1).get("key") == b"value"
    del client


def test_nobody_becomes_tenant_of_what_cannot_be_shared() -> None:
    alone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert share_server(alone, {}) is None
    assert share_server(dist.HashStore(), {}) is None


def test_the_store_of_an_agent_needs_no_tenants() -> None:
    store = open_store(free_port(), 0, 1)
    assert share_server(store, {"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None


async def test_a_released_store_goes_after_its_time() -> None:
    lease, port = StoreLease(), free_port()
    store = open_store(port, 0, 1)
    client = share_server(store, {})
    lease.keep(client)
    lease.release(client, after=0.01)
    assert listens(port)
    del store, client
    async with asyncio.timeout(10.0):
        while listens(port):  # noqa: ASYNC110  # a server that goes tells nobody
            await asyncio.sleep(0.01)


async def test_a_store_that_is_kept_again_stays() -> None:
    lease, port = StoreLease(), free_port()
    first = share_server(open_store(port, 0, 1), {})
    lease.keep(first)
    lease.release(first, after=0.0)
    lease.keep(share_server(first, {}))
    del first
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert listens(port)
