"""Shorten a failing list: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool], *, attempts: int = 200) -> tuple[T, ...]:
    """Return a part of ``items``, in order, that still fails, and from which no single item can be left out.

    ``items`` fails.  After ``attempts`` calls of ``fails`` the shortest found so far is returned.
    """
    left = attempts

    def ask(part: tuple[T, ...]) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(part)

    current = tuple(items)
    if current and ask(()):
        return ()
    parts = 2
    while len(current) > 1 and left > 0:
        size = -(-len(current) // parts)
        for start in range(0, len(current), size):
            rest = current[:start] + current[start + size :]
            if ask(rest):
                current, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(current), 2 * parts)
    return current


def simplify(
    items: Sequence[T],
    fails: Callable[[tuple[T, ...]], bool],
    simpler: Callable[[T], Sequence[T]],
    *,
    attempts: int = 60,
) -> tuple[T, ...]:
    """Return ``items`` with each replaced by the first of its ``simpler`` forms with which the list still fails."""
    current = tuple(items)
    for place in range(len(current)):
        for form in simpler(current[place]):
            attempts -= 1
            candidate = (*current[:place], form, *current[place + 1 :])
            if attempts >= 0 and fails(candidate):
                current = candidate
                break
    return current
