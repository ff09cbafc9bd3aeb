"""Values that can be called: the contract has methods where properties read better, so these serve as both.  Pure."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class CallableInt(int):
    """A whole number that is its own getter: ``x.size`` and ``x.size()`` are the same."""

    def __call__(self) -> int:
        return int(self)


class CallableFlag(int):
    """A truth value that is its own getter; equal to ``True`` or ``False``, which no class can inherit from."""

    def __new__(cls, value: object) -> CallableFlag:
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


class CallableTuple(tuple[T, ...]):
    """A tuple that is its own getter."""

    __slots__ = ()

    def __call__(self) -> tuple[T, ...]:
        return tuple(self)
