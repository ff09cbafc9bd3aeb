"""The process group of ``torch.distributed`` over asyncpar, and torch's constructor of one."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from asyncpar.blocking.thread import LoopThread, background
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.ledger import LARGEST_TAG
from asyncpar.errors import AsyncparError, PeerTimeout, UsageError
from asyncpar.node import Node, start_rank
from asyncpar.torch.errors import as_torch
from asyncpar.torch.exchanges import ExchangeOperations
from asyncpar.torch.gathers import GatherOperations
from asyncpar.torch.group_base import remains
from asyncpar.torch.instrumentation import NAME, uncompiled
from asyncpar.torch.optimizer_steps import OptimizerSteps
from asyncpar.torch.reductions import ReductionOperations
from asyncpar.torch.rendezvous.attach import attach_store
from asyncpar.torch.shared_tensors import SharedTensors
from asyncpar.torch.signatures import is_own, path_of
from asyncpar.torch.thread_ranks import InProcess

_TAG = LARGEST_TAG
_ANSWER_SECONDS = 2.0
"""Seconds for which the others wait longer than rank 0, so that its answer, which names the missing ranks, arrives."""


async def _collect(communicator: Communicator, number: int, seconds: float, *, wait_all_ranks: bool) -> None:
    """Run the barrier on rank 0: receive from all ranks, then notify them which ranks are missing."""
    waiting = {
        rank: asyncio.ensure_future(_receive(communicator, rank, number)) for rank in range(1, communicator.size)
    }
    when = asyncio.ALL_COMPLETED if wait_all_ranks else asyncio.FIRST_EXCEPTION
    try:
        if waiting:
            await asyncio.wait(waiting.values(), timeout=seconds, return_when=when)
        missing = [rank for rank, one in waiting.items() if not one.done()]
        failed = [rank for rank, one in waiting.items() if one.done() and one.exception() is not None]
        errors = [waiting[rank].exception() for rank in failed]
    finally:
        for reception in waiting.values():
            reception.cancel()
    absent = sorted(missing + failed)
    if not wait_all_ranks:
        absent = absent[:1]
    present = [rank for rank in waiting if rank not in missing and rank not in failed]
    await _answer(communicator, present, [number, *absent])
    for error in errors:
        if error is not None:
            raise error
    if absent:
        raise PeerTimeout(
            _timeout_message(absent, seconds), rank=communicator.ranks[absent[0]], operation="monitored_barrier"
        )


async def _receive(communicator: Communicator, rank: int, number: int) -> list[int]:
    """Return the rest of the message of ``rank`` in barrier ``number``; messages of earlier barriers are dropped."""
    while True:
        barrier, *rest = (await communicator.recv(rank, tag=_TAG)).tolist()
        if barrier == number:
            return rest


async def _answer(communicator: Communicator, ranks: Sequence[int], numbers: Sequence[int]) -> None:
    words = np.array(numbers, np.int64)
    await asyncio.gather(*(communicator.send(words, rank, tag=_TAG) for rank in ranks), return_exceptions=True)


async def _report(communicator: Communicator, number: int, seconds: float) -> None:
    """Run the barrier on a rank other than 0: send to rank 0 and wait for its answer."""
    try:
        async with asyncio.timeout(seconds + _ANSWER_SECONDS):
            await communicator.send(np.array([number], np.int64), 0, tag=_TAG)
            absent = await _receive(communicator, 0, number)
    except TimeoutError as error:
        if isinstance(error, PeerTimeout):
            raise
        message = f"monitored_barrier: rank 0 has not come, or not answered, within {seconds} s"
        raise PeerTimeout(message, rank=communicator.ranks[0], operation="monitored_barrier") from None
    if absent:
        raise PeerTimeout(_timeout_message(absent, seconds), operation="monitored_barrier")


def _timeout_message(absent: Sequence[int], seconds: float) -> str:
    """Name the ``absent`` ranks in the words of torch's other backends, which programs look for."""
    ranks = f"{'Rank' if len(absent) == 1 else 'Ranks'} {', '.join(map(str, absent))}"
    return f"Rank 0 timed out in monitoredBarrier after {seconds} s: {ranks} failed to pass monitoredBarrier in time"


