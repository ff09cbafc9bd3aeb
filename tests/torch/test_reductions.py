"""Collectives that compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceScatterOptions

from asyncpar.errors import UsageError
from tests.torch.values import FLOATS, INTEGERS, NUMBERS, assert_same, draw, dtype_of, everyone, reduced
from tests.torch.worlds import on_ranks

EXACT_OPS = ("SUM", "PRODUCT", "MIN", "MAX")


def op_of(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name)


@on_ranks(4)
def test_all_reduce_has_all_ops_in_every_dtype() -> None:
    mine = dist.get_rank()
    for dtype in NUMBERS:
        ops = ("SUM",) if dtype.startswith("complex") else EXACT_OPS
        bits = ("BAND", "BOR", "BXOR") if dtype in INTEGERS else ()
        for op in (*ops, *bits):
            x = draw(mine, dtype)
            dist.all_reduce(x, op_of(op))
            assert_same(x, reduced(op, everyone(dtype)))


@on_ranks(4)
def test_all_reduce_of_bool_is_or_and_and() -> None:
    anyone, everybody = torch.stack(everyone("bool")).any(0), torch.stack(everyone("bool")).all(0)
    for op, expected in {"MAX": anyone, "MIN": everybody, "BOR": anyone, "BAND": everybody, "SUM": anyone}.items():
        x = draw(dist.get_rank(), "bool")
        dist.all_reduce(x, op_of(op))
        assert_same(x, expected)


@on_ranks(4)
def test_avg_is_the_mean() -> None:
    for dtype in FLOATS:
        x = draw(dist.get_rank(), dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert_same(x, reduced("AVG", everyone(dtype)))


@on_ranks(4)
def test_premul_sum_multiplies_first() -> None:
    x = draw(dist.get_rank())
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))  # noqa: SLF001  # torch: the only maker of a PREMUL_SUM
    assert_same(x, reduced("SUM", everyone()) * 0.5)


@on_ranks(2)
def test_premul_sum_takes_a_tensor_as_factor_and_keeps_the_dtype() -> None:
    for dtype in (*FLOATS, "complex64"):
        for factor in (torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)):
            x = draw(dist.get_rank(), dtype)
            dist.all_reduce(x, dist._make_nccl_premul_sum(factor))  # noqa: SLF001  # torch: the only maker of a PREMUL_SUM
            assert_same(x, sum(half * 0.5 for half in everyone(dtype)))


@on_ranks(2)
def test_premul_sum_refuses_integers_which_cannot_hold_the_products() -> None:
    calls: list[Callable[[torch.Tensor, Any], Any]] = [
        dist.all_reduce,
        lambda x, op: dist.reduce(x, 0, op),
        lambda x, op: dist.reduce_scatter_single(x[:2], x, op),
    ]
    for dtype, factor in itertools.product((torch.int32, torch.uint8, torch.bool), (0.5, torch.tensor(0.5))):
        x = torch.ones(4, dtype=dtype)
        for call in calls:
            with pytest.raises(UsageError, match="PREMUL_SUM needs a floating dtype, as"):
                call(x, dist._make_nccl_premul_sum(factor))  # noqa: SLF001  # torch: the only maker of a PREMUL_SUM
        assert_same(x, torch.ones(4, dtype=dtype))


@on_ranks(4)
def test_all_ranks_get_the_same_bits() -> None:
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(x)
    copies = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(copies, x)
    for copy in copies:
        assert_same(copy, x)


@on_ranks(4)
def test_reduce_gives_the_result_to_one_rank() -> None:
    mine = dist.get_rank()
    for root in range(4):
        for op in EXACT_OPS:
            x = draw(mine)
            dist.reduce(x, root, op_of(op))
            if mine == root:
                assert_same(x, reduced(op, everyone()))


@on_ranks(4)
def test_reduce_scatter_gives_each_rank_its_part() -> None:
    mine = dist.get_rank()
    for dtype in ("int64", *FLOATS, "complex64"):
        parts = [draw(mine, dtype, seed=part) for part in range(4)]
        x = torch.empty_like(parts[0])
        dist.reduce_scatter(x, parts)
        assert_same(x, reduced("SUM", everyone(dtype, seed=mine)))
        for part, again in enumerate(parts):
            assert_same(again, draw(mine, dtype, seed=part))


@on_ranks(4)
def test_reduce_scatter_single_splits_the_first_dim() -> None:
    mine = dist.get_rank()
    for op in ("SUM", "MAX", "AVG"):
        x, whole = torch.empty(3, 2), draw(mine, shape=(12, 2))
        dist.reduce_scatter_single(x, whole, op_of(op))
        assert_same(x, reduced(op, everyone(shape=(12, 2)))[3 * mine : 3 * mine + 3])
        stacked = torch.empty(3, 2)
        dist.reduce_scatter_single(stacked, whole.view(4, 3, 2), op_of(op))
        assert_same(stacked, x)


@on_ranks(4)
def test_all_reduce_takes_any_layout() -> None:
    mine = dist.get_rank()
    scalar = torch.tensor(mine + 1.0)
    dist.all_reduce(scalar)
    assert_same(scalar, torch.tensor(10.0))
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    assert_same(empty, torch.empty(0, 3))
    total = reduced("SUM", everyone(shape=(6, 8)))
    turned, spread = draw(mine, shape=(6, 8)), draw(mine, shape=(6, 8))
    dist.all_reduce(turned.T)
    assert_same(turned, total)
    dist.all_reduce(spread[::2, 1::3])
    assert_same(spread[::2, 1::3], total[::2, 1::3])
    assert_same(spread[1::2], draw(mine, shape=(6, 8))[1::2])


@on_ranks(4)
def test_all_reduce_coalesced_reduces_each() -> None:
    mine = dist.get_rank()
    xs = [draw(mine, shape=(n,), seed=n) for n in (1, 5, 1000)]
    dist.all_reduce_coalesced(xs)
    for n, x in zip((1, 5, 1000), xs, strict=True):
        assert_same(x, reduced("SUM", everyone(shape=(n,), seed=n)))


@on_ranks(4)
@pytest.mark.parametrize("count", [1, 1023, 70_001, 1_500_000])
def test_sizes_of_all_kinds_are_summed(count: int) -> None:
    x = torch.arange(count, dtype=torch.float32) % 1000 * (dist.get_rank() + 1)
    dist.all_reduce(x)
    assert_same(x, torch.arange(count, dtype=torch.float32) % 1000 * 10)


@on_ranks(2)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_averaged_by_dividing_the_sum_towards_zero(dtype: str) -> None:
    mine, kind = dist.get_rank(), dtype_of(dtype)
    mean = dist.ReduceOp.AVG
    signed = kind.is_signed
    values = [torch.tensor([7, 5, 1, 0, 3, 8]), torch.tensor([2, 6, 0, 0, -10 if signed else 0, -9 if signed else 0])]
    wanted = torch.tensor([4, 5, 0, 0, -3 if signed else 1, 0 if signed else 4]).to(kind)
    own = values[mine].to(kind)

    def new() -> torch.Tensor:
        return own.clone()

    x, y = new(), new()
    dist.all_reduce(x, mean)
    assert_same(x, wanted)
    dist.reduce(y, 1, mean)
    assert_same(y, wanted if mine == 1 else own)
    xs = [new(), new()[:2]]
    dist.all_reduce_coalesced(xs, mean)
    assert_same(xs[0], wanted)
    assert_same(xs[1], wanted[:2])
    part, single = torch.empty(3, dtype=kind), torch.empty(3, dtype=kind)
    dist.reduce_scatter(part, [new()[:3], new()[3:]], mean)
    assert_same(part, wanted[3 * mine : 3 * mine + 3])
    dist.reduce_scatter_single(single, new(), mean)
    assert_same(single, part)
    uneven = torch.empty(2 + 2 * mine, dtype=kind)
    dist.reduce_scatter(uneven, [new()[:2], new()[2:]], mean)
    assert_same(uneven, wanted[2:] if mine else wanted[:2])
    coalesced = torch.empty(3, dtype=kind)
    group: Any = dist.group.WORLD
    group.reduce_scatter_single_coalesced([coalesced], [new()], _averaging()).wait()
    assert_same(coalesced, part)


def _averaging() -> Any:
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return options
