"""Traffic of each strategy: bytes, messages and steps of every rank are those of theory, for any size of world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from asyncpar.collectives import communicator
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.core.config.transport import LaneCosts
from asyncpar.gradsync import GradientBucketingConfig
from asyncpar.nn import Array
from tests.gradsync.worlds import Rank, on_all, parallel_world
from tests.products import in_turn, sampled
from tests.soak import first

COUNT = 3 * 5 * 7 * 64
"""Values of the one gradient: divisible by all sizes of worlds here."""

BYTES = 4 * COUNT
ONE_BUCKET = GradientBucketingConfig()


@dataclass(frozen=True)
class Sent:
    payload_bytes: int
    messages: int
    steps: int


@dataclass(frozen=True)
class One:
    """A model of one parameter."""

    grad: Array
    name: str = "p"

    def parameters(self) -> Iterator[One]:
        yield self


def ring(size: int) -> list[Sent]:
    """Two times size - 1 chunks of 1/size each."""
    return [Sent(2 * (size - 1) * BYTES // size, 2 * (size - 1), 2 * (size - 1))] * size


def halving(size: int) -> list[Sent]:
    """Among a power of two, the same bytes in 2 log2 steps; surplus ranks send all to another and get it back."""
    power = 1 << (size.bit_length() - 1)
    steps = 2 * (power.bit_length() - 1)
    within = 2 * (power - 1) * BYTES // power
    surplus = size - power
    folded = [Sent(BYTES, 1, 2)] * surplus
    absorbing = [Sent(within + BYTES, steps + 1, steps + 2)] * surplus
    return folded + absorbing + [Sent(within, steps, steps)] * (power - surplus)


def tree(size: int) -> list[Sent]:
    """Every rank but the root sends all of it to its parent, and every parent to its children."""
    sent = []
    for rank in range(size):
        reach = rank & -rank or size
        children = sum(1 for bit in range(size.bit_length()) if 1 << bit < reach and rank + (1 << bit) < size)
        parents = int(rank > 0)
        messages = children + parents
        sent.append(Sent(messages * BYTES, messages, 2 * messages))
    return sent


def hierarchical(hosts: int, each: int) -> list[Sent]:
    """Up and down all but its own part of 1/each, in between a ring over hosts with that part."""
    size = BYTES * (2 * (each - 1) * hosts + 2 * (hosts - 1)) // (each * hosts)
    steps = 2 * (each - 1) + 2 * (hosts - 1)
    return [Sent(size, steps, steps)] * (hosts * each)


async def measure(
    size: int, strategy: CommunicationStrategy, hosts: Sequence[str] | None = None
) -> tuple[list[Sent], list[str]]:
    """Synchronize one bucket and return what each rank's all-reduces sent, and by which algorithms."""
    parallelism = {"comm_strategy": strategy}
    async with parallel_world(size, parallelism=parallelism, hosts=hosts, bucketing=ONE_BUCKET) as ranks:

        async def main(rank: Rank) -> tuple[Sent, list[str]]:
            model = One(np.full(COUNT, float(rank.node.rank), np.float32))
            await rank.synchronizer.synchronize_gradients(model)
            np.testing.assert_array_equal(model.grad, (size - 1) / 2)
            traffic = rank.node.world.traffic
            total = traffic.of("all_reduce")
            algorithms = [entry.algorithm for entry in traffic.operations if entry.operation == "all_reduce"]
            return Sent(total.payload_bytes, total.messages, total.steps), algorithms

        results = await on_all(ranks, main)
    return [sent for sent, _ in results], results[0][1]


def by_bytes(sent: Sequence[Sent]) -> list[tuple[int, int, int]]:
    return sorted((each.payload_bytes, each.messages, each.steps) for each in sent)


@pytest.mark.parametrize("size", first(4, [2, 3, 4, 7, 8, 5]))
async def test_a_ring_sends_the_least_in_most_steps(size: int) -> None:
    sent, _ = await measure(size, CommunicationStrategy.RING_ALL_REDUCE)
    assert sent == ring(size)


@pytest.mark.parametrize("size", first(4, [2, 3, 4, 7, 8, 5]))
async def test_all_reduce_sends_the_least_in_fewest_steps(size: int) -> None:
    """Other numbers than powers of two would have surplus ranks send more than the least: they take the ring."""
    sent, algorithms = await measure(size, CommunicationStrategy.ALL_REDUCE)
    is_power = size & (size - 1) == 0
    assert algorithms == ["halving" if is_power else "ring"]
    assert by_bytes(sent) == by_bytes(halving(size) if is_power else ring(size))


@pytest.mark.parametrize("size", first(4, [2, 3, 4, 7, 8, 5]))
async def test_a_tree_sends_everything_along_its_edges(size: int) -> None:
    sent, _ = await measure(size, CommunicationStrategy.TREE_ALL_REDUCE)
    assert sent == tree(size)
    assert sum(each.payload_bytes for each in sent) == 2 * (size - 1) * BYTES


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (2, 3), (3, 2), (4, 2)])
async def test_the_hierarchical_strategy_sends_little_between_hosts(hosts: int, each: int) -> None:
    names = [f"host{index}" for index in range(hosts) for _ in range(each)]
    sent, _ = await measure(hosts * each, CommunicationStrategy.HIERARCHICAL_ALL_REDUCE, names)
    assert sent == hierarchical(hosts, each)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
