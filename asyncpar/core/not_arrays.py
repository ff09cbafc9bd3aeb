"""Descriptions of values that were passed in place of a numpy array or a parameter, with advice.  Pure."""

from __future__ import annotations

from collections.abc import Coroutine


def describe_other(value: object, write: str = "x") -> str:
    """Return a description of ``value`` that ends a sentence expecting an array; ``write`` is its name for users."""
    kind = type(value)
    if isinstance(value, Coroutine):
        return f"a call that was not awaited; write `await` before {getattr(value, '__name__', 'it')}(...)"
    if kind.__module__.partition(".")[0] == "torch":
        return f"a torch {kind.__name__}; pass {write}.detach().numpy(), which shares its memory, or use asyncpar.torch"
    if kind.__module__.partition(".")[0] == "jax":
        return "a value that JAX traces; inside compiled functions use asyncpar.jax"
    if isinstance(value, list | tuple | int | float | complex):
        return f"{kind.__name__}; pass np.asarray({write})"
    return kind.__name__


def describe_no_parameter(value: object) -> str:
    """Return the error message for ``value``, which was passed in place of a parameter."""
    got = describe_other(value, "tensor")
    return f"parameters: expected each to be a Parameter, such as Parameter('weight', array), got {got}"
