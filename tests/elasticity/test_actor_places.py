"""Placement of an elastic job's actors: by name, where they live, where their newest snapshot is."""

from __future__ import annotations

import itertools
import random

import pytest

from asyncpar.elasticity.actor_places import DeclaredActor, HeldActor, RankActors, order_of_ranks, place_actors


def declared(*names: str, spread: str = "") -> list[DeclaredActor]:
    return [DeclaredActor(name=name, class_path="tests:Actor", spread=spread) for name in names]


def ranks(*held: dict[str, tuple[int, int]]) -> list[RankActors]:
    """Ranks that hold actors by name: version of the snapshot, generation since which it lives there."""
    return [
        RankActors(
            identity=f"process {rank}",
            held=tuple(
                HeldActor(name=name, version=version, lives_since=since) for name, (version, since) in of.items()
            ),
        )
        for rank, of in enumerate(held)
    ]


def test_an_actor_stays_where_it_lives() -> None:
    for rank in range(4):
        found = place_actors(
            declared("a"), ranks(*({"a": (3, 0)} if at == rank else {} for at in range(4))), [range(4)]
        )
        assert (found["a"].rank, found["a"].is_live) == (rank, True)


def test_of_two_lives_the_later_one_counts() -> None:
    found = place_actors(declared("a"), ranks({"a": (9, 1)}, {"a": (2, 4)}), [range(2)])
    assert found["a"].rank == 1


def test_an_actor_goes_on_where_its_newest_snapshot_is() -> None:
    found = place_actors(declared("a"), ranks({"a": (1, -1)}, {}, {"a": (2, -1)}), [range(3)])
    assert (found["a"].rank, found["a"].source, found["a"].version, found["a"].is_live) == (2, 2, 2, False)


def test_snapshots_are_on_another_host_where_there_is_one() -> None:
    for name in map(str, range(50)):
        found = place_actors(declared(name), ranks({}, {}, {}, {}), [(0, 1), (2, 3)])[name]
        assert found.rank is not None
        assert found.mirrors
        assert {rank // 2 for rank in found.mirrors} == {1 - found.rank // 2}
    assert place_actors(declared("a"), ranks({}), [(0,)])["a"].mirrors == ()


def test_actors_of_a_spread_are_on_different_ranks_and_the_others_are_holes() -> None:
    found = place_actors(declared("a", "b", "c", spread="s"), ranks({}, {}), [range(2)])
    placed = [each.rank for each in found.values() if each.rank is not None]
    assert sorted(placed) == [0, 1]
    assert sum(each.rank is None for each in found.values()) == 1


def test_a_hole_keeps_its_snapshot_and_is_filled_by_a_newcomer() -> None:
    held = ranks({"a": (1, 0), "c": (5, -1)}, {"b": (1, 0)})
    found = place_actors(declared("a", "b", "c", spread="s"), held, [range(2)])
    assert (found["c"].rank, found["c"].keeper, found["c"].mirrors) == (None, 0, (1,))
    with_newcomer = ranks({"a": (1, 0), "c": (5, -1)}, {"b": (1, 0)}, {})
    found = place_actors(declared("a", "b", "c", spread="s"), with_newcomer, [range(3)])
    assert (found["c"].rank, found["c"].source, found["c"].version) == (2, 0, 5)


def test_a_lost_rank_moves_only_its_own_actors() -> None:
    names = [str(number) for number in range(200)]
    before = place_actors(declared(*names), ranks(*[{}] * 5), [range(5)])
    left = [RankActors(identity=f"process {rank}") for rank in (0, 1, 3, 4)]
    after = place_actors(declared(*names), left, [range(4)])
    now = [0, 1, 3, 4]
    moved = [name for name in names if before[name].rank != now[after[name].rank or 0]]
    assert moved == [name for name in names if before[name].rank == 2]
    counts = [sum(before[name].rank == rank for name in names) for rank in range(5)]
    assert min(counts) > 20, "every rank has its share"


@pytest.mark.parametrize("seed", range(50))
def test_all_is_well_whatever_ranks_hold(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.randint(1, 6)
    names = [f"n{number}" for number in range(dice.randint(1, 8))]
    actors = [each for name in names for each in declared(name, spread=dice.choice(["", "s", "t"]))]
    held = ranks(
        *(
            {name: (dice.randint(0, 3), dice.choice([-1, -1, 0, 1, 2])) for name in names if dice.random() < 0.4}
            for _ in range(size)
        )
    )
    hosts = [tuple(range(size))]
    found = place_actors(actors, held, hosts)
    assert list(found) == names
    for one, other in itertools.combinations(actors, 2):
        if one.spread and one.spread == other.spread and not found[one.name].is_live:
            assert found[one.name].rank is None or found[one.name].rank != found[other.name].rank
    for each in found.values():
        assert each.rank is None or 0 <= each.rank < size
        assert each.rank not in each.mirrors
        assert each.version == max((h.version for r in held if (h := r.find(each.name))), default=0)
        if each.is_live and each.rank is not None:
            mine = held[each.rank].find(each.name)
            assert mine is not None
            assert mine.lives_since >= 0


def test_the_order_depends_on_the_name_and_each_identity_alone() -> None:
    order = order_of_ranks("a", ["x", "y", "z"])
    assert sorted(order) == [0, 1, 2]
    moved = order_of_ranks("a", ["z", "x", "y"])
    assert [["x", "y", "z"][rank] for rank in order] == [["z", "x", "y"][rank] for rank in moved]


def test_mirrors_are_on_as_many_hosts_as_there_are() -> None:
    hosts = [(0, 1), (2, 3), (4, 5)]
    for name in map(str, range(50)):
        (found,) = place_actors(
            [DeclaredActor(name=name, class_path="tests:Actor", mirrors=2)], ranks(*[{}] * 6), hosts
        ).values()
        assert found.rank is not None
        assert sorted(rank // 2 for rank in (found.rank, *found.mirrors)) == [0, 1, 2]
    many = DeclaredActor(name="a", class_path="tests:Actor", mirrors=9)
    (found,) = place_actors([many], ranks(*[{}] * 6), hosts).values()
    assert sorted((found.rank or 0, *found.mirrors)) == list(range(6)), "as many as there are"
    none = DeclaredActor(name="a", class_path="tests:Actor", mirrors=0)
    assert place_actors([none], ranks({}, {}), [range(2)])["a"].mirrors == ()
