"""Pins are read exactly, and what is wrong in them is named."""

from __future__ import annotations

import pytest

from asyncpar.collectives.policy import parse_pin
from asyncpar.errors import UsageError


def test_ranges_hold_their_first_size_and_not_their_last() -> None:
    pin = parse_pin("all_reduce:0-64k@tree,64k-inf@ring;all_gather:0-inf@bruck")
    assert pin.find("all_reduce", 0) == "tree"
    assert pin.find("all_reduce", 65535) == "tree"
    assert pin.find("all_reduce", 65536) == "ring"
    assert pin.find("all_reduce", 1 << 40) == "ring"
    assert pin.find("all_gather", 12) == "bruck"
    assert pin.find("broadcast", 12) is None


def test_sizes_in_no_range_are_left_to_the_cost_model() -> None:
    pin = parse_pin("all_reduce: 1k-2k@tree , 1m-2m@ring")
    assert [pin.find("all_reduce", size) for size in (1023, 1024, 2047, 2048, 1 << 20)] == [
        None,
        "tree",
        "tree",
        None,
        "ring",
    ]


def test_the_seed_preset_is_a_tree_below_a_mebibyte_and_a_ring_from_there() -> None:
    pin = parse_pin("seed")
    assert pin.find("all_reduce", (1 << 20) - 1) == "tree"
    assert pin.find("all_reduce", 1 << 20) == "ring"


@pytest.mark.parametrize("text", ["", "  ", "auto"])
def test_an_empty_pin_pins_nothing(text: str) -> None:
    assert parse_pin(text).find("all_reduce", 0) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fast", "expected a preset"),
        ("all_reduce", "expected a preset"),
        ("all_things:0-inf@ring", "'all_things'"),
        ("all_reduce:0-inf@star", "'star'"),
        ("all_reduce:0-inf", "'0-inf'"),
        ("all_reduce:64k@ring", "'64k@ring'"),
        ("all_reduce:0-64x@ring", "'64x'"),
        ("all_reduce:-1-5@ring", "''"),
        ("all_reduce:64k-64k@ring", "is empty"),
        ("all_reduce:0-2k@ring,1k-3k@tree", "overlap from 1024 bytes on"),
        ("all_reduce:0-1@ring;all_reduce:1-2@ring", "named twice"),
        ("all_reduce@star;", "'star'"),
        ("all_reduce@@ring;", "'all_reduce@@ring'"),
    ],
)
def test_the_wrong_part_is_named(text: str, named: str) -> None:
    with pytest.raises(UsageError, match="pin: ") as caught:
        parse_pin(text)
    assert named in str(caught.value)


def test_a_pin_without_a_range_is_that_of_all_sizes() -> None:
    pin = parse_pin("all_reduce@ring; all_gather@nccl; broadcast:0-1k@staged,1k-inf@nccl")
    assert [pin.find("all_reduce", payload) for payload in (0, 1 << 40)] == ["ring", "ring"]
    assert pin.find_device("all_reduce", 4) is None


def test_device_arrays_have_pins_of_their_own() -> None:
    pin = parse_pin("all_gather@nccl; broadcast:0-1k@staged,0-inf@tree,1k-inf@nccl")
    assert (pin.find("all_gather", 4), pin.find_device("all_gather", 4)) == (None, "nccl")
    assert [pin.find_device("broadcast", payload) for payload in (1023, 1024)] == ["staged", "nccl"]
    assert pin.find("broadcast", 1024) == "tree"
