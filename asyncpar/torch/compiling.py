"""Keeping torch.compile out of the backend's own code.

Where a compiled program falls back to plain Python, torch's C++ calls the backend in the middle of it, and the compiler
would take the backend's methods for more of the program.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

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
