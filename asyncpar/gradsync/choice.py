"""Which codec ``"auto"`` stands for."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from asyncpar.codecs import Identity, parse_codec
from asyncpar.gradsync.config import AnyCodec, GradientCompressionConfig
from asyncpar.gradsync.groups import HostGroups, SyncGroups, shares_some_hosts, split_by_host
from asyncpar.gradsync.measurement import measure
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.prediction import Measured, slowest

_NOMINAL_COUNT = 6_250_000
"""Values, 25 MB of them, by which stages and slices choose, which hold different parameters but must choose alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The codec in force, and the groups of hosts where only what travels between them is encoded.

    ``adds_in_hosts``: some group of replicas has such groups, maybe not this rank's.
    With ``measured`` the codec depends on how many values there are, see ``settled``: on ``nominal`` ones, if that is
    given.  ``count`` is by how many it was chosen.
    """

    codec: AnyCodec
    hosts: HostGroups | None = None
    adds_in_hosts: bool = False
    measured: Measured | None = None
    nominal: int | None = None
    count: int = 0

    def settled(self, count: int) -> Resolved:
        """Return what it comes to for ``count`` values."""
        if self.measured is None:
            return self
        chosen = count if self.nominal is None else self.nominal
        codec = parse_codec(self.measured.choose(chosen))
        if codec == Identity():
            return replace(self, codec=codec, hosts=None, adds_in_hosts=False, count=chosen)
        return replace(self, codec=codec, count=chosen)

    def table(self) -> str:
        """Return what was measured, predicted and picked; empty where nothing was to be picked."""
        return "" if self.measured is None or not self.count else self.measured.table(self.count)


async def resolve(
    compression: GradientCompressionConfig,
    groups: SyncGroups,
    *,
    is_hierarchical: bool,
    key: str,
    given: HostGroups | None = None,
    chosen: str | None = None,
) -> Resolved:
    """Return what ``compression`` comes to; the same on all replicas.

    A codec with the hierarchical strategy encodes between hosts only, if there are several, and so does ``"auto"``,
    which inside a host is no codec.  ``given`` groups stand for hosts, also where there is no codec.  ``chosen`` is
    what ``"auto"`` was in the run that this one resumes: then nothing is measured.
    """
    hosts = given or split_by_host(groups.replicas)
    adds_in_hosts = given is not None or any(map(shares_some_hosts, groups.host_patterns))
    if compression.is_automatic and chosen is not None:
        codec = parse_codec(chosen) if any(len(hosts) > 1 for hosts in groups.host_patterns) else Identity()
        is_plain = codec == Identity()
        return Resolved(codec=codec, hosts=None if is_plain else hosts, adds_in_hosts=adds_in_hosts and not is_plain)
    if compression.is_automatic:
        measured = await _measure(groups, key)
        nominal = None if groups.is_data_parallel_only else _NOMINAL_COUNT
        return Resolved(codec=Identity(), hosts=hosts, adds_in_hosts=adds_in_hosts, measured=measured, nominal=nominal)
    codec = compression.make_codec() if compression.is_enabled else Identity()
    if not is_hierarchical:
        return Resolved(codec=codec)
    if isinstance(codec, Identity):
        return Resolved(codec=codec, hosts=given, adds_in_hosts=given is not None)
    return Resolved(codec=codec, hosts=hosts, adds_in_hosts=adds_in_hosts)


async def _measure(groups: SyncGroups, key: str) -> Measured | None:
    """Return what to choose by: the same on all ranks of all groups; None where all replicas share a host.

    All groups must choose alike, or copies of one parameter on different stages and slices would drift apart.
    """
    replicas, everyone = groups.replicas, groups.everyone
    own: Measured | None = None
    alike = Obligation(lambda: everyone.all_gather_object(own, key=f"{key}/alike", wanted=Measured | None))
    try:
        if len(replicas.hosts) > 1:
            own = await measure(replicas, key=key, clock=time.perf_counter)
    except BaseException:
        await alike.give_up()
        raise
    if everyone.size == replicas.size:
        return own
    every = await alike.run()
    known = [measured for measured in every if measured is not None]
    return slowest(known) if known else None
