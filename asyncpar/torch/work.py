"""The works that operations of the backend return, and their futures.

Works by tensor.  torch keeps, for each thread, which works belong to which storage.  Functional collectives register
theirs themselves and remove them by ``wait_tensor``.  Under ``allow_inflight_collective_as_graph_input_ctx()`` all
other operations are registered, too, and removed by ``Work.wait``.  torch cannot remove a single work of Python; it can
only wait for all works of a storage.  So ``forget_inflight`` does that, and the other works register themselves
again.

Futures.  Completing a future runs its callbacks, which may take long, call collectives and wait for them; on the event
loop that would block the loop.  So daemon threads complete futures: one, and another whenever all are busy.

Errors in the backward pass.  The reducer of DistributedDataParallel takes the futures of its operations and waits for
them in a callback at the end of the pass.  It would raise an error of a future as a ``RuntimeError`` with its text.  So
the futures that it takes only report that an operation is over; a callback that the engine runs after the reducer's
raises the error itself.  The reducer has ended the pass by then, and can be used for the next one.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.futures import Future

from asyncpar.blocking.pending import Pending
from asyncpar.errors import AsyncparError, PeerCancelled, PeerTimeout
from asyncpar.torch.errors import as_torch
from asyncpar.torch.instrumentation import uncompiled

_log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""Seconds without work after which a thread ends."""


class Completions:
    """Runs functions in daemon threads, one for each function that has not returned."""

    def __init__(self, name: str = "asyncpar completions") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, function: Callable[[], object]) -> None:
        """Run ``function`` soon, without waiting."""
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
            del function  # references must not stay alive until the next one comes
            with self._lock:
                self._idle += 1


_OUTSIDE = -1
_ENGINE = _engine_run_backward.__code__


class _Pass(threading.local):
    """The current backward pass of this thread, and the works whose errors it will raise."""

    number = _OUTSIDE
    works: list[Any]


_pass = _Pass()


def is_taken_by_reducer() -> bool:
    """Return whether the caller's caller is C++ code of a backward pass, not a Python hook, whose futures have
    errors.
    """
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
    """Return a future that holds ``tensors`` as a C++ list rather than a Python object."""
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


is_inflight_on = c10d._allow_inflight_collective_as_graph_input
"""Returns whether ``wait_tensor`` waits for operations that are not functional collectives."""


class _Removal(threading.local):
    """The work that this thread removes, and the other works of its storages."""

    work: object = None
    met: list[Any]


_removal = _Removal()


