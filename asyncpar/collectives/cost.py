"""Estimates of the costs of algorithms, and the choice among them.  Pure.

Theory of operation.  The alpha-beta-gamma model: an algorithm that takes ``steps`` message times, moves ``moved`` bytes
one after another over its busiest rank and combines ``combined`` bytes there takes ``steps * latency + moved /
bandwidth + combined / reduction``.  Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005.  Where the ranks of one host
share too few cores, the time that all ranks take for all their sends counts instead of ``moved``: then a tree is as
fast as a ring, which sends as much.  Every figure that goes into a choice is equal on all ranks, so the choice is too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncpar.collectives.algorithms.catalog import (
    ALGORITHMS,
    ARENA,
    check_algorithm,
    known_algorithms,
    leaders_of,
    work_of,
)
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.algorithms.work import PIECE_BYTES, AlgorithmWork
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Chooses algorithms for a group of ``size`` ranks on ``hosts``.

    ``lane`` holds the costs of messages between hosts (or of all, if there is one host), ``local`` of those inside a
    host.  ``has_arenas`` means that hosts are assumed to have arenas; it is equal on all ranks, even if one host has
    none.
    """

    size: int
    hosts: Hosts
    lane: LaneCosts
    local: LaneCosts
    has_arenas: bool = False

    def estimate(self, operation: str, algorithm: str, payload: int) -> float:
        """Return the estimated seconds of an operation over ``payload`` bytes."""
        if algorithm.startswith("hierarchical"):
            check_algorithm(operation, algorithm)
            return self._hierarchical(algorithm, payload)
        if algorithm == ARENA:
            check_algorithm(operation, algorithm)
            return arena_seconds(operation, self.size, payload)
        return _seconds(self.lane, work_of(operation, algorithm, self.size, payload))

    def learn(self, *, latency: float | None, bandwidth: float | None, is_measured: bool = False) -> CostModel:
        """Return the model updated with figures from operations of all ranks: seconds, and bytes/s that each rank sent.

        None leaves a figure unchanged.  ``is_measured`` means that all ranks have agreed on the figures.
        """
        lane = self.lane
        if latency is not None:
            lane = replace(lane, latency=latency)
        if bandwidth is not None and lane.together is not None and lane.together < self.size * lane.bandwidth:
            lane = replace(lane, together=self.size * bandwidth)  # each had its share of the cores
        elif bandwidth is not None:
            lane = replace(lane, bandwidth=bandwidth)
        if lane is self.lane:
            return self
        lane = replace(lane, is_measured=is_measured or lane.is_measured)
        return replace(self, lane=lane, local=lane if len(self.hosts) == 1 else self.local)

    def describe_lanes(self) -> str:
        """Describe the figures behind the estimates, and whether they were measured."""
        if len(self.hosts) == 1:
            return f"lanes: {_described(self.lane)}"
        inside = "" if max(map(len, self.hosts)) == 1 else f"; inside {_described(self.local)}"
        return f"lanes: between hosts {_described(self.lane)}{inside}"

    def _hierarchical(self, algorithm: str, payload: int) -> float:
        """Return the estimate of a hierarchical all-reduce; in arenas, the work inside hosts overlaps with the rest."""
        size, parts = max(map(len, self.hosts)), leaders_of(algorithm, self.hosts)
        between = "tree" if algorithm == "hierarchical-tree" else "ring"
        across = _seconds(self.lane, work_of("all_reduce", between, len(self.hosts), payload))
        if not self.has_arenas:
            share = payload * (size - 1) / parts
            work = (
                work_of("all_reduce", "tree", size, payload)
                if parts == 1
                else AlgorithmWork(2 * size - 2, 2 * share, share, 2 * size * share)
            )
            return across + _seconds(self.local, work)
        pieces = min(max(payload // PIECE_BYTES, 1), OVERLAPPED_PIECES)
        inside = arena_seconds("all_reduce", size, payload) + 2 * pieces * ARENA_TURN
        return max(across, inside) + min(across, inside) / pieces

    def choose(self, operation: str, payload: int, *, arena: bool = False) -> str:
        """Return the cheapest algorithm; among equals, the first one of the catalog."""
        candidates = self.candidates(operation, arena=arena)
        return min(candidates, key=lambda algorithm: self.estimate(operation, algorithm, payload))

    def candidates(self, operation: str, *, arena: bool = False) -> tuple[str, ...]:
        """Return the algorithms worth comparing: hierarchical ones only where there is a hierarchy, and so on."""
        if operation not in ALGORITHMS:
            raise UsageError(f"operation: expected one of {', '.join(ALGORITHMS)}, got {operation!r}")
        is_layered = 1 < len(self.hosts) < self.size
        names = tuple(name for name in known_algorithms(operation) if is_layered or not name.startswith("hierarchical"))
        return (*names, ARENA) if arena else names


ARENA_LATENCY = 5e-6
ARENA_BANDWIDTH = 10e9
"""Seconds per wait, and bytes/s of copying and combining there.  Measured on two cores with Python 3.11."""

ARENA_TURN = 60e-6
"""Seconds until the ranks of a host have agreed to run something for which each becomes ready independently."""

OVERLAPPED_PIECES = 8
"""Number of pieces of a hierarchical all-reduce that are in different stages at the same time."""


def arena_seconds(operation: str, size: int, payload: float) -> float:
    """Return the estimated seconds of an operation in the arena, from the copies and reductions of its busiest rank."""
    share = payload * (size - 1) / size
    touched = {"all_reduce": payload + 2 * share, "reduce_scatter": 2 * share, "all_to_all": 2 * share}
    chunks = 1 + payload // PIECE_BYTES
    return ARENA_LATENCY * (size - 1) * chunks + touched.get(operation, 2 * payload) / ARENA_BANDWIDTH


def _described(lane: LaneCosts) -> str:
    return str(lane) if lane.is_measured else f"{lane}, built in"


def _seconds(lane: LaneCosts, work: AlgorithmWork) -> float:
    moved = work.moved / lane.bandwidth
    if lane.together is not None:
        moved = max(moved, work.total / lane.together)
    return work.steps * lane.latency + moved + work.combined / lane.reduction


def choose(operation: str, payload: int, *, size: int, hosts: Hosts | None = None, lane: LaneCosts) -> str:
    """Return the cheapest algorithm for ``payload`` bytes over one kind of lane."""
    model = CostModel(size=size, hosts=hosts or (tuple(range(size)),), lane=lane, local=lane)
    return model.choose(operation, payload)


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from ``algbw`` to ``busbw``, which is comparable with the rate of the hardware.

    Source: PERFORMANCE.md of nccl-tests, and its gather.cu, scatter.cu and alltoall.cu.
    """
    match operation:
        case "all_reduce" | "all_reduce_many":
            return 2 * (ranks - 1) / ranks
        case "broadcast" | "reduce":
            return 1.0
    return (ranks - 1) / ranks
