"""Larger messages between devices go by NCCL, in the receiver's order; whatever fails ends on both ranks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from asyncpar.device.fabric import DeviceError, NcclResult
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerLost, PeerTimeout, WorldRevoked
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeCommunicator, FakeFabric
from tests.products import in_turn
from tests.soak import chosen

COUNT = 20_000
"""More than 64 KiB of float32."""


@pytest.fixture(name="enqueued")
def count_enqueued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the calls of NCCL, as they are made."""
    made: list[str] = []
    for name in ("send", "recv"):
        call = getattr(FakeCommunicator, name)

        def counted(*arguments: Any, _name: str = name, _call: Any = call) -> Any:
            made.append(_name)
            return _call(*arguments)

        monkeypatch.setattr(FakeCommunicator, name, counted)
    return made


def full(cluster: FakeCluster, value: float, count: int = COUNT) -> Any:
    return FakeDeviceArray.of(cluster, np.full(count, value, np.float32))


def check(array: Any, value: float) -> None:
    np.testing.assert_array_equal(array.get(), value)


async def exchange(cluster: FakeCluster, left: Any, right: Any) -> None:
    """Check that messages work both ways."""
    taken = [full(cluster, 0.0), full(cluster, 0.0)]
    await asyncio.gather(
        left.send(full(cluster, 5.0), 1),
        right.recv(0, out=taken[0]),
        right.send(full(cluster, 6.0), 0),
        left.recv(1, out=taken[1]),
    )
    check(taken[0], 5.0)
    check(taken[1], 6.0)


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
async def test_messages_between_devices_go_by_nccl(transport: str, enqueued: list[str]) -> None:
    cluster = FakeCluster(seed=1)
    async with device_world(2, cluster=cluster, transport=transport) as nodes:
        left, right = nodes[0].world, nodes[1].world
        await exchange(cluster, left, right)
        assert sorted(enqueued) == ["recv", "recv", "send", "send"]
        assert "send of device arrays  nccl" in left.algorithm_table()
        assert "recv of device arrays  nccl" in left.algorithm_table()


@pytest.mark.parametrize("seed", range(chosen(3, soak=8)))
async def test_the_receiver_orders_messages_of_many_tags(seed: int) -> None:
    """Sends and receives are called in other orders on the two ranks: NCCL alone would hang or mix them up."""
    cluster = FakeCluster(seed=seed, longest_delay=20)
    random = np.random.default_rng(seed)
    async with device_world(3, cluster=cluster) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        wanted = [(source, dest, tag) for source in range(3) for dest in range(3) if source != dest for tag in range(4)]
        out = {one: full(cluster, -1.0, COUNT + one[2]) for one in wanted}
        calls = [comms[a].send(full(cluster, 100 * a + 10 * b + tag, COUNT + tag), b, tag=tag) for a, b, tag in wanted]
        calls += [comms[b].recv(a, out=out[a, b, tag], tag=tag) for a, b, tag in wanted]
        async with asyncio.timeout(30):
            await asyncio.gather(*(calls[place] for place in random.permutation(len(calls))))
        for (a, b, tag), array in out.items():
            check(array, 100 * a + 10 * b + tag)


async def test_any_rank_may_be_the_source_and_one_that_has_left_does_not_matter() -> None:
    cluster = FakeCluster()
    async with device_world(3, cluster=cluster) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        out = full(cluster, 0.0)
        receiving = asyncio.ensure_future(comms[0].recv_any(out=out))
        await asyncio.sleep(0)
        await nodes[2].stop()
        await comms[1].send(full(cluster, 2.0), 0)
        assert await receiving == (1, out)
        check(out, 2.0)


async def test_a_small_array_is_sent_at_once_as_one_of_the_host_is() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = (node.world for node in nodes)
        async with asyncio.timeout(30):
            await left.send(full(cluster, 1.0, 16_384), 1)
            await right.send(full(cluster, 2.0, 16_384), 0)
        out = full(cluster, 0.0, 16_384)
        await left.recv(1, out=out)
        check(out, 2.0)
        np.testing.assert_array_equal(await right.recv(0), 1.0)


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_rank_without_nccl_makes_messages_go_through_the_host_which_is_logged_once(
    missing: int, caplog: pytest.LogCaptureFixture, enqueued: list[str]
) -> None:
    cluster = FakeCluster()
    fabrics = [None if rank == missing else FakeFabric(cluster, visible=[rank]) for rank in range(2)]
    async with device_world(2, cluster=cluster, fabrics=fabrics) as nodes:
        left, right = nodes[0].world, nodes[1].world
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                out = full(cluster, 0.0)
                await asyncio.gather(left.send(full(cluster, 1.0), 1), right.recv(0, out=out))
                check(out, 1.0)
        logged = [record.getMessage() for record in caplog.records if "there is no driver" in record.getMessage()]
        assert len(logged) == (1 if missing == 0 else 2)
        assert all("through the host" in text for text in logged)
        assert enqueued == []


