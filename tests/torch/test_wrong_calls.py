"""Calls that do not fit together: all ranks get an error, and the group goes on.

Generated: each operation in each of its forms, with each tensor, list, number and reduction of its arguments changed in
each way, on one rank or another or on all.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from asyncpar.torch import run_threads
from tests.soak import chosen
from tests.torch.worlds import on_ranks

Arguments = dict[str, Any]
LENGTH = 4
ALL = -1
FLOAT8, OTHER_FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape).to(dtype)


def several(count: int, *shape: int) -> list[torch.Tensor]:
    return [ones(*shape) for _ in range(count)]


@dataclass(frozen=True)
class Operation:
    """An operation: good arguments for a rank of a group of so many, and the call with them.

    ``moves`` says that it takes dtypes that have no sum.
    """

    make: Callable[[int, int], Arguments]
    call: Callable[[Any, Any], Any]
    moves: bool = False


def _uneven(size: int, extra: int = 0) -> list[torch.Tensor]:
    return [ones(LENGTH + rank + extra) for rank in range(size)]


def _reduction(arguments: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = arguments["op"]
    return options


def _coalesced(arguments: Any) -> Any:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = arguments["op"]
    return options


def _scattering(arguments: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = arguments["op"]
    return options


def _sparse(rank: int, size: int) -> Arguments:
    places = torch.arange(rank).reshape(1, rank)  # rank 0 has none
    return {"x": torch.sparse_coo_tensor(places, torch.ones(rank, 2), (size, 2), check_invariants=True)}


SUM = dist.ReduceOp.SUM

OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(
        lambda r, n: {"x": ones(LENGTH), "op": SUM}, lambda g, a: g.allreduce([a["x"]], _reduction(a))
    ),
    "allreduce of one": Operation(
        lambda r, n: {"x": ones(LENGTH, 2), "op": SUM}, lambda g, a: g.allreduce(a["x"], a["op"])
    ),
    "allreduce of integers": Operation(
        lambda r, n: {"x": ones(LENGTH, dtype=torch.int64), "op": SUM}, lambda g, a: g.allreduce(a["x"], a["op"])
    ),
    "allreduce of many": Operation(
        lambda r, n: {"x": ones(1 << 20), "op": SUM}, lambda g, a: g.allreduce(a["x"], a["op"])
    ),
    "allreduce of sparse": Operation(_sparse, lambda g, a: g.allreduce([a["x"]])),
    "allreduce_coalesced": Operation(
        lambda r, n: {"xs": several(3, LENGTH), "op": SUM}, lambda g, a: g.allreduce_coalesced(a["xs"], _coalesced(a))
    ),
    "broadcast": Operation(
        lambda r, n: {"x": ones(LENGTH), "root": 1}, lambda g, a: g.broadcast(a["x"], a["root"]), moves=True
    ),
    "broadcast of many": Operation(
        lambda r, n: {"x": ones(1 << 20), "root": 0}, lambda g, a: g.broadcast(a["x"], a["root"]), moves=True
    ),
    "reduce": Operation(
        lambda r, n: {"x": ones(LENGTH), "root": 1, "op": SUM}, lambda g, a: g.reduce(a["x"], a["root"], a["op"])
    ),
    "allgather": Operation(
        lambda r, n: {"outs": several(n, LENGTH), "x": ones(LENGTH)},
        lambda g, a: g.allgather([a["outs"]], [a["x"]]),
        moves=True,
    ),
    "allgather of uneven": Operation(
        lambda r, n: {"outs": _uneven(n), "x": ones(LENGTH + r)},
        lambda g, a: g.allgather([a["outs"]], [a["x"]]),
        moves=True,
    ),
    "allgather_into_tensor": Operation(
        lambda r, n: {"out": ones(n * LENGTH), "x": ones(LENGTH)},
        lambda g, a: g.all_gather_single(a["out"], a["x"]),
        moves=True,
    ),
    "allgather_into_tensor_coalesced": Operation(
        lambda r, n: {"outs": several(2, n * LENGTH), "xs": several(2, LENGTH)},
        lambda g, a: g.allgather_into_tensor_coalesced(a["outs"], a["xs"]),
        moves=True,
    ),
    "allgather_coalesced": Operation(
        lambda r, n: {"rows": [several(2, LENGTH) for _ in range(n)], "xs": several(2, LENGTH)},
        lambda g, a: g.allgather_coalesced(a["rows"], a["xs"]),
        moves=True,
    ),
    "gather": Operation(
        lambda r, n: {"outs": several(n, LENGTH) if r == 1 else [], "x": ones(LENGTH), "root": 1},
        lambda g, a: g.gather([a["outs"]] if a["outs"] else [], [a["x"]], a["root"]),
        moves=True,
    ),
    "scatter": Operation(
        lambda r, n: {"out": ones(LENGTH), "xs": several(n, LENGTH) if r == 1 else [], "root": 1},
        lambda g, a: g.scatter([a["out"]], [a["xs"]] if a["xs"] else [], a["root"]),
        moves=True,
    ),
    "reduce_scatter": Operation(
        lambda r, n: {"out": ones(LENGTH), "xs": several(n, LENGTH), "op": SUM},
        lambda g, a: g.reduce_scatter([a["out"]], [a["xs"]], _scattering(a)),
    ),
    "reduce_scatter of uneven": Operation(
        lambda r, n: {"out": ones(LENGTH + r), "xs": _uneven(n), "op": SUM},
        lambda g, a: g.reduce_scatter([a["out"]], [a["xs"]], _scattering(a)),
    ),
    "reduce_scatter_tensor": Operation(
        lambda r, n: {"out": ones(LENGTH), "x": ones(n * LENGTH), "op": SUM},
        lambda g, a: g.reduce_scatter_single(a["out"], a["x"], _scattering(a)),
    ),
    "reduce_scatter_tensor_coalesced": Operation(
        lambda r, n: {"outs": several(2, LENGTH), "xs": several(2, n * LENGTH), "op": SUM},
        lambda g, a: g.reduce_scatter_tensor_coalesced(a["outs"], a["xs"], _scattering(a)),
    ),
    "all_to_all_single": Operation(
        lambda r, n: {"out": ones(n * LENGTH), "x": ones(n * LENGTH)},
        lambda g, a: g.all_to_all_single(a["out"], a["x"], [], []),
        moves=True,
    ),
    "all_to_all_single with splits": Operation(
        lambda r, n: {
            "out": ones(n * (r + 1), 3),
            "x": ones(sum(range(1, n + 1)), 3),
            "taken": [r + 1] * n,
            "given": list(range(1, n + 1)),
        },
        lambda g, a: g.alltoall_base(a["out"], a["x"], a["taken"], a["given"]),
        moves=True,
    ),
    "all_to_all": Operation(
        lambda r, n: {"outs": several(n, LENGTH), "xs": several(n, LENGTH)},
        lambda g, a: g.alltoall(a["outs"], a["xs"]),
        moves=True,
    ),
    "all_to_all of uneven": Operation(
        lambda r, n: {"outs": several(n, r + 1), "xs": [ones(other + 1) for other in range(n)]},
        lambda g, a: g.alltoall(a["outs"], a["xs"]),
        moves=True,
    ),
}


def changed_tensors(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a tensor may be in place of ``x``, with what is wrong with it."""
    if x.is_sparse:
        yield (
            "longer",
            torch.sparse_coo_tensor(x.coalesce().indices(), x.coalesce().values(), (x.shape[0] + 1, x.shape[1])),
        )
        yield "other dtype", x.double()
        yield "other layout", x.to_dense()
        return
    yield "longer", torch.cat([x, x[:1]])
    yield "shorter", x[:-1].clone()
    yield "of no elements", x[:0].clone()
    yield "of other dimensions", x.sum() if x.numel() != 1 else ones(3)
    yield "of twice the elements", torch.cat([x, x])
    yield "of half the elements", x[: len(x) // 2].clone()
    yield "other dtype", x.to(torch.int32 if x.dtype is not torch.int32 else torch.int16)
    yield "wider dtype", x.double()
    yield "on meta", x.to("meta")
    yield "sparse", x.to_sparse()


def changed_lists(xs: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield what a list may be in place of ``xs``, with what is wrong with it."""
    yield "one more", [*xs, xs[-1]]
    yield "one fewer", xs[:-1]
    if isinstance(xs[0], torch.Tensor):
        yield "none", []
    for place in dict.fromkeys((0, len(xs) - 1)):
        for change, changed in changes(xs[place]):
            yield f"[{place}] {change}", [*xs[:place], changed, *xs[place + 1 :]]
    for change, every in _alike(xs):
        yield f"all {change}", every
    if isinstance(xs[0], int):
        yield "moved", [xs[0] - 1, xs[1] + 1, *xs[2:]]


def _alike(xs: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(xs[0], torch.Tensor):
        for options in zip(*map(changed_tensors, xs), strict=True):
            yield options[0][0], [changed for _, changed in options]


def changes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an argument may be in place of ``value``, with what is wrong with it."""
    match value:
        case torch.Tensor():
            yield from changed_tensors(value)
        case []:  # what only the root passes
            return
        case list():
            yield from changed_lists(value)
        case int():
            yield "more", value + 1
            yield "less", value - 1
            yield "out of range", 99
            yield "negative", -1
        case _:
            yield "mean", dist.ReduceOp.AVG
            yield "maximum", dist.ReduceOp.MAX
            yield "product with a factor", dist._make_nccl_premul_sum(2.0)  # noqa: SLF001  # torch: the only maker of it


def wrong(arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield arguments in one of which something was changed."""
    for name, value in arguments.items():
        for change, changed in changes(value):
            yield f"{name} {change}", arguments | {name: changed}


def outcome(call: Callable[[], Any]) -> str:
    """Return the result of the call: ``done``, or the error and whether the call itself raised it."""
    when = "refused"
    try:
        work = call()
        when = "failed"
        work.wait()
    except (UsageError, OperationMismatch, PeerCancelled) as error:
        is_torch = isinstance(error, dist.DistBackendError)
        return f"{when}: {type(error).__name__}: {error}" if is_torch else f"done with {error!r}"
    return "done"


def all_outcomes(mine: str) -> list[str]:
    """Return the outcomes of all ranks, for which the group must work."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def try_all(
    operation: Operation, argument: str = "", ranks: Sequence[int] = (0, 1, 2, ALL)
) -> Iterator[tuple[int, str, list[str]]]:
    """Let one of ``ranks`` after the other, or all (``ALL``), pass each kind of wrong arguments, or of ``argument``.

    Yields that rank, what is wrong, and all outcomes.
    """
    mine, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    assert outcome(lambda: operation.call(group, operation.make(mine, size))) == "done"
    for who in ranks:
        kinds = [
            [change for change, _ in wrong(operation.make(rank, size)) if change.startswith(argument)]
            for rank in range(size)
        ]
        for change in (
            kinds[who] if who != ALL else [change for change in kinds[0] if all(change in kind for kind in kinds)]
        ):
            good = operation.make(mine, size)
            arguments = dict(wrong(good))[change] if who in {mine, ALL} else good
            yield who, change, all_outcomes(outcome(partial(operation.call, group, arguments)))


@on_ranks(3, limit=120.0)
@pytest.mark.parametrize("ranks", [chosen([1, ALL], soak=[0, 1, 2, ALL])], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_all_ranks_get_an_error_when_one_is_wrong(name: str, ranks: list[int]) -> None:
    operation = OPERATIONS[name]
    found = [*try_all(operation, ranks=ranks)]
    assert {who for who, _, _ in found} == set(ranks)
    silent = [
        f"rank {who}: {change}: {outcomes}"
        for who, change, outcomes in found
        if any(one.startswith("done") for one in outcomes) and not (who == ALL and set(outcomes) == {"done"})
    ]
    assert not silent, "\n".join(silent)


@on_ranks(3)
@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if "root" in operation.make(0, 3)])
def test_a_root_that_is_no_rank_is_refused_at_the_call(name: str) -> None:
    operation = OPERATIONS[name]
    for who, change, outcomes in try_all(operation, "root"):
        if change in {"root out of range", "root negative"}:
            own = outcomes if who == ALL else [outcomes[who]]
            assert all(re.match("refused: UsageError: .*root: expected a rank", one) for one in own), outcomes


ROOTS = ("src", "dst", "group_src", "group_dst")
OTHERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: ones(LENGTH),
    "object_list": lambda: [1],
    "obj": lambda: 1,
    "scatter_object_output_list": lambda: [None],
    "scatter_object_input_list": lambda: [1, 2, 3],
}
"""The arguments of torch's functions, by name, that have no defaults."""
ROOTED = sorted(
    (name, root)
    for name, function in vars(dist).items()
    if type(function) is FunctionType and not name.startswith("_")
    for root in ROOTS
    if root in inspect.signature(function).parameters
)
"""All functions of torch.distributed that take a rank to send to or to receive from, with the name of the argument."""


