"""The names by which the collectives of a step meet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from asyncpar.gradsync.plan import Bucket

REPLICAS, SLICES, ENDS = "dp", "tp", "pp"
"""Groups of ranks that compare what they are about to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketKeys:
    """What the names of one bucket's collectives begin with, over replicas, slices and ends."""

    replicas: str
    slices: str
    ends: str


class Keys:
    """Names for the steps of the synchronizer ``name``.

    Names within a group begin anew after a disagreement, as its ranks had used different ones in it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._disagreements: Counter[str] = Counter()
        self.steps = 0

    def count_disagreement(self, group: str) -> None:
        """Begin anew in ``group``, as all of its ranks do."""
        self._disagreements[group] += 1

    def of(self, group: str) -> str:
        """Return what the names of a group begin with."""
        return f"{self._name}/{group}{self._disagreements[group]}"

    @property
    def everyone(self) -> str:
        """What names begin with where all ranks meet."""
        return self._name

    @property
    def rare(self) -> str:
        """What names begin with that are used in this step only."""
        return f"{self._name}/step/{self.steps}"

    def bucket(self, bucket: Bucket, digest: str) -> BucketKeys:
        """Return the names of a bucket; ``digest`` tells layouts apart."""
        return BucketKeys(
            replicas=f"{self.of(REPLICAS)}/{digest}/bucket/{bucket.index}",
            slices=f"{self.of(SLICES)}/{bucket.shared_name}",
            ends=f"{self.of(ENDS)}/{bucket.shared_name}",
        )