async def test_ranks_on_one_gpu_that_nccl_refuses_send_through_the_host(enqueued: list[str]) -> None:
    cluster = FakeCluster()
    fabrics = [FakeFabric(cluster, visible=[0]), FakeFabric(cluster, visible=[0])]
    async with device_world(2, cluster=cluster, fabrics=fabrics) as nodes:
        left, right = nodes[0].world, nodes[1].world
        await exchange(cluster, left, right)
        assert "staged: device: ranks 1 and 0 use the same GPU" in left.algorithm_table()
        assert enqueued == []


async def test_a_receive_on_the_host_takes_what_is_on_a_device(enqueued: list[str]) -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        fresh, _ = await asyncio.gather(right.recv(), left.send(full(cluster, 3.0), 1))
        np.testing.assert_array_equal(fresh, np.full(COUNT, 3.0))
        into, _ = await asyncio.gather(right.recv(0, out=np.empty(COUNT, np.float32)), left.send(full(cluster, 4.0), 1))
        np.testing.assert_array_equal(into, np.full(COUNT, 4.0))
        assert enqueued == []


async def test_what_differs_is_found_before_anything_is_enqueued(enqueued: list[str]) -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        wrong = [full(cluster, 0.0, COUNT + 1), FakeDeviceArray(cluster, (COUNT,), np.dtype(np.int32))]
        for out in wrong:
            ended = await asyncio.gather(
                left.send(full(cluster, 1.0), 1), right.recv(0, out=out), return_exceptions=True
            )
            for error in ended:
                assert isinstance(error, OperationMismatch)
                assert "rank 0 sends float32[20000]" in str(error)
        ended = await asyncio.gather(left.send(full(cluster, 1.0), 1), right.recv_object(0), return_exceptions=True)
        assert all(isinstance(error, OperationMismatch) for error in ended)
        assert enqueued == []
        await exchange(cluster, left, right)


@pytest.mark.parametrize(
    ("turns", "rank", "is_used"), in_turn([*range(0, 14, chosen(3, soak=1)), 20, 60], [0, 1], [False, True, True])
)
async def test_a_message_that_is_cancelled_at_any_point_ends_on_both_ranks(
    turns: int, rank: int, is_used: bool
) -> None:
    cluster = FakeCluster(seed=turns)
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        left.timeout = right.timeout = 120.0
        if is_used:
            await exchange(cluster, left, right)
        out = [full(cluster, 0.0) for _ in range(3)]
        sends = [asyncio.ensure_future(left.send(full(cluster, value), 1)) for value in (1.0, 2.0, 3.0)]
        receives = [asyncio.ensure_future(right.recv(0, out=array)) for array in out]
        for _ in range(turns):
            await asyncio.sleep(0)
        (sends, receives)[rank][0].cancel()
        async with asyncio.timeout(30):
            await asyncio.wait(receives)
            spare = [asyncio.ensure_future(right.recv(0, out=full(cluster, 0.0))) for one in sends if not one.done()]
            await asyncio.wait(sends)  # a receive that was cancelled before it had a message has taken none
        for task in spare:
            task.cancel()
        await asyncio.gather(*spare, return_exceptions=True)
        for one in (*sends, *receives):
            assert one.cancelled() or isinstance(one.exception(), PeerCancelled | type(None)), one
        for receive, array in zip(receives, out, strict=True):
            if not receive.cancelled() and receive.exception() is None:
                values = array.get()
                assert values[0] in (1.0, 2.0, 3.0)
                assert (values == values[0]).all()
        del sends, receives
        for _ in range(2):
            await exchange(cluster, left, right)


