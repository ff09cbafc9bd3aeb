"""Portions of a global batch, the tree along which their gradients are added, and their assignment to ranks.  Pure.

Theory of operation.  Floating-point sums depend on the order of the additions, and a sum over ranks on their number.
So the global batch is cut into a fixed number of *portions*, whatever the world, and gradients are added along one
binary tree over the numbers of the portions: the left half of a node holds the largest power of two of its portions
that leaves something for the right.  A rank has consecutive portions, adds up what it can (the largest subtrees that
are its own, its *partials*) and shares only those; the rest of the tree is added where all partials meet.
The additions are the same for every world size, and so is every bit of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

from asyncpar.errors import UsageError

T = TypeVar("T")

Node: TypeAlias = range
"""A node of the tree: the consecutive portions below it."""

MOST_PORTIONS = 1 << 16


def children(node: Node) -> tuple[Node, Node]:
    """Return the halves of a node that has at least two portions."""
    half = 1 << ((len(node) - 1).bit_length() - 1)
    return range(node.start, node.start + half), range(node.start + half, node.stop)


@dataclass(frozen=True)
class Portions:
    """``count`` portions over ``size`` ranks.

    Rank r has consecutive portions; the counts of ranks differ by at most one, and lower ranks have more.  Ranks beyond
    ``count`` have none: they hold the state, and do not compute.
    """

    count: int
    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_PORTIONS:
            raise UsageError(f"portions: expected 1..{MOST_PORTIONS}, got {self.count}")
        if self.size < 1:
            raise UsageError(f"size: expected at least 1 rank, got {self.size}")

    @property
    def root(self) -> Node:
        """The node of all portions."""
        return range(self.count)

    def of(self, rank: int) -> range:
        """Return the portions of ``rank``."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank: expected 0..{self.size - 1}, got {rank}")
        each, more = divmod(self.count, self.size)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def owner(self, portion: int) -> int:
        """Return the rank that has ``portion``."""
        if not 0 <= portion < self.count:
            raise UsageError(f"portion: expected 0..{self.count - 1}, got {portion}")
        each, more = divmod(self.count, self.size)
        if portion < more * (each + 1):
            return portion // (each + 1)
        return more + (portion - more * (each + 1)) // each

    def partials(self, rank: int) -> tuple[Node, ...]:
        """Return the largest subtrees within the portions of ``rank``, in order."""
        return tuple(_cover(self.root, self.of(rank)))

    @cached_property
    def all_partials(self) -> tuple[tuple[Node, ...], ...]:
        """Return the partials of each rank."""
        return tuple(self.partials(rank) for rank in range(self.size))

    @property
    def rounds(self) -> int:
        """The most partials of any rank: 1 if ranks have whole subtrees, at most 2 log2(count)."""
        return max(len(partials) for partials in self.all_partials)


def _cover(node: Node, owned: range) -> Iterator[Node]:
    start, stop = max(node.start, owned.start), min(node.stop, owned.stop)
    if start >= stop:
        return
    if start == node.start and stop == node.stop:
        yield node
        return
    for child in children(node):
        yield from _cover(child, owned)


def sum_tree(root: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Return the value of ``root``; ``values`` are given for nodes that together cover each portion once.

    ``add(left, right)`` may work in place.  Raises ``UsageError`` naming the portions that no value covers.
    """
    value = values.get(root)
    if value is not None:
        return value
    if len(root) == 1:
        raise UsageError(f"portions: there is no value for portion {root.start}")
    left, right = children(root)
    return add(sum_tree(left, values, add), sum_tree(right, values, add))


class PartialSums:
    """Adds up the portions of one rank as they arrive, in any order, along the tree.  Pure but for ``add``.

    At most log2(count) + 1 values are held at a time if portions arrive in order.
    """

    def __init__(self, portions: Portions, rank: int) -> None:
        self._mine = portions.of(rank)
        self._partials = portions.partials(rank)
        self._parents = dict(_parents(self._partials))
        self._taken: set[int] = set()

    @property
    def missing(self) -> tuple[int, ...]:
        """The portions that have not arrived yet."""
        return tuple(portion for portion in self._mine if portion not in self._taken)

    @property
    def partials(self) -> tuple[Node, ...]:
        """The nodes whose values remain when nothing is missing, in order."""
        return self._partials

    def check(self, portion: int) -> None:
        """Raise ``UsageError`` if ``portion`` does not belong to this rank, or has arrived before."""
        if isinstance(portion, bool) or not isinstance(portion, int):
            raise UsageError(f"portion: expected a number, got {portion!r}")
        if portion not in self._mine:
            mine = f"{self._mine.start}..{self._mine.stop - 1}" if self._mine else "none"
            raise UsageError(f"portion: this rank has {mine} in this world, got {portion}; see step.portions")
        if portion in self._taken:
            raise UsageError(f"portion: {portion} was added to this step before; a sum holds each portion once")

    def take(self, portion: int) -> None:
        """Record the arrival of ``portion``.  Raises ``UsageError`` as ``check`` does."""
        self.check(portion)
        self._taken.add(portion)

    def fold(self, portion: int, values: MutableMapping[Node, T], add: Callable[[T, T], T]) -> None:
        """Merge the value of ``portion``, just put into ``values``, upwards as far as its siblings are present."""
        node = range(portion, portion + 1)
        while (parent := self._parents.get(node)) is not None:
            left, right = children(parent)
            if left not in values or right not in values:
                return
            values[parent] = add(values.pop(left), values.pop(right))
            node = parent


def _parents(nodes: Iterable[Node]) -> Iterator[tuple[Node, Node]]:
    for node in nodes:
        if len(node) > 1:
            halves = children(node)
            yield from ((half, node) for half in halves)
            yield from _parents(halves)
