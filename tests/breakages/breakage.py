"""Mistakes that can be switched on, and the checks that must then fail."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import run_virtual

C = TypeVar("C", bound=Communicator)

SOON = 5.0
"""Virtual seconds that an operation may wait for a rank, where a mistake makes it hang."""


class Mistake(StrEnum):
    """What must not come back."""

    SUMMED_SLICES = "tensor-parallel ranks sum weights that are sharded over them"
    LEFT_OUT = "a gradient, the down projection's, is left out of every synchronization"
    TIED_DEADLOCK = "the synchronization of tied embeddings deadlocks with more than two stages"
    DROPPED_RESULT = "the result of a broadcast or reduction is dropped"
    MEAN_FORGOTTEN = "a mean is forgotten"
    MEAN_TWICE = "a mean is taken twice"
    CUMULATIVE_BUFFER = "buffers are fed sums so far at every micro-step"
    UNSYNCHRONIZED_APPLIED = "gradients are applied that were not synchronized"
    LEADERS_CALL_WORLD = "leaders call a collective of the world"
    SUBGROUP_IS_WORLD = "sub-groups are the world"
    RANK_IS_ZERO = "every rank is rank 0"
    HASH_ORDER = "an order comes from a hash map and differs from process to process"
    START_PAST_END = "a partition starts past the end"
    ALIASED_COORDINATES = "coordinates outside a mesh are another device's"
    WRONG_LAYOUT = "the layout is wrong along other dimensions than the first"
    LOST_REMAINDER = "reduce_scatter loses the remainder"
    OUTPUTS_SAVED = "outputs are kept as activations where the backward pass needs inputs"
    ZEROS_RECOMPUTED = "recomputed activations are zeros"
    CLIPPED_TOO_EARLY = "each rank clips before gradients are reduced"
    UNMEASURED_MEMORY = "memory is said to be saved and never measured"
    RANK_NEVER_CAME = "an all-reduce returns although a rank never came"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """A mistake in a place.

    ``check`` passes without it.  ``switch_on`` puts it into the code that runs, and then ``check`` raises an
    ``AssertionError`` or a typed error whose text matches ``shows``.
    """

    mistake: Mistake
    where: str
    switch_on: Callable[[pytest.MonkeyPatch], None]
    check: Callable[[], None]
    shows: str

    def __str__(self) -> str:
        return f"{self.mistake.name.lower()}-{self.where}"


def on_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Return the check that runs ``main`` on virtual time."""

    def check() -> None:
        try:
            run_virtual(main())
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    return check


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group of them."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


def impatient(communicator: C) -> C:
    """Return ``communicator``, whose operations wait for a rank as long as ``SOON`` says."""
    communicator.timeout = SOON
    return communicator
