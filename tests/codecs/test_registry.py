"""Codecs by name, and which can follow which."""

from __future__ import annotations

import pytest

from asyncpar.codecs import (
    Cast,
    Codec,
    Identity,
    Int4,
    Int8,
    PowerSgd,
    RandomK,
    RoundCodec,
    Sign,
    TopK,
    chain,
    parse_codec,
)
from asyncpar.errors import UsageError

CODECS: list[tuple[str, Codec | RoundCodec]] = [
    ("none", Identity()),
    ("bf16", Cast("bfloat16")),
    ("fp16", Cast("float16")),
    ("int8", Int8()),
    ("int4", Int4()),
    ("sign", Sign()),
    ("topk:0.01", TopK(0.01)),
    ("topk:1e-05", TopK(1e-5)),
    ("topk:1.0", TopK(1.0)),
    ("randomk:0.1", RandomK(0.1)),
    ("randomk:0.1:7", RandomK(0.1, 7)),
    ("powersgd:4", PowerSgd(4)),
    ("powersgd:4:7", PowerSgd(4, 7)),
    ("topk:0.01+int8", TopK(0.01, Int8())),
    ("topk:0.05+int4", TopK(0.05, Int4())),
    ("topk:0.05+sign", TopK(0.05, Sign())),
    ("randomk:0.1+bf16", RandomK(0.1, values=Cast("bfloat16"))),
    ("randomk:0.1:3+topk:0.5+fp16", RandomK(0.1, 3, TopK(0.5, Cast("float16")))),
]


@pytest.mark.parametrize(("name", "codec"), CODECS, ids=[name for name, _ in CODECS])
def test_a_name_and_its_codec_determine_each_other(name: str, codec: Codec | RoundCodec) -> None:
    assert codec.name == name
    assert parse_codec(name) == codec
    assert hash(parse_codec(name)) == hash(codec)


def test_codecs_with_other_arguments_are_others() -> None:
    codecs = [codec for _, codec in CODECS]
    assert all(one != other for one in codecs for other in codecs if one is not other)
    assert Int8() != "int8"


@pytest.mark.parametrize(
    ("text", "name"),
    [("topk:.5", "topk:0.5"), ("topk:1", "topk:1.0"), ("topk:0.1+none", "topk:0.1"), ("randomk:0.1:0", "randomk:0.1")],
)
def test_other_ways_of_writing_a_name_are_understood(text: str, name: str) -> None:
    assert parse_codec(text).name == name


def test_a_chain_of_codecs_is_one_codec() -> None:
    assert chain(Int8()) == Int8()
    assert chain(TopK(0.1), Int8()) == TopK(0.1, Int8())
    assert chain(TopK(0.1), RandomK(0.5, 3), Cast("bfloat16")) == TopK(0.1, RandomK(0.5, 3, Cast("bfloat16")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one of none, bf16, fp16, int8, int4, sign, topk:RATIO, .*, got ''"),
        ("zip", "expected one of none, .*powersgd:RANK.*, got 'zip'"),
        ("topk:0.1+zip", "expected one of none, .*, got 'zip' in 'topk:0.1\\+zip'"),
        ("topk:0.1+", "expected one of none, .*, got '' in 'topk:0.1\\+'"),
        ("int8:3", "expected one of none, .*, got 'int8:3'"),
        ("topk", "expected one of .*topk:RATIO.*, got 'topk'"),
        ("topk:0.1:3", "expected one of .*topk:RATIO.*, got 'topk:0.1:3'"),
        ("topk:much", "expected topk:RATIO with 0 < RATIO <= 1, got 'topk:much'"),
        ("topk:0", "expected topk:RATIO with 0 < RATIO <= 1, got 'topk:0'"),
        ("topk:nan", "expected topk:RATIO with 0 < RATIO <= 1, got 'topk:nan'"),
        ("randomk:1.5", r"expected randomk:RATIO\[:SEED\] with 0 < RATIO <= 1 .*, got 'randomk:1.5'"),
        ("randomk:0.5:x", r"expected randomk:RATIO\[:SEED\] .* an integer SEED, got 'randomk:0.5:x'"),
        ("powersgd:0", r"expected powersgd:RANK\[:SEED\] with a RANK of 1 or more .*, got 'powersgd:0'"),
        ("powersgd:many", r"expected powersgd:RANK\[:SEED\] .*, got 'powersgd:many'"),
        ("int8+int8", "int8 cannot follow int8: a chain is selections"),
        ("int8+topk:0.1", "topk:0.1 cannot follow int8: a chain is selections"),
        ("topk:0.1+int8+int4", "int4 cannot follow int8: a chain is selections"),
        ("powersgd:2+int8", "powersgd:2 stands alone: a chain is selections"),
        ("topk:0.1+powersgd:2", "powersgd:2 stands alone: a chain is selections"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"codec: {message}"):
        parse_codec(text)


def test_a_selection_whose_values_have_a_codec_takes_no_other() -> None:
    with pytest.raises(UsageError, match=r"int4 cannot follow topk:0.1\+int8"):
        chain(TopK(0.1, Int8()), Int4())
