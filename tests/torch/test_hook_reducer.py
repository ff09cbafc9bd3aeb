"""The gradient hook's work on the loop, among any number of ranks, without DistributedDataParallel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from asyncpar.codecs import Values
from asyncpar.core.config.names import Name
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.gradsync import Bucket, GradientCompressionConfig
from asyncpar.gradsync.layout import SchemeMaker
from asyncpar.gradsync.schemes import Scheme
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from asyncpar.torch.hook.bucket import HookBucket
from asyncpar.torch.hook.reducer import HookReducer, HookSettings, Hosts
from asyncpar.torch.hook.state import HookMemory, HookTally, ParameterNames

SHAPES = ((10, 5), (7,), (20, 15), (41,))
SIZES = (50, 7, 300, 41)
FIRST_BUCKETS = ((3,), (1, 2), (0,))
"""Which parameters are in which bucket in the first step, and later."""
LATER_BUCKETS = ((3, 2), (1, 0))


def make_gradient(rank: int, step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return torch.randn(SIZES[index], generator=generator)


@dataclass
class Replica:
    """One rank: parameters, and what reduces their gradients."""

    node: Node
    settings: HookSettings
    parameters: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(shape) for shape in SHAPES])

    def __post_init__(self) -> None:
        self.memory = HookMemory(names=ParameterNames([(f"p{i}", p) for i, p in enumerate(self.parameters)]))
        self.tally = HookTally(codec=self.settings.compression.codec_name, ranks=self.node.world.size)
        self.reducer = HookReducer(self.node.world, self.settings, self.memory, self.tally)

    async def step(self, number: int, buckets: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reduce the gradients of a step, all buckets at once, and return them in the order of parameters."""
        buffers = [torch.cat([make_gradient(self.node.rank, number, i) for i in bucket]) for bucket in buckets]
        async with asyncio.TaskGroup() as tasks:
            for index, (bucket, buffer) in enumerate(zip(buckets, buffers, strict=True)):
                given = HookBucket(
                    index=index,
                    is_last=index + 1 == len(buckets),
                    buffer=buffer,
                    parameters=tuple(self.parameters[i] for i in bucket),
                )
                tasks.create_task(self.reducer.begin(given))
        found: dict[int, torch.Tensor] = {}
        for bucket, buffer in zip(buckets, buffers, strict=True):
            parts = buffer.split([SIZES[index] for index in bucket])
            found.update(zip(bucket, parts, strict=True))
        return torch.cat([found[index] for index in sorted(found)])

    def residual(self) -> torch.Tensor:
        """Return what this rank owes of all parameters."""
        kept = dict(self.memory.all_residuals())
        zeros = [np.zeros(size, np.float32) for size in SIZES]
        return torch.from_numpy(np.concatenate([kept.get(f"p{i}", zero) for i, zero in enumerate(zeros)]))


def settings(codec: str, *, hosts: Hosts = True, error_feedback: bool = True) -> HookSettings:
    compression = GradientCompressionConfig(codec=Name(codec), error_feedback=error_feedback)
    return HookSettings(compression=compression, minimum_bytes=0, hosts=hosts)


def expected_mean(ranks: int, step: int) -> torch.Tensor:
    rows = [torch.cat([make_gradient(rank, step, i) for i in range(len(SIZES))]) for rank in range(ranks)]
    return torch.stack(rows).double().mean(0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.2", "bf16", "powersgd:1"])
async def test_nothing_is_lost_for_good_though_buckets_are_rebuilt(codec: str, ranks: int) -> None:
    """What was applied and what residuals hold add up to all gradients, after each step."""
    async with local_world(ranks) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings(codec)) for node in nodes]
        applied, wanted = torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
        for number in range(4):
            buckets = FIRST_BUCKETS if number == 0 else LATER_BUCKETS
            means = await asyncio.gather(*(replica.step(number, buckets) for replica in replicas))
            assert all(torch.equal(mean, means[0]) for mean in means)
            applied += means[0].double()
            wanted += expected_mean(ranks, number)
            owed = torch.stack([replica.residual() for replica in replicas]).double().mean(0)
            # encoded sums of bf16 are rounded where they are added, which no rank knows of
            torch.testing.assert_close(applied + owed, wanted, rtol=0, atol=0.03 if codec == "bf16" else 1e-4)
        assert all(replica.tally.total.steps == 4 for replica in replicas)
        is_exact = codec == "none" or ranks == 1
        assert all((replica.memory.residual_norm() == 0) == is_exact for replica in replicas)


