"""Settings of the arena: accepted and refused values."""

from __future__ import annotations

import pytest

from asyncpar.errors import UsageError
from asyncpar.net.arena.settings import ArenaSettings


def read(machine: str = "x86_64", **variables: str) -> ArenaSettings:
    return ArenaSettings.from_mapping(
        {f"ASYNCPAR_ARENA_{name}": text for name, text in variables.items()}, machine=machine
    )


def test_without_any_variable_each_rank_takes_8_mib() -> None:
    assert read() == ArenaSettings(bytes=8 << 20, polls=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("262144", 256 << 10),
        ("256K", 256 << 10),
        ("16M", 16 << 20),
        ("16 MiB", 16 << 20),
        ("2g", 2 << 30),
        ("1MB", 1 << 20),
    ],
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert read(BYTES=text).bytes == size


@pytest.mark.parametrize("text", ["0", "off", "OFF", "0M"])
def test_no_bytes_mean_no_arena(text: str) -> None:
    assert read(BYTES=text).is_off


@pytest.mark.parametrize("text", ["much", "-1", "1.5M", "8T", "8 M M", "9" * 30, "²"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^ASYNCPAR_ARENA_BYTES: expected a size such as 8M"):
        read(BYTES=text)


@pytest.mark.parametrize("text", ["1", "255K", "17G"])
def test_sizes_have_bounds(text: str) -> None:
    with pytest.raises(UsageError, match=r"^ASYNCPAR_ARENA_BYTES: expected 256K to 16G, or off, got \d+ bytes"):
        read(BYTES=text)


@pytest.mark.parametrize(
    ("machine", "wait", "polls"),
    [
        ("x86_64", "", True),
        ("AMD64", "", True),
        ("aarch64", "", False),
        ("riscv64", "", False),
        ("x86_64", "poll", True),
        ("x86_64", "doorbell", False),
        ("aarch64", "doorbell", False),
    ],
)
def test_memory_is_polled_where_stores_keep_their_order(machine: str, wait: str, polls: bool) -> None:
    assert read(machine, WAIT=wait).polls is polls


def test_polling_is_refused_where_stores_do_not_keep_their_order() -> None:
    with pytest.raises(UsageError, match=r"^ASYNCPAR_ARENA_WAIT: poll needs .* this one is aarch64; use doorbell"):
        read("aarch64", WAIT="poll")


def test_an_unknown_way_to_wait_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^ASYNCPAR_ARENA_WAIT: expected poll or doorbell, got 'nap'"):
        read(WAIT="nap")


def test_a_deadline_is_positive() -> None:
    with pytest.raises(UsageError, match=r"^seconds: expected more than 0"):
        ArenaSettings(polls=True, seconds=0.0)


def test_the_terms_distinguish_settings() -> None:
    settings = [read(), read(BYTES="16M"), read(WAIT="doorbell"), read(BYTES="off")]
    assert len({one.terms for one in settings}) == len(settings)
    assert read(BYTES="off", WAIT="doorbell").terms == read(BYTES="0").terms
