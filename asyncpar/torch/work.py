"""The works that operations of the backend return, and how torch's functional collectives wait for them.

torch keeps, for each thread, which works belong to which storage.  Functional collectives enter theirs themselves,
and take them out by ``wait_tensor``.  Under ``allow_inflight_collective_as_graph_input_ctx()`` all other operations are
entered, too, and taken out by ``Work.wait``.  For a work of Python torch offers no way to take out one, only to wait
for all of a storage; so ``forget_inflight`` does that, while works other than its own only enter themselves again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from asyncpar.blocking.pending import Pending
from asyncpar.errors import AsyncparError, PeerTimeout
from asyncpar.torch.errors import as_torch
from asyncpar.torch.futures import Completions, completed, is_taken_by_reducer, raise_at_end_of_pass
from asyncpar.torch.instrumentation import uncompiled

is_inflight_on = c10d._allow_inflight_collective_as_graph_input
"""Are operations to be waited for by their tensors?"""


class _Removal(threading.local):
    """The work that this thread is taking out, and the others that it has met meanwhile."""

    work: object = None
    met: list[Any]


_removal = _Removal()


def enter_inflight(work: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make ``wait_tensor`` of one of ``tensors`` wait for ``work``; return those that have storages."""
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
    """Is ``work`` waited for only because ``forget_inflight`` removes it or another work?"""
    if _removal.work is None:
        return False
    if _removal.work is not work:
        _removal.met.append(work)
    return True


_NONE = timedelta(0)
_completions = Completions()


@uncompiled
class Work(dist.Work):
    """An operation that is under way, whose results will be in ``tensors``.

    ``operation`` is its name in messages.  ``check_may_wait`` raises in code that must not wait for it;
    ``describe_waits`` says for whom its group waits.
    """

    def __init__(
        self,
        pending: Pending[Any],
        tensors: Sequence[Any],
        *,
        operation: str,
        check_may_wait: Callable[[], None],
        describe_waits: Callable[[], str],
    ) -> None:
        super().__init__()
        self._pending = pending
        self._tensors = list(tensors)
        self._operation = operation
        self._check_may_wait = check_may_wait
        self._describe_waits = describe_waits
        self._future: Future[Any] | None = None
        self._entered: list[Any] = []
        self._entered_by = 0

    def enter(self) -> None:
        """Let ``wait_tensor`` of this thread wait for it, until ``wait`` was called here."""
        self._entered = enter_inflight(self, self._tensors)
        self._entered_by = threading.get_ident()

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Wait until it is over, and raise what it raised: an error of asyncpar that is a ``DistBackendError``, too.

        Raises ``PeerTimeout`` after ``timeout`` (0: the group's alone counts), saying for whom the group waits; the
        operation goes on then.
        """
        if is_passed_over(self):
            return True
        pending = self._pending
        if not pending.is_done:
            self._check_may_wait()
        seconds = timeout.total_seconds() if timeout else None
        try:
            pending.wait(None if seconds is None or seconds <= 0 else seconds)
        except AsyncparError as error:
            error.__traceback__ = None  # it has this frame, which has the error: that would wait for the collector
            raise as_torch(error, self._operation) from None
        except TimeoutError:
            told = f"{self._operation}: not over after the {seconds} s that wait was given; it goes on"
            raise as_torch(PeerTimeout(f"{told}: {self._describe_waits()}")) from None
        finally:
            if self._entered and pending.is_done and self._entered_by == threading.get_ident():
                entered, self._entered = self._entered, []
                forget_inflight(self, entered)
        return True

    def synchronize(self) -> None:
        """Wait until it is over."""
        self.wait()

    def is_completed(self) -> bool:
        """Is it over, with a result or an error?"""
        return self._pending.is_done

    def is_success(self) -> bool:
        """Is it over, with a result?"""
        return self._pending.is_done and self._pending.exception() is None

    def exception(self) -> BaseException | None:
        """Return what it raised; None if it has not."""
        error = self._pending.exception()
        return None if error is None else as_torch(error, self._operation)

    def result(self) -> list[Any]:
        """Return the tensors that hold the result, when it is over."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank of the group that sent what was received; only for a receive from any rank."""
        self.wait()
        return cast("int", self._pending.wait())

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the list of tensors.  Its callbacks run in a thread that may wait for other operations.

        What the operation raises is raised by the future, as a ``RuntimeError`` with its text.  Where the reducer of
        DistributedDataParallel takes the future, backward raises it instead, as it is.
        """
        if self._future is None:
            self._future = self._make_reducer_future() if is_taken_by_reducer() else self._make_future()
        return self._future

    def _make_reducer_future(self) -> Future[Any]:
        """Return a future that tells when the operation is over; the backward pass raises what it raises.

        torch's own hook ``FP16_COMPRESS`` wants lists of C++, which no future can be given later: so what it begins is
        waited for here, and with it all in float16.
        """
        raise_at_end_of_pass(self)
        pending, tensors = self._pending, self._tensors
        if any(tensor.dtype is torch.float16 for tensor in tensors):
            with suppress(Exception):  # raised at the end of the pass
                self.wait()
            return completed(tensors)
        future: Future[Any] = Future()
        if pending.is_done:
            future.set_result(tensors)
        else:
            pending.add_done_callback(lambda _: _completions.run(lambda: future.set_result(tensors)))
        return future

    def _make_future(self) -> Future[Any]:
        pending, tensors = self._pending, self._tensors
        begun: Future[Any] = Future()

        def outcome(_: Future[Any]) -> list[Any]:
            self.wait()  # raises what the operation has raised, which is how futures come to hold errors
            return tensors

        future = cast("Future[Any]", begun.then(outcome))
        if pending.is_done:
            begun.set_result(None)
        else:
            pending.add_done_callback(lambda _: _completions.run(lambda: begun.set_result(None)))
        return future
