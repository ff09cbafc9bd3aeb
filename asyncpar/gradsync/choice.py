"""Which codec ``"auto"`` stands for."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.codecs import Identity, Int8
from asyncpar.gradsync.config import AnyCodec, GradientCompressionConfig
from asyncpar.gradsync.groups import HostGroups, SyncGroups, split_by_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The codec in force, and the groups of hosts where only what travels between them is encoded."""

    codec: AnyCodec
    hosts: HostGroups | None = None


async def resolve(compression: GradientCompressionConfig, groups: SyncGroups, *, is_hierarchical: bool) -> Resolved:
    """Return what ``compression`` comes to; the same on all replicas.

    A codec with the hierarchical strategy encodes between hosts only, and so does ``"auto"``.
    """
    hosts = split_by_host(groups.replicas)
    if compression.is_automatic:
        codec: AnyCodec = Identity() if len(groups.replicas.hosts) == 1 else Int8()
        return Resolved(codec=codec, hosts=None if isinstance(codec, Identity) else hosts)
    if not compression.is_enabled:
        return Resolved(codec=Identity())
    codec = compression.make_codec()
    return Resolved(codec=codec, hosts=hosts if is_hierarchical and not isinstance(codec, Identity) else None)