@pytest.mark.parametrize(("ticks", "rank"), in_turn([0, 3, 10, 100], [0, 1]))
async def test_a_lost_rank_ends_the_message_and_is_named(ticks: int, rank: int) -> None:
    cluster = FakeCluster(seed=ticks)
    made = [FakeFabric(cluster, visible=[number]) for number in range(2)]
    async with device_world(2, cluster=cluster, fabrics=made) as nodes:
        left, right = nodes[0].world, nodes[1].world
        await exchange(cluster, left, right)
        for one in made[1 - rank].cluster_communicators:
            one.fail_later(NcclResult.SYSTEM_ERROR)  # the devices do nothing more
        calls = [left.send(full(cluster, 1.0), 1), right.recv(0, out=full(cluster, 0.0))]
        task = asyncio.ensure_future(calls[rank])
        other = asyncio.ensure_future(calls[1 - rank])
        for _ in range(ticks):
            await asyncio.sleep(0)
        await nodes[1 - rank].stop()
        async with asyncio.timeout(30):
            await asyncio.wait([task, other])
        error = task.exception()
        assert isinstance(error, PeerLost | PeerCancelled), error
        assert error.rank == 1 - rank
        other.cancelled() or other.exception()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_does_not_come_is_named_in_time(rank: int) -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        left.timeout = right.timeout = 0.3
        call = left.send(full(cluster, 1.0), 1) if rank == 0 else right.recv(0, out=full(cluster, 0.0))
        with pytest.raises(PeerTimeout) as caught:
            await call
        assert caught.value.rank == 1 - rank


async def test_devices_that_hang_end_the_message_in_time_and_later_ones_work() -> None:
    cluster = FakeCluster(longest_delay=10**9, seed=2)
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        left.timeout = right.timeout = 0.3
        ended = await asyncio.gather(
            left.send(full(cluster, 1.0), 1), right.recv(0, out=full(cluster, 0.0)), return_exceptions=True
        )
        assert all(isinstance(one, PeerTimeout | PeerCancelled) for one in ended), ended
        assert any(isinstance(one, PeerTimeout) and one.rank is not None for one in ended)
        cluster.longest_delay = 1
        cluster.drop_work()
        left.timeout = right.timeout = 30.0
        await exchange(cluster, left, right)


async def test_what_nccl_says_later_ends_the_message_on_both_ranks() -> None:
    cluster = FakeCluster(seed=5)
    made = [FakeFabric(cluster, visible=[number]) for number in range(2)]
    async with device_world(2, cluster=cluster, fabrics=made) as nodes:
        left, right = nodes[0].world, nodes[1].world
        await exchange(cluster, left, right)
        for one in made[0].cluster_communicators:
            one.fail_later(NcclResult.INTERNAL_ERROR)
        sent, received = await asyncio.gather(
            left.send(full(cluster, 1.0), 1), right.recv(0, out=full(cluster, 0.0)), return_exceptions=True
        )
        assert isinstance(sent, DeviceError)
        assert isinstance(received, PeerCancelled)
        assert received.rank == 0
        assert "ncclInternalError" in str(received)
        await asyncio.gather(left.send(full(cluster, 1.0), 1), right.recv(0, out=full(cluster, 0.0)))


async def test_a_revoked_group_ends_its_messages() -> None:
    cluster = FakeCluster(longest_delay=10**9)
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        calls = [
            asyncio.ensure_future(left.send(full(cluster, 1.0), 1)),
            asyncio.ensure_future(right.recv(0, out=full(cluster, 0.0))),
        ]
        await asyncio.sleep(0.05)
        left.revoke("for a test")
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, WorldRevoked), error
        cluster.longest_delay = 1
        cluster.drop_work()


async def test_messages_of_a_group_that_is_closed_free_their_communicators() -> None:
    cluster = FakeCluster()
    made = [FakeFabric(cluster, visible=[number]) for number in range(2)]
    async with device_world(2, cluster=cluster, fabrics=made) as nodes:
        for _ in range(2):
            pair = [node.world.subgroup([0, 1]) for node in nodes]
            left, right = pair
            assert left is not None
            assert right is not None
            await exchange(cluster, left, right)
            left.close()
            right.close()
            for _ in range(1000):
                await asyncio.sleep(0.001)
                if not any(fabric.cluster_communicators for fabric in made):
                    break
            assert not any(fabric.cluster_communicators for fabric in made)


@pytest.mark.parametrize("seed", range(chosen(2, soak=5)))
async def test_a_message_comes_after_what_the_streams_of_its_arrays_hold(seed: int) -> None:
    cluster = FakeCluster(seed=seed, longest_delay=300)
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        source, out = full(cluster, 0.0), full(cluster, 0.0)
        later = full(cluster, 7.0)
        for array in (source, out):
            array.stream = cluster.create_stream(array.index)
        cluster.copy(source.address, later.address, later.nbytes, source.stream)
        cluster.run(lambda: out.set(np.zeros(COUNT, np.float32)), out.stream)
        await asyncio.gather(left.send(source, 1), right.recv(0, out=out))
        for array in (source, out):
            assert cluster.synchronize(array.stream)
            cluster.destroy_stream(array.stream)
        check(out, 7.0)
