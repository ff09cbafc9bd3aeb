"""Arrays of a state with a second buffer each, so a step that is not committed leaves no trace.

An array of an optimizer is *swapped*: an update goes into the second buffer, block by block, while a block is in the
cache; the program sees that buffer from then on, and an abort shows the first one again.  An array that the program
changes by itself is *kept* instead: it is always the same object, its second buffer holds the committed values, and an
abort copies them back.

The buffer that holds the committed values can be *lent* to readers, who keep it: it is never written again, and the
next change that would write it goes into new memory, listed in ``fresh``, which can be taken from the system before
that.  So a snapshot for a newcomer needs neither a copy nor a wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.not_arrays import describe_other
from asyncpar.elasticity.lineage import ArrayShape
from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[Any]


class Buffered(ABC):
    """One array of a state, with its second buffer."""

    def __init__(self, name: str, array: object) -> None:
        if not isinstance(array, np.ndarray):
            raise UsageError(f"{name}: expected an array of numbers, got {describe_other(array, name)}")
        if array.dtype.hasobject or not array.flags.c_contiguous:
            raise UsageError(
                f"{name}: expected a C-contiguous array of numbers, got {array.dtype}, strides {array.strides}"
            )
        self.shape = ArrayShape.of(name, array)
        self.committed: Array = array
        """The committed values; of a kept array, the values that the program sees, which may have changed since."""

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    @abstractmethod
    def latest(self) -> Array:
        """The values that a commit would keep."""

    @property
    @abstractmethod
    def is_changed(self) -> bool:
        """Whether ``latest`` may differ from the committed values."""

    @abstractmethod
    def lend(self) -> Array:
        """Return the committed values as an array that is never written again."""

    @property
    @abstractmethod
    def fresh(self) -> list[Array]:
        """Memory that may not have been touched yet, and will be soon."""

    @abstractmethod
    def commit(self) -> None:
        """Keep the changes."""

    @abstractmethod
    def abort(self) -> None:
        """Undo the changes."""


class SwappedArray(Buffered):
    """An array that is updated in its second buffer; ``show`` makes the program see one of the two."""

    def __init__(self, name: str, array: Array, show: Callable[[Array], None]) -> None:
        super().__init__(name, array)
        self._show = show
        self._spare = np.empty_like(array)
        self._is_open = False
        self._successor: Array | None = None
        """The replacement for a buffer that is lent."""

    @property
    def latest(self) -> Array:
        return self._spare if self._is_open else self.committed

    @property
    def is_changed(self) -> bool:
        return self._is_open

    def open(self) -> None:
        """Show the second buffer, which has to be filled, to the program."""
        self._is_open = True
        self._show(self._spare)

    def fill(self, part: slice) -> None:
        """Copy the committed values of this part of the flat array into the second buffer."""
        self._spare.reshape(-1)[part] = self.committed.reshape(-1)[part]

    def withdraw(self) -> None:
        """Show the committed values to the program: nothing was changed."""
        self._is_open = False
        self._show(self.committed)

    def lend(self) -> Array:
        if self._successor is None:
            self._successor = np.empty_like(self.committed)
        return self.committed

    @property
    def fresh(self) -> list[Array]:
        return [self._spare] if self._successor is None else [self._successor]

    def commit(self) -> None:
        if self._is_open:
            before, self.committed = self.committed, self._spare
            self._spare = before if self._successor is None else self._successor
            self._is_open, self._successor = False, None

    def abort(self) -> None:
        if self._is_open:
            self._show(self.committed)
            self._spare = np.empty_like(self.committed)  # an abandoned thread may still write the other
            self._is_open = False


class KeptArray(Buffered):
    """An array that the program changes in place at any time within a step."""

    def __init__(self, name: str, array: Array) -> None:
        super().__init__(name, array)
        if not array.flags.writeable:
            raise UsageError(f"{name}: expected an array that can be written, so that it can be restored")
        self._backup = array.copy()
        self._successor: Array | None = None
        """The replacement for a buffer that is lent."""

    @property
    def latest(self) -> Array:
        return self.committed

    @property
    def is_changed(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Back up the committed values, before the program changes them; may run in any thread."""
        if self._successor is not None:
            self._backup, self._successor = self._successor, None
        np.copyto(self._backup, self.committed)

    def lend(self) -> Array:
        """See ``Buffered``; call it after ``synchronize`` and before the end of the step."""
        if self._successor is None:
            self._successor = np.empty_like(self._backup)
        return self._backup

    @property
    def fresh(self) -> list[Array]:
        return [] if self._successor is None else [self._successor]

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        np.copyto(self.committed, self._backup)
