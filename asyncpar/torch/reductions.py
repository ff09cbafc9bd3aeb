"""Combining tensors of all ranks: all_reduce, reduce, reduce_scatter, in torch's forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.reduction import Array
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of, as_list, flat, only
from asyncpar.torch.devices import by_device
from asyncpar.torch.group_base import GroupBase, Make, together
from asyncpar.torch.reduce_ops import reduce_op
from asyncpar.torch.sparse import all_reduce_sparse
from asyncpar.torch.work import Work


class Reductions(GroupBase):
    """The operations that combine."""

    @by_device
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine the tensor of all ranks in place; several: as ``allreduce_coalesced``."""
        found = as_list(tensors)
        if len(found) > 1:
            return self.allreduce_coalesced(found, opts)
        tensor = found[0]
        communicator = self.communicator
        try:
            op, factor = reduce_op(opts)
            if tensor.is_sparse:
                return self._all_reduce_sparse(tensor, op, opts)
            array = array_of(tensor)
            _scale(array, factor)
        except UsageError as error:
            raise self.refuse("all_reduce", error) from None
        return self.start(
            lambda: communicator.all_reduce(array, op), found, operation="all_reduce", options=opts, timeout=timeout
        )

    @by_device
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Combine each of the tensors in place, in one operation."""
        found = as_list(tensors)
        communicator = self.communicator
        try:
            op, factor = reduce_op(opts)
            arrays = [array_of(tensor) for tensor in found]
            for array in arrays:
                _scale(array, factor)
        except UsageError as error:
            raise self.refuse("all_reduce_coalesced", error) from None
        return self.start(
            lambda: communicator.all_reduce_many(arrays, op), found, operation="all_reduce_coalesced", options=opts
        )

    @by_device
    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Combine the tensor of all ranks, in place at the root; the others keep theirs."""
        tensor = only(tensors, "tensors")
        communicator, root = self.communicator, opts.rootRank
        try:
            op, factor = reduce_op(opts)
            array = array_of(tensor)
            source = array if factor is None else _scaled(array, factor)
        except UsageError as error:
            raise self.refuse("reduce", error) from None
        out = array if communicator.rank == root else None
        if out is source:
            out = None
            source = array.copy()

        def put(result: Array | None) -> None:
            if result is not None:
                array[...] = result

        return self.start(
            lambda: After(communicator.reduce(source, op, root=root, out=out), put),
            [tensor],
            operation="reduce",
            options=opts,
        )

    @by_device
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Combine the lists of all ranks and leave entry ``r`` in the output of rank ``r``; entries may differ."""
        output = only(output_tensors, "output_tensors")
        inputs = _list_of(input_tensors)
        communicator = self.communicator
        try:
            op, factor = reduce_op(opts)
            self._check_entries(inputs, "input_list")
            out = array_of(output, "output")
            arrays = [_scaled(array_of(tensor, "input_list"), factor) for tensor in inputs]
            if out.shape != arrays[communicator.rank].shape or out.dtype != arrays[communicator.rank].dtype:
                raise UsageError(
                    f"output: expected the shape and dtype of this rank's entry of input_list, "
                    f"{_show(arrays[communicator.rank])}, got {_show(out)}"
                )
        except UsageError as error:
            raise self.refuse("reduce_scatter", error) from None
        if len({array.shape for array in arrays}) == 1:
            whole = np.concatenate([array.reshape(-1) for array in arrays])
            start = partial(self.start, tensors=[output], operation="reduce_scatter", options=opts, inputs=inputs)
            return self._reduce_scatter_flat(out, whole, op, start)

        async def run(calls: Sequence[Any]) -> None:
            results = await together(calls)
            out[...] = results[communicator.rank]

        return self.start(
            lambda: run([communicator.reduce(array, op, root=root) for root, array in enumerate(arrays)]),
            [output],
            operation="reduce_scatter",
            options=opts,
            inputs=inputs,
        )

    @by_device
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:  # noqa: A002
        """Combine ``input`` of all ranks, cut in as many equal parts as there are ranks, part ``r`` for rank ``r``."""
        try:
            out, whole, op = self._scattering(output, input, opts)
        except UsageError as error:
            raise self.refuse("reduce_scatter_tensor", error) from None
        start = partial(self.start, tensors=[output], operation="reduce_scatter_tensor", options=opts, inputs=[input])
        return self._reduce_scatter_flat(out, whole, op, start)

    _reduce_scatter_base = reduce_scatter_single

    @by_device
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Do ``reduce_scatter_single`` with each pair."""
        communicator = self.communicator
        try:
            parts = [self._scattering(out, x, opts) for out, x in zip(outputs, inputs, strict=True)]
        except UsageError as error:
            raise self.refuse("reduce_scatter_tensor_coalesced", error) from None

        async def run(calls: Sequence[Any]) -> None:
            for (out, _, _), result in zip(parts, await together(calls), strict=True):
                out[...] = result.reshape(out.shape)

        return self.start(
            lambda: run([communicator.reduce_scatter(whole, op) for _, whole, op in parts]),
            list(outputs),
            operation="reduce_scatter_tensor_coalesced",
            options=opts,
            inputs=inputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- inside ------------------------------------------------------------------------------------------------------

    def _reduce_scatter_flat(self, out: Array, whole: Array, op: str, start: Callable[[Make], Work]) -> Work:
        communicator = self.communicator
        if out.flags.c_contiguous and not np.may_share_memory(out, whole):
            target = out.reshape(-1)
            return start(lambda: communicator.reduce_scatter(whole, op, out=target))

        def put(part: Array) -> None:
            out[...] = part.reshape(out.shape)

        return start(lambda: After(communicator.reduce_scatter(whole, op), put))

    def _scattering(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> tuple[Array, Array, str]:
        op, factor = reduce_op(opts)
        out = array_of(output, "output")
        whole = _scaled(flat(source, "input", as_bits=False), factor)
        if whole.dtype != out.dtype or whole.size != out.size * self.communicator.size:
            raise UsageError(
                f"input: expected {self.communicator.size} times the elements of output, {_show(out)}, in its dtype, "
                f"got {_show(array_of(source, 'input'))}"
            )
        return out, whole, op

    def _check_entries(self, entries: Sequence[torch.Tensor], name: str) -> None:
        if len(entries) != self.communicator.size:
            raise UsageError(f"{name}: expected {self.communicator.size} tensors, one per rank, got {len(entries)}")

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: str, opts: Any) -> Work:
        communicator = self.communicator
        return self.start(
            lambda: all_reduce_sparse(communicator, tensor, op), [tensor], operation="all_reduce", options=opts
        )


def _list_of(tensors: Any) -> list[torch.Tensor]:
    """Return the list of tensors of an argument that may be wrapped in another list."""
    return list(tensors[0]) if tensors and not isinstance(tensors[0], torch.Tensor) else list(tensors)


def _scale(array: Array, factor: Any) -> None:
    if factor is not None:
        array *= _factor(factor, array)


def _scaled(array: Array, factor: Any) -> Array:
    return array if factor is None else (array * _factor(factor, array)).astype(array.dtype, copy=False)


def _factor(factor: Any, array: Array) -> Any:
    if array.dtype.kind in "biu":
        raise UsageError(f"op: PREMUL_SUM needs a floating dtype, as {array.dtype} cannot hold the products")
    return (array_of(factor, "op") if isinstance(factor, torch.Tensor) else np.asarray(factor)).astype(array.dtype)


def _show(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
