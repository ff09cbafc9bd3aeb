"""Estimate what algorithms cost, and choose.  Pure.

Theory of operation.  The alpha-beta-gamma model: an algorithm that takes ``steps`` message times, moves ``moved`` bytes
one after another over its busiest rank and combines ``combined`` bytes there takes ``steps * latency + moved /
bandwidth + combined / reduction``.  Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005.  Every figure that goes into a
choice is equal on all ranks, so the choice is too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncpar.collectives.algorithms.catalog import ARENA, KNOWN, carriers_of, check_algorithm
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError

PIECE_BYTES = 1 << 20
"""Chains work on pieces of this size."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the busiest rank has to do: message times, bytes moved in sequence, bytes combined."""

    steps: float
    moved: float
    combined: float = 0.0


def _folded(size: int, work: Callable[[int], Work], payload: float) -> Work:
    """Return ``work`` on the largest power of two, and what folding the other ranks adds."""
    power = 1 << (size.bit_length() - 1)
    inner = work(power)
    if power == size:
        return inner
    return Work(inner.steps + 2, inner.moved + 2 * payload, inner.combined + payload)


def _log(size: int) -> int:
    return (size - 1).bit_length()


def _all_reduce(algorithm: str, size: int, payload: float) -> Work:
    share = payload * (size - 1) / size
    match algorithm:
        case "ring":
            return Work(2 * (size - 1), 2 * share, share)
        case "halving":
            return _folded(size, lambda n: Work(2 * _log(n), 2 * payload * (n - 1) / n, payload * (n - 1) / n), payload)
        case "doubling":
            return _folded(size, lambda n: Work(_log(n), payload * _log(n), payload * _log(n)), payload)
    return Work(2 * _log(size), 2 * _log(size) * payload, _log(size) * payload)


def _chunk_per_rank(operation: str, algorithm: str, size: int, payload: float) -> Work:
    share = payload * (size - 1) / size
    combined = share if operation == "reduce_scatter" else 0.0
    match algorithm:
        case "bruck":
            return Work(_log(size), 1.5 * share)  # what wraps is packed and unpacked
        case "halving":
            return _folded(size, lambda n: Work(_log(n), 1.5 * share, combined), payload)  # packed, too
        case "ring" if operation == "reduce_scatter":
            return Work(size - 1, 1.25 * share, combined)  # works on a copy of the input
    return Work(size - 1, share, combined)


def _rooted(operation: str, algorithm: str, size: int, payload: float) -> Work:
    share = payload * (size - 1) / size
    if operation in ("gather", "scatter"):
        return Work(_log(size), 2 * share) if algorithm == "tree" else Work(1 + 0.25 * (size - 2), share)
    reduces = operation == "reduce"
    match algorithm:
        case "tree":
            return Work(_log(size), _log(size) * payload, _log(size) * payload * reduces)
        case "chain":
            filling = min(payload, PIECE_BYTES) * (size - 2)
            return Work(size - 1, payload + filling, (payload + filling) * reduces)
    steps = size - 1 if reduces else 1 + 0.25 * (size - 2)
    return Work(steps, (size - 1) * payload, (size - 1) * payload * reduces)


def _all_to_all(algorithm: str, size: int, payload: float) -> Work:
    if algorithm == "bruck":
        return Work(_log(size), 3 * _log(size) * payload / 2)  # half of the buffer per step, packed and unpacked
    return Work(size - 1, payload * (size - 1) / size)


def work_of(operation: str, algorithm: str, size: int, payload: float) -> Work:
    """Return the work of an operation over ``payload`` bytes, the largest buffer of any rank.  Not hierarchical."""
    check_algorithm(operation, algorithm)
    if size == 1:
        return Work(0, 0)
    match operation:
        case "all_reduce":
            return _all_reduce(algorithm, size, payload)
        case "all_gather" | "reduce_scatter":
            return _chunk_per_rank(operation, algorithm, size, payload)
        case "all_to_all":
            return _all_to_all(algorithm, size, payload)
        case "barrier":
            return Work(_log(size) if algorithm == "dissemination" else 2 * _log(size), 0)
    return _rooted(operation, algorithm, size, payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Chooses algorithms for a group of ``size`` ranks on ``hosts``.

    ``lane`` says what messages between hosts cost (or all, when there is one host), ``local`` those inside a host.
    ``has_arenas`` says that hosts are taken to have arenas; it is equal on all ranks, even if one host has none.
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

    def _hierarchical(self, algorithm: str, payload: int) -> float:
        """Return the estimate of a hierarchical all-reduce; in arenas, what goes on inside overlaps with the rest."""
        size, parts = max(map(len, self.hosts)), carriers_of(algorithm, self.hosts)
        between = "tree" if algorithm == "hierarchical-tree" else "ring"
        across = _seconds(self.lane, work_of("all_reduce", between, len(self.hosts), payload))
        if not self.has_arenas:
            share = payload * (size - 1) / parts
            work = work_of("all_reduce", "tree", size, payload) if parts == 1 else Work(2 * size - 2, 2 * share, share)
            return across + _seconds(self.local, work)
        pieces = min(max(payload // PIECE_BYTES, 1), OVERLAPPED_PIECES)
        inside = arena_seconds("all_reduce", size, payload) + 2 * pieces * ARENA_TURN
        return max(across, inside) + min(across, inside) / pieces

    def choose(self, operation: str, payload: int, *, arena: bool = False) -> str:
        """Return the cheapest algorithm; of equals the first one of the catalog."""
        candidates = self.candidates(operation, arena=arena)
        return min(candidates, key=lambda algorithm: self.estimate(operation, algorithm, payload))

    def candidates(self, operation: str, *, arena: bool = False) -> tuple[str, ...]:
        """Return the algorithms worth comparing: hierarchical ones only where there is a hierarchy, and so on."""
        if operation not in KNOWN:
            raise UsageError(f"operation: expected one of {', '.join(KNOWN)}, got {operation!r}")
        is_layered = 1 < len(self.hosts) < self.size
        names = tuple(name for name in KNOWN[operation] if is_layered or not name.startswith("hierarchical"))
        return (*names, ARENA) if arena else names


ARENA_LATENCY = 5e-6
ARENA_BANDWIDTH = 10e9
"""Seconds per wait, and bytes/s of copying and combining there.  Measured on two cores with Python 3.11."""

ARENA_TURN = 60e-6
"""Seconds until the ranks of a host have agreed to run something that each of them becomes ready for by itself."""

OVERLAPPED_PIECES = 8
"""Pieces of a hierarchical all-reduce, which are in different stages at the same time."""


def arena_seconds(operation: str, size: int, payload: float) -> float:
    """Return the estimated seconds of an operation in the arena: what its busiest rank copies and combines."""
    share = payload * (size - 1) / size
    touched = {"all_reduce": payload + 2 * share, "reduce_scatter": 2 * share, "all_to_all": 2 * share}
    chunks = 1 + payload // PIECE_BYTES
    return ARENA_LATENCY * (size - 1) * chunks + touched.get(operation, 2 * payload) / ARENA_BANDWIDTH


def _seconds(lane: LaneCosts, work: Work) -> float:
    return work.steps * lane.latency + work.moved / lane.bandwidth + work.combined / lane.reduction


def choose(operation: str, payload: int, *, size: int, hosts: Hosts | None = None, lane: LaneCosts) -> str:
    """Return the cheapest algorithm for ``payload`` bytes over one kind of lane."""
    model = CostModel(size=size, hosts=hosts or (tuple(range(size)),), lane=lane, local=lane)
    return model.choose(operation, payload)
