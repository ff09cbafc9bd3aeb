"""Methods of a process group, called in every form that torch's own have, do as Gloo's do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.torch.worlds import on_ranks

OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
)
LATER = timedelta(seconds=30)


def forms(name: str) -> Iterator[list[tuple[str, bool]]]:
    """Yield the arguments of each form of ``name`` that torch documents, and whether each may be left out."""
    for line in (getattr(dist.ProcessGroup, name).__doc__ or "").splitlines():
        found = re.match(rf"^(?:\d+\. )?{name}\(self: [\w.]+, (.*)\) -> ", line)
        if found:
            text = re.sub(r"<[^>]*>( object at 0x\w+>)?", "default", found[1])
            text = re.sub(r"\[[^\[\]]*(\[[^\[\]]*\])*[^\[\]]*\]", "", text)  # of types
            yield [(part.split(":")[0].strip(), "=" in part) for part in text.split(",")]


def tensor(first: float, count: int = 4) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32) + 10 * dist.get_rank()


def zeros(*counts: int) -> list[torch.Tensor]:
    return [torch.zeros(count) for count in counts]


def tensors(name: str, *, is_short: bool, root: int) -> dict[str, Any]:  # noqa: C901  # a table
    """Return the tensors for each argument of an operation; ``is_short``: for the forms without options."""
    at_root = dist.get_rank() == root
    one, two = tensor(1), [tensor(1), tensor(5)]
    match name:
        case "allreduce" | "broadcast" | "reduce":
            return {"tensors": [one], "tensor": one}
        case "allreduce_coalesced":
            return {"tensors": two}
        case "allgather":
            rows = zeros(4, 4)
            return {"output_tensors": rows if is_short else [rows], "input_tensors": [one], "input_tensor": one}
        case "_allgather_base" | "all_gather_single":
            return {"output": torch.zeros(8), "input": one}
        case "all_gather_single_coalesced" | "allgather_into_tensor_coalesced":
            return {"outputs": zeros(8, 8), "inputs": two}
        case "allgather_coalesced":
            return {"output_lists": [zeros(4, 4), zeros(4, 4)], "input_list": two}
        case "gather":
            rows = zeros(4, 4) if at_root else []
            return {
                "output_tensors": rows if is_short or not at_root else [rows],
                "input_tensors": [one],
                "input_tensor": one,
            }
        case "scatter":
            rows = two if at_root else []
            [out] = zeros(4)
            return {
                "output_tensors": [out],
                "output_tensor": out,
                "input_tensors": rows if is_short or not at_root else [rows],
            }
        case "reduce_scatter":
            [out] = zeros(4)
            return {"output_tensors": [out], "output": out, "input_tensors": [two], "input": two}
        case "_reduce_scatter_base" | "reduce_scatter_single":
            return {"outputTensor": torch.zeros(2), "inputTensor": one}
        case "reduce_scatter_single_coalesced" | "reduce_scatter_tensor_coalesced":
            return {"outputs": zeros(2, 2), "inputs": two}
        case "alltoall":
            return {"output_tensors": zeros(4, 4), "input_tensors": two}
        case "alltoall_base" | "all_to_all_single":
            return {"output": torch.zeros(4), "input": one, "output_split_sizes": [], "input_split_sizes": []}
    return {}


def options(name: str) -> Any:
    """Return options of an operation that are not the usual ones, if it has such."""
    kinds = {
        "allreduce": c10d.AllreduceOptions,
        "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
        "barrier": c10d.BarrierOptions,
        "broadcast": c10d.BroadcastOptions,
        "gather": c10d.GatherOptions,
        "reduce": c10d.ReduceOptions,
        "scatter": c10d.ScatterOptions,
    }
    kind: Any = kinds.get(name, c10d.AllgatherOptions if "gather" in name else c10d.AllToAllOptions)
    made = c10d.ReduceScatterOptions() if "reduce_scatter" in name else kind()
    if hasattr(made, "rootRank"):
        made.rootRank = 1
    if hasattr(made, "reduceOp"):
        made.reduceOp = dist.ReduceOp.MAX
    made.timeout = LATER
    return made


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to call an operation: with ``arguments``, of which the first ``positional`` have no names."""

    name: str
    arguments: list[str]
    positional: int
    is_short: bool

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}), {self.positional} by position"

    def take(self, group: dist.ProcessGroup) -> list[torch.Tensor] | None:
        """Call it; return all tensors of the call after it, None if the group does not have the operation."""
        root = 1 if {"opts", "root"} & {*self.arguments} else 0
        own = tensors(self.name, is_short=self.is_short, root=root)
        has = own | {"opts": options(self.name), "op": dist.ReduceOp.MAX, "root": 1, "timeout": LATER}
        passed = [has[argument] for argument in self.arguments]
        named = dict(zip(self.arguments[self.positional :], passed[self.positional :], strict=True))
        try:
            work = getattr(group, self.name)(*passed[: self.positional], **named)
        except RuntimeError as error:
            if "does not support" in str(error):
                return None
            raise
        work.wait()
        if self.name == "reduce" and dist.get_rank() != root:
            return []  # Gloo leaves parts of sums there
        return flatten([own[argument] for argument in self.arguments if argument in own])


def ways(name: str) -> Iterator[Way]:
    """Yield ways to call ``name``: each form, with and without what may be left out, by position and by name."""
    for form in forms(name):
        everything = [argument for argument, _ in form]
        for arguments in (everything, [argument for argument, is_optional in form if not is_optional]):
            for positional in {0, len(arguments)}:
                yield Way(name=name, arguments=arguments, positional=positional, is_short="opts" not in everything)


def flatten(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values if not isinstance(value, int) for tensor in flatten(value)]


@on_ranks(2)
def test_every_form_of_every_operation_does_as_with_gloo() -> None:
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert ours is not None
    seen = 0
    unknown = []
    for name in OPERATIONS:
        for way in ways(name):
            got, wanted = way.take(ours), way.take(gloo)
            assert got is not None, way
            if wanted is None:
                unknown.append(str(way))
                continue
            seen += 1
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(one, other), f"{way}: got {one}, Gloo {other}"
    assert not unknown, seen
