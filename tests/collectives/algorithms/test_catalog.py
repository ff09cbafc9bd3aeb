"""Every algorithm is proved for every size by running all ranks symbolically."""

from __future__ import annotations

from fractions import Fraction

import pytest

from asyncpar.collectives.algorithms.catalog import (
    ALGORITHMS,
    check_algorithm,
    known_algorithms,
    leaders_of,
    schedule_across,
    schedule_of,
)
from asyncpar.collectives.algorithms.check import Report, verify
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.algorithms.steps import Copy, RankSchedule, Round, Send
from asyncpar.errors import UsageError
from tests.soak import chosen

SIZES = (*range(1, 18), 24, *chosen((32,), soak=(31, 32, 33)))
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PLAIN = [
    (operation, algorithm)
    for operation, algorithms in ((name, known_algorithms(name)) for name in ALGORITHMS)
    for algorithm in algorithms
    if not algorithm.startswith("hierarchical")
]


SPREADS: list[Hosts] = [
    ((0,),),
    ((0, 1, 2),),
    ((0,), (1,)),
    ((0, 1), (2, 3)),
    ((0, 3, 4), (1,), (2, 5, 6, 7)),
    ((4, 1), (0, 2, 3)),
    ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    ((0, 5, 7, 9), (1, 2, 3), (4, 6, 8)),
]


def report_of(operation: str, algorithm: str, size: int, *, root: int = 0, hosts: Hosts | None = None) -> Report:
    schedules = [
        schedule_of(operation, algorithm, rank=rank, size=size, root=root, hosts=hosts) for rank in range(size)
    ]
    return verify(operation, schedules, root=root)


def log2(size: int) -> int:
    return (size - 1).bit_length()


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def share_sent(report: Report, rank: int) -> Fraction:
    """Return the part of the buffer that ``rank`` sends."""
    return Fraction(report.chunks_sent[rank], report.chunks)