@pytest.mark.parametrize("hosts", [True, [[0, 2], [1, 3]], [[0], [3, 1, 2]]])
async def test_ranks_of_a_host_add_first_and_hosts_compress(hosts: Hosts) -> None:
    places = None if not isinstance(hosts, bool) else ["a", "b", "a", "b"]
    async with local_world(4, hosts=places) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8", hosts=hosts)) for node in nodes]
        for number in range(2):
            means = await asyncio.gather(*(replica.step(number, LATER_BUCKETS) for replica in replicas))
        assert all(torch.equal(mean, means[0]) for mean in means)
        torch.testing.assert_close(means[0].double(), expected_mean(4, 1), rtol=0, atol=0.05)
        leaders = [0, 1] if isinstance(hosts, bool) else [host[0] for host in hosts]
        assert [rank for rank in range(4) if replicas[rank].memory.residual_norm() > 0] == sorted(leaders)


async def test_hosts_may_be_disregarded() -> None:
    async with local_world(4, hosts=["a", "b", "a", "b"]) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8", hosts=False)) for node in nodes]
        means = await asyncio.gather(*(replica.step(0, LATER_BUCKETS) for replica in replicas))
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert all(replica.memory.residual_norm() > 0 for replica in replicas)


async def test_auto_measures_between_hosts_and_picks_alike() -> None:
    async with local_world(2, hosts=["a", "b"]) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("auto")) for node in nodes]
        for number in range(2):
            means = await asyncio.gather(*(replica.step(number, LATER_BUCKETS) for replica in replicas))
        assert torch.equal(means[0], means[1])
        torch.testing.assert_close(means[0].double(), expected_mean(2, 1), rtol=0, atol=0.2)
        assert replicas[0].tally.total.buckets_compressed == replicas[1].tally.total.buckets_compressed


async def test_large_buckets_go_through_threads_and_lend_their_memory() -> None:
    count = 1 << 18
    async with local_world(2) as nodes, asyncio.timeout(20):
        buffers, schemes = [], []

        async def main(node: Node) -> None:
            parameter = torch.zeros(count)
            memory = HookMemory(names=ParameterNames(None))
            reducer = HookReducer(node.world, settings("int8"), memory, HookTally(codec="int8", ranks=2))
            buffer = torch.randn(count, generator=torch.Generator().manual_seed(node.rank))
            buffers.append(buffer)
            await reducer.begin(HookBucket(index=0, is_last=True, buffer=buffer, parameters=(parameter,)))
            schemes.append(memory.buckets[0].lossy)

        await asyncio.gather(*map(main, nodes))
    assert torch.equal(buffers[0], buffers[1])
    expected = sum(torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(2)) / 2
    torch.testing.assert_close(buffers[0], expected, rtol=0, atol=0.05)
    addresses = {buffer.data_ptr() for buffer in buffers}
    assert {scheme.flat.ctypes.data for scheme in schemes if scheme is not None} == addresses


async def test_a_rank_that_cannot_make_its_buffers_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next step is a good one."""
    make = SchemeMaker.make

    def fail(maker: SchemeMaker, bucket: Bucket) -> Scheme:
        if maker.groups.replicas.rank == 1:
            raise MemoryError("no room for buckets")
        return make(maker, bucket)

    async with local_world(2) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8")) for node in nodes]
        with monkeypatch.context() as patch:
            patch.setattr(SchemeMaker, "make", fail)
            notified, failed = await failures(replicas)
        means = await asyncio.gather(*(replica.step(2, LATER_BUCKETS) for replica in replicas))
    torch.testing.assert_close(means[0].double(), expected_mean(2, 2), rtol=0, atol=0.05)
    assert torch.equal(means[0], means[1])
    assert isinstance(failed, MemoryError)
    assert isinstance(notified, PeerCancelled)
    assert notified.rank == 1
    assert "rank 1 cannot compress bucket 0 (p3 to p2): MemoryError: no room for buckets" in str(notified)


async def test_a_rank_that_fails_while_it_encodes_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next step is a good one."""
    read = HookBucket.read_into

    def fail(given: HookBucket, out: Values) -> None:
        if given.parameters[0] is replicas[1].parameters[3]:
            raise MemoryError("no room to encode")
        read(given, out)

    async with local_world(3) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8")) for node in nodes]
        await asyncio.gather(*(replica.step(0, LATER_BUCKETS) for replica in replicas))
        kept = [replica.residual() for replica in replicas]
        with monkeypatch.context() as patch:
            patch.setattr(HookBucket, "read_into", fail)
            first, failed, last = await failures(replicas)
        assert isinstance(failed, MemoryError)
        assert isinstance(first, PeerCancelled)
        assert isinstance(last, PeerCancelled)
        assert first.rank == last.rank == 1
        assert all(torch.equal(replica.residual(), before) for replica, before in zip(replicas, kept, strict=True))
        means = await asyncio.gather(*(replica.step(2, LATER_BUCKETS) for replica in replicas))
    assert all(torch.equal(mean, means[0]) for mean in means)
    torch.testing.assert_close(means[0].double(), expected_mean(3, 2), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (settings("int4"), "rank 0 has codec int8, error feedback on.*, rank 1 has codec int4, error feedback on"),
        (settings("int8", error_feedback=False), "rank 1 has codec int8, error feedback off"),
        (settings("int8", hosts=False), "rank 0 has .* by host, rank 1 has .* regardless of hosts"),
    ],
)
async def test_ranks_of_different_settings_are_told_apart_in_every_step(other: HookSettings, found: str) -> None:
    async with local_world(2) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, each) for node, each in zip(nodes, (settings("int8"), other), strict=True)]
        for _ in range(2):
            for error in await failures(replicas):
                with pytest.raises(UsageError, match=found):
                    raise error


