"""A backend of ``ray.util.collective``: the actors of a group are the ranks of a world.

Rank 0 serves the rendezvous and puts its address, with the group's secret, into the key-value store of Ray's
controller, until all ranks have met.  A program that can read that store can run code in the cluster anyway.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec
import numpy as np
import ray
from ray.experimental import internal_kv
from ray.util.collective import is_backend_available, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

from asyncpar.blocking.communicator import Communicator
from asyncpar.blocking.node import Node
from asyncpar.blocking.thread import background
from asyncpar.collectives.arrays import Array
from asyncpar.core.addresses import split_address
from asyncpar.core.config import names
from asyncpar.core.config.secret import SECRET_BYTES, Secret
from asyncpar.engines.rendezvous import make_environment, serve_rendezvous
from asyncpar.errors import LaunchError, UsageError

NAME: Final = "ASYNCPAR"
_OPERATIONS: Final[dict[Any, names.ReduceOp]] = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}
_TIMEOUT: Final = "ASYNCPAR_RENDEZVOUS_TIMEOUT"
_SECONDS: Final = "60"
_LOOK_SECONDS: Final = 0.02
_CONNECT_SECONDS: Final = 1.0


class RayMeeting(msgspec.Struct, frozen=True):
    """The world that rank 0 of a group has opened: the address of its rendezvous, its secret, and its size."""

    job: str
    address: str
    secret: bytes
    size: int

    def __repr__(self) -> str:
        return f"RayMeeting({self.job!r}, {self.address!r}, <secret>, {self.size})"


class AsyncparGroup(BaseGroup):
    """A group of Ray's actors whose collectives are asyncpar's; calls block until they are complete.

    Tensors are numpy arrays and torch tensors in the CPU's memory, strided ones included, of any dtype that asyncpar
    reduces.  Ranks meet within ``ASYNCPAR_RENDEZVOUS_TIMEOUT`` seconds (60) or raise ``PeerTimeout`` or
    ``LaunchError``.  Calls raise the errors of ``asyncpar.errors``: ``PeerLost`` names a rank whose actor is dead,
    ``OperationMismatch`` the difference between two ranks, ``UsageError`` a tensor that cannot be reduced.  Ray's
    callers get them as causes of Ray's errors.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._stack = AsyncExitStack()
        self._thread = background()
        try:
            self._node = self._join(ray.util.get_node_ip_address(), _read_timeout())
        except BaseException:
            self._close()
            raise

    @classmethod
    def backend(cls) -> str:
        """Return the name of this backend in Ray."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: its requirements come with asyncpar."""
        return True

    @property
    def communicator(self) -> Communicator:
        """The communicator of the group's ranks, which has all operations of asyncpar."""
        return self._node.world

    def destroy_group(self) -> None:
        """Leave the world in an orderly way."""
        self._node.close()
        self._close()

    # -- the operations of BaseGroup: each argument is in a list of its own --------------------------------------------

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Combine the tensors of all ranks in place."""
        self.communicator.all_reduce(_one(tensor), _operation(allreduce_options), timeout=_seconds(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        """Return when all ranks have arrived."""
        self.communicator.barrier(timeout=_seconds(barrier_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """Combine the tensors of all ranks in the root's; the others stay unchanged."""
        root, x = getattr(reduce_options, "root_rank", 0), _one(tensor)
        out = x if self._rank == root else None
        self.communicator.reduce(x, _operation(reduce_options), root=root, out=out, timeout=_seconds(reduce_options))

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        """Put the tensor of each rank into the list, in the order of ranks."""
        (targets,), x = tensor_list, _one(tensor)
        places = [_array(target, f"tensor_list[{rank}]") for rank, target in enumerate(targets)]
        for rank, place in enumerate(places):
            if (place.shape, place.dtype) != (x.shape, x.dtype):
                raise UsageError(
                    f"tensor_list[{rank}]: expected shape {x.shape} and {x.dtype} as of tensor, got {place.shape} and "
                    f"{place.dtype}"
                )
        gathered = self.communicator.all_gather(x, timeout=_seconds(allgather_options))
        for place, values in zip(places, gathered, strict=True):
            place[...] = values

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """Overwrite the tensor with that of the root."""
        root = getattr(broadcast_options, "root_rank", 0)
        self.communicator.broadcast(_one(tensor), root=root, timeout=_seconds(broadcast_options))

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None) -> None:
        """Combine entry i of the lists of all ranks in the tensor of rank i; the lists stay unchanged."""
        (sources,), out = tensor_list, _one(tensor)
        parts = [_array(source, f"tensor_list[{rank}]") for rank, source in enumerate(sources)]
        for rank, part in enumerate(parts):
            if (part.shape, part.dtype) != (out.shape, out.dtype):
                raise UsageError(
                    f"tensor_list[{rank}]: expected shape {out.shape} and {out.dtype} as of tensor, got {part.shape} "
                    f"and {part.dtype}"
                )
        self.communicator.reduce_scatter(
            np.stack(parts),
            _operation(reducescatter_options),
            out=out[np.newaxis],
            timeout=_seconds(reducescatter_options),
        )

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send the tensor; return when it may be changed."""
        self.communicator.send(_one(tensor), send_options.dst_rank, timeout=_seconds(send_options))

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive into the tensor."""
        self.communicator.recv(recv_options.src_rank, out=_one(tensor), timeout=_seconds(recv_options))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _join(self, address: str, timeout: float) -> Node:
        """Meet the other ranks; rank 0 then removes its entry from the store."""
        key = f"asyncpar-collective-{ray.get_runtime_context().namespace}-{self._group_name}".encode()
        if self._rank != 0:
            return self._start(_find_meeting(key, self, timeout), address, timeout)
        job, secret = f"ray-{self._group_name}-{secrets.token_hex(4)}", Secret(secrets.token_bytes(SECRET_BYTES))
        rendezvous = self._thread.call(
            lambda: serve_rendezvous(self._stack, job=job, size=self._world_size, secret=secret, address=address)
        )
        meeting = RayMeeting(job, rendezvous, bytes(secret), self._world_size)
        internal_kv._internal_kv_put(key, msgspec.msgpack.encode(meeting), overwrite=True)
        try:
            return self._start(meeting, address, timeout)
        finally:
            internal_kv._internal_kv_del(key)

    def _start(self, meeting: RayMeeting, address: str, timeout: float) -> Node:
        environment = make_environment(
            self._stack,
            rank=self._rank,
            size=self._world_size,
            rendezvous=meeting.address,
            job=meeting.job,
            secret=Secret(meeting.secret),
            address=address,
            timeout=timeout,
            transport=os.environ.get("ASYNCPAR_TRANSPORT") or None,
        )
        return Node.start(environment)

    def _close(self) -> None:
        if not self._thread.is_closed:
            self._thread.call(self._stack.aclose)


