"""Copies of one rank's tensors to all others; small ones are sent together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from asyncpar.errors import UsageError
from asyncpar.torch.process_group import ProcessGroup

_SMALL_BYTES = 1 << 18
"""Larger tensors are sent alone: copying them would take longer than a separate message."""

_PACKET_BYTES = 1 << 20

_OPERATION = "broadcast"


def copy_from(source: int, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of rank ``source`` of the group, where they have the same shapes and dtypes.

    Autograd is not notified, so tensors saved by an earlier forward do not count as changed.
    """
    packets = [*_packets(tensors)]
    flat = [_join(packet) for packet in packets]
    works = [dist.broadcast(each, group_src=source, group=group, async_op=True) for each in flat]
    for work in works:
        work.wait()
    if group.rank() != source:
        for packet, each in zip(packets, flat, strict=True):
            _split(each, packet)


def refuse_copies(tensors: Sequence[torch.Tensor], group: ProcessGroup, error: BaseException, *, taken: int = 0) -> int:
    """End ``copy_from`` on the other ranks, except its first ``taken`` operations; return how many it has too few."""
    if isinstance(error, dist.DistBackendError):  # for it ``refuse`` takes no place, as it did so before
        error = UsageError(str(error))
    for _ in _packets(tensors):
        if taken:
            taken -= 1
        else:
            group.refuse(_OPERATION, error, lambda: group.communicator.refuse(_OPERATION, error))
    return taken


def _packets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors to send together: the same on all ranks, since it depends on dtypes and sizes alone."""
    small = [each.data for each in tensors if _is_small(each)]
    small.sort(key=lambda each: -each.element_size())  # so that each is aligned for its dtype
    packet: list[torch.Tensor] = []
    size = 0
    for each in small:
        if packet and size + each.nbytes > _PACKET_BYTES:
            yield packet
            packet, size = [], 0
        packet.append(each)
        size += each.nbytes
    if packet:
        yield packet
    yield from ([each.data] for each in tensors if not _is_small(each))


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.nbytes <= _SMALL_BYTES


def _join(packet: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenated bytes of ``packet``, or its only tensor itself."""
    if len(packet) == 1:
        return packet[0]
    return torch.cat([each.reshape(-1).view(torch.uint8) for each in packet])


def _split(flat: torch.Tensor, packet: Sequence[torch.Tensor]) -> None:
    if len(packet) == 1:
        return
    for part, each in zip(flat.split([each.nbytes for each in packet]), packet, strict=True):
        each.copy_(part.view(each.dtype).view(each.shape))
