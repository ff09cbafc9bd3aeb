"""The names by which the collectives of a step meet."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.gradsync.plan import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketKeys:
    """What the names of one bucket's collectives begin with, over replicas, slices and ends."""

    replicas: str
    slices: str
    ends: str


@dataclass(slots=True)
class Keys:
    """Names for the steps of the synchronizer ``name``.

    Every rank uses each name exactly once in a step in which ranks agree, whether it succeeds or not, and none but
    that of the agreement in another.
    """

    name: str
    steps: int = 0

    @property
    def agreement(self) -> str:
        return f"{self.name}/agreement"

    @property
    def ending(self) -> str:
        return f"{self.name}/ending"

    @property
    def rare(self) -> str:
        """What names begin with that are used in this step only."""
        return f"{self.name}/step/{self.steps}"

    def bucket(self, bucket: Bucket) -> BucketKeys:
        """Return the names of a bucket."""
        return BucketKeys(
            replicas=f"{self.name}/bucket/{bucket.index}",
            slices=f"{self.name}/tp/{bucket.shared_name}",
            ends=f"{self.name}/pp/{bucket.shared_name}",
        )
