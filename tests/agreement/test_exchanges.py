"""Differences between ranks are named."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpar.agreement.exchanges import digest_of, find_difference


def difference(*everything: Sequence[str], names: Sequence[int] | None = None) -> str | None:
    """Compare ranks of one group."""
    ranks = range(len(everything))
    found = find_difference([{"dp": lines} for lines in everything], {"dp": [ranks]}, names or ranks)
    return None if found is None else str(found)


def test_equal_lines_do_not_differ() -> None:
    assert difference(["a", "b"], ["a", "b"]) is None


def test_the_first_rank_and_line_that_differ_are_named() -> None:
    message = difference(["a", "b", "c"], ["a", "b", "c"], ["a", "x", "y"], names=[3, 5, 8])
    assert message is not None
    assert message.endswith("where rank 3 has b, rank 8 has x")


def test_a_missing_line_is_named() -> None:
    message = difference(["a", "b"], ["a"])
    assert message is not None
    assert message.endswith("where rank 0 has b, rank 1 has nothing more")


def test_an_additional_line_is_named() -> None:
    message = difference(["a"], ["a", "b"])
    assert message is not None
    assert message.endswith("where rank 0 has nothing more, rank 1 has b")


def test_ranks_of_different_groups_may_differ() -> None:
    everything = [{"dp": ["a"], "tp": ["x"]}, {"dp": ["b"], "tp": ["x"]}, {"dp": ["a"], "tp": ["y"]}]
    assert find_difference(everything, {"dp": [(0, 2), (1,)], "tp": [(0, 1), (2,)]}, range(3)) is None
    found = find_difference(everything, {"dp": [(0, 2), (1,)], "tp": [(0,), (1, 2)]}, range(3))
    assert found is not None
    assert (found.first, found.rank, found.expected, found.got) == (1, 2, "x", "y")


def test_digests_tell_the_order() -> None:
    assert digest_of(["a", "b"]) == digest_of(["a", "b"])
    assert digest_of(["a", "b"]) != digest_of(["b", "a"])
