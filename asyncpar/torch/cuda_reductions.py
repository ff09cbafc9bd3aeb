"""all_reduce, reduce and reduce_scatter of CUDA tensors over the communicator of a group; see ``cuda_path.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import as_list, check_same_dtype, only, pairs, unwrapped
from asyncpar.torch.cuda_tensors import CallTensors, copy_to, overlap, scale
from asyncpar.torch.group_base import GroupBase, Make, root_of
from asyncpar.torch.reductions import TorchReduction, reduction_of
from asyncpar.torch.work import Work


class CudaReductions:
    """``group``'s operations that combine CUDA tensors."""

    def __init__(self, group: GroupBase) -> None:
        self.group = group

    @property
    def _communicator(self) -> Communicator:
        return self.group.communicator

    # -- combining ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        """Combine the tensor of all ranks in place."""
        return self._all_reduce([only(tensors, "tensors", instead="allreduce_coalesced")], opts, "all_reduce")

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Work:
        """Combine each of the tensors, which have one dtype, in place, in one operation."""
        found = as_list(tensors)
        check_same_dtype(found, "tensors")
        return self._all_reduce(found, opts, "all_reduce_coalesced")

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any, name: str) -> Work:
        use = CallTensors(tensors)
        reduction = reduction_of(opts, tensors[0].dtype)
        places = [use.landing(tensor, "tensors", is_reduced=True, has_input=True) for tensor in tensors]
        for place in places:
            scale(place, reduction)
        arrays = [use.array(place) for place in places]
        if reduction.divides:
            use.later[:0] = [partial(self._divide, place, reduction) for place in places]
        if name == "all_reduce":
            return self._start(use, lambda: self._communicator.all_reduce(arrays[0], reduction.op), tensors, name, opts)
        return self._start(use, lambda: self._communicator.all_reduce_many(arrays, reduction.op), tensors, name, opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        """Combine the tensor of all ranks, in place at the root; the others keep theirs."""
        tensor = only(tensors, "tensors")
        use, root = CallTensors([tensor]), root_of(opts, self._communicator)
        reduction = reduction_of(opts, tensor.dtype)
        source = use.flat(tensor, "tensors", is_reduced=True).clone()
        scale(source, reduction)
        out = None
        if self._communicator.rank == root:
            place = use.landing(tensor, "tensors", is_reduced=True)
            out = use.array(place)
            use.later.insert(0, lambda: self._divide(place, reduction))
        array = use.array(source)
        call = lambda: self._communicator.reduce(array, reduction.op, root=root, out=out)  # noqa: E731
        return self._start(use, call, [tensor], "reduce", opts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Combine the lists of all ranks and leave entry ``r`` in the output of rank ``r``; entries may differ."""
        output, inputs = only(output_tensors, "output_tensors"), unwrapped(input_tensors, "input_list")
        self._check_count(inputs, "input_list")
        rank = self._communicator.rank
        check_same_dtype([output, *inputs], "output and input_list")
        if output.shape != inputs[rank].shape:
            raise UsageError(
                f"output: expected the shape of this rank's entry of input_list, {list(inputs[rank].shape)}, "
                f"got {list(output.shape)}"
            )
        use = CallTensors([output, *inputs])
        flats = [use.flat(tensor, "input_list", is_reduced=True) for tensor in inputs]
        if len({len(flat) for flat in flats}) == 1:
            return self._reduce_scatter(use, [output], [torch.stack(flats)], opts, "reduce_scatter")
        reduction = reduction_of(opts, output.dtype)
        sums = [flat.clone() for flat in flats]
        for each in sums:
            scale(each, reduction)
        arrays = [use.array(each) for each in sums]

        def put() -> None:
            self._divide(sums[rank], reduction)
            output.detach().copy_(sums[rank].view(output.shape))

        use.later.append(put)
        call = lambda: self._communicator.all_reduce_many(arrays, reduction.op)  # noqa: E731
        return self._start(use, call, [output], "reduce_scatter", opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Work:  # noqa: A002
        """Combine ``input`` of all ranks, cut in as many equal parts as there are ranks, part ``r`` for rank ``r``."""
        return self._scatter_pairs([output], [input], opts, "reduce_scatter_tensor")

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Do ``reduce_scatter_single`` with each pair, in one operation; all have one dtype."""
        check_same_dtype([*outputs, *inputs], "outputs and inputs")
        return self._scatter_pairs(list(outputs), list(inputs), opts, "reduce_scatter_tensor_coalesced")

    def _scatter_pairs(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, name: str) -> Work:
        size = self._communicator.size
        use = CallTensors([*outputs, *inputs])
        wholes = []
        for output, source in pairs(outputs, inputs):
            if source.dtype != output.dtype or source.numel() != output.numel() * size:
                raise UsageError(
                    f"input: expected {size} times the elements of output, {output.dtype}{list(output.shape)}, in its "
                    f"dtype, got {source.dtype}{list(source.shape)}"
                )
            wholes.append(use.flat(source, "input", is_reduced=True).view(size, output.numel()))
        return self._reduce_scatter(use, outputs, wholes, opts, name)

    def _reduce_scatter(
        self, use: CallTensors, outputs: list[Tensor], wholes: list[Tensor], opts: Any, name: str
    ) -> Work:
        """Combine ``wholes``, which have a row for each rank, and leave this rank's rows in ``outputs``."""
        reduction = reduction_of(opts, outputs[0].dtype)
        whole = wholes[0] if len(wholes) == 1 else torch.cat(wholes, 1)
        if reduction.factor is not None:
            whole = whole.clone()
            scale(whole, reduction)
        if len(outputs) == 1 and outputs[0].is_contiguous() and not overlap(outputs[0], whole):
            row = use.landing(outputs[0], "output", is_reduced=True)
        else:
            row = whole.new_empty(whole.shape[1])
            ends = [each.shape[1] for each in wholes]
            use.later.append(lambda: copy_to(row.split(ends), outputs))
        if reduction.divides:
            use.later.insert(0, lambda: self._divide(row, reduction))
        source, out = use.array(whole), use.array(row.view(1, -1))
        call = lambda: self._communicator.reduce_scatter(source, reduction.op, out=out)  # noqa: E731
        return self._start(use, call, outputs, name, opts)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(
        self,
        use: CallTensors,
        make: Make,
        tensors: Sequence[Tensor],
        name: str,
        opts: Any = None,
        *,
        peer: int | None = None,
    ) -> Work:
        """Start the operation of ``make``; afterwards results received elsewhere are copied into the tensors."""
        if not use.later:
            return self.group.start(make, list(tensors), operation=name, options=opts, peer=peer)
        begun = lambda: After(make(), use.take_over)  # noqa: E731
        return self.group.start(begun, list(tensors), operation=name, options=opts, follow=use.followed, peer=peer)

    def _divide(self, total: Tensor, reduction: TorchReduction) -> None:
        """Divide a sum of integers for a mean, truncating towards zero like NCCL."""
        if reduction.divides:
            size = self._communicator.size
            if size > torch.iinfo(total.dtype).max:
                total.zero_()
            else:
                total.div_(size, rounding_mode="trunc")

    def _check_count(self, entries: Sequence[Any], name: str) -> None:
        if len(entries) != self._communicator.size:
            raise UsageError(f"{name}: expected {self._communicator.size} tensors, one per rank, got {len(entries)}")
