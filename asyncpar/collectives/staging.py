"""Memory for the steps of programs in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Scratch:
    """Memory that is used within one step only, and therefore by all.  It grows to the largest step."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of ``count`` elements."""
        size = count * dtype.itemsize
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype)
