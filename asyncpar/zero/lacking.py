"""Corrections that compression owes to reduced gradients, and their transfer to another layout of ranks.

Theory of operation.  Each rank keeps, for its part of a parameter, a residual: the part that its encoded gradients have
left out so far.  Alone it means nothing, but the weighted sum of all replicas' residuals of the same values is the
amount that the reduced gradients of these values lack.  It does not depend on the number of ranks, on which values each
holds, or on which ranks encode, so it can be transferred: the weighted residuals are added up over the replicas that
had them, and ranks of the new layout turn the sum into residuals, by their own weights (``GradientFlow.owe``).

Ranks that hold copies of the same values without being replicas of each other have the same residuals, or one of them
has all: of these only one is counted.  A checkpoint identifies them by what they are a part of; between groups the
first rank that has any passes it to the others, so copies stay equal bit by bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.checkpoint import Wanted, load_checkpoint
from asyncpar.checkpoint.loading import Loaded
from asyncpar.checkpoint.rank_state import wanted_of_rank
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.zero.flow import GradientFlow, ReductionState

Lacking: TypeAlias = dict[str, NDArray[np.float64]]
"""The amount that the reduced gradient of each parameter of this rank lacks, flat."""

_MOST_NAMES: Final = 8

_log = logging.getLogger(__name__)


def describe_parts(flow: GradientFlow, state: ReductionState) -> dict[str, Any]:
    """Return the description of ``state`` to save in this rank's ``extra``, so that another layout can use it."""
    names = {name for name, _ in state.parts.values()}
    return {
        "replica": flow.replica,
        "parts": {key: [name, weight] for key, (name, weight) in state.parts.items()},
        "slices": {one.name: asdict(one.slice) for one in flow.parameters if one.name in names},
        "lost": list(state.lost),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """An array of a rank that saved, and the parameter of which it is a part."""

    rank: int
    index: int
    size: int
    dtype: str
    slice: TensorSlice
    weight: float

    @property
    def wanted(self) -> Wanted:
        return wanted_of_rank(self.rank, [(self.size, self.dtype)], first=self.index)[0]

    def weighted(self, array: NDArray[Any]) -> NDArray[np.float64]:
        return array.astype(np.float64).reshape(self.slice.local_shape) * self.weight


async def load_lacking(
    loaded: Loaded,
    arrays: Sequence[Sequence[Sequence[Any]]],
    described: Sequence[Mapping[str, Any]],
    parameters: Sequence[Parameter],
    *,
    model: Mapping[str, Any],
    communicator: Communicator,
) -> Lacking:
    """Return the amount that the ranks of a ``loaded`` checkpoint lacked of ``parameters``; all ranks call it.

    ``arrays`` are key, size and dtype of all arrays of each of them, ``described`` the results of ``describe_parts``.
    """
    total: Lacking = {}
    replicas = {one["replica"] for one in described if one["parts"]}
    for replica in sorted(replicas):  # one at a time: together they may be too much
        sources = _sources_of(replica, arrays, described)
        mine = [(one, sources[one.name]) for one in parameters if one.name in sources]
        wanted = [source.wanted for _, found in mine for source in found]
        again = await load_checkpoint(loaded.path, wanted, model=model, communicator=communicator)
        add = partial(_add_up, total, mine, iter(again.arrays))
        await off_loop(add, nbytes=sum(array.nbytes for array in again.arrays))
    return total


def _sources_of(
    replica: int, arrays: Sequence[Sequence[Sequence[Any]]], described: Sequence[Mapping[str, Any]]
) -> dict[str, list[_Source]]:
    """Return all arrays of a replica by parameter, one of several copies."""
    found: dict[str, dict[TensorSlice, _Source]] = {}
    for rank, one in enumerate(described):
        if one["replica"] != replica:
            continue
        for index, (key, size, dtype) in enumerate(arrays[rank]):
            if key in one["parts"]:
                name, weight = one["parts"][key]
                part = _slice_of(one["slices"][name])
                source = _Source(rank=rank, index=index, size=size, dtype=dtype, slice=part, weight=weight)
                found.setdefault(name, {}).setdefault(part, source)
    return {name: list(of_name.values()) for name, of_name in found.items()}


def _slice_of(fields: Mapping[str, Any]) -> TensorSlice:
    return TensorSlice(
        global_shape=tuple(fields["global_shape"]),
        view_shape=tuple(fields["view_shape"]),
        dim=fields["dim"],
        start=fields["start"],
        stop=fields["stop"],
        local_shape=tuple(fields["local_shape"]),
    )


def _add_up(total: Lacking, mine: Sequence[tuple[Parameter, list[_Source]]], arrays: Iterator[NDArray[Any]]) -> None:
    """Add the arrays of one replica to ``total``, each at the position of its values in this rank's parameter."""
    for parameter, sources in mine:
        weighted = [(source.slice, source.weighted(next(arrays))) for source in sources]
        if [part for part, _ in weighted] == [parameter.slice]:
            own = weighted[0][1]
        else:
            whole = np.zeros(parameter.slice.global_shape)
            for part, values in weighted:
                part.put(values, whole)
            own = parameter.slice.cut(whole)
        known = total.get(parameter.name)
        total[parameter.name] = own.reshape(-1) if known is None else known + own.reshape(-1)


async def gather_lacking(state: ReductionState, parameters: Sequence[Parameter], groups: ProcessGroups) -> Lacking:
    """Return the amount that all ranks with their ``state`` lack of ``parameters``, which do not move; all call it."""
    total: Lacking = {}
    for key, (name, weight) in state.parts.items():
        total[name] = state.arrays[key].astype(np.float64) * weight
    sizes = {parameter.name: parameter.size for parameter in parameters}
    for name in await _known_in(groups.dp, list(total)):
        own = total.get(name)
        total[name] = await groups.dp.all_reduce(np.zeros(sizes[name]) if own is None else own)
    replicated = {one.name: one.name for one in parameters if one.placement.replicated is not None}
    tied = {one.placement.tied: one.name for one in parameters if one.placement.tied is not None}
    await _show_copies(groups.tp, replicated, total)
    if groups.embedding is not None:
        await _show_copies(groups.embedding, tied, total)
    return total


async def _known_in(group: Communicator, names: list[str]) -> list[str]:
    """Return all names of ranks of ``group``, in one order."""
    gathered = await group.all_gather_object(names, wanted=list[str])
    return list(dict.fromkeys(name for of_rank in gathered for name in of_rank))


async def _show_copies(group: Communicator, copies: Mapping[str, str], total: Lacking) -> None:
    """Send all ranks of ``group`` what its first rank with any lacks of each copy, by their common name for it."""
    if group.size == 1:
        return
    held = {copy: total[name] for copy, name in copies.items() if name in total}
    gathered = await group.all_gather_object({copy: x.size for copy, x in held.items()}, wanted=dict[str, int])
    first = {copy: rank for rank in reversed(range(group.size)) for copy in gathered[rank]}
    for copy in sorted(first):
        own = held.get(copy)
        x = np.zeros(gathered[first[copy]][copy]) if own is None else own
        total[copies[copy]] = await group.broadcast(x, root=first[copy])


def take_over(flow: GradientFlow, lacking: Mapping[str, Array], *, lost: Sequence[str] = ()) -> None:
    """Make ``flow`` compensate for ``lacking``; warn about parameters that it cannot, and about ``lost`` ones."""
    names = [*flow.owe(lacking), *lost]
    if names and flow.replica == 0:
        more = len(names) - _MOST_NAMES
        _log.warning(
            "in the new layout nothing makes up for what compression still owes, or keeps what a codec has learned, "
            "so this is dropped: %s%s",
            ", ".join(names[:_MOST_NAMES]),
            f" and {more} more" if more > 0 else "",
        )
