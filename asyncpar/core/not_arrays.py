"""Say what a value is that was given where an array of numpy goes, and how the array comes from it.  Pure."""

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
