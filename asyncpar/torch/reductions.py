"""all_reduce, reduce and reduce_scatter in torch's forms, and torch's reduce operations as asyncpar's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.core.config.names import Name, ReduceOp
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of, as_list, check_same_dtype, flat, only, pairs, unwrapped
from asyncpar.torch.group_base import GroupBase, Make, root_of
from asyncpar.torch.packed import reduce_several, sparse_all_reduce
from asyncpar.torch.signatures import operation
from asyncpar.torch.work import Work

_Kind = dist.ReduceOp.RedOpType


@dataclass(frozen=True, slots=True)
class TorchReduction:
    """A reduction: inputs times ``factor``, combined by the communicator's ``op``, divided by the group's size.

    ``factor`` is None for none.  Only means of integers are divided here (``divides``), since the communicator does not
    support them.
    """

    op: ReduceOp
    factor: Any = None
    divides: bool = False

    @property
    def detail(self) -> str:
        """The settings besides ``op`` on which ranks must agree."""
        return "of products" if self.factor is not None else "divided" if self.divides else ""

    @property
    def is_plain(self) -> bool:
        """Whether the communicator does the whole reduction."""
        return self.factor is None and not self.divides

    def scaled(self, array: Array) -> Array:
        """Return the inputs times the factor: ``array`` itself if there is none."""
        if self.factor is None:
            return array
        return (array * self._factor(array)).astype(array.dtype, copy=False)

    def scale(self, array: Array) -> None:
        """Multiply the inputs by the factor, in place."""
        if self.factor is not None:
            array *= self._factor(array)

    def divide(self, array: Array, size: int) -> Array:
        """Divide the sum over ``size`` ranks in place, if the reduction is a mean of integers.

        Quotients are truncated towards zero, like NCCL: -7 / 2 is -3.
        """
        if self.divides:
            if size > np.iinfo(array.dtype).max:
                array[...] = 0
            else:
                is_rounded_down = (array < 0) & (array % size != 0)
                array //= size
                array += is_rounded_down
        return array

    def _factor(self, array: Array) -> Any:
        if array.dtype.kind in "biu":
            raise UsageError(f"op: PREMUL_SUM needs a floating dtype, as {array.dtype} cannot hold the products")
        factor = self.factor
        return (array_of(factor, "op") if isinstance(factor, torch.Tensor) else np.asarray(factor)).astype(array.dtype)


_PLAIN = {
    int(kind): TorchReduction(Name(name))
    for kind, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.BAND, "band"),
        (dist.ReduceOp.BOR, "bor"),
        (dist.ReduceOp.BXOR, "bxor"),
    )
}
"""By number, since torch's enumeration is slow to hash and to compare."""

_MEAN = _PLAIN[int(dist.ReduceOp.AVG)]
_INTEGER_MEAN = TorchReduction("sum", divides=True)


def reduction_of(options: Any, dtype: torch.dtype) -> TorchReduction:
    """Return the reduction of ``options`` for tensors of ``dtype``.

    Integers are averaged like NCCL: the sum, which wraps around in their dtype, is divided and truncated towards zero.
    """
    operation = options.reduceOp
    kind = getattr(operation, "op", operation)
    if isinstance(kind, _Kind):
        found = _PLAIN.get(kind.value)
        if found is not None:
            if found is _MEAN and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
                return _INTEGER_MEAN
            return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        return TorchReduction("sum", operation.__getstate__()[1])
    raise UsageError(f"op: expected a torch.distributed.ReduceOp, got {operation!r}")


