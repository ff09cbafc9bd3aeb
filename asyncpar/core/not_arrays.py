"""Say what a value is that was given where an array of numpy or a parameter goes, and how that comes from it.  Pure."""

from __future__ import annotations

from collections.abc import Coroutine


def describe_other(value: object, write: str = "x") -> str:
    """Return what ``value`` is, for the end of a sentence that expects an array; ``write`` is what users call it."""
    kind = type(value)
    if isinstance(value, Coroutine):
        return f"a call that was not awaited; write `await` before {getattr(value, '__name__', 'it')}(...)"
    if kind.__module__.partition(".")[0] == "torch":
        return f"a torch {kind.__name__}; pass {write}.detach().numpy(), which shares its memory, or use asyncpar.torch"
    if isinstance(value, list | tuple | int | float | complex):
        return f"{kind.__name__}; pass np.asarray({write})"
    return kind.__name__


def describe_no_parameter(value: object) -> str:
    """Return the sentence about ``value``, which was given where a parameter goes."""
    got = describe_other(value, "tensor")
    return f"parameters: expected each to be a Parameter, such as Parameter('weight', array), got {got}"
