"""asyncpar for programs without an event loop: the node's loop runs in a background thread.

import asyncpar.blocking, numpy as np

with asyncpar.blocking.init() as node:
    x = np.full(1 << 20, node.rank, np.float32)
    node.world.all_reduce(x)                         # blocks
    pending = node.world.start.all_reduce(x)         # does not
    pending.wait(timeout=10)
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncpar.blocking.communicator import Communicator
from asyncpar.blocking.node import Node, init
from asyncpar.blocking.pending import Cancelled, Pending
from asyncpar.blocking.refs import Ref
from asyncpar.blocking.thread import LoopThread, background

T = TypeVar("T")


def run_coroutine(make: Callable[[], Coroutine[Any, Any, T]], *, timeout: float | None = None) -> T:
    """Run the coroutine that ``make`` returns on the process's background loop, and return its result.

    It is cancelled after ``timeout`` seconds (None: never).
    """
    return background().call(make, timeout=timeout)


__all__ = [
    "Cancelled",
    "Communicator",
    "LoopThread",
    "Node",
    "Pending",
    "Ref",
    "background",
    "init",
    "run_coroutine",
]
