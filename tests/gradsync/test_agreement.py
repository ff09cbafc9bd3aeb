"""What differs between ranks is named."""

from __future__ import annotations

from asyncpar.gradsync.agreement import digest_of, find_difference


def test_equal_lines_do_not_differ() -> None:
    assert find_difference([["a", "b"], ["a", "b"]], [0, 1]) is None


def test_the_first_rank_and_line_that_differ_are_named() -> None:
    message = find_difference([["a", "b", "c"], ["a", "b", "c"], ["a", "x", "y"]], [3, 5, 8])
    assert message is not None
    assert message.endswith("where rank 3 has b, rank 8 has x")


def test_a_missing_line_is_named() -> None:
    message = find_difference([["a", "b"], ["a"]], [0, 1])
    assert message is not None
    assert message.endswith("where rank 0 has b, rank 1 has nothing more")


def test_an_additional_line_is_named() -> None:
    message = find_difference([["a"], ["a", "b"]], [0, 1])
    assert message is not None
    assert message.endswith("where rank 0 has nothing more, rank 1 has b")


def test_digests_tell_the_order() -> None:
    assert digest_of(["a", "b"]) == digest_of(["a", "b"])
    assert digest_of(["a", "b"]) != digest_of(["b", "a"])
