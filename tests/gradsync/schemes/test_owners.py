"""Reduction by owners, done by hand for several ranks without any communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from asyncpar.codecs import Int8
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import ProtocolError
from asyncpar.gradsync import GradientSpec, layout_cache, plan_buckets
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes import SchemeMemory, ShardedReduce
from asyncpar.nn import Parameter

SIZE = 3
SHAPES = {"a": (40, 30), "b": (7,), "c": (1025,)}


@dataclass(frozen=True)
class Seat:
    """As much of a communicator as a scheme needs before it communicates."""

    rank: int
    size: int = SIZE

    async def all_to_all(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    all_gather = all_to_all


def make_parameters(rank: int, dtype: str = "float32") -> dict[str, Parameter]:
    rng = np.random.default_rng(rank)
    parameters = {name: Parameter(name, np.zeros(shape, dtype)) for name, shape in SHAPES.items()}
    for parameter in parameters.values():
        parameter.grad[...] = rng.normal(size=parameter.grad.shape)
    return parameters


def make_bucket(dtype: str = "float32") -> Bucket:
    specs = [GradientSpec(name=name, shape=shape, dtype=np.dtype(dtype)) for name, shape in SHAPES.items()]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 20, max_buckets=1).buckets
    return bucket


def make_scheme(rank: int = 0, dtype: str = "float32", *, feedback: bool = True) -> ShardedReduce:
    seat = cast(Communicator, Seat(rank))
    return ShardedReduce(make_bucket(dtype), seat, Int8(), has_feedback=feedback, memory=SchemeMemory())


def exchange(ranks: list[ShardedReduce]) -> None:
    for rank, scheme in enumerate(ranks):
        for other, peer in enumerate(ranks):
            peer.incoming[rank] = scheme.outgoing[other]


def gather(ranks: list[ShardedReduce]) -> None:
    for scheme in ranks:
        for rank, peer in enumerate(ranks):
            scheme.incoming[rank] = peer.owned


def reduce_by_owners(ranks: list[ShardedReduce], parameters: list[dict[str, Parameter]]) -> None:
    for scheme, own in zip(ranks, parameters, strict=True):
        layout_cache.pack(scheme, layout_cache.Packing(parameters=own))
        scheme.encode()
    exchange(ranks)
    for scheme in ranks:
        scheme.sum_owned()
    gather(ranks)
    for scheme in ranks:
        scheme.settle()


def make_world() -> tuple[list[ShardedReduce], list[dict[str, Parameter]]]:
    return [make_scheme(rank) for rank in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]


def true_sum(parameters: list[dict[str, Parameter]]) -> Any:
    return sum(np.concatenate([own[name].grad.ravel() for name in ("c", "b", "a")]) for own in parameters)


def test_all_ranks_hold_the_same_bits_and_nearly_the_sum() -> None:
    ranks, parameters = make_world()
    reduce_by_owners(ranks, parameters)
    for scheme in ranks:
        assert scheme.is_finite
        np.testing.assert_array_equal(scheme.result, ranks[0].result)
    largest = np.array([max(np.abs(scheme.result).max() for scheme in ranks)], np.float32)
    bound = (SIZE + 1) * Int8().error_bound(largest)
    np.testing.assert_allclose(ranks[0].reduced, true_sum(parameters), atol=bound)


def test_the_mean_is_over_those_who_contributed() -> None:
    scheme = make_scheme()
    assert scheme.factor(SIZE) == pytest.approx(1 / 3)
    assert scheme.factor(2) == pytest.approx(1 / 2)


def test_what_all_ranks_lost_is_what_the_sum_misses() -> None:
    ranks, parameters = make_world()
    reduce_by_owners(ranks, parameters)
    losses = [scheme.feedback.lost for scheme in ranks]
    lost = sum(loss[: ranks[0].bucket.count] for loss in losses if loss is not None)
    np.testing.assert_allclose(ranks[0].reduced + lost, true_sum(parameters), atol=1e-5)


def test_with_feedback_the_sum_over_steps_stays_right() -> None:
    ranks, parameters = make_world()
    total = np.zeros(ranks[0].bucket.count)
    for _ in range(40):
        reduce_by_owners(ranks, parameters)
        total += ranks[0].reduced
        for scheme in ranks:
            scheme.commit()
    assert np.abs(total / 40 - true_sum(parameters)).max() < 0.005


def test_residuals_change_only_when_they_are_kept() -> None:
    ranks, parameters = make_world()
    reduce_by_owners(ranks, parameters)
    assert not any(residual.any() for _, residual in ranks[0].residuals())
    ranks[0].commit()
    residual = np.concatenate([part for _, part in ranks[0].residuals()])
    assert ranks[0].feedback.residual is not None
    np.testing.assert_array_equal(residual, ranks[0].feedback.residual[: residual.size])
    assert residual.any()
    assert [name for name, _ in ranks[0].residuals()] == ["c", "b", "a"]


def test_without_feedback_there_are_no_residuals() -> None:
    scheme = make_scheme(feedback=False)
    layout_cache.pack(scheme, layout_cache.Packing(parameters=make_parameters(0)))
    scheme.encode()
    scheme.commit()
    assert list(scheme.residuals()) == []


def test_values_that_are_not_finite_are_found_by_every_rank() -> None:
    ranks, parameters = make_world()
    parameters[1]["b"].grad[3] = np.nan
    reduce_by_owners(ranks, parameters)
    assert [scheme.is_finite for scheme in ranks] == [False] * SIZE


def test_a_sum_that_overflows_is_found_by_every_rank() -> None:
    ranks, parameters = make_world()
    for own in parameters:
        own["a"].grad[0, 0] = 3e38
    reduce_by_owners(ranks, parameters)
    assert [scheme.is_finite for scheme in ranks] == [False] * SIZE


def test_double_precision_beyond_float32_counts_as_not_finite() -> None:
    scheme, parameters = make_scheme(dtype="float64"), make_parameters(0, "float64")
    parameters["a"].grad[0, 0] = 1e300
    layout_cache.pack(scheme, layout_cache.Packing(parameters=parameters))
    scheme.encode()
    scheme.incoming[:] = scheme.outgoing
    scheme.sum_owned()
    assert not scheme.is_finite


def test_what_cannot_be_decoded_is_blamed_on_its_sender() -> None:
    ranks, parameters = make_world()
    for scheme, own in zip(ranks, parameters, strict=True):
        layout_cache.pack(scheme, layout_cache.Packing(parameters=own))
        scheme.encode()
    exchange(ranks)
    ranks[0].incoming[2, 4:8] = 0xFF  # a scale that is no number
    with pytest.raises(ProtocolError, match=r"bucket 0 \(c to a\): what rank 2 sent cannot be decoded"):
        ranks[0].sum_owned()
