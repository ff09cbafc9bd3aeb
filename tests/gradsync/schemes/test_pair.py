"""Reduction between two ranks, done by hand without any communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from asyncpar.codecs import Codec, parse_codec
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import layout_cache
from asyncpar.gradsync.groups import Keys, Name
from asyncpar.gradsync.schemes import PAIR, Pair, SchemeMemory
from asyncpar.nn import Parameter
from tests.gradsync.schemes.test_owners import Seat, make_bucket, make_parameters

CODECS = ("int8", "int4", "sign", "topk:0.1", "topk:0.1+int8", "randomk:0.25")


def make_pair(name: str = "int8", *, keeps_input: bool = False) -> list[Pair]:
    codec = parse_codec(name)
    assert isinstance(codec, Codec)
    memory = SchemeMemory(keeps_input=keeps_input)
    seats = [cast(Communicator, replace(Seat(rank), size=PAIR)) for rank in range(PAIR)]
    return [Pair(make_bucket(), seat, codec, has_feedback=True, memory=memory) for seat in seats]


def pack_and_encode(pair: list[Pair], parameters: list[dict[str, Parameter]]) -> None:
    for scheme, own in zip(pair, parameters, strict=True):
        scheme.reduction_steps(Name(Keys("test"), "key"), (1, 2))
        layout_cache.pack(scheme, layout_cache.Packing(parameters=own))
        scheme.encode()


def gather(pair: list[Pair]) -> None:
    for scheme in pair:
        for rank, peer in enumerate(pair):
            scheme.incoming[rank] = peer.outgoing


def reduce_pair(pair: list[Pair], parameters: list[dict[str, Parameter]]) -> None:
    pack_and_encode(pair, parameters)
    gather(pair)
    for scheme in pair:
        scheme.settle()


def make_world(name: str = "int8") -> tuple[list[Pair], list[dict[str, Parameter]]]:
    return make_pair(name), [make_parameters(rank) for rank in range(PAIR)]


def true_mean(parameters: list[dict[str, Parameter]]) -> Any:
    return sum(np.concatenate([own[name].grad.ravel() for name in ("c", "b", "a")]) for own in parameters) / PAIR


@pytest.mark.parametrize("codec", CODECS)
def test_both_hold_the_same_bits_and_lost_what_the_mean_misses(codec: str) -> None:
    pair, parameters = make_world(codec)
    reduce_pair(pair, parameters)
    np.testing.assert_array_equal(pair[0].result, pair[1].result)
    lost = sum(scheme.feedback.lost for scheme in pair if scheme.feedback.lost is not None)
    np.testing.assert_allclose(pair[0].reduced + lost / PAIR, true_mean(parameters), atol=1e-5)


def test_the_input_is_kept_if_that_is_wanted() -> None:
    pair, parameters = make_pair(keeps_input=True), [make_parameters(rank) for rank in range(PAIR)]
    pack_and_encode(pair, parameters)
    before = [scheme.flat.copy() for scheme in pair]
    gather(pair)
    for scheme, flat in zip(pair, before, strict=True):
        scheme.settle()
        np.testing.assert_array_equal(scheme.flat, flat)


def test_a_rank_without_finite_values_tells_the_other() -> None:
    pair, parameters = make_world()
    parameters[1]["b"].grad[3] = np.nan
    reduce_pair(pair, parameters)
    assert [scheme.is_finite for scheme in pair] == [False, False]


def test_a_sum_that_overflows_is_not_finite_on_either() -> None:
    pair, parameters = make_world()
    for own in parameters:
        own["b"].grad.fill(3e38)
    reduce_pair(pair, parameters)
    assert [scheme.is_finite for scheme in pair] == [False, False]


def test_what_a_step_lost_is_sent_by_the_next() -> None:
    pair, parameters = make_world("topk:0.1")
    total: Any = 0.0
    for _ in range(60):
        reduce_pair(pair, parameters)
        total = total + pair[0].reduced
        for scheme in pair:
            scheme.commit()
    np.testing.assert_allclose(total / 60, true_mean(parameters), atol=0.5)
    assert any(residual.any() for _, residual in pair[0].residuals())