class GroupOptions(c10d.Backend.Options):
    """The options of ``group``, like those of torch's own backends; its timeout is the group's, also when it is set."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        super().__init__(NAME)
        self._group = group
        self.group_name = group.getGroupName()
        self.global_ranks_in_group = list(ranks)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._group.seconds)

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)


@uncompiled
class ProcessGroup(ReductionOperations, GatherOperations, ExchangeOperations):
    """A group of ranks whose collectives are asyncpar's, as ``init_process_group("asyncpar")`` makes it.

    It has all of torch's operations on tensors in the CPU's memory, of any dtype, from any thread.  Calls take their
    place in the order of the group's operations when they are made; the ranks of the group make the same calls in the
    same order.  Errors are those of ``asyncpar.errors`` and ``torch.distributed.DistBackendError`` at the same time.
    """

    _shared_tensors: SharedTensors | None = None

    @property
    def _shared(self) -> SharedTensors:
        if self._shared_tensors is None:
            thread, communicator = self.thread, self.communicator
            self._shared_tensors = SharedTensors(lambda nbytes: thread.do(lambda: communicator.empty(nbytes, np.uint8)))
        return self._shared_tensors

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have called this; raise ``PeerTimeout`` naming those that have not within ``timeout``.

        With ``wait_all_ranks`` all missing ranks are named, else the first one found.  Rank 0 receives a message from
        each rank, then answers each.  Messages carry the number of the barrier, so a late message for an earlier
        barrier does not count for this one.
        """
        communicator = self.communicator
        seconds = timeout.total_seconds() if timeout is not None else self.seconds

        def make() -> Coroutine[Any, Any, None]:
            self.barriers += 1
            if communicator.rank == 0:
                return _collect(communicator, self.barriers, seconds, wait_all_ranks=wait_all_ranks)
            return _report(communicator, self.barriers, seconds)

        try:
            self.call(make, "monitored_barrier")
        except AsyncparError as error:
            raise as_torch(error) from None

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether tensors of ``allocate_tensor`` make operations faster: true for the CPU's memory."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """Return an uninitialized vector in memory that the ranks of a host share; ``device`` is the CPU.

        Operations read it in place instead of copying it first.  When all its views are gone its memory is kept for the
        next tensor of its size.  It is an ordinary tensor if the host has no room left.  FSDP2 allocates its buffers by
        this after ``set_allocate_memory_from_process_group_for_comm(True)``.
        """
        if not self.supports_tensor_alloc(device):
            raise as_torch(UsageError(f"device: expected the CPU, got {device}"), "allocate_tensor")
        try:
            return self._shared.empty(size, dtype)
        except AsyncparError as error:
            raise as_torch(error, "allocate_tensor") from None

    def split_group(self, *_: Any, **__: Any) -> None:
        """Refuse: torch splits only groups of accelerators, and does not check the backend before it calls this."""
        raise as_torch(UsageError("split_group: expected a group of an accelerator's backend; use dist.new_group"))

    def own_cuda_path(self) -> Any:
        """Return the object that runs operations on CUDA tensors over ``communicator``."""
        from asyncpar.torch.cuda_path import CudaPath  # needed only by users of devices

        return CudaPath(self)

    # -- devices, for torch ------------------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the object that runs operations for ``device``: this group itself, for the CPU's memory."""
        place = torch.device(device)
        try:
            path = self if place.type == "cpu" else path_of(self, place)
            return self if is_own(path) else path
        except UsageError as error:
            raise as_torch(error, "_get_backend") from None

    @property
    def options(self) -> GroupOptions:
        """Return the options; the only one of the group is its timeout."""
        return GroupOptions(self, () if self._owns_node else self.communicator.ranks)

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False


def own_group(group: dist.ProcessGroup | None, name: str) -> ProcessGroup:
    """Return ``group``, by default that of all ranks, for ``name``, which requires one of this backend."""
    found = group
    if group is None:
        if not dist.is_initialized():
            raise UsageError(f'{name}: there is no process group yet; call dist.init_process_group("asyncpar") first')
        found = dist.group.WORLD
    if not isinstance(found, ProcessGroup):
        got = type(found).__name__ if not isinstance(found, dist.ProcessGroup) else dist.get_backend(found)
        raise UsageError(
            f"group: expected a process group of the backend asyncpar, got {got}; "
            'make it by dist.init_process_group("asyncpar") or dist.new_group(backend="asyncpar")'
        )
    return found


def _check_options(options: Any, timeout: timedelta) -> None:
    """Raise ``UsageError`` unless ``options`` are None or those of a group of this backend.

    Their only option is a timeout, and ``timeout``, that of the call that makes the group, takes precedence: a
    difference causes a warning, as torch does for NCCL.
    """
    if options is None:
        return
    if not isinstance(options, c10d.Backend.Options) or options.backend != NAME:
        raise UsageError(f"pg_options: expected None or the options of a group of the backend {NAME}, got {options!r}")
    if options._timeout != timeout:
        warnings.warn(
            f"pg_options: their _timeout, {options._timeout}, has no effect; the argument timeout is {timeout}",
            stacklevel=2,
        )


def create_group(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Create the group that torch describes: a separate world, or a part of that of the default group.

    Raises the errors of forming a world: ``PeerTimeout`` naming missing ranks, ``UsageError``.
    """
    in_process = backend_options if isinstance(backend_options, InProcess) else None
    try:
        if in_process is None:
            _check_options(backend_options, options.timeout)
        parent = _default_group() if options.global_ranks_in_group else None
        if parent is None:
            return _own_world(options, in_process)
        return _part(parent, options)
    except AsyncparError as error:
        raise as_torch(error) from None


def _default_group() -> ProcessGroup | None:
    """Return the default group if it is one of ours."""
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return group if isinstance(group, ProcessGroup) and not group.is_ended else None


def _own_world(options: Any, in_process: InProcess | None) -> ProcessGroup:
    if remains and in_process is None:
        gc.collect()  # frees garbage shared memory of earlier worlds, which Python's collector might do late
    thread = background()
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    if in_process is None:
        attach = attach_store(options.store, rank=rank, size=size, timeout=seconds)
    else:
        attach = in_process.attach
    node = thread.call(lambda: start_rank(attach))
    group = _group(node, node.world, thread, options, owns_node=True, steps=OptimizerSteps(node.world))
    thread.at_close(group, group.leave_at_exit)
    return group


def _part(parent: ProcessGroup, options: Any) -> ProcessGroup:
    """Return a group of ranks of the default group; nothing is exchanged."""
    thread, node = parent.thread, parent.node
    ranks, name = list(options.global_ranks_in_group), options.group_id

    async def divide() -> Any:
        return parent.communicator.subgroup(ranks, name=name, key=f"torch {name}", has_own_timeout=True)

    communicator = thread.call(divide)
    if communicator is None:
        raise UsageError(f"ranks: expected this rank, {parent.rank()}, among those of group {name}, got {ranks}")
    return _group(node, communicator, thread, options, owns_node=False, steps=parent.steps)


def _group(
    node: Node, communicator: Any, thread: LoopThread, options: Any, *, owns_node: bool, steps: OptimizerSteps
) -> ProcessGroup:
    communicator.timeout = options.timeout.total_seconds()
    return ProcessGroup(communicator, thread, node, store=options.store, owns_node=owns_node, steps=steps)