def register() -> None:
    """Register the backend with ``ray.util.collective`` in this process; once is enough."""
    if not is_backend_available(NAME):
        register_collective_backend(NAME, AsyncparGroup)


def _find_meeting(key: bytes, group: AsyncparGroup, timeout: float) -> RayMeeting:
    """Wait for rank 0 to publish its address and to answer there: a killed group may have left its entry."""
    deadline, trouble = time.monotonic() + timeout, "it has not come"
    while time.monotonic() < deadline:
        note = internal_kv._internal_kv_get(key)
        if note is not None:
            meeting = msgspec.msgpack.decode(note, type=RayMeeting)
            try:
                socket.create_connection(split_address(meeting.address), timeout=_CONNECT_SECONDS).close()
            except OSError as error:
                trouble = f"{meeting.address} does not answer ({error})"
            else:
                if meeting.size != group.world_size:
                    raise UsageError(
                        f"world_size: expected {meeting.size}, as rank 0 of group {group.group_name!r} has it, got "
                        f"{group.world_size} on rank {group.rank}"
                    )
                return meeting
        time.sleep(_LOOK_SECONDS)
    raise LaunchError(
        f"rank {group.rank} of group {group.group_name!r} has not found rank 0 for {timeout:g} s: {trouble}; have all "
        f"{group.world_size} actors register the backend and call init_collective_group ({_TIMEOUT} waits longer)"
    )


def _read_timeout() -> float:
    text = os.environ.get(_TIMEOUT) or _SECONDS
    try:
        seconds = float(text)
    except ValueError as error:
        raise UsageError(f"{_TIMEOUT}: expected a number of seconds, got {text!r}") from error
    if not seconds > 0.0:
        raise UsageError(f"{_TIMEOUT}: expected a positive number of seconds, got {text!r}")
    return seconds


def _one(tensor: list[Any]) -> Array:
    """Return the array of an argument; Ray puts it into a list, which is longer for several GPUs of one process."""
    if len(tensor) != 1:
        raise UsageError(f"tensor: expected one, as a process has one CPU, got {len(tensor)}; use the backend NCCL")
    return _array(tensor[0], "tensor")


def _array(tensor: Any, name: str) -> Array:
    """Return the array that shares the memory of ``tensor``."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if type(tensor).__module__.partition(".")[0] == "torch":
        from asyncpar.torch.arrays import array_of  # it imports torch, which the caller has

        return array_of(tensor, name)
    raise UsageError(f"{name}: expected a numpy array or a torch tensor, got {type(tensor).__name__}")


def _operation(options: Any) -> names.ReduceOp:
    wanted = getattr(options, "reduceOp", ReduceOp.SUM)
    found = _OPERATIONS.get(wanted)
    if found is None:
        raise UsageError(f"op: expected one of {', '.join(map(str, _OPERATIONS))}, got {wanted!r}")
    return found


def _seconds(options: Any) -> float | None:
    """Return the limit in ``options``; Ray's default is negative and means none."""
    limit = getattr(options, "timeout_ms", None)
    seconds = -1.0 if limit is None else float(limit.total_seconds())
    return seconds if seconds > 0.0 else None
