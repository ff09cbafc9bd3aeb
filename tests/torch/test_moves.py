"""Collectives that move tensors without computing: every dtype, whatever the layout."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from tests.torch.values import MOVED, assert_same, draw, everyone
from tests.torch.worlds import on_ranks


@on_ranks(4)
def test_broadcast_moves_every_dtype_from_any_root() -> None:
    for dtype in MOVED:
        for root in (0, 3):
            x = draw(dist.get_rank(), dtype)
            dist.broadcast(x, root)
            assert_same(x, draw(root, dtype))


@on_ranks(4)
def test_all_gather_fills_a_list() -> None:
    for dtype in MOVED:
        xs = [torch.empty_like(x) for x in everyone(dtype)]
        dist.all_gather(xs, draw(dist.get_rank(), dtype))
        for x, expected in zip(xs, everyone(dtype), strict=True):
            assert_same(x, expected)


@on_ranks(4)
def test_all_gather_takes_tensors_of_different_sizes() -> None:
    shapes = [(rank, 2) for rank in range(4)]
    xs = [torch.empty(shape) for shape in shapes]
    mine = dist.get_rank()
    dist.all_gather(xs, draw(mine, shape=shapes[mine]))
    for rank, x in enumerate(xs):
        assert_same(x, draw(rank, shape=shapes[rank]))


@on_ranks(4)
def test_all_gather_single_concatenates_or_stacks() -> None:
    for dtype in ("float32", "bfloat16", "bool", "complex64"):
        mine, expected = draw(dist.get_rank(), dtype), torch.cat(everyone(dtype))
        joined = torch.empty_like(expected)
        dist.all_gather_single(joined, mine)
        assert_same(joined, expected)
        stacked = torch.empty(4, 5, 3, dtype=mine.dtype)
        dist.all_gather_single(stacked, mine)
        assert_same(stacked, expected.view(4, 5, 3))


@on_ranks(4)
def test_old_names_still_work() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        mine = draw(dist.get_rank())
        joined = torch.empty(20, 3)
        dist.all_gather_into_tensor(joined, mine)
        assert_same(joined, torch.cat(everyone()))
        part = torch.empty(5, 3)
        dist.reduce_scatter_tensor(part, torch.cat(everyone()))
        assert_same(part, 4 * mine)
        lists = [[torch.empty(5, 3), torch.empty(2)] for _ in range(4)]
        dist.all_gather_coalesced(lists, [mine, draw(dist.get_rank(), shape=(2,))])
        for rank, (first, second) in enumerate(lists):
            assert_same(first, draw(rank))
            assert_same(second, draw(rank, shape=(2,)))


@on_ranks(4)
def test_gather_fills_a_list_on_one_rank() -> None:
    mine = dist.get_rank()
    for dtype in MOVED:
        for root in (0, 2):
            xs = [torch.empty_like(x) for x in everyone(dtype)] if mine == root else None
            dist.gather(draw(mine, dtype), xs, dst=root)
            for x, expected in zip(xs or [], everyone(dtype), strict=False):
                assert_same(x, expected)


@on_ranks(4)
def test_scatter_hands_out_a_list_of_one_rank() -> None:
    mine = dist.get_rank()
    for dtype in MOVED:
        for root in (0, 2):
            x = torch.zeros_like(draw(mine, dtype))
            dist.scatter(x, everyone(dtype) if mine == root else None, src=root)
            assert_same(x, draw(mine, dtype))


def swapped(tensors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return what this rank gets when each rank sends each rank a tensor."""
    return [row[dist.get_rank()] for row in tensors]


@on_ranks(4)
def test_all_to_all_exchanges_lists() -> None:
    mine = dist.get_rank()
    for dtype in MOVED:
        table = [
            [draw(10 * source + target, dtype, (source + 1, target)) for target in range(4)] for source in range(4)
        ]
        outputs = [torch.empty_like(x) for x in swapped(table)]
        dist.all_to_all(outputs, table[mine])
        for x, expected in zip(outputs, swapped(table), strict=True):
            assert_same(x, expected)


