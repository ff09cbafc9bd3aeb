"""Calls of operations: how they run and fail, and what happens to a call that is never awaited."""

from __future__ import annotations

import asyncio
import warnings
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import msgspec

from asyncpar.collectives.causes import DEADLINE_PASSED, reason_of
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.protocol import Reason
from asyncpar.collectives.wait_report import describe_wait
from asyncpar.core.observe.reporting import text_of
from asyncpar.errors import OperationMismatch, PeerError, PeerLost, UsageError

T_co = TypeVar("T_co", covariant=True)


class Call(Coroutine[Any, Any, T_co]):
    """A call of an operation: a coroutine that takes its place in the order of operations before it is awaited.

    A call that is never awaited, or that is cancelled or closed before its first step, gives up its place, so that the
    other ranks do not wait for it.  A plain coroutine cannot do that: it never runs if it is cancelled before its first
    step, and the traceback of the cancellation keeps its arguments alive, so neither a ``finally`` nor a finalizer
    would learn of it in time.
    """

    __slots__ = ("_steps",)

    _steps: Generator[Any, Any, T_co] | None
    """The generator that runs the call; None before it is awaited.  Subclasses set it once the call has its place."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The operation that is called."""

    @abstractmethod
    def _begin(self) -> Generator[Any, Any, T_co]:
        """Return the generator that runs the call."""

    @abstractmethod
    def _give_up(self, error: BaseException | None = None) -> None:
        """End the operation, if it has not begun: the call will not be awaited (because of ``error``, if given).

        Thread-safe.
        """

    @property
    def is_over(self) -> bool:
        """Whether the operation has ended without this call, so that it need not be awaited."""
        return False

    @property
    def runs_anywhere(self) -> bool:
        """Whether the call can run without a task, and in another thread than the loop's.

        Only operations in shared memory can, and those of a rank alone.
        """
        return False

    def __await__(self) -> Generator[Any, Any, T_co]:
        if self._steps is not None:
            raise RuntimeError("cannot reuse already awaited coroutine")
        self._steps = steps = self._begin()
        return steps

    def __getattr__(self, name: str) -> str:
        """Provide the attributes of a coroutine, for tracebacks and warnings."""
        if name in ("__name__", "__qualname__"):
            return f"Communicator.{self.name}"
        raise AttributeError(name if name.startswith("_") else f"{name}: {self._advice()}")

    def __repr__(self) -> str:
        """Return the text that a prompt shows where ``await`` was forgotten."""
        return f"<{self._advice() if self._steps is None else f'the call of {self.name}, awaited'}>"

    def _advice(self) -> str:
        return f"this is the call of {self.name}, not its result: write `await comm.{self.name}(...)`"

    def _use(self, *_: object) -> NoReturn:
        """Raise, because the call was used as its result."""
        raise UsageError(self._advice())

    def __bool__(self) -> bool:
        return True  # not its length

    __array__ = __len__ = __iter__ = __contains__ = __getitem__ = __float__ = __int__ = __index__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _use
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _use
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = _use
    __lt__ = __le__ = __gt__ = __ge__ = _use

    def send(self, value: Any) -> Any:
        return (self._steps or self.__await__()).send(value)

    def throw(self, *error: Any) -> Any:
        try:
            return (self._steps or self.__await__()).throw(*error)  # it may have more to await before it ends
        except BaseException:
            self._give_up(next((part for part in error if isinstance(part, BaseException)), None))
            raise
        finally:
            del error  # its traceback has this frame, and the frame holds the call with its arrays

    def close(self) -> None:
        try:
            (self._steps or self.__await__()).close()
        finally:
            self._give_up()

    def __del__(self) -> None:
        try:
            is_forgotten = self._steps is None
        except AttributeError:
            return  # the constructor refused the call
        if is_forgotten and not self.is_over:
            warnings.warn(f"coroutine '{self.__qualname__}' was never awaited", RuntimeWarning, stacklevel=2)
            self._give_up()


