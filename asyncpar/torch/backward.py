"""Errors of what DistributedDataParallel begins in a backward pass: raised by it as they are.

The reducer takes futures of its operations, and waits for them in a callback at the end of the pass.  Of an error in a
future it would raise the text alone, as a ``RuntimeError``.  So the futures that it takes tell only that an operation
is over, and a callback of ours, which the engine runs after the reducer's, raises what the operation raised: the
reducer has ended the pass by then, and can be used for the next one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.futures import Future

from asyncpar.errors import PeerCancelled

_OUTSIDE = -1
_ENGINE = _engine_run_backward.__code__


class _Pass(threading.local):
    """The backward pass that this thread is in, and the works whose errors it will raise."""

    number = _OUTSIDE
    works: list[Any]


_pass = _Pass()


def is_taken_by_reducer() -> bool:
    """Is the caller's caller C++ code of a backward pass, as opposed to a hook in Python, whose futures have errors?"""
    if torch._C._current_graph_task_id() == _OUTSIDE:
        return False
    caller = sys._getframe(2) if sys._getframe(1).f_back is not None else None
    return caller is None or caller.f_code is _ENGINE


def raise_at_end_of_pass(work: Any) -> None:
    """Have the backward pass that this thread is in wait for ``work``, and raise what it raises."""
    number = torch._C._current_graph_task_id()
    if _pass.number != number:
        _pass.number, _pass.works = number, []
        _queue(partial(_wait, _pass.works))
    _pass.works.append(work)


def completed(tensors: list[torch.Tensor]) -> Future[Any]:
    """Return a future that has ``tensors`` as a list of C++, not as an object of Python."""
    made: Future[Any] = torch._C.fork(lambda: tensors)
    return made


def _wait(works: list[Any]) -> None:
    """At the end of the pass, before the reducer's callback: wait as it will, and see that errors are raised after."""
    _pass.number = _OUTSIDE
    errors: list[BaseException] = []
    for work in works:
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001  # raised when the reducer has ended the pass
            errors.append(error)
    if errors:
        _queue(partial(_raise, min(errors, key=lambda error: isinstance(error, PeerCancelled))))


def _raise(error: BaseException) -> None:
    raise error


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)
