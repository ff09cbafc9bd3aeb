"""What torch's profilers see of an operation: an event, from the call until the result is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from torch.futures import Future

from asyncpar.torch.backend_name import NAME

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