@on_ranks(4)
def test_all_to_all_single_splits_evenly_unless_told() -> None:
    mine = dist.get_rank()
    x = torch.empty(8, 2)
    dist.all_to_all_single(x, draw(mine, shape=(8, 2)))
    assert_same(x, torch.cat([other[2 * mine : 2 * mine + 2] for other in everyone(shape=(8, 2))]))


@on_ranks(4)
def test_all_to_all_single_has_uneven_and_empty_splits() -> None:
    mine = dist.get_rank()
    counts = [[(source + 2 * target) % 4 for target in range(4)] for source in range(4)]
    for dtype in ("float32", "bfloat16", "int64", "complex64"):
        rows = [
            [draw(10 * source + target, dtype, (counts[source][target], 3)) for target in range(4)]
            for source in range(4)
        ]
        expected = torch.cat(swapped(rows))
        x = torch.empty_like(expected)
        dist.all_to_all_single(x, torch.cat(rows[mine]), [row[mine] for row in counts], counts[mine])
        assert_same(x, expected)


@on_ranks(4)
def test_nothing_at_all_can_be_exchanged() -> None:
    empty = torch.empty(0, 3)
    dist.all_to_all_single(empty, torch.empty(0, 3), [0] * 4, [0] * 4)
    dist.broadcast(empty, 1)
    dist.all_gather([torch.empty(0) for _ in range(4)], torch.empty(0))
    dist.all_gather_single(torch.empty(0, 3), empty)
    dist.reduce_scatter_single(torch.empty(0, 3), empty)
    dist.scatter(empty, [empty] * 4 if dist.get_rank() == 0 else None)
    dist.gather(empty, [torch.empty(0, 3) for _ in range(4)] if dist.get_rank() == 0 else None)


@on_ranks(4)
def test_strided_tensors_are_read_and_written_where_they_are() -> None:
    mine = dist.get_rank()
    whole = torch.zeros(6, 8)
    view = whole[::2, 1::3]
    view.copy_(draw(mine, shape=(3, 3)))
    dist.broadcast(view, 2)
    assert_same(view.contiguous(), draw(2, shape=(3, 3)))
    assert whole.count_nonzero() == 9
    columns = [torch.zeros(3, 4).T for _ in range(4)]
    dist.all_gather(columns, draw(mine, shape=(3, 4)).T)
    for rank, column in enumerate(columns):
        assert_same(column.T, draw(rank, shape=(3, 4)))


@on_ranks(2)
def test_results_are_written_into_what_requires_grad() -> None:
    x = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        x += dist.get_rank() + 1
    dist.all_reduce(x)
    assert_same(x, torch.full((3,), 3.0))
    xs = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    dist.all_gather(xs, x)
    assert_same(xs[1], torch.full((3,), 3.0))
    assert x.is_leaf
    assert x.grad_fn is None


@on_ranks(2)
def test_inference_tensors_are_taken() -> None:
    with torch.inference_mode():
        x = torch.full((3,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        assert_same(x, torch.full((3,), 3.0))
    dist.all_reduce(torch.ones(3))
    xs = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(xs, x)
    assert_same(xs[0], torch.full((3,), 3.0))


@on_ranks(2)
def test_shapes_of_one_element_and_none_are_kept() -> None:
    mine = torch.tensor(dist.get_rank() + 1)
    xs = [torch.tensor(0) for _ in range(2)]
    dist.all_gather(xs, mine)
    assert [x.shape for x in xs] == [torch.Size([])] * 2
    assert [x.item() for x in xs] == [1, 2]
    joined = torch.zeros(2, dtype=torch.int64)
    dist.all_gather_single(joined, mine)
    assert joined.tolist() == [1, 2]
    dist.broadcast(mine, 1)
    assert mine.item() == 2
