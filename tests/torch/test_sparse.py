"""The sum of sparse tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.torch.worlds import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("dense", [[], [3], [2, 3]])
def test_sparse_tensors_with_different_indices_are_summed(dense: list[int]) -> None:
    torch.sparse.check_sparse_tensor_invariants.enable()
    mine = dist.get_rank()
    whole = [_entries(rank, dense) for rank in range(2)]
    x = whole[mine].clone()

    dist.all_reduce(x)

    torch.testing.assert_close(x.to_dense(), whole[0].to_dense() + whole[1].to_dense())


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_a_sparse_tensor_that_is_empty_on_one_rank_gets_what_the_other_has(dtype: str) -> None:
    torch.sparse.check_sparse_tensor_invariants.enable()
    other = _entries(1, []).to(getattr(torch, dtype))
    x = other.clone() if dist.get_rank() == 1 else torch.sparse_coo_tensor(other.shape, dtype=other.dtype)

    dist.all_reduce(x)

    torch.testing.assert_close(x.to_dense(), other.to_dense())


@on_ranks(2)
def test_sparse_tensors_are_summed_while_others_are_under_way() -> None:
    mine = dist.get_rank()
    whole = [_entries(rank, [3]) for rank in range(2)]
    xs, dense = [whole[mine].clone() for _ in range(3)], torch.ones(1000)

    works = [dist.all_reduce(x, async_op=True) for x in (xs[0], dense, xs[1], xs[2])]
    future = works[0].get_future()
    for work in reversed(works):
        work.wait()

    for x in (*xs, future.wait()[0]):
        torch.testing.assert_close(x.to_dense(), whole[0].to_dense() + whole[1].to_dense())
    assert dense[0].item() == 2.0


@on_ranks(2)
def test_sparse_tensors_can_only_be_summed() -> None:
    with pytest.raises(ValueError, match="op: expected SUM for sparse tensors, got max"):
        dist.all_reduce(_entries(0, []), dist.ReduceOp.MAX)


def _entries(rank: int, dense: list[int]) -> torch.Tensor:
    """Return a tensor with ``rank + 2`` entries, one of which others have, too, and one that is there twice."""
    places = torch.tensor([[0, *range(rank + 1)], [1, *range(rank, 2 * rank + 1)]])
    values = torch.arange(rank + 2.0).reshape(-1, *[1] * len(dense)).expand(-1, *dense) + 1.0
    return torch.sparse_coo_tensor(places, values, (3, 4, *dense))
