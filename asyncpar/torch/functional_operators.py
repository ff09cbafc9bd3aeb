"""Functional operators that torch cannot do with a process group that is written in Python.

They call methods of the group in C++ that Python cannot override: ``all_gather_single``, and those that begin and end a
batch.  torch has one kernel for each of them, for all devices; a kernel for a device takes precedence.  The kernels
here perform the operation by the methods of our groups, and pass calls for other groups on to torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.library import Library, get_kernel

from asyncpar.errors import UsageError
from asyncpar.torch.errors import as_torch
from asyncpar.torch.instrumentation import not_traced
from asyncpar.torch.process_group import ProcessGroup

_NAMESPACE = "_c10d_functional"
_DEVICES = ("CPU", "CUDA")
_SEND, _RECEIVE = "isend", "irecv"


def all_gather_into_tensor_out(
    group: ProcessGroup,
    input: torch.Tensor,  # noqa: A002
    group_size: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Start gathering ``input`` in ``out``, which ``wait_tensor`` waits for."""
    del group_size  # the group knows it
    c10d._register_work(out, group.all_gather_single(out, input.contiguous(), c10d.AllgatherOptions()))
    return out


def batch_p2p_ops(
    group: ProcessGroup,
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Start the messages; return tensors for ``wait_tensor``: the received ones, and an empty one for each sent one."""
    if not len(op_list) == len(peer_list) == len(tag_list) == len(tensors):
        raise UsageError(
            f"op_list, peer_list, tag_list and tensors: expected lists of one length, got {len(op_list)}, "
            f"{len(peer_list)}, {len(tag_list)} and {len(tensors)}"
        )
    strange = [kind for kind in op_list if kind not in (_SEND, _RECEIVE)]
    if strange:
        raise UsageError(f"op_list: expected {_SEND} and {_RECEIVE}, got {strange[0]!r}")
    results = []
    for kind, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if kind == _SEND:
            work, result = group.send([tensor], peer, tag), tensor.new_empty(0)
        else:
            work, result = group.recv([tensor], peer, tag), tensor
        c10d._register_work(result, work)
        results.append(result)
    return results


def _own_group(found: object) -> ProcessGroup | None:
    """Return the group passed to an operator, by its name or itself, if it is one of ours."""
    group = c10d._resolve_process_group(found) if isinstance(found, str) else found
    return group if isinstance(group, ProcessGroup) else None


def _kernel(own: Callable[..., Any], original: Any, place: int) -> Callable[..., Any]:
    """Return the kernel that runs ``own`` with our groups, and ``original`` with others; ``place`` is the group's."""

    @not_traced
    def run(keys: Any, *arguments: Any, **named: Any) -> Any:
        group = _own_group(arguments[place])
        if group is None:
            return original.call_boxed(keys, *arguments, **named)
        try:
            return own(group, *arguments[:place], **named)
        except UsageError as error:
            raise as_torch(error, own.__name__) from None

    return run


def _registered() -> Library:
    library = Library(_NAMESPACE, "IMPL")
    for own, place in ((all_gather_into_tensor_out, 2), (batch_p2p_ops, 4)):
        for device in _DEVICES:
            original = get_kernel(f"{_NAMESPACE}::{own.__name__}", device)
            library.impl(own.__name__, _kernel(own, original, place), device, with_keyset=True)
    return library


_library = _registered()
"""The kernels are registered during its lifetime."""