async def test_hooks_meet_though_some_ranks_have_had_others_before() -> None:
    async with local_world(2) as nodes, asyncio.timeout(20):
        alone = Replica(nodes[1], settings("int8"))
        replicas = [Replica(node, settings("int4")) for node in nodes]
        for error in await failures([replicas[0], alone]):
            assert isinstance(error, UsageError)
        means = await asyncio.gather(*(Replica(node, settings("int8")).step(0, LATER_BUCKETS) for node in nodes))
    torch.testing.assert_close(means[0].double(), expected_mean(2, 0), rtol=0, atol=0.05)
    assert torch.equal(means[0], means[1])


async def test_a_hook_that_goes_on_does_not_meet_one_that_begins() -> None:
    async with local_world(2) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8")) for node in nodes]
        await asyncio.gather(*(replica.step(0, FIRST_BUCKETS) for replica in replicas))
        fresh = Replica(nodes[1], settings("int8"))
        fresh.memory.steps = 1
        for error in await failures([replicas[0], fresh]):
            with pytest.raises(
                UsageError, match=r"rank 0 has step 2 of hook [0-9a-f]+, rank 1 has step 2 of a new hook"
            ):
                raise error


async def test_a_model_that_is_another_on_some_rank_is_told() -> None:
    async with local_world(2) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8")) for node in nodes]
        named = [("q", replicas[1].parameters[3]), *((f"p{i}", p) for i, p in enumerate(replicas[1].parameters[:3]))]
        replicas[1].memory.names = ParameterNames(named)
        for error in await failures(replicas):
            with pytest.raises(UsageError, match=r"rank 0 has p3 float32\[41\], rank 1 has q float32\[41\]"):
                raise error


async def test_a_bucket_that_cannot_be_reduced_on_some_rank_is_told_to_all() -> None:
    async with local_world(2) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8")) for node in nodes]
        replicas[1].memory.names = ParameterNames([("p0", replicas[1].parameters[0])])
        notified, refused = await failures(replicas)
    assert "none for a tensor of shape [41]" in str(refused)
    assert "rank 1 has an error: parameters: expected all of the model's" in str(notified)


async def test_a_step_begins_when_the_last_one_is_over() -> None:
    async with local_world(2) as nodes, asyncio.timeout(20):
        replicas = [Replica(node, settings("int8")) for node in nodes]
        first = [asyncio.ensure_future(replica.step(0, LATER_BUCKETS)) for replica in replicas]
        await asyncio.sleep(0)
        for error in await failures(replicas):
            with pytest.raises(UsageError, match="expected the 2 buckets of the last backward pass to be through"):
                raise error
        means = await asyncio.gather(*first)
    torch.testing.assert_close(means[0].double(), expected_mean(2, 0), rtol=0, atol=0.05)


async def failures(replicas: Sequence[Replica]) -> list[Exception]:
    """Run a step that fails on all ranks and return the error of each."""
    outcomes = await asyncio.gather(*(replica.step(1, LATER_BUCKETS) for replica in replicas), return_exceptions=True)
    found: list[Exception] = []
    for outcome in outcomes:
        assert isinstance(outcome, ExceptionGroup), outcome
        errors = sorted(outcome.exceptions, key=lambda error: isinstance(error, PeerCancelled))
        found.append(errors[0])
    return found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"minimum_bytes": -1}, "minimum_bytes: expected a number of 0 or more, got -1"),
        ({"warm_up_steps": 1.5}, "warm_up_steps: expected a number of 0 or more, got 1.5"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        HookSettings(compression=GradientCompressionConfig(codec="int8"), **change)


def test_a_state_of_something_else_is_refused_and_changes_nothing() -> None:
    tensor = torch.zeros(3)
    memory = HookMemory(names=ParameterNames([("module.w", tensor)]), steps=7)
    assert memory.names.of(tensor) == "w"
    for state, found in [
        ({}, "what state_dict"),
        ({"steps": 1, "residuals": 3, "codec_state": {}}, "what state_dict"),
        ({"steps": 1, "residuals": {"v": torch.zeros(3)}, "codec_state": {}}, "such as 'w', got 'v'"),
    ]:
        with pytest.raises(UsageError, match=found):
            memory.restore(state)
    assert memory.state() == {"steps": 7, "residuals": {}, "codec_state": {}}
