"""What torch's compiler and profilers see of the backend.

Where a compiled program falls back to plain Python, torch's C++ calls the backend in the middle of it, and the compiler
would trace the backend's methods as part of the program: ``uncompiled`` excludes them.  Profilers see each operation as
an event, from the call until the result is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.futures import Future

from asyncpar.torch.backend_name import NAME

T = TypeVar("T", bound=type)

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""For a function, and for all that it calls."""


def uncompiled(kind: T) -> T:
    """Make the methods of a class run as they are wherever they are called from.  Costs nothing per call."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("asyncpar.")]
    for value in [value for base in own for value in vars(base).values()]:
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return kind


Make = Callable[[], Coroutine[Any, Any, Any]]

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Does a profiler of torch run in this thread?"""


def recorded(make: Make, operation: str, inputs: Sequence[torch.Tensor]) -> Make:
    """Return ``make`` for an operation that is an event from now on, named ``asyncpar:operation``, of those inputs.

    The event ends in another thread than the one it began in, which is how profilers know that it is asynchronous; so
    under a profiler an operation takes as much longer as a change of threads takes.
    """
    record = torch.autograd._record_function_with_args_enter(f"{NAME}:{operation}", *inputs)
    ended: Future[None] = Future()
    # What hangs on a future ends the event with the profiler's state of this thread, whichever thread completes it.
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, ended)

    async def run(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        finally:
            await asyncio.to_thread(ended.set_result, None)

    return lambda: run(make())
