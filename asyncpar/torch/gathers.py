"""Broadcast, gathers, scatter and barrier in torch's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._C import _distributed_c10d as c10d

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of, bits_detail, check_same_dtype, flat, of_root, only, pairs, unwrapped
from asyncpar.torch.group_base import GroupBase, root_of
from asyncpar.torch.packed import gather_several, tensors_detail
from asyncpar.torch.signatures import operation
from asyncpar.torch.work import Work


class GatherOperations(GroupBase):
    """The operations that move whole tensors."""

    @operation("broadcast", "tensors|tensor", options=c10d.BroadcastOptions, extras=("root", "timeout"))
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """Overwrite the tensor with that of the root."""
        tensor = only(tensors, "tensors")
        communicator, root = self.communicator, root_of(opts, self.communicator)
        array = array_of(tensor, as_bits=True)
        return self.start(
            lambda: communicator.broadcast(array, root=root),
            [tensor],
            operation="broadcast",
            options=opts,
            detail=bits_detail([tensor]),
        )

    @operation("barrier", options=c10d.BarrierOptions, extras=("timeout",))
    def barrier(self, opts: Any) -> Work:
        """Wait until all ranks have reached the barrier."""
        return self.start(self.communicator.barrier, (), operation="barrier", options=opts)

    @operation(
        "all_gather",
        "output_tensors",
        "input_tensors|input_tensor",
        options=c10d.AllgatherOptions,
        extras=("timeout",),
    )
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Collect the tensor of rank ``r`` in ``output_tensors[r]`` on all ranks; their shapes may differ."""
        source, outputs = only(input_tensors, "input_tensors"), unwrapped(output_tensors, "tensor_list")
        communicator = self.communicator
        self._check_count(outputs, "tensor_list")
        check_same_dtype([source, *outputs], "tensor_list and tensor")
        arrays = [array_of(tensor, "tensor_list", as_bits=True) for tensor in outputs]
        x = array_of(source, as_bits=True)
        _check_like(arrays[communicator.rank], x, "tensor_list", communicator.rank)
        if all(array.shape == x.shape for array in arrays):
            return self.start(
                lambda: After(communicator.all_gather(x), lambda rows: _hand_out(rows, arrays)),
                outputs,
                operation="all_gather",
                options=opts,
                inputs=[source],
                detail=bits_detail([source]),
            )
        lengths = [array.size for array in arrays]

        async def run(call: Any) -> None:
            _hand_out(np.split(await call, np.cumsum(lengths)[:-1]), arrays)

        return self.start(
            lambda: run(communicator.all_gather_v(x.reshape(-1))),
            outputs,
            operation="all_gather",
            options=opts,
            inputs=[source],
            detail=", ".join(filter(None, [f"lengths={lengths}", bits_detail([source])])),
        )

    @operation("all_gather_into_tensor", "output", "input", options=c10d.AllgatherOptions)
    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Work:  # noqa: A002
        """Collect ``input`` of all ranks in ``output``, concatenated or stacked."""
        communicator = self.communicator
        out, x = self._gathering(output, input)
        if out.flags.c_contiguous:
            target = out.reshape(communicator.size, *x.shape)
            return self.start(
                lambda: communicator.all_gather(x, out=target),
                [output],
                operation="all_gather_into_tensor",
                options=opts,
                inputs=[input],
                detail=bits_detail([input]),
            )

        def put(rows: Array) -> None:
            out[...] = rows.reshape(out.shape)

        return self.start(
            lambda: After(communicator.all_gather(x), put),
            [output],
            operation="all_gather_into_tensor",
            options=opts,
            inputs=[input],
            detail=bits_detail([input]),
        )

    _allgather_base = all_gather_single

    @operation("all_gather_into_tensor_coalesced", "outputs", "inputs", options=c10d.AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Do ``all_gather_single`` with each pair, in one operation."""
        communicator = self.communicator
        found = [self._gathering(out, x) for out, x in pairs(outputs, inputs)]

        def put(results: Sequence[Array]) -> None:
            for (out, _), result in zip(found, results, strict=True):
                out[...] = result.reshape(out.shape)

        return self.start(
            lambda: gather_several(communicator, [x for _, x in found], put),
            list(outputs),
            operation="all_gather_into_tensor_coalesced",
            options=opts,
            inputs=inputs,
            detail=tensors_detail(inputs),
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @operation("all_gather_coalesced", "output_lists", "input_list", options=c10d.AllgatherOptions)
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any) -> Work:
        """Collect each tensor of ``input_list``: that of rank ``r`` in ``output_lists[r]``."""
        communicator = self.communicator
        self._check_count(output_lists, "output_lists")
        for row in output_lists:
            if len(row) != len(input_list):
                raise UsageError(f"output_lists: expected {len(input_list)} tensors for each rank, got {len(row)}")
            for output, source in zip(row, input_list, strict=True):
                if output.dtype != source.dtype or output.numel() != source.numel():
                    raise UsageError(
                        f"output_lists: expected {source.dtype}{list(source.shape)} like the tensor of input_list, "
                        f"got {output.dtype}{list(output.shape)}"
                    )
        targets = [[array_of(tensor, "output_lists", as_bits=True) for tensor in row] for row in output_lists]
        arrays = [array_of(tensor, "input_list", as_bits=True) for tensor in input_list]

        def put(results: Sequence[Array]) -> None:
            for place, result in enumerate(results):
                _hand_out(result, [row[place] for row in targets])

        return self.start(
            lambda: gather_several(communicator, arrays, put),
            [tensor for row in output_lists for tensor in row],
            operation="all_gather_coalesced",
            options=opts,
            inputs=input_list,
            detail=tensors_detail(input_list),
        )

    @operation(
        "gather",
        "output_tensors",
        "input_tensors|input_tensor",
        options=c10d.GatherOptions,
        extras=("root", "timeout"),
        leads=1,
    )
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Collect the tensor of rank ``r`` in ``output_tensors[r]`` of the root."""
        source, root = only(input_tensors, "input_tensors"), root_of(opts, self.communicator)
        communicator = self.communicator
        outputs = of_root(output_tensors, "gather_list", is_root=communicator.rank == root)
        check_same_dtype([source, *outputs], "gather_list and tensor")
        x = array_of(source, as_bits=True)
        arrays = [array_of(tensor, "gather_list", as_bits=True) for tensor in outputs]
        if communicator.rank == root:
            self._check_count(outputs, "gather_list")
            for rank, array in enumerate(arrays):
                _check_like(array, x, "gather_list", rank)

        def put(rows: Array | None) -> None:
            if rows is not None:
                _hand_out(rows, arrays)

        return self.start(
            lambda: After(communicator.gather(x, root=root), put),
            outputs,
            operation="gather",
            options=opts,
            inputs=[source],
            detail=bits_detail([source]),
        )

    @operation(
        "scatter",
        "output_tensors|output_tensor",
        "input_tensors",
        options=c10d.ScatterOptions,
        extras=("root", "timeout"),
    )
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Scatter the root's list of tensors, entry ``r`` to rank ``r``."""
        output, root = only(output_tensors, "output_tensors"), root_of(opts, self.communicator)
        communicator = self.communicator
        out = array_of(output, as_bits=True)
        inputs = of_root(input_tensors, "scatter_list", is_root=communicator.rank == root)
        x = None
        if communicator.rank == root:
            self._check_count(inputs, "scatter_list")
            check_same_dtype([output, *inputs], "scatter_list and tensor")
            arrays = [array_of(tensor, "scatter_list", as_bits=True) for tensor in inputs]
            for rank, array in enumerate(arrays):
                _check_like(array, out, "scatter_list", rank)
            x = np.stack(arrays)
        return self.start(
            lambda: communicator.scatter(x, root=root, out=out),
            [output],
            operation="scatter",
            options=opts,
            inputs=inputs,
            detail=bits_detail([output]),
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _gathering(self, output: torch.Tensor, source: torch.Tensor) -> tuple[Array, Array]:
        out, x = array_of(output, "output_tensor", as_bits=True), flat(source, "input_tensor")
        if output.dtype != source.dtype or out.size != x.size * self.communicator.size:
            raise UsageError(
                f"output_tensor: expected {self.communicator.size} times the elements of input_tensor, "
                f"{source.dtype}{list(source.shape)}, got {output.dtype}{list(output.shape)}"
            )
        place = source.data_ptr() - output.data_ptr()
        if -x.nbytes < place < out.nbytes and place != x.nbytes * self.communicator.rank:
            x = x.copy()  # data of other ranks are about to overwrite it
        return out, x

    def _check_count(self, entries: Sequence[Any], name: str) -> None:
        if len(entries) != self.communicator.size:
            raise UsageError(f"{name}: expected {self.communicator.size} entries, one per rank, got {len(entries)}")


def _hand_out(results: Any, targets: Sequence[Array]) -> None:
    for target, result in zip(targets, results, strict=True):
        assert target.dtype == result.dtype, "numpy would convert"
        target[...] = result.reshape(target.shape)


def _check_like(array: Array, like: Array, name: str, rank: int) -> None:
    if array.shape != like.shape or array.dtype != like.dtype:
        raise UsageError(
            f"{name}[{rank}]: expected {like.dtype}{list(like.shape)} like the other tensor, "
            f"got {array.dtype}{list(array.shape)}"
        )
