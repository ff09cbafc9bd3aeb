"""Estimates of operations on device arrays by NCCL, by host, and through the host, and the choice among them.  Pure.

Theory of operation.  The model is that of ``cost.py``.  NCCL moves, over the busiest GPU, the multiples of the payload
that its own benchmark divides by (``busbw`` in NVIDIA/nccl-tests, doc/PERFORMANCE.md), by rings for large payloads, and
takes the depth of a tree for small ones.  Between hosts a ring is as fast as its slowest lane, and each GPU has its
own.  By host, one array per host goes over asyncpar's lanes, in one piece: reduced by NCCL, copied, moved, copied,
distributed.  Through the host, each rank copies its input and its output.  The agreement of the ranks beforehand is in
no estimate: it is the same for all ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncpar.collectives.algorithms.catalog import HIERARCHICAL, HIERARCHICAL_ON_DEVICES, NCCL, STAGED
from asyncpar.collectives.cost import CostModel
from asyncpar.core.config.device_lanes import DeviceLanes
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError

_COPIED: Final = {
    "all_reduce": (1, 1),
    "reduce": (1, 1),
    "broadcast": (1, 1),
    "reduce_scatter": (1, 0),
    "all_gather": (0, 1),
    "gather": (0, 1),
    "scatter": (1, 0),
    "all_to_all": (1, 1),
}
"""Whether the whole payload is copied to the host, and back; otherwise a rank's part of it."""

_ALIASES: Final = {"all_reduce_many": "all_reduce", "all_gather_v": "all_gather", "all_to_all_v": "all_to_all"}


def device_operation(name: str) -> str | None:
    """Return the operation whose estimates apply to ``name``; None for one without, such as a message."""
    name = _ALIASES.get(name, name)
    return name if name in _COPIED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCostModel:
    """Estimates for the group of ``model``, the cost model of the host, with an arena if it ``has_arena``."""

    model: CostModel
    lanes: DeviceLanes
    has_arena: bool = False

    def estimate(self, operation: str, algorithm: str, payload: int) -> float:
        """Return the estimated seconds for ``payload`` bytes, the largest array of any rank.

        Raises ``UsageError`` for an operation that device arrays do not support, or not by ``algorithm``.
        """
        name = device_operation(operation)
        if name is None:
            raise UsageError(f"operation: expected one of {', '.join((*_COPIED, *_ALIASES))}, got {operation!r}")
        if algorithm == NCCL:
            return self._by_nccl(name, payload, [len(host) for host in self.model.hosts])
        if algorithm == STAGED:
            return self._staged(name, payload)
        if algorithm == HIERARCHICAL and name in HIERARCHICAL_ON_DEVICES:
            return self._by_host(name, payload)
        raise UsageError(f"algorithm: {operation} of device arrays has no {algorithm!r}")

    def choose(self, operation: str, payload: int, possible: Sequence[str]) -> str:
        """Return one of the ``possible`` ways, of which the first is used without measured figures.

        Built-in figures are not used to choose, as they were not measured here.
        """
        if self.lanes.is_built_in or device_operation(operation) is None:
            return possible[0]
        return min(possible, key=lambda algorithm: self.estimate(operation, algorithm, payload))

    def _by_nccl(self, operation: str, payload: float, hosts: Sequence[int]) -> float:
        """Return the estimate over ``hosts``, given as the number of ranks of each."""
        lanes, size = self.lanes, sum(hosts)
        share = payload * (size - 1) / size
        trips = 2 if operation == "all_reduce" else 1
        moved = trips * share if operation not in ("broadcast", "reduce") or size == 1 else payload
        combined = share if operation in ("all_reduce", "reduce_scatter", "reduce") else 0.0
        inside, across = _depth(max(hosts)), _depth(len(hosts))
        bandwidth = min((lanes.between if across else lanes.within).bandwidth, lanes.within.bandwidth)
        latency = lanes.within.latency * (1 + trips * inside) + lanes.between.latency * trips * across
        return latency + moved / bandwidth + combined / lanes.within.reduction

    def _staged(self, operation: str, payload: int) -> float:
        part = payload / self.model.size
        there, back = (payload if is_whole else part for is_whole in _COPIED[operation])
        chosen = self.model.choose(operation, payload, arena=self.has_arena)
        return self._copies(there, back) + self.model.estimate(operation, chosen, payload)

    def _by_host(self, operation: str, payload: int) -> float:
        hosts = self.model.hosts
        alone = [max(map(len, hosts))]
        inside = self._by_nccl("broadcast", payload, alone)
        if operation == "all_reduce":
            inside += self._by_nccl("reduce", payload, alone)
        if len(hosts) == 1:
            return inside
        leaders = CostModel(
            size=len(hosts),
            hosts=tuple((place,) for place in range(len(hosts))),
            lane=self.model.lane,
            local=self.model.lane,
        )
        across = leaders.estimate(operation, leaders.choose(operation, payload), payload)
        return inside + self._copies(payload, payload) + across

    def _copies(self, there: float, back: float) -> float:
        """Return the seconds of copies to the host and back, including another copy of the host's result."""
        copy, host = self.lanes.copy, self.model.local
        return 2 * copy.latency + (there + back) / copy.bandwidth + back / host.reduction


def _depth(size: int) -> int:
    return (size - 1).bit_length()


def measured_lane(small: float, large: float, moved: float, *, steps: int, reduction: float) -> LaneCosts:
    """Return the costs of a lane on which a small operation of ``steps`` took ``small`` seconds, one of ``moved``
    bytes ``large``."""
    seconds = max(large - small, large / 10, 1e-9)
    return LaneCosts(
        latency=max(small / steps, 1e-9), bandwidth=max(moved, 1) / seconds, reduction=reduction, is_measured=True
    )