def _rooted(name: str, root: str, bad: int, group: Any) -> Callable[[], Any]:
    """Return the call of a function of torch with ``bad`` as its ``root``; an operation goes on beside the program."""
    function = getattr(dist, name)
    parameters = inspect.signature(function).parameters
    given = {other: make() for other, make in OTHERS.items() if other in parameters} | {"group": group, root: bad}
    return partial(function, **given, **({"async_op": True} if "async_op" in parameters else {}))


def _rooted_operators(bad: int, group: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    operators, name, x = torch.ops._c10d_functional, group.group_name, ones(LENGTH)  # noqa: SLF001  # torch: operators
    yield "functional broadcast", lambda: operators.broadcast(x, bad, name)
    yield "functional isend", lambda: operators.isend(x, bad, 0, name)
    yield "functional irecv", lambda: operators.irecv(x, bad, 0, name)
    yield "functional batch", lambda: operators.batch_p2p_ops(["isend"], [bad], [0], [x], name)
    yield "send of the group", lambda: group.send([x], bad, 0)
    yield "recv of the group", lambda: group.recv([x], bad, 0)


def _not_refused(rank: int) -> list[str]:
    """Return what rank 0 of a group of two, or of all three ranks, may call with a rank that is not in the group."""
    world: Any = dist.group.WORLD
    pair: Any = dist.new_group([0, 1])
    found = []
    for group in [world, *([pair] if rank < 2 else [])]:
        for bad in (7, -1, dist.get_world_size(group)):
            calls = {f"{name}({root}={bad})": _rooted(name, root, bad, group) for name, root in ROOTED}
            calls |= {f"{name} {bad}": call for name, call in _rooted_operators(bad, group)}
            if group is world:
                calls[f"batch {bad}"] = partial(
                    dist.batch_isend_irecv, [dist.P2POp(dist.isend, ones(2), bad), dist.P2POp(dist.irecv, ones(2), bad)]
                )
            for label, call in calls.items():
                try:
                    call()
                except (UsageError, ValueError) as error:
                    if not re.search(r"expected a rank 0\.\.|is not part of group", str(error)):
                        found.append(f"{label}: {error!r}")
                else:
                    found.append(label)
    for label, call in (("send", dist.isend), ("recv", dist.irecv)):
        with pytest.raises(UsageError, match=f"{label}: .*expected another rank than this one, got {rank}"):
            call(ones(2), rank)
        with pytest.raises(UsageError, match=f"{label}: tag: expected an integer"):
            call(ones(2), (rank + 1) % 3, tag=-1)
    x = ones(1)
    dist.all_reduce(x)
    assert x.item() == 3.0
    return found


def test_no_function_of_torch_begins_with_a_rank_that_is_not_in_the_group() -> None:
    assert {name for name, _ in ROOTED} >= {"broadcast", "reduce", "gather", "scatter", "isend", "irecv"}
    assert run_threads(3, _not_refused) == [[], [], []]


def with_dtype(make: Callable[[int, int], Arguments], dtype: torch.dtype) -> Callable[[int, int], Arguments]:
    """Return ``make`` with tensors of ``dtype``."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype)
        return [*map(convert, value)] if isinstance(value, list) else value

    return lambda rank, size: {name: convert(value) for name, value in make(rank, size).items()}


@on_ranks(3)
@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.moves])
def test_dtypes_that_are_moved_as_bits_are_told_apart(name: str) -> None:
    operation, mine, size = OPERATIONS[name], dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    of_one, of_other = (with_dtype(operation.make, dtype) for dtype in (FLOAT8, OTHER_FLOAT8))
    assert outcome(lambda: operation.call(group, of_one(mine, size))) == "done"
    for who in range(size):
        make = of_other if mine == who else of_one
        found = all_outcomes(outcome(partial(operation.call, group, make(mine, size))))
        assert "done" not in found, found
