"""Every operator of torch's functional collectives: the same results as over Gloo, eager and compiled.

Generated: the operators are those that the installed torch has, and arguments follow from their names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # it defines what operators give to compilers
import torch.distributed.tensor  # it defines the operators of _dtensor

from asyncpar.errors import UsageError
from tests.torch.values import assert_same, draw
from tests.torch.worlds import on_ranks

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
OPERATORS = sorted(
    schema.name.replace("::", ".")
    for schema in torch._C._jit_get_all_schemas()  # noqa: SLF001  # torch: the list of all operators
    if schema.name.partition("::")[0] in NAMESPACES and not schema.name.endswith("::mesh_get_process_group")
)
"""All but one, which looks a group up in a mesh and communicates nothing."""
OTHER_SIDE = {"isend": "irecv", "irecv": "isend"}
"""The operator that rank 1 calls where rank 0 calls another one."""
COMPILERS = ("aot_eager", *(["inductor"] if os.environ.get("ASYNCPAR_TORCH_INDUCTOR") else []))
"""Inductor compiles C++, for half a minute: only where that is asked for."""

Tensors = list[torch.Tensor]
Call = tuple[Any, list[Any], dict[str, Any]]
"""An operator, its arguments and those that are named."""


def argument(name: str, operator: str, xs: Tensors, group: str) -> Any:
    """Return the argument ``name`` of ``operator``, which gets ``xs``; a ``KeyError`` is one that is new in torch."""
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    values: dict[str, Callable[[], Any]] = {
        "input": xs[0].clone,
        "inputs": lambda: [x.clone() for x in xs],
        "tensor": xs[0].clone,
        "out": lambda: xs[0].new_zeros(8 if "gather" in operator else 2, 2),
        "reduce_op": lambda: "sum",
        "group_size": lambda: 2,
        "group_name": lambda: group,
        "src": lambda: 1 if "broadcast" in operator else other,
        "dst": lambda: other,
        "tag": lambda: 3,
        "input_split_sizes": lambda: [[1, 3], [2, 2]][mine],
        "output_split_sizes": lambda: [[1, 2], [3, 2]][mine],
        "gather_dim": lambda: 0,
        "shard_dim": lambda: 1,
        "op_list": lambda: ["isend", "irecv"] * len(xs),
        "peer_list": lambda: [other, other] * len(xs),
        "tag_list": lambda: [tag for tag in range(len(xs)) for _ in range(2)],
        "tensors": lambda: [tensor for x in xs for tensor in (x.clone(), torch.zeros_like(x))],
    }
    return values[name]()


def call_of(name: str, xs: Tensors, group: str) -> Call:
    """Return what this rank calls with ``xs`` where the operator ``name`` is tested."""
    space, _, own = name.partition(".")
    operator = getattr(getattr(torch.ops, space), OTHER_SIDE.get(own, own) if dist.get_rank() else own).default
    arguments = operator._schema.arguments  # noqa: SLF001  # torch: the names of an operator's arguments
    values = {each.name: argument(each.name, name, xs, group) for each in arguments}
    named = {each.name: values.pop(each.name) for each in arguments if each.kwarg_only}
    return operator, [*values.values()], named


def results(call: Call) -> Tensors:
    """Call an operator, wait for it, and return its results."""
    operator, arguments, named = call
    found = operator(*arguments, **named)
    return [
        torch.ops._c10d_functional.wait_tensor(one)  # noqa: SLF001  # torch: what waits for functional operators
        for one in (found if isinstance(found, list | tuple) else [found])
    ]


def own_tensors() -> Tensors:
    return [draw(dist.get_rank(), shape=shape) for shape in ((4, 2), (2, 1))]


def groups() -> tuple[str, str]:
    """Return the names of two groups of all ranks: one of the backend under test, and one of Gloo."""
    return dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one.clone(), other.clone())


def test_all_namespaces_have_operators() -> None:
    assert [space for space in NAMESPACES if not any(name.startswith(f"{space}.") for name in OPERATORS)] == []


@on_ranks(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_gloo_gives(name: str) -> None:
    own, gloo = (results(call_of(name, own_tensors(), group)) for group in groups())
    assert_equal(own, gloo)


def is_compiled(operator: Any) -> bool:
    """Can the operator be part of what is compiled?  torch refuses those that return what they write to."""
    return not any(result.alias_info for result in operator._schema.returns)  # noqa: SLF001  # torch: what it returns


@on_ranks(2, limit=240)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_operators_give_what_gloo_gives(compiler: str) -> None:
    own, gloo = groups()
    names = [name for name in OPERATORS if is_compiled(call_of(name, own_tensors(), own)[0])]
    expected = [results(call_of(name, own_tensors(), gloo)) for name in names]
    operators = [call_of(name, own_tensors(), own)[0] for name in names]

    def program(arguments: list[Any]) -> list[Tensors]:
        return [results((operator, *rest)) for operator, rest in zip(operators, arguments, strict=True)]

    compiled = torch.compile(program, backend=compiler, fullgraph=True)
    for _ in range(2):
        found = compiled([call_of(name, own_tensors(), own)[1:] for name in names])
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


@on_ranks(2)
@pytest.mark.parametrize("name", [name for name in OPERATORS if name.startswith("_c10d_functional_autograd.")])
def test_gradients_of_an_operator_are_those_of_gloo(name: str) -> None:
    found = []
    for group in groups():
        xs = [x.requires_grad_() for x in own_tensors()]
        sum((result * draw(7, shape=result.shape)).sum() for result in results(call_of(name, xs, group))).backward()
        found.append([x.grad for x in xs if x.grad is not None])
    assert found[0]
    assert_equal(*found)


@on_ranks(2)
def test_a_batch_that_cannot_be_is_refused_and_the_group_goes_on() -> None:
    mine, group = dist.get_rank(), dist.group.WORLD.group_name
    batch, x = torch.ops._c10d_functional.batch_p2p_ops, torch.ones(2)  # noqa: SLF001  # torch: the operator
    with pytest.raises(UsageError, match=r"batch_p2p_ops: op_list: expected isend and irecv, got 'send'"):
        batch(["send"], [1 - mine], [0], [x], group)
    with pytest.raises(UsageError, match=r"expected lists of one length, got 1, 2, 1 and 1"):
        batch(["isend"], [1 - mine, 0], [0], [x], group)
    dist.all_reduce(x)
    assert_same(x, torch.full((2,), 2.0))
