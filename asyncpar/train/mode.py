"""How often ranks meet in training, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from asyncpar.errors import UsageError

T = TypeVar("T", int, float)

FORMS = "sync, local:H, diloco:H[:RATE[:MOMENTUM]], hierarchical:H[:RATE[:MOMENTUM]], async, stale:STEPS"


class ModeKind(StrEnum):
    """SYNC: gradients in every step.  LOCAL: means of parameters every H steps.  DILOCO: the same with an outer
    optimizer.  HIERARCHICAL: gradients inside hosts in every step, rounds between hosts every H.  ASYNC: nobody waits.
    STALE: nobody runs more than so many steps ahead.
    """

    SYNC = "sync"
    LOCAL = "local"
    DILOCO = "diloco"
    HIERARCHICAL = "hierarchical"
    ASYNC = "async"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMode:
    """``every``, ``learning_rate`` and ``momentum`` are of the rounds, where there are any, ``staleness`` of STALE."""

    kind: ModeKind = ModeKind.SYNC
    every: int = 1
    learning_rate: float = 1.0
    momentum: float = 0.0
    staleness: int = 0

    @property
    def has_rounds(self) -> bool:
        """Do ranks, or hosts, go their own ways for several steps?"""
        return self.kind in (ModeKind.LOCAL, ModeKind.DILOCO, ModeKind.HIERARCHICAL)

    @property
    def is_free(self) -> bool:
        """Do ranks exchange updates without meeting?"""
        return self.kind in (ModeKind.ASYNC, ModeKind.STALE)

    @property
    def has_replicas(self) -> bool:
        """Are the parameters of all ranks equal in every step?"""
        return self.kind is ModeKind.SYNC

    def rounds(self, steps: int) -> int:
        """Return how many rounds ``steps`` steps take."""
        return -(-steps // self.every)


def parse_mode(text: str) -> TrainingMode:
    """Return the mode called ``text``.  Raises ``UsageError`` that tells which there are."""
    name, *arguments = text.split(":")
    if name not in list(ModeKind):
        raise _unknown(text)
    kind = ModeKind(name)
    match kind, arguments:
        case ((ModeKind.SYNC | ModeKind.ASYNC), []):
            return TrainingMode(kind=kind)
        case ModeKind.STALE, [steps]:
            return TrainingMode(kind=kind, staleness=_number(text, int, steps, least=1))
        case ModeKind.LOCAL, [every]:
            return TrainingMode(kind=kind, every=_number(text, int, every, least=1))
        case ((ModeKind.DILOCO | ModeKind.HIERARCHICAL), [every, *rest]) if len(rest) <= 2:
            return _with_outer(text, kind, every, rest)
        case _:
            raise _unknown(text)


def _with_outer(text: str, kind: ModeKind, every: str, rest: list[str]) -> TrainingMode:
    """Return a mode of rounds with an outer optimizer; DiLoCo's has its paper's settings unless it says otherwise."""
    numbers = [_number(text, float, part, least=0.0) for part in rest]
    defaults = (0.7, 0.9) if kind is ModeKind.DILOCO else (1.0, 0.0)
    rate, momentum = (*numbers, *defaults[len(numbers) :])
    return TrainingMode(kind=kind, every=_number(text, int, every, least=1), learning_rate=rate, momentum=momentum)


def _number(text: str, kind: Callable[[str], T], part: str, *, least: T) -> T:
    try:
        number = kind(part)
    except ValueError:
        raise _unknown(text) from None
    if not (number >= least and math.isfinite(number)):
        raise UsageError(f"sync: expected a number of at least {least}, got {part} in {text!r}")
    return number


def _unknown(text: str) -> UsageError:
    return UsageError(f"sync: expected one of {FORMS}, got {text!r}")