async def test_the_adaptive_strategy_is_one_of_the_others(size: int) -> None:
    sent, algorithms = await measure(size, CommunicationStrategy.ADAPTIVE)
    theory = {"ring": ring, "halving": halving, "tree": tree}
    (algorithm,) = algorithms
    if algorithm in theory:
        assert by_bytes(sent) == by_bytes(theory[algorithm](size))
    else:
        assert algorithm == "doubling"


@pytest.mark.parametrize(("strategy", "size"), in_turn(CommunicationStrategy, [2, 3, 5]))
async def test_statistics_count_what_the_communicator_counts(size: int, strategy: CommunicationStrategy) -> None:
    steps = 3
    async with parallel_world(size, parallelism={"comm_strategy": strategy}) as ranks:

        async def main(rank: Rank) -> None:
            before = rank.node.world.traffic.payload_bytes
            for step in range(steps):
                rank.draw(step)
                await rank.synchronize()
            statistics = rank.synchronizer.get_sync_stats()
            assert statistics.bytes_on_wire == rank.node.world.traffic.payload_bytes - before
            assert statistics.total_sync_operations == steps
            assert statistics.compression_ratio_achieved == pytest.approx(1.0)
            assert statistics.average_sync_time_ms == pytest.approx(1e3 * statistics.total_sync_time / steps)

        await on_all(ranks, main)


LAYOUTS = {
    "pair": ["a", "a"],
    "host": ["a"] * 4,
    "apart": ["a", "b"],
    "spread": ["a", "b", "c"],
    "two-by-two": ["a", "a", "b", "b"],
    "three-by-two": ["a", "a", "b", "b", "c", "c"],
}


def in_arenas(hosts: Sequence[str]) -> list[int]:
    """Every rank shows its host its array once, and the leaders send their parts around the ring of hosts."""
    count, each = len(set(hosts)), hosts.count(hosts[0])
    return [BYTES * (each > 1) + 2 * (count - 1) * BYTES // (count * each)] * len(hosts)


def in_theory(strategy: CommunicationStrategy, hosts: Sequence[str], *, shares_memory: bool) -> list[int]:
    """Return the payload bytes of each rank."""
    size, count, each = len(hosts), len(set(hosts)), hosts.count(hosts[0])
    is_layered = 1 < count < size
    least = ring(size) if size & (size - 1) else halving(size)
    sent: list[Sent]
    match strategy:
        case CommunicationStrategy.RING_ALL_REDUCE:
            sent = ring(size)
        case CommunicationStrategy.TREE_ALL_REDUCE:
            sent = tree(size)
        case CommunicationStrategy.HIERARCHICAL_ALL_REDUCE if shares_memory:
            return in_arenas(hosts)
        case CommunicationStrategy.HIERARCHICAL_ALL_REDUCE:
            sent = hierarchical(count, each)
        case _ if shares_memory and each == size:
            return [BYTES] * size
        case _ if is_layered:
            return in_arenas(hosts) if shares_memory else [one.payload_bytes for one in hierarchical(count, each)]
        case _:
            sent = least
    return [one.payload_bytes for one in sent]


@pytest.mark.parametrize(
    ("strategy", "layout", "shares_memory"),
    sampled(
        [one for one in CommunicationStrategy if one is not CommunicationStrategy.ADAPTIVE],
        list(LAYOUTS),
        [False, True],
    ),
)
async def test_every_strategy_sends_what_theory_says_on_every_layout_of_hosts(
    strategy: CommunicationStrategy, layout: str, shares_memory: bool
) -> None:
    hosts = LAYOUTS[layout]
    transport = None if shares_memory else "inproc"
    parallelism = {"comm_strategy": strategy}
    async with parallel_world(
        len(hosts), parallelism=parallelism, hosts=hosts, transport=transport, bucketing=ONE_BUCKET
    ) as ranks:

        async def main(rank: Rank) -> tuple[int, int]:
            model = One(np.full(COUNT, float(rank.node.rank), np.float32))
            await rank.synchronizer.synchronize_gradients(model)
            traffic = rank.node.world.traffic
            statistics = rank.synchronizer.get_sync_stats()
            assert statistics.bytes_on_wire == traffic.payload_bytes
            assert 0.0 < statistics.communication_efficiency <= 1.0
            assert statistics.measured_bandwidth >= statistics.bytes_on_wire / statistics.total_sync_time
            return traffic.of("all_reduce").payload_bytes, traffic.payload_bytes

        results = await on_all(ranks, main)
    expected = in_theory(strategy, hosts, shares_memory=shares_memory)
    assert sorted(reduced for reduced, _ in results) == sorted(expected)
    assert all(total - reduced < 200 for reduced, total in results), "what ranks agree upon is small"


async def test_the_bandwidth_is_measured_whatever_the_cost_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    absurd = LaneCosts(latency=1.0, bandwidth=1e15)
    monkeypatch.setattr(communicator, "INPROC_COSTS", absurd)
    async with parallel_world(2, bucketing=ONE_BUCKET) as ranks:
        assert ranks[0].node.world.bandwidth == 1e15, "nothing was measured yet"

        async def main(rank: Rank) -> None:
            await rank.synchronizer.synchronize_gradients(One(np.ones(1 << 20, np.float32)))

        await on_all(ranks, main)
        for rank in ranks:
            statistics = rank.synchronizer.get_sync_stats()
            assert 1e6 < rank.node.world.bandwidth <= statistics.measured_bandwidth < 1e12
            assert statistics.communication_efficiency > 0.001
        await on_all(ranks, lambda rank: rank.node.world.calibrate())
        for rank in ranks:
            assert 1e6 < rank.node.world.bandwidth < 1e12
