"""How gradients get into a scheme and out of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncpar.gradsync.schemes import Scheme
from asyncpar.torch.hook.bucket import GivenBucket
from asyncpar.torch.hook.memory import HookMemory, Seat


@dataclass(frozen=True, slots=True)
class HookPassage:
    """What is done before and after ``scheme``, in threads.  It ``is_lent`` the gradients' memory, or has its own."""

    scheme: Scheme
    given: GivenBucket
    is_lent: bool
    ranks: int

    def divide(self, memory: HookMemory, seat: Seat) -> None:
        """Add what earlier steps owe, and divide by the number of ranks as torch does it."""
        for slot, values in memory.waiting(seat):
            self.given.add(slice(slot.start, slot.stop), values)
        self.given.scale(1.0 / self.ranks)

    def read(self) -> None:
        """Copy the gradients, unless they are where they are needed."""
        if not self.is_lent:
            self.given.read_into(self.scheme.payload)

    def write(self) -> None:
        """Make the gradients the mean; all of them NaN if some are not finite on some rank."""
        if not self.scheme.is_finite:
            self.given.fill(float("nan"))
            return
        factor = self.scheme.factor(self.ranks)
        if factor != 1.0:
            reduced = self.scheme.reduced
            np.multiply(reduced, np.float32(factor), out=reduced)
        if not self.is_lent:
            self.given.write(self.scheme.reduced)