@pytest.mark.parametrize(("operation", "algorithm"), PLAIN, ids=["-".join(pair) for pair in PLAIN])
def test_every_algorithm_is_right_for_every_size_and_root(operation: str, algorithm: str) -> None:
    for size in SIZES:
        for root in sorted({0, 1 % size, size // 2, size - 1}) if operation in ROOTED else (0,):
            report_of(operation, algorithm, size, root=root)


@pytest.mark.parametrize("algorithm", ["hierarchical", "hierarchical-tree"])
@pytest.mark.parametrize("hosts", SPREADS, ids=str)
def test_hierarchical_algorithms_are_right_for_any_spread_over_hosts(algorithm: str, hosts: Hosts) -> None:
    report = report_of("all_reduce", algorithm, sum(map(len, hosts)), hosts=hosts)
    assert len(report.messages) == sum(map(len, hosts))


@pytest.mark.parametrize("size", SIZES[1:])
def test_ring_all_reduce_sends_twice_what_each_rank_lacks(size: int) -> None:
    report = report_of("all_reduce", "ring", size)
    assert report.steps == 2 * (size - 1)
    assert set(report.messages) == {2 * (size - 1)}
    assert {share_sent(report, rank) for rank in range(size)} == {Fraction(2 * (size - 1), size)}


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [
        ("reduce_scatter", "ring"),
        ("reduce_scatter", "pairwise"),
        ("all_gather", "ring"),
        ("all_gather", "pairwise"),
        ("all_gather", "bruck"),
        ("all_to_all", "pairwise"),
    ],
)
def test_optimal_algorithms_send_only_what_others_lack(operation: str, algorithm: str, size: int) -> None:
    report = report_of(operation, algorithm, size)
    assert {share_sent(report, rank) for rank in range(size)} == {Fraction(size - 1, size)}
    assert report.steps == (log2(size) if algorithm == "bruck" else size - 1)


@pytest.mark.parametrize("size", [size for size in SIZES[1:] if is_power_of_two(size)])
def test_halving_takes_logarithmic_steps_at_the_least_traffic(size: int) -> None:
    for operation, rounds in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        report = report_of(operation, "halving", size)
        assert report.steps == rounds * log2(size)
        assert {share_sent(report, rank) for rank in range(size)} == {Fraction(rounds * (size - 1), size)}


@pytest.mark.parametrize("size", SIZES[1:])
def test_steps_of_logarithmic_algorithms_are_the_theory(size: int) -> None:
    folding = 0 if is_power_of_two(size) else 2
    power = size.bit_length() - 1
    assert report_of("all_reduce", "doubling", size).steps == power + folding
    assert report_of("all_reduce", "halving", size).steps == 2 * power + folding
    assert report_of("barrier", "dissemination", size).steps == log2(size)
    assert report_of("all_to_all", "bruck", size).steps == log2(size)
    assert report_of("broadcast", "tree", size).steps <= log2(size)
    assert report_of("reduce", "tree", size).steps <= log2(size)


@pytest.mark.parametrize("size", SIZES[1:])
def test_trees_send_each_buffer_once_per_edge(size: int) -> None:
    assert sum(report_of("reduce", "tree", size).messages) == size - 1
    assert sum(report_of("broadcast", "tree", size).messages) == size - 1
    assert sum(report_of("all_reduce", "tree", size).messages) == 2 * (size - 1)
    assert report_of("broadcast", "tree", size).messages[0] == log2(size)
    assert max(report_of("broadcast", "chain", size).messages) == 1


@pytest.mark.parametrize("size", SIZES[1:])
def test_bruck_all_to_all_sends_a_chunk_per_set_bit_of_its_distance(size: int) -> None:
    report = report_of("all_to_all", "bruck", size)
    assert set(report.chunks_sent) == {sum(distance.bit_count() for distance in range(size))}


def crossing(schedule: RankSchedule, rank: int, hosts: Hosts) -> list[Round]:
    """Return the rounds of ``rank`` with what goes to other hosts only."""
    (near,) = (set(members) for members in hosts if rank in members)
    rounds = (
        tuple(step for step in steps if not isinstance(step, Copy) and step.peer not in near)
        for steps in schedule.rounds
    )
    return [steps for steps in rounds if steps]


@pytest.mark.parametrize("algorithm", ["hierarchical", "hierarchical-tree"])
@pytest.mark.parametrize("hosts", SPREADS, ids=str)
def test_what_goes_between_hosts_is_the_same_without_what_goes_on_inside(algorithm: str, hosts: Hosts) -> None:
    for rank in range(sum(map(len, hosts))):
        whole = schedule_of("all_reduce", algorithm, rank=rank, size=sum(map(len, hosts)), hosts=hosts)
        across = schedule_across(algorithm, rank=rank, hosts=hosts)
        assert (whole.chunks, crossing(whole, rank, hosts)) == (across.chunks, list(across.rounds))


@pytest.mark.parametrize("hosts", SPREADS, ids=str)
def test_the_first_ranks_of_each_host_send_others_their_share_of_the_least_possible(hosts: Hosts) -> None:
    size, leaders = sum(map(len, hosts)), leaders_of("hierarchical", hosts)
    assert leaders == min(map(len, hosts))
    for members in hosts:
        for place, rank in enumerate(members):
            plan = schedule_of("all_reduce", "hierarchical", rank=rank, size=size, hosts=hosts)
            rounds = crossing(plan, rank, hosts)
            chunks = sum(
                len(range(*span))
                for steps in rounds
                for step in steps
                if isinstance(step, Send)
                for span in step.chunks
            )
            share = Fraction(2 * (len(hosts) - 1), len(hosts)) / leaders
            assert Fraction(chunks, plan.chunks) == (share if place < leaders else 0)


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="all_gather has ring, bruck, halving, pairwise, arena; got 'star'"):
        check_algorithm("all_gather", "star")
    with pytest.raises(UsageError, match="operation: expected one of all_reduce"):
        check_algorithm("all_things", "ring")


def test_schedules_are_made_once() -> None:
    assert schedule_of("all_reduce", "ring", rank=1, size=5) is schedule_of("all_reduce", "ring", rank=1, size=5)
