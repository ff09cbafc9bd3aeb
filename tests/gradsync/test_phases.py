"""The phases of a bucket, run by hand for several ranks without any communication."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.codecs import Identity, Int8
from asyncpar.errors import NonFiniteValue, PeerCancelled
from asyncpar.gradsync import GradientSpec, phases, plan_buckets
from asyncpar.gradsync.buffers import BucketBuffers
from asyncpar.nn import Parameter

SIZE = 3
SHAPES = {"a": (40, 30), "b": (7,), "c": (1025,)}


def make_parameters(rank: int, dtype: str = "float32") -> dict[str, Parameter]:
    rng = np.random.default_rng(rank)
    parameters = {name: Parameter(name, np.zeros(shape, dtype)) for name, shape in SHAPES.items()}
    for parameter in parameters.values():
        parameter.grad[...] = rng.normal(size=parameter.grad.shape)
    return parameters


def make_buffers(dtype: str = "float32", *, lossy: bool = True, feedback: bool = True) -> BucketBuffers:
    specs = [GradientSpec(name=name, shape=shape, dtype=np.dtype(dtype)) for name, shape in SHAPES.items()]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 20, max_buckets=1).buckets
    return BucketBuffers(bucket, size=SIZE, codec=Int8() if lossy else Identity(), has_feedback=feedback)


def exchange(ranks: list[BucketBuffers]) -> None:
    for rank, buffers in enumerate(ranks):
        for other, peer in enumerate(ranks):
            peer.incoming[rank] = buffers.outgoing[other]


def gather(ranks: list[BucketBuffers]) -> None:
    for buffers in ranks:
        for rank, peer in enumerate(ranks):
            buffers.incoming[rank] = peer.reduced


def reduce_by_owners(ranks: list[BucketBuffers], parameters: list[dict[str, Parameter]]) -> None:
    for buffers, own in zip(ranks, parameters, strict=True):
        phases.pack(buffers, own)
        phases.encode(buffers)
    exchange(ranks)
    for rank, buffers in enumerate(ranks):
        phases.sum_owned(buffers, rank)
    gather(ranks)
    for buffers in ranks:
        phases.decode(buffers)


def test_pack_then_unpack_scales_and_keeps_shapes() -> None:
    buffers, parameters = make_buffers(lossy=False), make_parameters(0)
    before = {name: parameter.grad.copy() for name, parameter in parameters.items()}
    phases.pack(buffers, parameters)
    phases.unpack(buffers, parameters, factor=0.5)
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter.grad, before[name] * np.float32(0.5))


def test_gradients_follow_each_other_in_backward_order() -> None:
    buffers, parameters = make_buffers(lossy=False), make_parameters(0)
    phases.pack(buffers, parameters)
    expected = np.concatenate([parameters[name].grad.ravel() for name in ("c", "b", "a")])
    np.testing.assert_array_equal(buffers.payload, expected)


def test_all_ranks_hold_the_same_bits_and_nearly_the_sum() -> None:
    ranks, parameters = [make_buffers() for _ in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]
    reduce_by_owners(ranks, parameters)
    expected = sum(np.concatenate([own[name].grad.ravel() for name in ("c", "b", "a")]) for own in parameters)
    for buffers in ranks:
        np.testing.assert_array_equal(buffers.flat, ranks[0].flat)
    largest = np.array([max(np.abs(buffers.flat).max() for buffers in ranks)], np.float32)
    np.testing.assert_allclose(ranks[0].payload, expected, atol=(SIZE + 1) * Int8().error_bound(largest))


def test_what_all_ranks_lost_is_what_the_sum_misses() -> None:
    ranks, parameters = [make_buffers() for _ in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]
    reduce_by_owners(ranks, parameters)
    true = sum(np.concatenate([own[name].grad.ravel() for name in ("c", "b", "a")]) for own in parameters)
    lost = sum(buffers.lost[: buffers.bucket.count] for buffers in ranks if buffers.lost is not None)
    np.testing.assert_allclose(ranks[0].payload + lost, true, atol=1e-5)


def test_with_feedback_the_sum_over_steps_stays_right() -> None:
    ranks, parameters = [make_buffers() for _ in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]
    true = sum(np.concatenate([own[name].grad.ravel() for name in ("c", "b", "a")]) for own in parameters)
    total = np.zeros(ranks[0].bucket.count)
    for _ in range(40):
        reduce_by_owners(ranks, parameters)
        total += ranks[0].payload
        for buffers in ranks:
            buffers.keep_lost()
    assert np.abs(total / 40 - true).max() < 0.005


def test_residuals_change_only_when_they_are_kept() -> None:
    ranks, parameters = [make_buffers() for _ in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]
    reduce_by_owners(ranks, parameters)
    assert ranks[0].residual_square == 0.0
    ranks[0].keep_lost()
    residual = np.concatenate([part for _, part in ranks[0].residuals()])
    assert ranks[0].residual_square == pytest.approx(float(residual @ residual), rel=1e-5)
    assert ranks[0].residual_square > 0.0
    assert [name for name, _ in ranks[0].residuals()] == ["c", "b", "a"]


def test_without_feedback_there_are_no_residuals() -> None:
    buffers = make_buffers(feedback=False)
    phases.pack(buffers, make_parameters(0))
    phases.encode(buffers)
    buffers.keep_lost()
    assert list(buffers.residuals()) == []


def test_a_rank_that_is_not_finite_is_named_by_every_rank() -> None:
    ranks, parameters = [make_buffers() for _ in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]
    parameters[1]["b"].grad[3] = np.nan
    for buffers, own in zip(ranks, parameters, strict=True):
        phases.pack(buffers, own)
        phases.encode(buffers)
    exchange(ranks)
    for rank, buffers in enumerate(ranks):
        with pytest.raises(NonFiniteValue, match=r"NaN or infinity from rank 1 in bucket 0 \(c to a\)"):
            phases.sum_owned(buffers, rank)


def test_a_sum_that_overflows_is_found_by_every_rank() -> None:
    ranks, parameters = [make_buffers() for _ in range(SIZE)], [make_parameters(rank) for rank in range(SIZE)]
    for own in parameters:
        own["a"].grad[0, 0] = 3e38
    for buffers, own in zip(ranks, parameters, strict=True):
        phases.pack(buffers, own)
        phases.encode(buffers)
    exchange(ranks)
    for rank, buffers in enumerate(ranks):
        phases.sum_owned(buffers, rank)
    gather(ranks)
    for buffers in ranks:
        with pytest.raises(NonFiniteValue, match="NaN or infinity from rank 1"):
            phases.decode(buffers)


def test_double_precision_beyond_float32_counts_as_not_finite() -> None:
    buffers, parameters = make_buffers("float64"), make_parameters(0, "float64")
    parameters["a"].grad[0, 0] = 1e300
    phases.pack(buffers, parameters)
    phases.encode(buffers)
    buffers.incoming[:] = buffers.outgoing
    with pytest.raises(NonFiniteValue):
        phases.sum_owned(buffers, 0)


def test_parameters_whose_mean_is_not_finite_are_named() -> None:
    buffers, parameters = make_buffers(lossy=False), make_parameters(0)
    parameters["b"].grad[2] = -np.inf
    phases.pack(buffers, parameters)
    with pytest.raises(NonFiniteValue, match=r"got NaN or infinity in b$"):
        phases.check_finite(buffers)


def test_a_bucket_that_was_given_up_cannot_pass_for_gradients() -> None:
    lossy, plain = make_buffers(), make_buffers(lossy=False)
    phases.spoil(lossy)
    lossy.incoming[:] = lossy.outgoing
    with pytest.raises(PeerCancelled, match="rank 0 gave up the step before it sent bucket 0"):
        phases.sum_owned(lossy, 0)
    phases.spoil(plain)
    with pytest.raises(NonFiniteValue):
        phases.check_finite(plain)
