"""The operations of a process group on CUDA tensors, over the group's communicator: by NCCL, or any other transport.

Theory of operation.  A call inspects its tensors and the current stream in the thread of the program; the communicator
begins after that stream's work and ends when the device is done.  So ``Work.wait`` waits for the device, and nothing
after it has to be ordered by streams, except results that were received elsewhere: those are copied into the caller's
tensors in the stream of the call, which the waiting stream then follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncpar.errors import UsageError
from asyncpar.torch.arrays import check_same_dtype, of_root, only, pairs, unwrapped
from asyncpar.torch.cuda_reductions import CudaReductions
from asyncpar.torch.cuda_tensors import CallTensors, as_bytes, check_like, copy_to, overlap, units
from asyncpar.torch.exchanges import check_equal_parts, check_received, split_sizes
from asyncpar.torch.group_base import RECEIVE, RECEIVE_ANY, SEND, check_message, root_of
from asyncpar.torch.work import Work


class CudaPath(CudaReductions):
    """``group``'s operations on CUDA tensors, with the arguments of the methods of the same names."""

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """Overwrite the tensor with that of the root."""
        tensor = only(tensors, "tensors")
        use, root = CallTensors([tensor]), root_of(opts, self._communicator)
        array = use.array(use.landing(tensor, "tensors", has_input=True))
        return self._start(use, lambda: self._communicator.broadcast(array, root=root), [tensor], "broadcast", opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Collect the tensor of rank ``r`` in ``output_tensors[r]`` on all ranks; their shapes may differ."""
        source, outputs = only(input_tensors, "input_tensors"), unwrapped(output_tensors, "tensor_list")
        self._check_count(outputs, "tensor_list")
        check_same_dtype([source, *outputs], "tensor_list and tensor")
        check_like(outputs[self._communicator.rank], source, "tensor_list", self._communicator.rank)
        if all(output.shape == source.shape for output in outputs):
            put = lambda found: copy_to(found, outputs)  # noqa: E731
            return self._gather_bytes(outputs, [source], put, opts, "all_gather")
        use = CallTensors([*outputs, source])
        flat = use.flat(source, "tensor")
        lengths = [output.numel() * units(output) for output in outputs]
        joined = flat.new_empty(sum(lengths))
        use.later.append(lambda: copy_to(joined.split(lengths), outputs))
        x, out = use.array(flat), use.array(joined)
        return self._start(use, lambda: self._communicator.all_gather_v(x, out=out), outputs, "all_gather", opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Work:  # noqa: A002
        """Collect ``input`` of all ranks in ``output``, concatenated or stacked."""
        size = self._communicator.size
        self._check_gathered(output, input)
        if not output.is_contiguous():
            return self.all_gather_single_coalesced([output], [input], opts)
        use = CallTensors([output, input])
        source = use.flat(input, "input")
        target = use.landing(output, "output").view(size, -1)
        if overlap(output, input) and source.data_ptr() != target[self._communicator.rank].data_ptr():
            source = source.clone()  # data of other ranks are about to overwrite it
        x, out = use.array(source), use.array(target)
        call = lambda: self._communicator.all_gather(x, out=out)  # noqa: E731
        return self._start(use, call, [output], "all_gather_into_tensor", opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Do ``all_gather_single`` with each pair, in one operation."""
        found = pairs(outputs, inputs)
        for output, source in found:
            self._check_gathered(output, source)
        lengths = [source.nbytes for _, source in found]

        def put(rows: Tensor) -> None:
            for part, (output, _) in zip(rows.split(lengths, 1), found, strict=True):
                copy_to([part.contiguous()], [output])

        name = "all_gather_into_tensor_coalesced"
        return self._gather_bytes(list(outputs), [source for _, source in found], put, opts, name)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any) -> Work:
        """Collect each tensor of ``input_list``: that of rank ``r`` in ``output_lists[r]``."""
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
        lengths = [source.nbytes for source in input_list]

        def put(rows: Tensor) -> None:
            for row, targets in zip(rows, output_lists, strict=True):
                copy_to(row.split(lengths), targets)

        outputs = [tensor for row in output_lists for tensor in row]
        return self._gather_bytes(outputs, input_list, put, opts, "all_gather_coalesced")

    def _gather_bytes(
        self, outputs: list[Tensor], inputs: Sequence[Tensor], put: Callable[[Tensor], None], opts: Any, name: str
    ) -> Work:
        """Collect the bytes of ``inputs`` of all ranks, a row for each, which ``put`` writes to ``outputs``."""
        use = CallTensors([*outputs, *inputs])
        source = torch.cat([as_bytes(use.flat(tensor, "input")) for tensor in inputs])
        found = source.new_empty((self._communicator.size, source.numel()))
        use.later.append(lambda: put(found))
        x, out = use.array(source), use.array(found)
        return self._start(use, lambda: self._communicator.all_gather(x, out=out), outputs, name, opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Collect the tensor of rank ``r`` in ``output_tensors[r]`` of the root."""
        source, root = only(input_tensors, "input_tensors"), root_of(opts, self._communicator)
        is_root = self._communicator.rank == root
        outputs = of_root(output_tensors, "gather_list", is_root=is_root)
        check_same_dtype([source, *outputs], "gather_list and tensor")
        use = CallTensors([source, *outputs])
        flat = use.flat(source, "tensor")
        out = None
        if is_root:
            self._check_count(outputs, "gather_list")
            for rank, output in enumerate(outputs):
                check_like(output, source, "gather_list", rank)
            found = flat.new_empty((len(outputs), flat.numel()))
            out = use.array(found)
            use.later.append(lambda: copy_to(found, outputs))
        x = use.array(flat)
        call = lambda: self._communicator.gather(x, root=root, out=out)  # noqa: E731
        return self._start(use, call, outputs, "gather", opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Scatter the root's list of tensors, entry ``r`` to rank ``r``."""
        output, root = only(output_tensors, "output_tensors"), root_of(opts, self._communicator)
        is_root = self._communicator.rank == root
        inputs = of_root(input_tensors, "scatter_list", is_root=is_root)
        if is_root:
            self._check_count(inputs, "scatter_list")
            check_same_dtype([output, *inputs], "scatter_list and tensor")
            for rank, source in enumerate(inputs):
                check_like(source, output, "scatter_list", rank)
        use = CallTensors([output, *inputs])
        x = use.array(torch.stack([use.flat(source, "scatter_list") for source in inputs])) if inputs else None
        out = use.array(use.landing(output, "output_tensors"))
        scatter: Any = self._communicator.scatter
        return self._start(use, lambda: scatter(x, root=root, out=out), [output], "scatter", opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send the ``r``-th part of ``input`` along its first dimension to rank ``r``, and collect theirs likewise."""
        size = self._communicator.size
        counts = split_sizes(input, input_split_sizes, size, "input")
        wanted = split_sizes(output, output_split_sizes, size, "output")
        check_equal_parts(output, input, (output_split_sizes, input_split_sizes))
        inputs = list(input.detach().split(counts))
        outputs = list(torch.empty_like(output, memory_format=torch.contiguous_format).detach().split(wanted))
        use = CallTensors([output, input])
        use.later.append(lambda: output.detach().copy_(torch.cat(outputs)))
        return self._exchange(use, outputs, inputs, [output], opts, "all_to_all_single")

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Send ``input_tensors[r]`` to rank ``r`` and collect theirs in ``output_tensors``; all may differ in shape."""
        outputs, inputs = list(output_tensors), list(input_tensors)
        self._check_count(outputs, "output_tensor_list")
        self._check_count(inputs, "input_tensor_list")
        check_same_dtype([*outputs, *inputs], "output_tensor_list and input_tensor_list")
        return self._exchange(CallTensors([*outputs, *inputs]), outputs, inputs, outputs, opts, "all_to_all")

    def _exchange(
        self,
        use: CallTensors,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        name: str,
    ) -> Work:
        """Send ``inputs[r]`` to rank ``r`` and collect theirs in ``outputs``."""
        flats = [use.flat(tensor, "input") for tensor in inputs]
        counts, wanted = [len(flat) for flat in flats], [output.numel() * units(output) for output in outputs]
        joined = flats[0].new_empty(sum(wanted))
        use.later.insert(0, lambda: copy_to(joined.split(wanted), outputs))
        x, out = use.array(torch.cat(flats)), use.array(joined)

        async def run(call: Any) -> None:
            _, received = await call
            check_received(self._communicator, received, wanted, "elements")
            use.take_over(None)

        exchange: Any = self._communicator.all_to_all_v
        call = lambda: run(exchange(x, counts, out=out))  # noqa: E731
        return self.group.start(call, list(results), operation=name, options=opts, follow=use.followed)

    def send(self, tensors: Any, dst_rank: int, tag: int) -> Work:
        """Send the elements of the tensor to a rank of the group, which receives equally many with the same tag."""
        tensor = only(tensors, "tensors")
        check_message(self._communicator, dst_rank, tag, "dest")
        use = CallTensors([tensor])
        x: Any = use.array(use.flat(tensor, "tensor"))
        call = lambda: self._communicator.send(x, dst_rank, tag=tag)  # noqa: E731
        return self._start(use, call, [tensor], SEND, peer=dst_rank)

    def recv(self, tensors: Any, src_rank: int, tag: int) -> Work:
        """Receive the elements of the tensor from a rank of the group."""
        return self._receive(tensors, src_rank, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Receive the elements of the tensor from the rank that sends first; the work's ``source_rank`` names it."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, source: int | None, tag: int) -> Work:
        tensor = only(tensors, "tensors")
        check_message(self._communicator, source, tag, "source")
        use = CallTensors([tensor])
        out: Any = use.array(use.landing(tensor, "tensor"))

        async def run(call: Any) -> int:
            found = await call
            return found[0] if source is None else source

        if source is None:
            return self._start(use, lambda: run(self._communicator.recv_any(out=out, tag=tag)), [tensor], RECEIVE_ANY)
        call = lambda: run(self._communicator.recv(source, out=out, tag=tag))  # noqa: E731
        return self._start(use, call, [tensor], RECEIVE, peer=source)

    def _check_gathered(self, output: Tensor, source: Tensor) -> None:
        if output.dtype != source.dtype or output.numel() != source.numel() * self._communicator.size:
            raise UsageError(
                f"output_tensor: expected {self._communicator.size} times the elements of input_tensor, "
                f"{source.dtype}{list(source.shape)}, got {output.dtype}{list(output.shape)}"
            )