class CoroutineCall(Call[T_co]):
    """Call of ``name`` that ``coroutine`` carries out, which takes no place when it is dropped."""

    __slots__ = ("_coroutine", "_name")

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, T_co]) -> None:
        self._name = name
        self._coroutine = coroutine
        self._steps = None

    @property
    def name(self) -> str:
        return self._name

    def _begin(self) -> Generator[Any, Any, T_co]:
        return self._coroutine.__await__()

    def _give_up(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._coroutine.close()


class MessageCall(Call[T_co]):
    """Call of ``operation``, which ``body`` carries out by messages.

    ``count`` is called with the operation when it has succeeded.  ``gone`` returns the error of a rank missing for it;
    by default of the first rank of its group that is lost.
    """

    __slots__ = ("_body", "_count", "_gone", "_is_alone", "_operation")

    def __init__(
        self,
        operation: Operation,
        body: Callable[[Operation], Awaitable[T_co]],
        count: Callable[[Operation], None],
        *,
        is_alone: bool = False,
        gone: Callable[[], PeerLost | None] | None = None,
    ) -> None:
        self._operation = operation
        self._body = body
        self._count = count
        self._is_alone = is_alone
        self._gone = gone
        self._steps = None

    @property
    def name(self) -> str:
        return self._operation.name

    @property
    def operation(self) -> Operation:
        """The operation that is called."""
        return self._operation

    @property
    def is_over(self) -> bool:
        return self._operation.is_over

    @property
    def runs_anywhere(self) -> bool:
        return self._is_alone

    def _begin(self) -> Generator[Any, Any, T_co]:
        body = self._body
        del self._body  # with its arrays: a finished task that is kept keeps its call
        return self._run(body).__await__()

    def _give_up(self, error: BaseException | None = None) -> None:
        give_up(self._operation, error)

    async def _run(self, body: Callable[[Operation], Awaitable[T_co]]) -> T_co:
        operation = self._operation
        context = operation.context
        try:
            context.check_home_loop(operation.label)
        except UsageError as error:
            give_up(operation, error)
            raise
        try:
            operation.begin(context.lost_member(operation.home) if self._gone is None else self._gone())
            context.watch(operation)
            if self._is_alone and context.is_turn_due(operation.started_at):
                await asyncio.sleep(0)
            operation.begun_at = context.clock()
            result = await body(operation)
        except BaseException as error:
            outcome = [ended(operation, error)]  # popped, as its traceback has this frame
            if outcome[0] is error:
                outcome.pop()
                raise
            raise outcome.pop() from error
        operation.finish()
        self._count(operation)
        return result


class WatchedCall(Call[T_co]):
    """Call of ``coroutine``; ``ended`` is called when it is closed, or ends at once by an exception thrown into it."""

    __slots__ = ("_coroutine", "_ended")

    def __init__(self, coroutine: Coroutine[Any, Any, T_co], ended: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._ended = ended
        self._steps = None

    @property
    def name(self) -> str:
        return str(getattr(self._coroutine, "__name__", "call"))

    @property
    def is_over(self) -> bool:
        return True  # ``coroutine`` itself warns if it is never awaited

    def __getattr__(self, name: str) -> Any:
        """Expose the coroutine's names, code and frame to tools that display it."""
        return getattr(self._coroutine, name)

    def _begin(self) -> Generator[Any, Any, T_co]:
        return self._coroutine.__await__()

    def _give_up(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._ended()


class ConvertedCall(Call[T_co]):
    """Call that returns what ``convert`` makes of the result of another one, ``call``."""

    __slots__ = ("_call", "_convert")

    def __init__(self, call: Coroutine[Any, Any, Any], convert: Callable[[Any], T_co]) -> None:
        self._call = call
        self._convert = convert
        self._steps = None

    @property
    def name(self) -> str:
        return str(getattr(self._call, "name", "call"))

    @property
    def is_over(self) -> bool:
        return True  # ``call`` itself warns if it is never awaited

    @property
    def runs_anywhere(self) -> bool:
        return isinstance(self._call, Call) and self._call.runs_anywhere

    def _begin(self) -> Generator[Any, Any, T_co]:
        call, convert = self._call, self._convert
        del self._convert  # with the arrays: a finished task that is kept keeps its call
        return convert((yield from call.__await__()))

    def _give_up(self, error: BaseException | None = None) -> None:
        if isinstance(self._call, Call):
            self._call._give_up(error)
        self._call.close()  # it was not forgotten


class CancelReason(msgspec.Struct):
    """The reason why operations of a block are cancelled: ``text``, and the ``rank`` of the world that caused it."""

    text: str = ""
    rank: int | None = None

    def take(self, error: BaseException) -> None:
        """Make ``error`` the reason of cancellations from now on."""
        if self.text or isinstance(error, asyncio.CancelledError | GeneratorExit | BaseExceptionGroup):
            return
        if isinstance(error, Abandoned):
            self.text, self.rank = error.reason.text, error.reason.rank
        elif isinstance(error, PeerError):
            self.text, self.rank = error.cause or text_of(error), error.rank
        else:
            self.text = f"{type(error).__name__}: {text_of(error)}"


class Abandoned(Exception):  # noqa: N818
    """Ends a block from inside because of ``cause``, an error outside of it, which other ranks get as the reason."""

    def __init__(self, cause: BaseException) -> None:
        self.reason = CancelReason()
        self.reason.take(cause)
        if not self.reason.text:
            self.reason.text = f"its block was left by {type(cause).__name__}"
        super().__init__(self.reason.text)


_REASON: ContextVar[CancelReason | None] = ContextVar("why operations are cancelled", default=None)


@contextmanager
def cancel_reason() -> Iterator[CancelReason]:
    """Send the reason in ``CancelReason`` to other ranks when operations of the block or of its tasks are cancelled."""
    why, before = CancelReason(), _REASON.get()
    _REASON.set(why)
    try:
        yield why
    finally:
        _REASON.set(before)  # not reset: a generator may be closed in another context


def ended(operation: Operation, error: BaseException) -> BaseException:
    """Clean up after ``error``, notify other ranks if they cannot know, and return the error that the caller gets."""
    if isinstance(error, GeneratorExit) and not operation.context.loop.is_running():
        return error  # the loop has ended: no rank can be notified
    if operation.failure is not None and not isinstance(error, asyncio.CancelledError):
        operation.discard()
        return operation.failure
    if isinstance(error, asyncio.CancelledError):
        now, why = operation.context.now(), operation.why_cancelled or reason_of(error)
        message, culprit = describe_wait(operation, now), operation.find_culprit(now)
        error.args = (message,)
        error.add_note(message)
        missing = operation.waits_for() if culprit is None else [culprit.rank]
        error.missing_ranks = missing  # type: ignore[attr-defined]  # for the code that turns it into PeerTimeout
        if operation.failure is None:
            given = _REASON.get()
            if given is not None and given.text:
                operation.report_failure("failed", given.text, lost=given.rank)
            elif why == DEADLINE_PASSED and culprit is not None and culprit.silent_for is not None:
                silence = f"it waited for rank {culprit.rank}, which has not answered for {culprit.silent_for:.1f} s"
                operation.report_failure("cancelled", f"{why}; {silence}", lost=culprit.rank)
            else:
                operation.report_failure("cancelled", why)
    elif isinstance(error, OperationMismatch):
        operation.report_failure("mismatch", f"{operation.label}: {error}")
    elif isinstance(error, PeerLost):
        operation.report_failure("lost", error.cause or str(error), lost=error.rank)
        operation.discard()
        return operation.lost(error)
    elif isinstance(error, GeneratorExit):
        operation.report_failure("failed", "GeneratorExit: the call was closed")
    else:
        operation.report_failure("failed", reason_of(error))
    operation.discard()
    return error


def give_up(operation: Operation, error: BaseException | None = None) -> None:
    """End an operation whose call will not be awaited, because of ``error`` if it is given.  Thread-safe."""
    loop = operation.context.loop
    if not operation.has_started and not operation.is_over and not loop.is_closed():
        loop.call_soon_threadsafe(_give_up_now, operation, error)


def _give_up_now(operation: Operation, error: BaseException | None) -> None:
    """Notify the other ranks that the call was never awaited: they must not wait for it."""
    if operation.has_started or operation.is_over:
        return
    given = _REASON.get()  # from the code that gave up: the loop runs this in a copy of its context
    if given is not None and given.text:
        operation.report_failure("failed", given.text, lost=given.rank)
    elif error is None:
        operation.report_failure("failed", "it was called there, but never awaited")
    else:
        reason: Reason = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        operation.report_failure(reason, f"{reason_of(error)}, before it began")
    operation.discard()


def refuse(operation: Operation, error: BaseException) -> None:
    """End ``operation`` on the other ranks, because its caller got ``error`` instead of a call."""
    operation.report_failure("refused", text_of(error) or type(error).__name__)
    operation.discard()
