"""Integration with torch's compiler and profilers.

Where a compiled program falls back to plain Python, torch's C++ calls the backend, and the compiler would trace the
backend's methods as part of the program: ``uncompiled`` excludes them.  ``stepped_over`` and ``not_traced`` do so for
the functions around a compiled module.  Profilers show each operation as an event, from the call to the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.futures import Future

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

NAME = "asyncpar"
"""The backend's name in torch's profilers and programs; ``registration``, which must not import this, repeats it."""

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""The compiler traces neither the function nor the functions that it calls."""

_STEP_OVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""The compiler does not trace the function itself, but does trace those that it calls."""


def uncompiled(kind: T) -> T:
    """Exclude the methods of a class from compilation, at no cost per call."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("asyncpar.")]
    for value in [value for base in own for value in vars(base).values()]:
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return kind


def stepped_over(function: F) -> F:
    """Exclude a function from compilation, but not the functions that it calls, at no cost per call.

    Compiled code that calls it ends before the call, and continues after it.
    """
    return _excluded(function, _STEP_OVER)


def not_traced(function: F) -> F:
    """Exclude a function, and those that it calls, from compilation, at no cost per call."""
    return _excluded(function, _SKIP)


def _excluded(function: F, strategy: Any) -> F:
    found: Any = function
    found._torchdynamo_disable = True  # for compiled callers; the strategy is for the others
    eval_frame.set_code_exec_strategy(found.__code__, strategy)
    return function


Make = Callable[[], Coroutine[Any, Any, Any]]

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns whether a profiler of torch runs in this thread."""


def recorded(make: Make, operation: str, inputs: Sequence[torch.Tensor]) -> Make:
    """Start the event ``asyncpar:operation`` with these inputs; return ``make`` for the operation that ends it.

    The event ends in another thread than the one it began in, by which profilers recognize it as asynchronous; so under
    a profiler an operation takes longer by one thread switch.
    """
    record = torch.autograd._record_function_with_args_enter(f"{NAME}:{operation}", *inputs)
    ended: Future[None] = Future()
    # A callback of a future ends the event with the profiler's state of this thread, whichever thread completes it.
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, ended)

    async def run(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        finally:
            await asyncio.to_thread(ended.set_result, None)

    return lambda: run(make())