def enter_inflight(work: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make ``wait_tensor`` of each of ``tensors`` wait for ``work``; return those that have storages."""
    known = [tensor for tensor in tensors if tensor.layout is torch.strided]
    for tensor in known:
        c10d._register_work(tensor, work)
    return known


def forget_inflight(work: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Undo ``enter_inflight``, in the same thread, for a work that is over."""
    for tensor in tensors:
        _removal.work, _removal.met = work, []
        try:
            torch.ops._c10d_functional.wait_tensor(tensor)
        finally:
            _removal.work, met = None, _removal.met
            for other in met:
                c10d._register_work(tensor, other)


def is_passed_over(work: Any) -> bool:
    """Return whether ``work`` is waited for only because ``forget_inflight`` removes it or another work."""
    if _removal.work is None:
        return False
    if _removal.work is not work:
        _removal.met.append(work)
    return True


def _devices(tensors: Sequence[Any]) -> list[torch.device]:
    """Return the CUDA devices of ``tensors``, which a future of them must know."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda"))


_NONE = timedelta(0)
_completions = Completions()


@uncompiled
class Work(dist.Work):
    """An operation in progress, whose results will be in ``tensors``.

    ``operation`` is its name in messages.  ``check_may_wait`` raises in code that must not wait for it; ``overdue``
    returns the error that names the rank for which it waits, prefixed by a text; ``follow`` is called after a
    successful wait, and ``waited`` after each wait, with its seconds.
    """

    def __init__(
        self,
        pending: Pending[Any],
        tensors: Sequence[Any],
        *,
        operation: str,
        check_may_wait: Callable[[], None],
        overdue: Callable[[str], PeerTimeout],
        follow: Callable[[], None] | None,
        waited: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._pending = pending
        self._tensors = list(tensors)
        self._operation = operation
        self._check_may_wait = check_may_wait
        self._overdue = overdue
        self._follow = follow
        self._waited = waited
        self._future: Future[Any] | None = None
        self._entered: list[Any] = []
        self._entered_by = 0

    def enter(self) -> None:
        """Make ``wait_tensor`` of this thread wait for it, until ``wait`` is called here."""
        self._entered = enter_inflight(self, self._tensors)
        self._entered_by = threading.get_ident()

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Wait until it is over and raise its error: one of asyncpar that is a ``DistBackendError``, too.

        Raises ``PeerTimeout`` after ``timeout`` (0: only the group's applies), naming the rank that has not done its
        part; the operation continues.  This queries the ranks: if they do not answer at once, the error is raised up to
        a second later.
        """
        if is_passed_over(self):
            return True
        pending = self._pending
        if not pending.is_done:
            self._check_may_wait()
        seconds = timeout.total_seconds() if timeout else None
        began = time.perf_counter()
        try:
            self._wait_for(None if seconds is None or seconds <= 0 else seconds)
        except AsyncparError as error:
            error.__traceback__ = None  # it has this frame, which has the error: that would wait for the collector
            raise as_torch(error, self._operation) from None
        finally:
            self._waited(time.perf_counter() - began)
            if self._entered and pending.is_done and self._entered_by == threading.get_ident():
                entered, self._entered = self._entered, []
                forget_inflight(self, entered)
        if self._follow is not None:
            self._follow()
        return True

    def _wait_for(self, seconds: float | None) -> None:
        """Wait for ``seconds`` (None: forever); raises the operation's error, or one naming the missing ranks."""
        try:
            self._pending.wait(seconds)
            return
        except AsyncparError:
            raise
        except TimeoutError:
            late = self._overdue(f"{self._operation}: not over after the {seconds} s that wait was given")
        if not self._pending.is_done:
            raise late
        self._pending.wait()  # it has ended while ranks were queried

    def when_over(self, function: Callable[[BaseException | None], object]) -> None:
        """Call ``function`` with the error, or None, when it is over, in any thread; it must be fast."""
        self._pending.add_done_callback(lambda pending: function(pending.exception()))

    def synchronize(self) -> None:
        """Wait until it is over."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, with a result or an error."""
        return self._pending.is_done

    def is_success(self) -> bool:
        """Return whether it is over with a result."""
        return self._pending.is_done and self._pending.exception() is None

    def exception(self) -> BaseException | None:
        """Return its error; None if it has not raised one."""
        error = self._pending.exception()
        return None if error is None else as_torch(error, self._operation)

    def result(self) -> list[Any]:
        """Return the tensors that hold the result, when it is over."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank of the group that sent the received data; only for a receive from any rank."""
        self.wait()
        return cast("int", self._pending.wait())

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the list of tensors.  Its callbacks run in a thread that may wait for other operations.

        The future raises the operation's error as a ``RuntimeError`` with its text.  Where the reducer of
        DistributedDataParallel takes the future, backward raises the error itself instead.
        """
        if self._future is None:
            self._future = self._make_reducer_future() if is_taken_by_reducer() else self._make_future()
        return self._future

    def _make_reducer_future(self) -> Future[Any]:
        """Return a future that is done when the operation is over; the backward pass raises its error.

        torch's hook ``FP16_COMPRESS`` needs a C++ list, which cannot be set later from Python; so operations on float16
        are waited for here.
        """
        raise_at_end_of_pass(self)
        pending, tensors = self._pending, self._tensors
        if any(tensor.dtype is torch.float16 for tensor in tensors) and not _devices(tensors):
            with suppress(Exception):  # raised at the end of the pass
                self.wait()
            return completed(tensors)
        future: Future[Any] = Future(devices=_devices(tensors))
        if pending.is_done:
            future.set_result(tensors)
        else:
            pending.add_done_callback(lambda _: _completions.run(lambda: future.set_result(tensors)))
        return future

    def _make_future(self) -> Future[Any]:
        pending, tensors = self._pending, self._tensors
        begun: Future[Any] = Future(devices=_devices(tensors))

        def outcome(_: Future[Any]) -> list[Any]:
            self.wait()  # raises the error of the operation, which is how futures come to hold errors
            return tensors

        future = cast("Future[Any]", begun.then(outcome))
        if pending.is_done:
            begun.set_result(None)
        else:
            pending.add_done_callback(lambda _: _completions.run(lambda: begun.set_result(None)))
        return future
