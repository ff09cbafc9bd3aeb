"""Sizes as people write them."""

from __future__ import annotations

import pytest

from asyncpar.bench.sizes import parse_size, short_size, sizes_between
from asyncpar.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", 4),
        ("4B", 4),
        ("64K", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        ("64KB", 64000),
        ("25MB", 25_000_000),
        ("128M", 128 << 20),
        ("1G", 1 << 30),
        ("1GB", 10**9),
        (" 8 ", 8),
    ],
)
def test_letters_alone_are_binary_and_with_a_b_decimal(text: str, count: int) -> None:
    assert parse_size("--min", text) == count


@pytest.mark.parametrize(
    "text", ["", "K", "4T", "-4", "4.5M", "0", "0K", "1e6", "٤", "9" * 30, "2000000G", "4 K", "4KK"]
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"--min: expected a size .*got"):
        parse_size("--min", text)


def test_sizes_grow_by_the_factor_and_stop_at_the_largest() -> None:
    assert sizes_between(4, 64, 4) == (4, 16, 64)
    assert sizes_between(4, 63, 4) == (4, 16)
    assert sizes_between(7, 7, 2) == (7,)


@pytest.mark.parametrize("text", ["4", "64K", "25MB", "128M", "1G", "3000001", "1000"])
def test_what_is_shown_can_be_read_again(text: str) -> None:
    assert parse_size("--max", short_size(parse_size("--max", text))) == parse_size("--max", text)


def test_the_shortest_unit_is_shown() -> None:
    assert [short_size(count) for count in (4, 1024, 1000, 25_000_000, 1 << 30)] == ["4", "1K", "1KB", "25MB", "1G"]
