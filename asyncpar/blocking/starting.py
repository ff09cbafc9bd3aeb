"""Operations that are started without waiting: ``comm.start.all_reduce(x)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncpar.blocking.node_handle import NodeHandle
from asyncpar.blocking.pending import Pending
from asyncpar.collectives.all_reduce import AllReduce
from asyncpar.collectives.communicator import Communicator

P = ParamSpec("P")
R = TypeVar("R")


def _started(
    operation: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Starting, P], Pending[R]]:
    """Return the method that starts ``operation`` of the communicator, with the same arguments."""
    name = operation.__name__

    def start(starting: Starting, /, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        return starting._handle.start(name, lambda: operation(starting._on_loop, *args, **kwargs))

    functools.update_wrapper(start, operation)
    return start


class Starting:
    """The operations of a communicator, each of which returns a ``Pending`` at once.

    They take their place in the order of the group's operations when they are called here.
    """

    def __init__(self, handle: NodeHandle, on_loop: Communicator) -> None:
        self._handle = handle
        self._on_loop = on_loop

    all_reduce = _started(AllReduce.all_reduce)
    all_reduce_many = _started(Communicator.all_reduce_many)
    reduce = _started(Communicator.reduce)
    reduce_scatter = _started(Communicator.reduce_scatter)
    all_gather = _started(Communicator.all_gather)
    all_gather_v = _started(Communicator.all_gather_v)
    gather = _started(Communicator.gather)
    scatter = _started(Communicator.scatter)
    broadcast = _started(Communicator.broadcast)
    barrier = _started(Communicator.barrier)
    all_to_all = _started(Communicator.all_to_all)
    all_to_all_v = _started(Communicator.all_to_all_v)
    agree = _started(Communicator.agree)
    send = _started(Communicator.send)
    recv = _started(Communicator.recv)
    recv_any = _started(Communicator.recv_any)
    send_object = _started(Communicator.send_object)
    recv_object = _started(Communicator.recv_object)
    broadcast_object = _started(Communicator.broadcast_object)
    all_gather_object = _started(Communicator.all_gather_object)
    gather_object = _started(Communicator.gather_object)
    scatter_object = _started(Communicator.scatter_object)
    calibrate = _started(Communicator.calibrate)
