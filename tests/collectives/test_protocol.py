"""Control frames are checked, and descriptions depend on what matters only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.protocol import (
    Abort,
    Probe,
    Status,
    decode_control,
    describe,
    difference,
    encode_control,
    shortened,
)
from asyncpar.errors import ProtocolError

SUM = describe("all_reduce", ("float32[8]", "sum"), "ring")


@pytest.mark.parametrize(
    "message", [Abort("mismatch", "text", SUM, True), Probe(SUM), Status("in op #3"), Abort("lost", rank=2)]
)
def test_messages_come_back_as_they_went(message: Abort | Probe | Status) -> None:
    kind: type[Any] = type(message)
    assert decode_control(encode_control(message), kind) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(payload: bytes) -> None:
    kinds: tuple[type[Any], ...] = (Abort, Probe, Status)
    for kind in kinds:
        with pytest.raises(ProtocolError, match=f"{kind.__name__} frame"):
            decode_control(payload, kind)


@pytest.mark.parametrize(
    "wrong", [{"reason": "bored"}, {"reason": "failed", "more": 1}, {"reason": "failed", "text": 3}, {}]
)
def test_fields_that_cannot_be_are_a_protocol_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="Abort frame"):
        decode_control(msgspec.msgpack.encode(wrong), Abort)


def test_long_texts_are_cut() -> None:
    assert shortened("a" * 5000) == "a" * 4093 + "..."
    assert shortened("short") == "short"


def test_descriptions_differ_by_text_and_algorithm() -> None:
    tree = describe("all_reduce", ("float32[8]", "sum"), "tree")
    other = describe("all_reduce", ("float32[9]", "sum"), "ring")
    assert len({SUM.fingerprint, tree.fingerprint, other.fingerprint}) == 3
    assert describe("all_reduce", ("float32[8]", "sum"), "ring") == SUM
    assert SUM.text == "all_reduce(float32[8], sum)"
    assert 0 < SUM.fingerprint < 1 << 32


def test_a_difference_names_the_lower_rank_first_and_algorithms_when_only_they_differ() -> None:
    tree = describe("all_reduce", ("float32[8]", "sum"), "tree")
    assert difference(5, SUM, 2, tree, where="here") == (
        "rank 2 calls all_reduce(float32[8], sum) by tree where rank 5 calls all_reduce(float32[8], sum) by ring (here)"
    )


def test_hashes_are_the_same_in_every_process() -> None:
    assert hash64("group", 1, (0, 2), 1) == hash64("group", 1, (0, 2), 1)
    assert hash64("group", 1, (0, 2), 1) != hash64("group", 1, (0, 2), 2)
    assert 0 < hash64("world", 0) < 1 << 64
