"""Futures of torch: the threads that complete them, and the errors of those that a backward pass takes.

Completing a future runs its callbacks, which may take long, call collectives and wait for them; on the event loop that
would block the loop.  So it happens in daemon threads: one, and another whenever all are busy, so that a callback may
also wait for another future.

The reducer of DistributedDataParallel takes futures of its operations, and waits for them in a callback at the end of
the pass.  Of an error in a future it would raise the text alone, as a ``RuntimeError``.  So the futures that it takes
tell only that an operation is over, and a callback of ours, which the engine runs after the reducer's, raises what the
operation raised: the reducer has ended the pass by then, and can be used for the next one.
"""

from __future__ import annotations

import logging
import queue
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

_log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""After so long without work a thread ends."""


class Completions:
    """Runs functions in daemon threads, as many as there are functions that have not returned."""

    def __init__(self, name: str = "asyncpar completions") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, function: Callable[[], object]) -> None:
        """Run ``function`` soon; never waits."""
        with self._lock:
            self._queue.put(function)
            if self._idle:
                self._idle -= 1
                return
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                function = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._idle -= 1
                        return
                    continue
            try:
                function()
            except Exception:  # noqa: BLE001  # torch gives errors of callbacks to their futures; this is what is left
                _log.exception("a callback of a future failed")
            del function  # what it holds is not to live until the next one comes
            with self._lock:
                self._idle += 1


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
    """Make the backward pass of this thread wait for ``work`` and raise its error."""
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
    """Wait at the end of the pass, before the reducer's callback, and queue a callback that raises errors after it."""
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
