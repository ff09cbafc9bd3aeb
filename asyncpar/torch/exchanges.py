"""all_to_all, send and recv in torch's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch._C import _distributed_c10d as c10d

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator, exchange_expected
from asyncpar.errors import OperationMismatch, UsageError
from asyncpar.torch.arrays import Landing, array_of, bits_detail, check_same_dtype, flat, only
from asyncpar.torch.group_base import RECEIVE, RECEIVE_ANY, SEND, GroupBase, check_message
from asyncpar.torch.signatures import operation
from asyncpar.torch.work import Work


def _refuse_send(communicator: Communicator, error: BaseException, _: Any, dst_rank: int, tag: int) -> None:
    communicator.refuse_send(error, dst_rank, tag=tag)


def _refuse_recv(communicator: Communicator, error: BaseException, _: Any, src_rank: int, tag: int) -> None:
    communicator.refuse_recv(error, src_rank, tag=tag)


def _refuse_recv_any(communicator: Communicator, error: BaseException, _: Any, tag: int) -> None:
    communicator.refuse_recv(error, tag=tag)


class ExchangeOperations(GroupBase):
    """The operations between pairs of ranks."""

    @operation(
        "all_to_all_single",
        "output",
        "input",
        "output_split_sizes",
        "input_split_sizes",
        options=c10d.AllToAllOptions,
        extras=("timeout",),
    )
    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send the ``r``-th part of ``input`` along its first dimension to rank ``r``, and collect theirs likewise.

        Parts are equal, or have the given split sizes; ranks pass split sizes for both or for neither.
        """
        communicator = self.communicator
        out, x = array_of(output, "output", as_bits=True), array_of(input, "input", as_bits=True)
        counts = split_sizes(x, input_split_sizes, communicator.size, "input")
        wanted = split_sizes(out, output_split_sizes, communicator.size, "output")
        check_equal_parts(output, input, (output_split_sizes, input_split_sizes))
        detail = bits_detail([input])
        if not len(output_split_sizes) and not len(input_split_sizes):

            def put(rows: Array) -> None:
                out[...] = rows.reshape(out.shape)

            parts = x.reshape(communicator.size, -1, *x.shape[1:]) if x.size else x.reshape(communicator.size, 0)
            return self.start(
                lambda: After(communicator.all_to_all(parts), put),
                [output],
                operation="all_to_all_single",
                options=opts,
                inputs=[input],
                detail=detail,
            )

        async def run(call: Any) -> None:
            out[...], _ = await call

        return self.start(
            lambda: run(exchange_expected(communicator, x, counts, wanted, "rows")),
            [output],
            operation="all_to_all_single",
            options=opts,
            inputs=[input],
            detail=detail,
        )

    alltoall_base = all_to_all_single

    @operation("all_to_all", "output_tensors", "input_tensors", options=c10d.AllToAllOptions)
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        """Send ``input_tensors[r]`` to rank ``r`` and collect theirs in ``output_tensors``; all may differ in shape."""
        communicator = self.communicator
        outputs, inputs = list(output_tensors), list(input_tensors)
        for entries, name in ((outputs, "output_tensor_list"), (inputs, "input_tensor_list")):
            if len(entries) != communicator.size:
                raise UsageError(f"{name}: expected {communicator.size} tensors, got {len(entries)}")
        check_same_dtype([*outputs, *inputs], "output_tensor_list and input_tensor_list")
        targets = [array_of(tensor, "output_tensor_list", as_bits=True) for tensor in outputs]
        arrays = [flat(tensor, "input_tensor_list") for tensor in inputs]
        counts, wanted = [array.size for array in arrays], [target.size for target in targets]
        whole = np.concatenate(arrays)

        async def run(call: Any) -> None:
            rows, received = await call
            for target, part in zip(targets, np.split(rows, np.cumsum(received)[:-1]), strict=True):
                target[...] = part.reshape(target.shape)

        return self.start(
            lambda: run(exchange_expected(communicator, whole, counts, wanted, "elements")),
            outputs,
            operation="all_to_all",
            options=opts,
            inputs=inputs,
            detail=bits_detail(inputs[:1]),
        )

    @operation("send", "tensors", "dstRank", "tag", refuse=_refuse_send)
    def send(self, tensors: Any, dst_rank: int, tag: int) -> Work:
        """Send the elements of the tensor to a rank of the group, which receives equally many with the same tag."""
        tensor = only(tensors, "tensors")
        communicator = self.communicator
        check_message(communicator, dst_rank, tag, "dest")
        array = flat(tensor, "tensor")
        make = lambda: communicator.send(array, dst_rank, tag=tag)  # noqa: E731
        return self.start(make, [tensor], operation=SEND, peer=dst_rank)

    @operation("recv", "tensors", "srcRank", "tag", refuse=_refuse_recv)
    def recv(self, tensors: Any, src_rank: int, tag: int) -> Work:
        """Receive the elements of the tensor from a rank of the group."""
        return self._receive(tensors, src_rank, tag)

    @operation("recv", "tensors|arg0", "tag|arg1", refuse=_refuse_recv_any)
    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Receive the elements of the tensor from the rank that sends first; the work's ``source_rank`` names it."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, source: int | None, tag: int) -> Work:
        tensor = only(tensors, "tensors")
        communicator = self.communicator
        check_message(communicator, source, tag, "source")
        landing = Landing(tensor, "tensor")

        async def run(call: Any) -> int:
            sender: int | None = source
            if source is None:
                sender, _ = await call
            else:
                await call
            landing.settle()
            assert sender is not None
            return sender

        if source is None:
            return self.start(
                lambda: run(communicator.recv_any(out=landing.array, tag=tag)), [tensor], operation=RECEIVE_ANY
            )
        make = lambda: run(communicator.recv(source, out=landing.array, tag=tag))  # noqa: E731
        return self.start(make, [tensor], operation=RECEIVE, peer=source)


def split_sizes(array: Any, sizes: Sequence[int], size: int, name: str) -> list[int]:
    """Return the number of rows of ``array`` for each of ``size`` ranks."""
    if array.ndim == 0:
        raise UsageError(f"{name}: expected a tensor with at least one dimension, got a scalar")
    rows = array.shape[0]
    if not len(sizes):
        if rows % size:
            raise UsageError(f"{name}: expected a first dimension that is a multiple of {size} ranks, got {rows}")
        return [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise UsageError(
            f"{name}_split_sizes: expected {size} numbers that add up to the {rows} rows of {name}, got {list(sizes)}"
        )
    return list(sizes)


def check_equal_parts(output: Any, input: Any, sizes: Sequence[Sequence[int]]) -> None:  # noqa: A002
    """Raise ``UsageError`` unless ``output`` fits the data exchanged for ``input``; ``sizes`` are the split sizes."""
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise UsageError(
            f"output: expected {input.dtype}[?, {list(input.shape[1:])}] like input, "
            f"got {output.dtype}{list(output.shape)}"
        )
    if not any(map(len, sizes)) and len(output) != len(input):
        raise UsageError(
            f"output: expected the {len(input)} rows of input, as there are no split sizes, got {len(output)}"
        )


def check_received(communicator: Communicator, received: Sequence[int], wanted: Sequence[int], what: str) -> None:
    me, ranks = communicator.ranks[communicator.rank], communicator.ranks
    for rank, came, expected in zip(ranks, received, wanted, strict=True):
        if came != expected:
            raise OperationMismatch(
                f"rank {rank} sends {came} {what} where rank {me} expects {expected} (group {communicator.name})"
            )
