"""How fast ranks compute, and how fast they send to each other.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncpar.config.checks import check_count, check_positive

DEFAULT_FLOPS = 50e9
DEFAULT_BANDWIDTH = 1.25e9
DEFAULT_HOST_BANDWIDTH = 4e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hosts of ``ranks_per_host`` ranks each, rank ``r`` on host ``r // ranks_per_host``.

    ``flops`` is what a rank really computes per second.  ``bandwidth`` is what a host sends to others, in bytes/s,
    ``host_bandwidth`` what a rank sends to others of its host.
    """

    ranks_per_host: int
    flops: float = DEFAULT_FLOPS
    bandwidth: float = DEFAULT_BANDWIDTH
    host_bandwidth: float = DEFAULT_HOST_BANDWIDTH

    def __post_init__(self) -> None:
        check_count("ranks_per_host", self.ranks_per_host)
        check_positive("flops", self.flops, "operations per second")
        check_positive("bandwidth", self.bandwidth, "bytes per second")
        check_positive("host_bandwidth", self.host_bandwidth, "bytes per second")

    def rings_bandwidth(self, groups: Iterable[Sequence[int]]) -> float:
        """Return the bytes/s at which a rank sends when each of ``groups`` runs a ring at once: of the slowest.

        The ranks of a group stand in its ring by host, so each host it is on sends for it to one other; rings that
        leave a host share what it sends.
        """
        leaving = Counter[int]()
        for group in groups:
            if len(group) == 1:
                continue
            hosts = {self._host(rank) for rank in group}
            leaving.update(hosts if len(hosts) > 1 else ())
        return self._shared(leaving)

    def hops_bandwidth(self, hops: Iterable[tuple[int, int]]) -> float:
        """Return the bytes/s at which ranks send when each of ``hops`` (from, to) is used at once: of the slowest."""
        leaving = Counter(self._host(source) for source, to in hops if self._host(source) != self._host(to))
        return self._shared(leaving)

    def _shared(self, leaving: Counter[int]) -> float:
        most = max(leaving.values(), default=0)
        return min(self.host_bandwidth, self.bandwidth / most) if most else self.host_bandwidth

    def _host(self, rank: int) -> int:
        return rank // self.ranks_per_host
