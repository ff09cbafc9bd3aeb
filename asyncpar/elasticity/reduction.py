"""The sum of all portions' gradients over a world, along the tree of ``portions.py``, whatever the size of the world.

Each rank sends its partials to the ranks, each rank adds up one part of the values, and the parts are gathered: if
ranks have whole subtrees this is as much traffic as any all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by name from now on
import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.not_arrays import describe_other
from asyncpar.elasticity.portion_codec import StepCodec
from asyncpar.elasticity.portions import Node, PartialSums, Portions, sum_tree
from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[Any]
Description: TypeAlias = tuple[list[str] | None, list[tuple[str, list[int]]]]
Gradients: TypeAlias = "Mapping[str, Array] | Sequence[Array]"


_SLACK = 1 << 14
"""Elements by which flat arrays may be longer than their content, so they fit worlds of other sizes, too."""


class FlatPool:
    """Reuses memory of flat arrays: the first touch of new memory takes longer than adding it up."""

    def __init__(self) -> None:
        self._free: dict[tuple[np.dtype[Any], int], list[Array]] = {}

    @property
    def has_memory(self) -> bool:
        """Whether an array was given back before."""
        return bool(self._free)

    def take(self, dtype: np.dtype[Any], content: int, length: int) -> Array:
        """Return an array of ``length`` elements, of undefined content, of which ``content`` matter."""
        capacity = max(content + _SLACK, length)
        free = self._free.get((dtype, capacity))
        base = free.pop() if free else np.empty(capacity, dtype)
        return base[:length]

    def reserve(self, layout: GradientLayout, count: int) -> list[Array]:
        """Prepare ``count`` sets of flat arrays of ``layout``, and return their memory, which was not touched yet."""
        taken = [array for _ in range(count) for array in layout.take(self, 1)]
        self.give(taken)
        return taken

    def give(self, arrays: Iterable[Array]) -> None:
        """Take back arrays returned by ``take``."""
        for array in arrays:
            base = array.base
            assert isinstance(base, np.ndarray)
            self._free.setdefault((base.dtype, base.size), []).append(base)


class GradientLayout:
    """Layout of gradients in one flat array per dtype; made from the first gradients, and equal for all later ones."""

    def __init__(self, gradients: Gradients) -> None:
        arrays = _arrays(gradients)
        self.names = tuple(gradients) if isinstance(gradients, Mapping) else None
        self._shapes = [(array.dtype, array.shape) for array in arrays]
        self._lengths: dict[np.dtype[Any], int] = {}
        self._places: list[tuple[np.dtype[Any], int, int]] = []
        for array in arrays:
            start = self._lengths.get(array.dtype, 0)
            self._places.append((array.dtype, start, start + array.size))
            self._lengths[array.dtype] = start + array.size

    @classmethod
    def described(cls, description: Description) -> GradientLayout:
        """Return the layout that ``description`` describes."""
        names, shapes = description
        arrays = [np.broadcast_to(np.zeros((), np.dtype(dtype)), shape) for dtype, shape in shapes]
        return cls(arrays if names is None else dict(zip(names, arrays, strict=True)))

    @property
    def description(self) -> Description:
        """The layout as plain data."""
        names = None if self.names is None else list(self.names)
        return names, [(dtype.name, list(shape)) for dtype, shape in self._shapes]

    @property
    def empty(self) -> Array:
        """An array without values, of the only dtype.  Raises ``UsageError`` if there are several."""
        if len(self._lengths) > 1:
            raise UsageError(f"gradients: expected one dtype, got {', '.join(map(str, self._lengths))}")
        return np.empty(0, next(iter(self._lengths), np.float32))

    def trimmed(self, flats: Sequence[Array]) -> list[Array]:
        """Return flat arrays without their padding."""
        return [flat[:length] for flat, length in zip(flats, self._lengths.values(), strict=True)]

    def trimmed_from(self, content: bytearray | memoryview) -> list[Array]:
        """Return the flat arrays that follow one another in ``content``.  Raises ``ValueError`` for another length."""
        flats, start = [], 0
        for dtype, length in self._lengths.items():
            flats.append(np.frombuffer(content, dtype, length, start))
            start += length * dtype.itemsize
        if start != len(content):
            raise ValueError(f"expected {start} bytes, got {len(content)}")
        return flats

    def take(self, pool: FlatPool, multiple: int) -> list[Array]:
        """Return flat arrays whose lengths are multiples of ``multiple``, of undefined content."""
        return [pool.take(dtype, length, -(-length // multiple) * multiple) for dtype, length in self._lengths.items()]

    def take_from(self, memory: ArrayPool) -> list[Array]:
        """Return flat arrays as long as their content, which is undefined."""
        return [memory.empty((length,), dtype) for dtype, length in self._lengths.items()]

    def pack(self, gradients: Gradients, flats: Sequence[Array]) -> None:
        """Copy ``gradients`` into flat arrays.  Raises ``UsageError`` if they differ in form from the first ones."""
        arrays = _arrays(gradients)
        names = tuple(gradients) if isinstance(gradients, Mapping) else None
        if names != self.names or [(array.dtype, array.shape) for array in arrays] != self._shapes:
            shown = [f"{array.dtype}{list(array.shape)}" for array in arrays[:4]]
            raise UsageError(
                f"gradients: expected the same names, dtypes and shapes for every portion and step, got {len(arrays)} "
                f"arrays, {', '.join(shown)}..., where there were {len(self._shapes)} before"
            )
        by_dtype = dict(zip(self._lengths, flats, strict=True))
        for array, (dtype, start, stop) in zip(arrays, self._places, strict=True):
            by_dtype[dtype][start:stop] = array.reshape(-1)
        for flat, length in zip(flats, self._lengths.values(), strict=True):
            flat[length:] = 0

    def views(self, flats: Sequence[Array]) -> dict[str, Array] | list[Array]:
        """Return the arrays within flat ones, in the form in which they were given."""
        by_dtype = dict(zip(self._lengths, flats, strict=True))
        arrays = [
            by_dtype[dtype][start:stop].reshape(shape)
            for (dtype, start, stop), (_, shape) in zip(self._places, self._shapes, strict=True)
        ]
        return arrays if self.names is None else dict(zip(self.names, arrays, strict=True))


def _arrays(gradients: Gradients) -> list[Array]:
    given = list(gradients.values()) if isinstance(gradients, Mapping) else list(gradients)
    for array in given:
        if not isinstance(array, np.ndarray):
            raise UsageError(f"gradients: expected arrays, got {describe_other(array, 'gradient')}")
    return given


class PortionSum:
    """Takes the gradients of one rank's portions in one step, and returns the sum over all portions."""

    def __init__(
        self,
        portions: Portions,
        sums: PartialSums,
        layout: GradientLayout | None,
        pool: FlatPool,
        codec: StepCodec | None = None,
    ) -> None:
        self._portions = portions
        self._codec = codec
        self._encoded: dict[int, Array] = {}
        self._sums = sums
        self.layout = layout
        self._values: dict[Node, list[Array]] = {}
        self._losses: dict[Node, float] = {}
        self._pool = pool
        self._free: list[list[Array]] = []
        self._taken: list[Array] = []
        self._is_mean = False

    def pack(self, gradients: Gradients) -> list[Array]:
        """Return a copy of ``gradients`` as flat arrays.  Raises ``UsageError`` if their form differs."""
        layout = GradientLayout(gradients) if self.layout is None else self.layout
        flats = self._free.pop() if self._free else self._take(layout)
        try:
            layout.pack(gradients, flats)
        except UsageError:
            self._free.append(flats)
            raise
        self.layout = layout
        return flats

    def encode(self, portion: int, flats: list[Array]) -> None:
        """Apply the codec, if there is one, to the packed gradients of ``portion``."""
        if self._codec is not None:
            try:
                self._encoded[portion] = self._codec.encode(portion, self._trimmed(flats))
            except UsageError:
                self._free.append(flats)
                raise

    def _trimmed(self, flats: list[Array]) -> list[Array]:
        assert self.layout is not None
        return self.layout.trimmed(flats)

    def add(self, portion: int, flats: list[Array], loss: float) -> None:
        """Add a portion that was packed and checked."""
        leaf = range(portion, portion + 1)
        self._values[leaf], self._losses[leaf] = flats, loss
        self._sums.fold(portion, self._values, self._merge)
        self._sums.fold(portion, self._losses, lambda left, right: left + right)

    def _merge(self, left: list[Array], right: list[Array]) -> list[Array]:
        for mine, other in zip(left, right, strict=True):
            np.add(mine, other, out=mine)
        self._free.append(right)
        return left

    async def total(
        self, communicator: Communicator, *, is_mean: bool = False, bounds: Sequence[int] | None = None
    ) -> tuple[list[Array], float]:
        """Return the flat sums (or means) over all portions, and the sum of the losses; equal bits on all ranks.

        With ``bounds`` each rank gets only the range ``bounds[rank]`` to ``bounds[rank + 1]`` of the sums.
        """
        partials = [self._values[node] for node in self._sums.partials]
        loss = await self._total_loss(communicator)
        if self.layout is None:
            self.layout = await _layout_of_others(communicator, None)
        elif self._has_idle_ranks:
            await _layout_of_others(communicator, self.layout)
        self._is_mean = is_mean
        if self._codec is not None and self._codec.codec.is_less(self._portions):
            return [await self._total_encoded(communicator, self._codec, partials, bounds)], loss
        if bounds is not None:
            return [await self._own_total(communicator, [flats[0] for flats in partials], bounds)], loss
        spares, results = self._take(self.layout), self._take(self.layout)
        totals = []
        for number, (spare, result) in enumerate(zip(spares, results, strict=True)):
            totals.append(await self._total(communicator, [flats[number] for flats in partials], spare, result))
        return totals, loss

    def release(self) -> None:
        """Give all memory back; the result of ``total`` must not be used any more."""
        self._pool.give(self._taken)
        self._taken = []

    def _take(self, layout: GradientLayout) -> list[Array]:
        flats = layout.take(self._pool, self._portions.size)
        self._taken += flats
        return flats

    @property
    def _has_idle_ranks(self) -> bool:
        return self._portions.size > self._portions.count

    async def _total(self, communicator: Communicator, flats: list[Array], spare: Array, result: Array) -> Array:
        size, all_partials = self._portions.size, self._portions.all_partials
        if size == 1:
            return await self._finished(flats[0])
        if size == 2 and all(len(partials) == 1 for partials in all_partials):
            return await self._finished(await communicator.all_reduce(flats[0]))  # one addition has no order
        shown: dict[Node, Array] = {}
        for place in range(self._portions.rounds):
            mine = flats[place] if place < len(flats) else None
            if place == 0:
                into = spare
            elif place <= len(flats):
                into = flats[place - 1]  # which all ranks have received by now
            else:
                into = self._pool.take(spare.dtype, spare.size, spare.size)
                self._taken.append(into)
            shown |= await self._exchange(communicator, place, mine, into)
        part = await off_loop(partial(sum_tree, self._portions.root, shown, _add), nbytes=spare.nbytes)
        await communicator.all_gather(await self._finished(part), out=result.reshape(size, -1))
        return result

    async def _total_encoded(
        self, communicator: Communicator, codec: StepCodec, partials: list[list[Array]], bounds: Sequence[int] | None
    ) -> Array:
        """Return the sum, for which all ranks send all portions in their encoded form."""
        portions, rank = self._portions, communicator.rank
        assert self.layout is not None
        mine = [self._encoded[portion] for portion in portions.of(rank)]
        gathered = await communicator.all_gather_v(np.array(mine, np.uint8).reshape(-1, codec.codec.nbytes))
        shown = {node: flats[0] for node, flats in zip(self._sums.partials, partials, strict=True)}
        layout, free = self.layout, self._free

        def work() -> Array:
            for other in range(portions.size):
                if other != rank:
                    sums = PartialSums(portions, other)
                    for portion in portions.of(other):
                        flat = (free.pop() if free else self._take(layout))[0]
                        (content,) = layout.trimmed([flat])
                        codec.decode(portion, gathered[portion], content)
                        flat[content.size :] = 0
                        shown[range(portion, portion + 1)] = flat
                        sums.fold(portion, shown, self._merge_flat)
            return sum_tree(portions.root, shown, _add)

        total = await self._finished(await off_loop(work, nbytes=portions.count * codec.codec.nbytes))
        return total if bounds is None else total[bounds[rank] : bounds[rank + 1]]

    def _merge_flat(self, left: Array, right: Array) -> Array:
        np.add(left, right, out=left)
        self._free.append([right])
        return left

    async def _own_total(self, communicator: Communicator, flats: Sequence[Array], bounds: Sequence[int]) -> Array:
        """Return this rank's range of the sum; no rank has all of it."""
        rank, size = communicator.rank, communicator.size
        own = slice(bounds[rank], bounds[rank + 1])
        if size == 1:
            return await self._finished(flats[0][own])
        assert self.layout is not None
        counts, nothing = [bounds[other + 1] - bounds[other] for other in range(size)], self.layout.empty
        shown: dict[Node, Array] = {}
        for place in range(self._portions.rounds):
            nodes = [partials[place] for partials in self._portions.all_partials if place < len(partials)]
            has_one = place < len(flats)
            sent = flats[place][: bounds[-1]] if has_one else nothing
            rows, _ = await communicator.all_to_all_v(sent, counts if has_one else [0] * size)
            shown |= dict(zip(nodes, rows.reshape(len(nodes), -1), strict=True))
        nbytes = sum(array.nbytes for array in shown.values())
        return await self._finished(await off_loop(partial(sum_tree, self._portions.root, shown, _add), nbytes=nbytes))

    async def _finished(self, total: Array) -> Array:
        if self._is_mean:
            count = self._portions.count
            await off_loop(lambda: np.divide(total, count, out=total, casting="same_kind"), nbytes=total.nbytes)
        return total

    async def _exchange(
        self, communicator: Communicator, place: int, mine: Array | None, into: Array
    ) -> dict[Node, Array]:
        """Return this rank's part of partial number ``place`` of all ranks."""
        size = self._portions.size
        nodes = {rank: nodes[place] for rank, nodes in enumerate(self._portions.all_partials) if place < len(nodes)}
        part = into.size // size
        rows = into[: len(nodes) * part].reshape(len(nodes), part)
        if len(nodes) == size:
            assert mine is not None
            await communicator.all_to_all(mine.reshape(size, part), out=rows)
        else:
            sent = into[:0] if mine is None else mine
            await communicator.all_to_all_v(sent, [0 if mine is None else part] * size, out=rows.reshape(-1))
        return {node: rows[number] for number, node in enumerate(nodes.values())}

    async def _total_loss(self, communicator: Communicator) -> float:
        if self._portions.size == 1:
            return self._losses[self._portions.root]
        mine = np.zeros(self._portions.rounds)
        for place, node in enumerate(self._sums.partials):
            mine[place] = self._losses[node]
        gathered = (await communicator.all_gather(mine)).reshape(self._portions.size, -1)
        shown = {
            node: float(gathered[rank, place])
            for rank, nodes in enumerate(self._portions.all_partials)
            for place, node in enumerate(nodes)
        }
        return sum_tree(self._portions.root, shown, lambda left, right: left + right)


def _add(left: Array, right: Array) -> Array:
    return np.add(left, right, out=left)


async def _layout_of_others(communicator: Communicator, mine: GradientLayout | None) -> GradientLayout:
    """Return the layout; ranks without portions learn it from rank 0, which always has one."""
    described = mine.description if mine is not None and communicator.rank == 0 else None
    return GradientLayout.described(await communicator.broadcast_object(described))
