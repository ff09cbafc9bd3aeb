"""The names by which the collectives of a step meet."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.errors import ProtocolError
from asyncpar.gradsync.plan import Bucket

_STEPS_BITS = 32
"""Steps between two restarts have less."""


class Name:
    """The name of a collective, complete when it is used: by then ranks have agreed on the epoch, which is part of it.

    As a string it is the name itself, so ``f"{name}/shards"`` must be written where the collective begins.
    """

    def __init__(self, keys: Keys, rest: str) -> None:
        self._keys = keys
        self._rest = rest

    def __str__(self) -> str:
        return f"{self._keys.prefix}/{self._keys.epoch}/{self._rest}"

    def __truediv__(self, rest: str) -> Name:
        return Name(self._keys, f"{self._rest}/{rest}")

    def other(self, rest: str) -> Name:
        """Return another name in the same step."""
        return Name(self._keys, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketKeys:
    """Prefixes of one bucket's names, over replicas, tensor-parallel ranks and both ends of a pipeline."""

    replicas: Name
    tp: Name
    embedding: Name


@dataclass(slots=True)
class Keys:
    """Names for the steps of the synchronizer ``name``.

    Every rank uses the name of the agreement exactly once in every step, whatever happens in it.  All other names begin
    with the epoch: a step that fails on a rank begins a new one there, and in the next agreement all ranks take over
    the latest.  So it does not matter which names a rank has used up in steps that failed.
    """

    name: str
    steps: int = 0
    epoch: int = 0
    restarts: int = 0
    has_agreed: bool = False
    """Has the name of the agreement been used in this step, by an earlier agreement to measure?"""

    @property
    def agreement(self) -> str:
        return f"{self.rare}/agreement" if self.has_agreed else f"{self.prefix}/agreement"

    @property
    def ending(self) -> Name:
        return Name(self, "ending")

    @property
    def rare(self) -> str:
        """What names begin with that are used in this step only."""
        return f"{self.prefix}/step/{self.steps}"

    @property
    def prefix(self) -> str:
        """What all names begin with since the last ``restart``."""
        return f"{self.name}/restart/{self.restarts}" if self.restarts else self.name

    def begin_step(self) -> None:
        """Go on to the next step."""
        self.steps += 1
        self.has_agreed = False

    def restart(self, number: int) -> None:
        """Begin anew, with names and steps of their own for each ``number``."""
        self.restarts, self.steps, self.epoch = number, number << _STEPS_BITS, 0
        self.has_agreed = False

    def bucket(self, bucket: Bucket) -> BucketKeys:
        """Return the names of a bucket."""
        return BucketKeys(
            replicas=Name(self, f"bucket/{bucket.index}"),
            tp=Name(self, f"tp/{bucket.shared_name}"),
            embedding=Name(self, f"pp/{bucket.shared_name}"),
        )

    def adopt(self, epoch: int) -> None:
        """Go on in ``epoch``, the latest of all ranks.  Raises ``ProtocolError`` for one that cannot be."""
        if epoch > self.steps:
            raise ProtocolError(f"gradients: expected at most one failed step in each of {self.steps}, got {epoch}")
        self.epoch = max(self.epoch, epoch)
