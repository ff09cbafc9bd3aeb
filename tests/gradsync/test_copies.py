"""Copies of one parameter hold the same bits after each step: replicas, tensor-parallel ranks and both ends of a tie.

However ranks lie on hosts, whatever the strategy and the codec: groups of replicas that would add in different orders
must not do so.  ``--soak`` runs the whole product in place of a sample.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.gradsync.schemes import Copies
from tests.gradsync.worlds import Rank, assert_right, compressed, draw_and_synchronize, parallel_world
from tests.soak import chosen, is_soak

STEPS = chosen(2, soak=3)
SAMPLE, SEED = 8, 21714
SMALL = ((2, 2, 1), (3, 2, 1), (2, 1, 2), (3, 1, 3), (2, 2, 2))
FACTORIZATIONS = chosen(SMALL, soak=(*SMALL, (4, 2, 1), (4, 1, 3), (3, 2, 2)))
CODECS = ("none", "bf16", "int8", "topk:0.25+int8", "randomk:0.5", "powersgd:2", "auto")
HOSTS = ("one", "each", "pairs", "threes", "fours", "uneven")
TRANSPORTS = ("inproc", "inproc", "launched")


@dataclass(frozen=True, kw_only=True)
class Case:
    sizes: tuple[int, int, int]
    hosts: str
    strategy: CommunicationStrategy
    codec: str
    transport: str

    def __str__(self) -> str:
        dp, tp, pp = self.sizes
        return f"dp{dp}-tp{tp}-pp{pp}-{self.hosts}-{self.strategy}-{self.codec}-{self.transport}"

    def host_names(self) -> list[str]:
        dp, tp, pp = self.sizes
        width = {"one": 64, "each": 1, "pairs": 2, "threes": 3, "fours": 4}.get(self.hosts)
        if width is None:  # 3, 1, 4, 1, ... ranks
            return [f"host{host}" for host, width in enumerate((3, 1, 4, 1, 5)) for _ in range(width)][: dp * tp * pp]
        return [f"host{rank // width}" for rank in range(dp * tp * pp)]


def cases() -> list[Case]:
    product = itertools.product(FACTORIZATIONS, HOSTS, CommunicationStrategy, CODECS, sorted(set(TRANSPORTS)))
    everything = [
        Case(sizes=sizes, hosts=hosts, strategy=strategy, codec=codec, transport=transport)
        for sizes, hosts, strategy, codec, transport in product
    ]
    if is_soak():
        return everything
    weights = [3 if case.transport == "inproc" else 1 for case in everything]  # sockets take longer
    return list(dict.fromkeys(random.Random(SEED).choices(everything, weights, k=SAMPLE)))


REPORTED = (
    Case(
        sizes=(3, 2, 1),
        hosts="threes",
        strategy=CommunicationStrategy.HIERARCHICAL_ALL_REDUCE,
        codec="int8",
        transport="inproc",
    ),
    Case(sizes=(4, 1, 3), hosts="fours", strategy=CommunicationStrategy.ALL_REDUCE, codec="auto", transport="inproc"),
)


def test_the_sample_has_every_value() -> None:
    sample = cases()
    assert {case.sizes for case in sample} == set(FACTORIZATIONS)
    assert {case.hosts for case in sample} == set(HOSTS)
    assert {case.strategy for case in sample} == set(CommunicationStrategy)
    assert {case.codec for case in sample} == set(CODECS)
    assert {case.transport for case in sample} == set(TRANSPORTS)


@pytest.mark.parametrize("case", [*REPORTED, *cases()], ids=str)
async def test_copies_hold_the_same_bits_after_each_step(case: Case) -> None:
    transport = None if case.transport == "launched" else case.transport
    async with parallel_world(
        *case.sizes,
        hosts=case.host_names(),
        transport=transport,
        parallelism={"comm_strategy": case.strategy},
        compression=compressed(None if case.codec == "none" else case.codec),
    ) as ranks:
        for step in range(STEPS):
            await draw_and_synchronize(ranks, step)
            assert_same_bits(ranks)
            if case.codec == "none":
                for rank in ranks:
                    assert_right(rank, step=step, tolerance=2e-6)


def assert_same_bits(ranks: Sequence[Rank]) -> None:
    """Assert that all copies of each parameter have equal bytes."""
    held: dict[tuple[object, ...], tuple[int, bytes]] = {}
    for rank in ranks:
        for parameter in rank.model.parameters():
            placement, mapping = parameter.placement, rank.mapping
            slice_ = () if placement.replicated is not None else (mapping.tp_rank,)
            what = (placement.tied,) if placement.tied is not None else (mapping.pp_rank, parameter.name)
            first, value = held.setdefault((*what, *slice_), (rank.node.rank, parameter.grad.tobytes()))
            assert parameter.grad.tobytes() == value, f"{parameter.name} differs on ranks {first} and {rank.node.rank}"


async def test_groups_that_lie_alike_all_reduce_their_copies() -> None:
    """Where each replica has a host of its own nothing needs to be broadcast."""
    assert not await copies_are_broadcast(2, 2, hosts=["a", "b"] * 2)


async def test_groups_that_lie_differently_have_one_that_reduces_copies() -> None:
    assert await copies_are_broadcast(2, 2, hosts=["a", "a", "a", "b"])


async def copies_are_broadcast(dp: int, tp: int, *, hosts: Sequence[str]) -> bool:
    """Run a step with the order of ranks dp, tp, and return whether one rank reduces copies for the others."""
    async with parallel_world(dp, tp, hosts=hosts, parallelism={"order": "dp-tp-pp"}) as ranks:
        await draw_and_synchronize(ranks)
        layouts = [rank.synchronizer._layouts.layout for rank in ranks]  # noqa: SLF001  # which rank reduces for the others shows in no result
        found = {
            any(isinstance(scheme, Copies) for scheme in layout.schemes) for layout in layouts if layout is not None
        }
        assert len(found) == 1
        return found.pop()
