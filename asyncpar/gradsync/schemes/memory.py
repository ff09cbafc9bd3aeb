"""Where buckets get their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import ArenaFull, UsageError

Empty: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Returns a new array of undefined content, such as ``Communicator.empty``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """``empty`` makes what other ranks read, so that collectives need not copy it.

    With ``keeps_input`` what a bucket comes to goes elsewhere than what went into it.
    """

    empty: Empty = np.empty
    keeps_input: bool = False

    def shared(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return zeros that other ranks can read, or of ordinary memory where there is no room for them."""
        try:
            array = self.empty(shape, np.dtype(dtype))
        except (ArenaFull, UsageError):
            return np.zeros(shape, dtype)
        array.fill(0)
        return array
