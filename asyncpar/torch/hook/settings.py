"""What a gradient hook is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncpar.codecs import Identity
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig, HostGroups
from asyncpar.gradsync.choice import Resolved, resolve
from asyncpar.gradsync.groups import SyncGroups

Hosts: TypeAlias = Sequence[Sequence[int]] | bool
"""Ranks of the group by host; True: as they are; False: as if no two shared one."""

MINIMUM_BYTES = 1 << 14
"""A message of less takes as long as it does because there is one, not because of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """Which buckets are compressed, and how; the same on all ranks."""

    compression: GradientCompressionConfig
    minimum_bytes: int = MINIMUM_BYTES
    warm_up_steps: int = 0
    hosts: Hosts = True

    def __post_init__(self) -> None:
        for name in ("minimum_bytes", "warm_up_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name}: expected a number of 0 or more, got {value!r}")

    @property
    def is_lossless(self) -> bool:
        """Is there no codec at all?"""
        return not self.compression.is_automatic and self.compression.make_codec() == Identity()

    def is_exact(self, *, nbytes: int, step: int) -> bool:
        """Is a bucket of ``nbytes`` left as it is in ``step``, of which the first is 1?"""
        return self.is_lossless or step <= self.warm_up_steps or nbytes < self.minimum_bytes

    async def resolve(self, groups: SyncGroups, key: str) -> Resolved:
        """Return what the codec comes to: takes an exchange between all ranks for ``"auto"``, else none."""
        given = None if isinstance(self.hosts, bool) else HostGroups.of(groups.replicas, self.hosts)
        is_hierarchical = self.hosts is not False
        return await resolve(self.compression, groups, is_hierarchical=is_hierarchical, key=key, given=given)

    def __str__(self) -> str:
        hosts = "by host" if self.hosts is True else "regardless of hosts"
        return (
            f"{self.compression}, in buckets of {self.minimum_bytes} bytes or more after {self.warm_up_steps} steps, "
            f"{hosts if isinstance(self.hosts, bool) else f'hosts {[list(host) for host in self.hosts]}'}"
        )
