"""Schemes work in memory that others lend them, where it fits."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncpar.codecs import Codec, parse_codec
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import Bucket, GradientSpec, plan_buckets
from asyncpar.gradsync.schemes import Alone, Pair, SchemeMemory, ShardedReduce
from tests.gradsync.schemes.test_owners import Seat

COUNT = 64


def make_bucket() -> Bucket:
    spec = GradientSpec(name="x", shape=(COUNT,), dtype=np.dtype(np.float32))
    (bucket,) = plan_buckets([spec], bucket_bytes=1, max_buckets=1).buckets
    return bucket


def make_pair(memory: SchemeMemory) -> Pair:
    codec = parse_codec("int8")
    assert isinstance(codec, Codec)
    return Pair(make_bucket(), cast(Communicator, Seat(rank=0, size=2)), codec, has_feedback=True, memory=memory)


def test_a_lossy_scheme_works_in_what_it_is_lent() -> None:
    scheme, lent = make_pair(SchemeMemory()), np.ones(COUNT, np.float32)
    assert scheme.lend(lent)
    assert scheme.flat is scheme.result is lent
    scheme.encode()
    scheme.incoming[:] = scheme.outgoing
    scheme.settle()
    np.testing.assert_allclose(lent, 1.0, rtol=0.01)


@pytest.mark.parametrize("lent", [np.ones(COUNT), np.ones(COUNT + 1, np.float32), np.ones(2 * COUNT, np.float32)[::2]])
def test_what_does_not_fit_is_left_alone(lent: NDArray[Any]) -> None:
    scheme = make_pair(SchemeMemory())
    own = scheme.flat
    assert not scheme.lend(lent)
    assert scheme.flat is scheme.result is own


def test_what_was_lent_is_let_go_when_the_next_does_not_fit() -> None:
    """Else the gradients of the next step would be written into memory that its owner uses for something else."""
    scheme, lent = make_pair(SchemeMemory()), np.ones(COUNT, np.float32)
    assert scheme.lend(lent)
    assert not scheme.lend(np.ones(COUNT))
    assert scheme.flat is scheme.result
    assert scheme.flat.shape == lent.shape
    assert not np.shares_memory(scheme.flat, lent)


def test_a_scheme_that_keeps_its_input_works_in_its_own_memory() -> None:
    scheme = make_pair(SchemeMemory(keeps_input=True))
    own = scheme.flat, scheme.result
    assert not scheme.lend(np.ones(COUNT, np.float32))
    assert scheme.flat is own[0]
    assert scheme.result is own[1]


def test_owners_take_a_bucket_that_is_cut_without_padding() -> None:
    codec = parse_codec("int8")
    assert isinstance(codec, Codec)
    for size, fits in ((4, True), (3, False)):
        seat = cast(Communicator, Seat(rank=0, size=size))
        scheme = ShardedReduce(make_bucket(), seat, codec, has_feedback=True, memory=SchemeMemory())
        assert scheme.lend(np.ones(COUNT, np.float32)) == fits


def test_without_a_codec_nothing_is_taken() -> None:
    assert not Alone(make_bucket()).lend(np.ones(COUNT, np.float32))
