"""Mistakes of callers: errors name what was wrong, on every rank that can know, and the group goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.values import assert_gone, assert_same
from tests.torch.worlds import on_ranks

Call = Callable[[], Any]

ADVICE = r"got one on meta.*pass tensor\.cpu\(\)"


def assert_works() -> None:
    """Assert that the default group works, on all ranks."""
    x = torch.ones(3)
    dist.all_reduce(x)
    assert_same(x, torch.full((3,), float(dist.get_world_size())))


def refused(call: Call, text: str, kind: type[Exception] = ValueError) -> None:
    """Assert that ``call`` raises ``kind``, also as an error of torch, which says ``text``."""
    with pytest.raises(kind, match=text) as raised:
        call()
    assert isinstance(raised.value, dist.DistBackendError), raised.value


@on_ranks(2)
def test_tensors_elsewhere_are_refused_with_advice() -> None:
    other = 1 - dist.get_rank()
    far, near, wide = torch.ones(4, device="meta"), torch.ones(4), torch.ones(8)
    calls: list[tuple[str, Call]] = [
        ("all_reduce", lambda: dist.all_reduce(far)),
        ("broadcast", lambda: dist.broadcast(far, 0)),
        ("reduce", lambda: dist.reduce(far, 0)),
        ("all_gather", lambda: dist.all_gather([far, far], near)),
        ("all_gather", lambda: dist.all_gather([near, near], far)),
        ("all_gather", lambda: dist.all_gather_single(wide, far)),
        ("reduce_scatter", lambda: dist.reduce_scatter_single(near, torch.ones(8, device="meta"))),
        ("reduce_scatter", lambda: dist.reduce_scatter(near, [far, far])),
        ("all_to_all", lambda: dist.all_to_all_single(near, far)),
        ("all_to_all", lambda: dist.all_to_all([near, near], [far, far])),
        ("gather", lambda: dist.gather(far, [near, near] if other else None)),
        ("send", lambda: dist.send(far, other)),
        ("recv", lambda: dist.recv(far, other)),
        ("recv", lambda: dist.recv(far)),
    ]
    for name, call in calls:
        refused(call, f"{name}.*{ADVICE}")
    assert_works()


class FakePath:
    """Stands in for what runs operations on another device."""

    def __init__(self, place: tuple[int, int]) -> None:
        self.place = place
        self.calls: list[tuple[str, Any]] = []

    def allreduce(self, tensors: Any, *rest: Any) -> Any:
        self.calls.append(("allreduce", tensors))
        return dist.group.WORLD.allreduce([torch.ones(1)])


@on_ranks(2)
def test_a_path_for_a_device_takes_its_operations() -> None:
    from asyncpar.torch.signatures import device_paths

    made: list[FakePath] = []

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> FakePath:
        assert isinstance(store, dist.Store)
        assert timeout > timedelta(0)
        made.append(FakePath((rank, size)))
        return made[-1]

    device_paths["meta"] = make
    x = torch.ones(3, device="meta")
    try:
        dist.all_reduce(x)
        dist.all_reduce(x)
    finally:
        del device_paths["meta"]
        del dist.group.WORLD.paths["meta"]
    [path] = made
    assert path.place == (dist.get_rank(), 2)
    assert [name for name, _ in path.calls] == ["allreduce", "allreduce"]
    assert path.calls[0][1][0] is x


@on_ranks(2)
def test_ranks_with_other_shapes_learn_of_both() -> None:
    n = 3 + dist.get_rank()
    calls: list[tuple[str, Call]] = [
        (r"all_reduce\(float32\[{},2\]", lambda: dist.all_reduce(torch.ones(n, 2))),
        (r"all_gather\(float32\[{},2\]", lambda: dist.all_gather([torch.ones(n, 2)] * 2, torch.ones(n, 2))),
        (r"all_gather\(float32\[{}\]", lambda: dist.all_gather_single(torch.ones(2 * n), torch.ones(n))),
        (r"all_to_all\(float32\[2,{}\]", lambda: dist.all_to_all_single(torch.ones(2 * n), torch.ones(2 * n))),
    ]
    for text, call in calls:
        refused(call, f"rank 0 calls {text.format(3)}.*rank 1 calls {text.format(4)}")
        assert_works()
    text = r"rank 0 calls reduce_scatter\(float32\[6\].*rank 1 calls reduce_scatter\(float32\[8\]"
    refused(lambda: dist.reduce_scatter_single(torch.ones(n), torch.ones(2 * n)), text)
    assert_works()


@on_ranks(2)
def test_a_rank_that_needs_what_does_not_fit_learns_of_both() -> None:
    mine = dist.get_rank()
    calls: list[tuple[str, Call]] = [
        ("broadcast", lambda: dist.broadcast(torch.ones(3 + mine, 2), 0)),
        ("reduce", lambda: dist.reduce(torch.ones(3 + mine, 2), 1)),
    ]
    for name, call in calls:
        if mine == 1:
            refused(call, rf"rank 0 calls {name}\(float32\[3,2\].*rank 1 calls {name}\(float32\[4,2\]")
        else:  # it has sent its part and is through, perhaps before the other has come
            with suppress(ValueError):
                call()
        assert_works()


@on_ranks(2)
def test_ranks_with_other_dtypes_learn_of_both() -> None:
    x = torch.ones(3, dtype=torch.float32 if dist.get_rank() else torch.int64)
    refused(lambda: dist.all_reduce(x), r"rank 0 calls all_reduce\(int64\[3\].*rank 1 calls all_reduce\(float32\[3\]")
    assert_works()


@on_ranks(2)
def test_other_operations_on_two_ranks_name_both() -> None:
    calls: list[Call] = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(3), 0)]
    refused(calls[dist.get_rank()], r"rank 0 calls all_reduce.*rank 1 calls broadcast")
    assert_works()
    op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
    refused(lambda: dist.all_reduce(torch.ones(3), op=op), r"rank 0 calls .*sum.*rank 1 calls .*max")
    assert_works()


@on_ranks(2)
def test_a_message_that_does_not_fit_names_both_ranks() -> None:
    text = r"rank 0 sends float32\[100000\] where rank 1 receives float32\[4\]"
    if dist.get_rank() == 0:
        refused(lambda: dist.send(torch.ones(100_000), 1), text, RuntimeError)
    else:
        refused(lambda: dist.recv(torch.ones(4), 0), text)
    assert_works()


@on_ranks(2)
def test_splits_that_do_not_fit_name_the_sender() -> None:
    mine = dist.get_rank()
    output, sizes = torch.ones(5), [3, 2] if mine == 0 else [1, 4]

    def exchange() -> None:
        dist.all_to_all_single(output, torch.arange(4.0), sizes, [2, 2])

    for rank, expected in ((0, sizes[0]), (1, sizes[1])):
        if expected != 2:
            refused(exchange, f"rank {rank} sends 2 rows where rank {mine} expects {expected}")
            break
    assert_works()


@on_ranks(2)
def test_arguments_are_checked_and_named() -> None:
    mine = dist.get_rank()
    x, pair = torch.ones(3), [torch.ones(3), torch.ones(3)]
    calls: list[tuple[str, Call]] = [
        ("broadcast: root: expected a rank 0..1 of the group, got 5", lambda: dist.broadcast(x, 5)),
        ("reduce: root: .*got 5", lambda: dist.reduce(x, 5)),
        ("gather: root: .*got 5", lambda: dist.gather(x, dst=5)),
        ("scatter: root: .*got 5", lambda: dist.scatter(x, src=5)),
        ("send: dest: .*got 5", lambda: dist.send(x, 5)),
        ("recv: source: .*got 5", lambda: dist.recv(x, 5)),
        ("send: tag: expected an integer 0..65535, got 70000", lambda: dist.send(x, 1 - mine, tag=70_000)),
        ("recv: tag: .*got -1", lambda: dist.recv(x, 1 - mine, tag=-1)),
        ("all_gather: tensor_list: expected 2 entries, one per rank, got 1", lambda: dist.all_gather([x], x)),
        (r"all_gather: tensor_list\[.\]: expected float32\[3\]", lambda: dist.all_gather([torch.ones(4)] * 2, x)),
        ("reduce_scatter: input_list: expected 2 tensors", lambda: dist.reduce_scatter(x, [x])),
        ("all_to_all: output_tensor_list: expected 2 tensors", lambda: dist.all_to_all([x], pair)),
        (
            "output_split_sizes: expected 2 numbers that add up to the 3",
            lambda: dist.all_to_all_single(x, x, [1], [1, 2]),
        ),
        ("input: expected a first dimension that is a multiple of 2", lambda: dist.all_to_all_single(x, x)),
        ("output_tensor: expected 2 times the elements", lambda: dist.all_gather_single(torch.ones(5), x)),
        ("input: expected 2 times the elements", lambda: dist.reduce_scatter_single(x, torch.ones(7))),
    ]
    for text, call in calls:
        refused(call, text)
    assert_works()


@on_ranks(2)
def test_tensors_of_several_dtypes_in_one_operation_are_refused() -> None:
    group: Any = dist.group.WORLD
    x, y, wide = torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(8)
    eight, bits = torch.ones(4).to(torch.float8_e4m3fn), torch.ones(4, dtype=torch.uint8)
    pair = [torch.ones(2), torch.ones(2)]
    calls: list[tuple[str, Call]] = [
        ("all_reduce_coalesced: tensors", lambda: group.allreduce_coalesced([x, y])),
        ("all_gather: tensor_list", lambda: group.allgather([[x, y]], [x])),
        ("all_gather: tensor_list", lambda: group.allgather([[bits, bits]], [eight])),
        ("all_gather_coalesced: output_lists", lambda: group.allgather_coalesced([[y], [y]], [x + 0.5])),
        ("all_gather_coalesced: output_lists", lambda: group.allgather_coalesced([[x], [y]], [x])),
        ("all_gather_coalesced: output_lists", lambda: group.allgather_coalesced([[wide], [wide]], [x])),
        ("all_gather_into_tensor: output", lambda: group.all_gather_single(wide.long(), x)),
        ("all_gather_into_tensor_coalesced: output", lambda: group.all_gather_single_coalesced([wide.long()], [x])),
        ("all_to_all: output_tensor_list", lambda: group.alltoall([y, y], [x, x])),
        ("all_to_all: output_tensor_list", lambda: group.alltoall([x, x], [x, y])),
        ("all_to_all_single: output", lambda: group.all_to_all_single(y, x, [], [])),
        ("all_to_all_single: output", lambda: group.all_to_all_single(bits, eight, [], [])),
        ("gather: gather_list", lambda: group.gather([[x, y]], [x], root=dist.get_rank())),
        ("scatter: scatter_list", lambda: group.scatter([x], [[x, y]], root=dist.get_rank())),
        ("reduce_scatter: output", lambda: group.reduce_scatter([x], [[x, y]])),
        ("reduce_scatter: output", lambda: group.reduce_scatter([y], [[x, x]])),
        ("reduce_scatter_tensor: input", lambda: group.reduce_scatter_single(pair[0].long(), x)),
        (
            "reduce_scatter_tensor_coalesced: outputs",
            lambda: group.reduce_scatter_single_coalesced([pair[0], pair[1].long()], [x, y]),
        ),
    ]
    for text, call in calls:
        refused(call, text)
    assert_works()


@on_ranks(2)
def test_several_tensors_of_one_rank_are_refused_where_gloo_adds_them_up() -> None:
    group: Any = dist.group.WORLD
    several = [torch.ones(2), torch.ones(2)]
    for text, call in [
        (r"all_reduce: tensors: expected one .* got 2; allreduce_coalesced takes", lambda: group.allreduce(several)),
        ("broadcast: tensors: expected one tensor per rank, got 2", lambda: group.broadcast(several)),
        ("reduce: tensors: expected one tensor per rank, got 2", lambda: group.reduce(several)),
        ("all_gather: input_tensors: expected one", lambda: group.allgather([several, several], several)),
        ("reduce_scatter: output_tensors: expected one", lambda: group.reduce_scatter(several, [several, several])),
        ("send: tensors: expected one", lambda: group.send(several, 1, 0)),
        ("all_reduce: tensors: expected at least one tensor, got none", lambda: group.allreduce([])),
        ("coalesced: outputs: expected as many", lambda: group.all_gather_single_coalesced([], several)),
    ]:
        refused(call, text)
    if dist.get_rank() == 1:  # the send to this rank has taken its place
        refused(lambda: dist.recv(torch.ones(2), 0), "refused on rank 0: tensors: expected one", RuntimeError)
    assert_works()


@on_ranks(2)
def test_lists_that_an_operation_does_not_take_are_refused_as_by_other_backends() -> None:
    group: Any = dist.group.WORLD
    mine, x, pair = dist.get_rank(), torch.ones(2), [torch.ones(2), torch.ones(2)]
    for text, call in [
        ("all_gather: tensor_list: expected one list .* got 2", lambda: group.allgather([pair, pair], [x])),
        ("reduce_scatter: input_list: expected one list .* got 2", lambda: group.reduce_scatter([x], [pair, pair])),
        ("gather: gather_list: expected one list .* got 2", lambda: group.gather([pair, pair], [x], root=mine)),
        ("scatter: scatter_list: expected one list .* got 2", lambda: group.scatter([x], [pair, pair], root=mine)),
        ("gather: gather_list: expected 2 entries, .* got 0", lambda: group.gather(None, [x], root=mine)),
        ("gather: gather_list: expected none .* not the root, got 2", lambda: group.gather([pair], [x], root=1 - mine)),
        ("scatter: scatter_list: expected none .* got 2", lambda: group.scatter([x], [pair], root=1 - mine)),
    ]:
        refused(call, text)
    assert_works()


@on_ranks(2)
def test_arguments_that_are_none_of_an_operation_are_refused() -> None:
    group: Any = dist.group.WORLD
    x = torch.ones(2)
    wrong = dist.BroadcastOptions()
    wrong.rootTensor = -1
    for text, call in [
        ("broadcast: rootTensor: expected 0, .* got -1", lambda: group.broadcast([x], wrong)),
        ("reduce: root: expected what torch's ReduceOptions takes", lambda: group.reduce([x], wrong)),
        ("all_reduce: root: expected no such argument", lambda: group.allreduce(x, root=1)),
        ("all_reduce: timeout: expected a timedelta, got 3", lambda: group.allreduce(x, timeout=3)),
        ("all_reduce: op: expected what", lambda: group.allreduce(x, op="sum")),
        ("all_reduce: tensors: expected a tensor, got int", lambda: group.allreduce([3])),
        ("broadcast: tensors: expected this argument, got none", group.broadcast),
        ("send: expected 3 arguments, got 4", lambda: group.send([x], 1, 0, 0)),
        ("broadcast: .*root.*5", lambda: group.broadcast(x, 5).wait()),
        ("broadcast: .*root.*-1", lambda: group.broadcast(x, -1).wait()),
        ("send: .*rank.*5", lambda: group.send([x], 5, 0).wait()),
        ("recv: .*rank.*-1", lambda: group.recv([x], -1, 0).wait()),
    ]:
        refused(call, text)
    assert_works()


@on_ranks(2)
def test_operations_that_a_dtype_does_not_have_are_refused() -> None:
    ops = dist.ReduceOp
    for dtype, op, text in [
        (torch.float32, ops.BAND, "band works on integers and bool"),
        (torch.bool, ops.AVG, "mean needs a floating dtype"),
        (torch.float8_e4m3fn, ops.SUM, "can be reduced, got torch.float8_e4m3fn"),
    ]:
        x = torch.ones(3).to(dtype)
        refused(lambda x=x, op=op: dist.all_reduce(x, op=op), text)  # type: ignore[misc]
    assert_works()


@on_ranks(2)
def test_layouts_without_plain_memory_are_refused_with_advice() -> None:
    sparse, lazy = torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64).conj().imag
    refused(lambda: dist.broadcast(sparse, 0), r"got layout torch.sparse_coo; pass tensor.to_dense")
    refused(lambda: dist.all_reduce(sparse, op=dist.ReduceOp.MAX), "expected SUM for sparse tensors, got max")
    refused(lambda: dist.all_reduce(lazy), r"pass tensor.resolve_conj\(\) or tensor.resolve_neg\(\)")
    assert_works()


@on_ranks(2)
def test_errors_of_calls_that_are_not_waited_for_come_with_the_wait() -> None:
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    future = work.get_future()
    refused(work.wait, "rank 0 calls .*rank 1 calls ")
    refused(work.wait, "rank 0 calls .*rank 1 calls ")
    assert work.is_completed()
    assert not work.is_success()
    assert "rank 1 calls" in str(work.exception())
    with pytest.raises(RuntimeError, match=r"OperationMismatch: rank 0 calls"):
        future.wait()
    assert_works()


@on_ranks(2)
def test_leaves_that_require_gradients_are_written_and_stay_leaves() -> None:
    leaf, out = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(6))
    dist.all_reduce(leaf)
    dist.all_gather_single(out, torch.ones(3))
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert_same(leaf.detach(), torch.full((3,), 2.0))
    assert_same(out.detach(), torch.ones(6))
    (leaf * 2).sum().backward()
    assert_same(leaf.grad, torch.full((3,), 2.0))


@on_ranks(2)
def test_tensors_that_overlap_give_what_separate_ones_give() -> None:
    mine = dist.get_rank()
    whole = torch.arange(8.0) + 10 * mine
    dist.all_gather_single(whole, whole[:4])
    assert_same(whole, torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]))
    swapped = torch.arange(4.0) + 10 * mine
    dist.all_to_all_single(swapped, swapped)
    assert_same(swapped, torch.tensor([0.0, 1.0, 10.0, 11.0]) + 2 * mine)
    narrow = torch.arange(4.0)
    dist.reduce_scatter_single(narrow[:2], narrow)
    assert_same(narrow[:2], 2 * torch.arange(4.0)[2 * mine : 2 * mine + 2])


@on_ranks(2)
def test_one_tensor_in_two_operations_gets_them_one_after_the_other() -> None:
    for count in (3, 1 << 20):
        x = torch.ones(count)
        works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        assert_same(x, torch.full((count,), 4.0))


@on_ranks(2)
def test_tensors_live_until_their_operation_is_over_and_no_longer() -> None:
    x = torch.ones(1 << 18)
    if dist.get_rank() == 0:
        gone = weakref.ref(x)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        del x
        gc.collect()
        assert gone() is not None
        dist.send(torch.ones(1), 1)
        assert_same(future.wait()[0], torch.full((1 << 18,), 2.0))
        del work, future
        dist.barrier()
        gc.collect()
        assert_gone(gone)
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(x)
        dist.barrier()


@on_ranks(2)
def test_callbacks_may_wait_for_their_own_work() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)

    def again(future: Any) -> float:
        work.wait()
        [value] = future.wait()
        return float(value.sum())

    assert work.get_future().then(again).wait() == 8


@on_ranks(2)
def test_a_wait_that_takes_too_long_says_for_whom() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(3), 1)
        text = r"recv: not over after the 0\.05 s.*waited .* for rank 1"
        refused(lambda: work.wait(timedelta(milliseconds=50)), text, TimeoutError)
        dist.send(torch.ones(1), 1)
        assert work.wait(timedelta(seconds=20))
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(3), 0)
    assert_works()
