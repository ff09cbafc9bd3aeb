"""Credentials of ranks that meet through a store, and the addresses of their servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.errors import UsageError
from asyncpar.net.membership.credentials import create_secret
from asyncpar.torch.rendezvous.attach import choose_bind
from asyncpar.torch.rendezvous.messages import Participants, RankHello, WorldIdentity
from tests.torch.rendezvous_ranks import SOON, outcomes, start, total, world

# -- credentials ---------------------------------------------------------------------------------------------------


async def test_without_a_secret_rank_0_makes_one_that_goes_through_the_store() -> None:
    store = dist.HashStore()
    async with world(store, 2) as nodes:
        assert len({node.credentials.secret for node in nodes}) == 1
        assert nodes[0].credentials.secret.hex() in store.get("default_pg/asyncpar/1/participants").decode()


async def test_a_secret_file_is_used_and_never_seen_in_the_store(tmp_path: Path) -> None:
    secret = create_secret(tmp_path / "secret")
    store = dist.HashStore()
    async with world(store, 2, [{"ASYNCPAR_SECRET_FILE": str(tmp_path / "secret")}] * 2) as nodes:
        assert {node.credentials.secret for node in nodes} == {secret}
        assert await total(nodes) == 3.0
        written = b"".join(
            store.get(f"default_pg/asyncpar/1/{key}") for key in ("hello/0", "hello/1", "participants", "end")
        )
        assert secret.hex().encode() not in written


async def test_ranks_with_different_secrets_are_named(tmp_path: Path) -> None:
    store = dist.HashStore()
    create_secret(tmp_path / "secret")
    with_file = {"ASYNCPAR_SECRET_FILE": str(tmp_path / "secret")}
    errors = await outcomes(start(store, 0, 2), start(store, 1, 2, environment=with_file))
    for error in errors:
        assert isinstance(error, UsageError)
        assert "rank 0 has none, rank 1 has one with fingerprint" in str(error)


async def test_certificates_without_a_secret_are_refused() -> None:
    (error,) = await outcomes(start(dist.HashStore(), 0, 1, environment={"ASYNCPAR_CERTS": "/nowhere"}))
    assert isinstance(error, UsageError)
    assert "ASYNCPAR_SECRET_FILE" in str(error)


def launched(rank: int, size: int, secret: Path, *, host: str, generation: int = 0) -> dict[str, str]:
    return LaunchEnvironment(
        rank=rank,
        local_rank=0,
        world_size=size,
        local_world_size=size,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        rendezvous="127.0.0.1:1",
        secret_file=str(secret),
        job="the-job",
        generation=generation,
        restart_count=0,
        host=host,
        host_id=host,
        bind="127.0.0.1",
        timeout=SOON,
    ).to_mapping()


async def test_a_launched_rank_has_the_job_the_secret_and_the_host_of_the_launcher(tmp_path: Path) -> None:
    secret = create_secret(tmp_path / "secret")
    environments = [launched(rank, 3, tmp_path / "secret", host="aba"[rank], generation=5) for rank in range(3)]
    async with world(dist.HashStore(), 3, environments) as nodes:
        members = nodes[0].membership
        assert (members.job, members.generation) == ("the-job", 6)
        assert members.hosts == ((0, 2), (1,))
        assert [member.local_rank for member in members.members] == [0, 0, 1]
        assert {node.credentials.secret for node in nodes} == {secret}
        assert await total(nodes) == 6.0


async def test_what_torchrun_sets_is_no_obstacle() -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    async with world(dist.HashStore(), 2, [given, given]) as nodes:
        assert await total(nodes) == 3.0


async def test_a_pinned_transport_holds() -> None:
    async with world(dist.HashStore(), 2, [{"ASYNCPAR_TRANSPORT": "tcp"}] * 2) as nodes:
        assert not nodes[0].has_arena
        assert await total(nodes) == 3.0
        assert nodes[0].links.lane_kind(1) == "tcp"


async def test_ranks_that_move_cuda_tensors_in_two_ways_are_told_so() -> None:
    with pytest.raises(UsageError, match=r"path of CUDA tensors \(ASYNCPAR_TORCH_CUDA\)"):
        async with world(dist.HashStore(), 2, [{}, {"ASYNCPAR_TORCH_CUDA": "asyncpar"}]):
            pass


# -- where servers are bound ---------------------------------------------------------------------------------------


def met(*hosts: str) -> Participants:
    hellos = tuple(RankHello(rank=rank, host=host, host_id=host, terms={}) for rank, host in enumerate(hosts))
    return Participants(hellos=hellos, identity=WorldIdentity(job="job", generation=0))


def test_ranks_of_one_host_are_bound_to_loopback() -> None:
    assert choose_bind(met("a", "a"), {"MASTER_ADDR": "192.0.2.1"}, dist.HashStore(), 0) == "127.0.0.1"


def test_what_the_environment_says_about_binding_holds() -> None:
    assert choose_bind(met("a", "a"), {"ASYNCPAR_BIND": "192.0.2.1"}, dist.HashStore(), 0) == "192.0.2.1"


def test_ranks_of_several_hosts_are_bound_where_they_reach_the_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert choose_bind(met("a", "b"), {"MASTER_ADDR": "192.0.2.1"}, dist.PrefixStore("p", store), 1) == "127.0.0.1"


def test_without_a_host_that_holds_the_store_the_master_is_asked_for() -> None:
    assert choose_bind(met("a", "b"), {"MASTER_ADDR": "localhost"}, dist.HashStore(), 1) == "127.0.0.1"


def test_if_nothing_says_how_hosts_reach_each_other_the_setting_is_named() -> None:
    with pytest.raises(UsageError, match=r"ASYNCPAR_BIND: .* reach b, since rank 1 is there and rank 0 on a"):
        choose_bind(met("a", "b"), {}, dist.HashStore(), 1)


def test_a_master_that_cannot_be_found_is_named() -> None:
    with pytest.raises(UsageError, match=r"rank 1 on b finds no route to no-such-host\.invalid"):
        choose_bind(met("a", "b"), {"MASTER_ADDR": "no-such-host.invalid"}, dist.HashStore(), 1)