class ReductionOperations(GroupBase):
    """The operations that combine tensors of several ranks."""

    @operation("all_reduce", "tensors|tensor", options=c10d.AllreduceOptions, extras=("op", "timeout"))
    def allreduce(self, tensors: Any, opts: Any) -> Work:
        """Combine the tensor of all ranks in place."""
        tensor = only(tensors, "tensors", instead="allreduce_coalesced")
        communicator = self.communicator
        reduction = reduction_of(opts, tensor.dtype)
        if tensor.is_sparse:
            make_sparse = sparse_all_reduce(communicator, tensor, reduction.op)
            return self.start(make_sparse, [tensor], operation="all_reduce", options=opts)
        array = array_of(tensor)
        if reduction.is_plain:
            op = reduction.op
            make: Make = lambda: communicator.all_reduce(array, op)  # noqa: E731
        else:
            make = self._make_all_reduce(array, reduction)
        return self.start(make, [tensor], operation="all_reduce", options=opts, detail=reduction.detail)

    @operation("all_reduce_coalesced", "tensors", options=c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Work:
        """Combine each of the tensors, which have one dtype, in place, in one operation."""
        found = as_list(tensors)
        communicator = self.communicator
        check_same_dtype(found, "tensors")
        reduction = reduction_of(opts, found[0].dtype)
        arrays = [array_of(tensor) for tensor in found]
        for array in arrays:
            reduction.scale(array)

        def divide(_: Any) -> None:
            for array in arrays:
                reduction.divide(array, communicator.size)

        return self.start(
            lambda: After(communicator.all_reduce_many(arrays, reduction.op), divide),
            found,
            operation="all_reduce_coalesced",
            options=opts,
            detail=reduction.detail,
        )

    @operation("reduce", "tensors|tensor", options=c10d.ReduceOptions, extras=("root", "op", "timeout"))
    def reduce(self, tensors: Any, opts: Any) -> Work:
        """Combine the tensor of all ranks, in place at the root; the others keep theirs."""
        tensor = only(tensors, "tensors")
        communicator, root = self.communicator, root_of(opts, self.communicator)
        reduction = reduction_of(opts, tensor.dtype)
        array = array_of(tensor)
        source = reduction.scaled(array)
        out = array if communicator.rank == root else None
        if out is source:
            out = None
            source = array.copy()

        def put(result: Array | None) -> None:
            if result is not None:
                array[...] = reduction.divide(result, communicator.size)

        return self.start(
            lambda: After(communicator.reduce(source, reduction.op, root=root, out=out), put),
            [tensor],
            operation="reduce",
            options=opts,
            detail=reduction.detail,
        )

    @operation(
        "reduce_scatter",
        "output_tensors|output",
        "input_tensors|input",
        options=c10d.ReduceScatterOptions,
        extras=("op", "timeout"),
    )
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Combine the lists of all ranks and leave entry ``r`` in the output of rank ``r``; entries may differ."""
        output = only(output_tensors, "output_tensors")
        inputs = unwrapped(input_tensors, "input_list")
        communicator = self.communicator
        if len(inputs) != communicator.size:
            raise UsageError(f"input_list: expected {communicator.size} tensors, one per rank, got {len(inputs)}")
        check_same_dtype([output, *inputs], "output and input_list")
        reduction = reduction_of(opts, output.dtype)
        out = array_of(output, "output")
        arrays = [reduction.scaled(array_of(tensor, "input_list")) for tensor in inputs]
        if out.shape != arrays[communicator.rank].shape:
            raise UsageError(
                f"output: expected the shape of this rank's entry of input_list, "
                f"{_show(arrays[communicator.rank])}, got {_show(out)}"
            )
        start = partial(
            self.start,
            tensors=[output],
            operation="reduce_scatter",
            options=opts,
            inputs=inputs,
            detail=reduction.detail,
        )
        if len({array.shape for array in arrays}) == 1:
            whole = np.concatenate([array.reshape(-1) for array in arrays])
            return self._reduce_scatter_flat(out, whole, reduction, start)

        def put(results: Sequence[Array]) -> None:
            out[...] = results[communicator.rank]

        return start(lambda: reduce_several(communicator, arrays, reduction.op, reduction.divide, put))

    @operation("reduce_scatter_tensor", "output|outputTensor", "input|inputTensor", options=c10d.ReduceScatterOptions)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Work:  # noqa: A002
        """Combine ``input`` of all ranks, cut in as many equal parts as there are ranks, part ``r`` for rank ``r``."""
        out, whole, reduction = self._scattering(output, input, opts)
        start = partial(
            self.start,
            tensors=[output],
            operation="reduce_scatter_tensor",
            options=opts,
            inputs=[input],
            detail=reduction.detail,
        )
        return self._reduce_scatter_flat(out, whole, reduction, start)

    _reduce_scatter_base = reduce_scatter_single

    @operation("reduce_scatter_tensor_coalesced", "outputs", "inputs", options=c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Do ``reduce_scatter_single`` with each pair, in one operation; all have one dtype."""
        communicator = self.communicator
        check_same_dtype([*outputs, *inputs], "outputs and inputs")
        parts = [self._scattering(out, x, opts) for out, x in pairs(outputs, inputs)]

        def put(results: Sequence[Array]) -> None:
            for (out, _, _), result in zip(parts, results, strict=True):
                out[...] = result.reshape(communicator.size, *out.shape)[communicator.rank]

        reduction = parts[0][2] if parts else TorchReduction("sum")
        return self.start(
            lambda: reduce_several(communicator, [whole for _, whole, _ in parts], reduction.op, reduction.divide, put),
            list(outputs),
            operation="reduce_scatter_tensor_coalesced",
            options=opts,
            inputs=inputs,
            detail=reduction.detail,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make_all_reduce(self, array: Array, reduction: TorchReduction) -> Make:
        """Return the all-reduce of ``array`` with the scaling before it and the division after it."""
        communicator = self.communicator
        reduction.scale(array)
        return lambda: After(
            communicator.all_reduce(array, reduction.op), lambda _: reduction.divide(array, communicator.size)
        )

    def _reduce_scatter_flat(
        self, out: Array, whole: Array, reduction: TorchReduction, start: Callable[[Make], Work]
    ) -> Work:
        communicator = self.communicator
        if out.flags.c_contiguous and not np.may_share_memory(out, whole) and reduction.is_plain:
            target = out.reshape(-1)
            return start(lambda: communicator.reduce_scatter(whole, reduction.op, out=target))

        def put(part: Array) -> None:
            out[...] = reduction.divide(part, communicator.size).reshape(out.shape)

        return start(lambda: After(communicator.reduce_scatter(whole, reduction.op), put))

    def _scattering(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> tuple[Array, Array, TorchReduction]:
        out = array_of(output, "output")
        reduction = reduction_of(opts, output.dtype)
        whole = flat(source, "input", as_bits=False)
        if source.dtype != output.dtype or whole.size != out.size * self.communicator.size:
            raise UsageError(
                f"input: expected {self.communicator.size} times the elements of output, {_show(out)}, in its dtype, "
                f"got {_show(array_of(source, 'input'))}"
            )
        return out, reduction.scaled(whole), reduction


def _show(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
