"""Collecting and handing out: broadcast, gathers, scatter, barrier, in torch's forms."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.reduction import Array
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of, as_list, flat, only
from asyncpar.torch.devices import by_device
from asyncpar.torch.group_base import GroupBase, together
from asyncpar.torch.work import Work


class Gathers(GroupBase):
    """The operations that move whole tensors."""

    @by_device
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Overwrite the tensors with those of the root (``opts.rootRank``, or a rank)."""
        found = as_list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        options = None if isinstance(opts, int) else opts
        communicator = self.communicator
        try:
            arrays = [array_of(tensor, as_bits=True) for tensor in found]
        except UsageError as error:
            raise self.refuse("broadcast", error) from None
        if len(arrays) == 1:
            array = arrays[0]
            return self.start(
                lambda: communicator.broadcast(array, root=root),
                found,
                operation="broadcast",
                options=options,
                timeout=timeout,
            )
        return self.start(
            lambda: together([communicator.broadcast(array, root=root) for array in arrays]),
            found,
            operation="broadcast",
            options=options,
            timeout=timeout,
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until all ranks have come here."""
        communicator = self.communicator
        options = opts if hasattr(opts, "asyncOp") else None
        return self.start(communicator.barrier, (), operation="barrier", options=options, timeout=timeout)

    @by_device
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Collect the tensor of rank ``r`` in ``output_tensors[r]`` on all ranks; their shapes may differ."""
        outputs, source = _outputs(output_tensors), only(input_tensors, "input_tensors")
        communicator = self.communicator
        try:
            self._check_count(outputs, "tensor_list")
            arrays = [array_of(tensor, "tensor_list", as_bits=True) for tensor in outputs]
            x = array_of(source, as_bits=True)
            _check_like(arrays[communicator.rank], x, "tensor_list", communicator.rank)
        except UsageError as error:
            raise self.refuse("all_gather", error) from None
        if all(array.shape == x.shape for array in arrays):
            return self.start(
                lambda: After(communicator.all_gather(x), lambda rows: _hand_out(rows, arrays)),
                outputs,
                operation="all_gather",
                options=opts,
                inputs=[source],
            )

        async def run(call: Any) -> None:
            _hand_out(np.split(await call, np.cumsum([array.size for array in arrays])[:-1]), arrays)

        return self.start(
            lambda: run(communicator.all_gather_v(x.reshape(-1))),
            outputs,
            operation="all_gather",
            options=opts,
            inputs=[source],
        )

    @by_device
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:  # noqa: A002
        """Collect ``input`` of all ranks in ``output``, one after another or stacked."""
        communicator = self.communicator
        try:
            out, x = self._gathering(output, input)
        except UsageError as error:
            raise self.refuse("all_gather_into_tensor", error) from None
        if out.flags.c_contiguous:
            target = out.reshape(communicator.size, *x.shape)
            return self.start(
                lambda: communicator.all_gather(x, out=target),
                [output],
                operation="all_gather_into_tensor",
                options=opts,
                inputs=[input],
            )

        def put(rows: Array) -> None:
            out[...] = rows.reshape(out.shape)

        return self.start(
            lambda: After(communicator.all_gather(x), put),
            [output],
            operation="all_gather_into_tensor",
            options=opts,
            inputs=[input],
        )

    _allgather_base = all_gather_single

    @by_device
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Do ``all_gather_single`` with each pair."""
        communicator = self.communicator
        try:
            pairs = [self._gathering(out, x) for out, x in zip(outputs, inputs, strict=True)]
        except UsageError as error:
            raise self.refuse("all_gather_into_tensor_coalesced", error) from None

        async def run(calls: Sequence[Any]) -> None:
            for (out, _), result in zip(pairs, await together(calls), strict=True):
                out[...] = result.reshape(out.shape)

        return self.start(
            lambda: run([communicator.all_gather(x) for _, x in pairs]),
            list(outputs),
            operation="all_gather_into_tensor_coalesced",
            options=opts,
            inputs=inputs,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_device
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work:
        """Collect each tensor of ``input_list``: that of rank ``r`` in ``output_lists[r]``."""
        communicator = self.communicator
        try:
            self._check_count(output_lists, "output_lists")
            targets = [[array_of(tensor, "output_lists", as_bits=True) for tensor in row] for row in output_lists]
            arrays = [array_of(tensor, "input_list", as_bits=True) for tensor in input_list]
            for row in targets:
                if len(row) != len(arrays):
                    raise UsageError(f"output_lists: expected {len(arrays)} tensors for each rank, got {len(row)}")
        except UsageError as error:
            raise self.refuse("all_gather_coalesced", error) from None

        async def run(calls: Sequence[Any]) -> None:
            for place, result in enumerate(await together(calls)):
                _hand_out(result, [row[place] for row in targets])

        return self.start(
            lambda: run([communicator.all_gather(array) for array in arrays]),
            [tensor for row in output_lists for tensor in row],
            operation="all_gather_coalesced",
            options=opts,
            inputs=input_list,
        )

    @by_device
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Collect the tensor of rank ``r`` in ``output_tensors[r]`` of the root."""
        source, root = only(input_tensors, "input_tensors"), opts.rootRank
        communicator = self.communicator
        outputs = _outputs(output_tensors) if communicator.rank == root else []
        try:
            x = array_of(source, as_bits=True)
            arrays = [array_of(tensor, "gather_list", as_bits=True) for tensor in outputs]
            if communicator.rank == root:
                self._check_count(outputs, "gather_list")
                for rank, array in enumerate(arrays):
                    _check_like(array, x, "gather_list", rank)
        except UsageError as error:
            raise self.refuse("gather", error) from None

        def put(rows: Array | None) -> None:
            if rows is not None:
                _hand_out(rows, arrays)

        return self.start(
            lambda: After(communicator.gather(x, root=root), put),
            outputs,
            operation="gather",
            options=opts,
            inputs=[source],
        )

    @by_device
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Hand out the root's list of tensors, entry ``r`` to rank ``r``."""
        output, root = only(output_tensors, "output_tensors"), opts.rootRank
        communicator = self.communicator
        try:
            out = array_of(output, as_bits=True)
            x, inputs = None, []
            if communicator.rank == root:
                inputs = _outputs(input_tensors)
                self._check_count(inputs, "scatter_list")
                arrays = [array_of(tensor, "scatter_list", as_bits=True) for tensor in inputs]
                for rank, array in enumerate(arrays):
                    _check_like(array, out, "scatter_list", rank)
                x = np.stack(arrays)
        except UsageError as error:
            raise self.refuse("scatter", error) from None
        return self.start(
            lambda: communicator.scatter(x, root=root, out=out),
            [output],
            operation="scatter",
            options=opts,
            inputs=inputs,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _gathering(self, output: torch.Tensor, source: torch.Tensor) -> tuple[Array, Array]:
        out, x = array_of(output, "output_tensor", as_bits=True), flat(source, "input_tensor")
        if out.dtype != x.dtype or out.size != x.size * self.communicator.size:
            raise UsageError(
                f"output_tensor: expected {self.communicator.size} times the elements of input_tensor, "
                f"{source.dtype}{list(source.shape)}, got {output.dtype}{list(output.shape)}"
            )
        place = source.data_ptr() - output.data_ptr()
        if -x.nbytes < place < out.nbytes and place != x.nbytes * self.communicator.rank:
            x = x.copy()  # what others send is about to overwrite it
        return out, x

    def _check_count(self, entries: Sequence[Any], name: str) -> None:
        if len(entries) != self.communicator.size:
            raise UsageError(f"{name}: expected {self.communicator.size} entries, one per rank, got {len(entries)}")


def _outputs(tensors: Any) -> list[torch.Tensor]:
    """Return the list of tensors of an argument that may be wrapped in another list."""
    return list(tensors[0]) if tensors and not isinstance(tensors[0], torch.Tensor) else list(tensors)


def _hand_out(results: Any, targets: Sequence[Array]) -> None:
    for target, result in zip(targets, results, strict=True):
        target[...] = result.reshape(target.shape)


def _check_like(array: Array, like: Array, name: str, rank: int) -> None:
    if array.shape != like.shape or array.dtype != like.dtype:
        raise UsageError(
            f"{name}[{rank}]: expected {like.dtype}{list(like.shape)} like the other tensor, "
            f"got {array.dtype}{list(array.shape)}"
        )
