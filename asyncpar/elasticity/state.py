"""The state of a run: committed with a step, restored when one is aborted, compared, and sent to newcomers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.elasticity.buffers import Array, Buffered, KeptArray, SwappedArray
from asyncpar.elasticity.lineage import ArrayShape, checksums, state_digest
from asyncpar.elasticity.local_workers import momentum_name
from asyncpar.elasticity.plain import decode_plain
from asyncpar.elasticity.settings import run_settings
from asyncpar.elasticity.sharded import Sharded, Sharding
from asyncpar.elasticity.state_inputs import Parameters, check_memory, checked_optimizer, named_parameters
from asyncpar.elasticity.values import (
    UPDATE,
    PlainField,
    arguments_field,
    encode_all,
    extra_field,
    frozen_field,
    optimizer_field,
    rng_field,
)
from asyncpar.errors import UsageError
from asyncpar.hosts.lineage import Lineage, first_lineage
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers import MASTER, FlatRange, Optimizer
from asyncpar.nn.parameter import Parameter

_FROZEN = ", frozen"

Sums: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """Identity of a committed state: its lineage, its own digest, and the checksums of its arrays."""

    lineage: Lineage
    digest: bytes
    sums: Sums


class ElasticState:
    """Parameters, optimizers, random streams and values of a run.  Made by ``ElasticJob.state``.

    ``state["name"]`` is a value that was given by name; assign to it within a step to change one that is not a list,
    dict or object.  Values and states of an optimizer alternate between two arrays: read ``parameter.value`` anew in
    every step.  All other arrays remain the same objects, and may be changed in place within a step.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizers: Sequence[object] = (),
        rng: np.random.Generator | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        sharding: Sharding | None = None,
    ) -> None:
        self.parameters = named_parameters(parameters)
        self.optimizers: tuple[Optimizer, ...] = tuple(checked_optimizer(optimizer) for optimizer in optimizers)
        self.sharded = None if sharding is None else Sharded.of(sharding, self.parameters.values(), self.optimizers)
        """The part of the state that is cut into parts, by portion; None if there is none."""
        self._values: dict[str, Any] = {}
        self._arrays: dict[str, Buffered] = {}
        self._fields: dict[str, PlainField] = {}
        self._swapped: dict[int, list[SwappedArray]] = {}
        self._fills: dict[int, Callable[[slice], None]] = {}
        check_memory(self.parameters, self.optimizers)
        for number, optimizer in enumerate(self.optimizers):
            name = f"optimizer{number or ''}"
            if self.sharded is None or self.sharded.workers is None:  # otherwise each worker has its own
                self._fields[name] = optimizer_field(name, optimizer)
            self._fields[f"{name}{_FROZEN}"] = frozen_field(f"{name}{_FROZEN}", optimizer)
            self._add_optimizer(name, optimizer)
        for name, parameter in self.parameters.items():
            if name not in self._arrays and not (self.sharded is not None and self.sharded.holds(parameter)):
                array = stored_value(parameter) if isinstance(parameter, Parameter) else parameter
                self._add(KeptArray(name, array))
        if rng is not None:
            self._fields["rng"] = rng_field("rng", rng)
        for name, value in (extra or {}).items():
            self._add_extra(name, value)
        if self.sharded is not None and self.sharded.optimizer is not None:
            self._fields[UPDATE] = arguments_field(self.sharded.optimizer)
        self._check_part_names()
        self._committed = encode_all(self._fields)
        sums = _all_checksums((name, array.committed) for name, array in self._arrays.items())
        sums = {**sums, **self._part_sums}
        digest = self._digest(sums, self._committed)
        self._first = StateIdentity(first_lineage(digest), digest, sums)
        self._prepared: tuple[dict[str, bytes], asyncio.Future[Sums], Sums] | None = None
        self._identity: asyncio.Task[StateIdentity] | None = None
        self.step = 0
        """The number of committed steps."""
        self.settings: Mapping[str, str] = {} if sharding is None else run_settings(sharding, self.optimizers)
        """Settings that newcomers must share."""

    # -- making --------------------------------------------------------------------------------------------------------

    def _add(self, array: Buffered) -> None:
        if self._arrays.setdefault(array.name, array) is not array:
            raise UsageError(f"state: two arrays are named {array.name!r}; names must be unique")

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        swapped: list[SwappedArray] = []
        for flat in optimizer.ranges:
            parameter = flat.parameter
            if self.parameters.get(parameter.name) is not parameter:
                raise UsageError(
                    f"{name}: it moves {parameter.name!r}, which is not one of the parameters of the state"
                )
            if self.sharded is not None and self.sharded.holds(parameter):
                parameter.release_value()
                continue
            workers = None if self.sharded is None else self.sharded.workers
            show = parameter.restore_value if workers is None else workers.shown(parameter)
            value = SwappedArray(parameter.name, stored_value(parameter), show)
            states = [
                SwappedArray(f"{name}.{parameter.name}.{kind}", array, partial(_show, flat, kind))
                for kind, array in flat.arrays().items()
            ]
            swapped += [value, *states]
            if workers is not None:
                zeros = np.zeros_like(value.committed)
                swapped.append(SwappedArray(momentum_name(parameter.name), zeros, _show_no_owner))
            self._fills[id(flat)] = partial(_fill_all, states if flat.master is not None else [value, *states])
        for made in swapped:
            self._add(made)
        self._swapped[id(optimizer)] = swapped

    def _add_extra(self, name: str, value: Any) -> None:
        if name in self._fields or name in self._arrays:
            raise UsageError(f"{name}: the state has this name already; choose another")
        if isinstance(value, np.ndarray):
            self._add(KeptArray(name, value))
        self._values[name] = value
        if not isinstance(value, np.ndarray):
            self._fields[name] = extra_field(name, self._values)

    # -- the program's interface ---------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise UsageError(f"state: expected one of {sorted(self._values)}, got {name!r}")
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._fields or name not in self._values:
            raise UsageError(f"state: expected the name of a value, one of {sorted(self._values)}, got {name!r}")
        self._values[name] = value

    @property
    def frozen(self) -> list[str]:
        """The names of the parameters that are frozen in the committed state."""
        fields = (f"optimizer{number or ''}{_FROZEN}" for number in range(len(self.optimizers)))
        return [name for field in fields for name in decode_plain(self._committed[field])]

    @property
    def nbytes(self) -> int:
        """The number of bytes of all arrays, each counted once."""
        return sum(array.shape.nbytes for array in self._arrays.values())

    # -- one step ------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Make sure that everything that the program may change by itself can be undone."""
        await off_loop(self._synchronize_kept, nbytes=self._kept_bytes)

    def _synchronize_kept(self) -> None:
        for array in self._arrays.values():
            if isinstance(array, KeptArray):
                array.synchronize()

    @property
    def _kept_bytes(self) -> int:
        return sum(array.shape.nbytes for array in self._arrays.values() if isinstance(array, KeptArray))

    async def open(self, optimizer: Optimizer) -> None:
        """Let ``optimizer`` update the second buffers; called again in a step, it continues from the first update."""
        arrays = self._swapped.get(id(optimizer))
        if arrays is None:
            raise UsageError("optimizer: expected one that was given to job.state, got another")
        if any(array.is_changed for array in arrays):
            for flat in optimizer.ranges:
                flat.fill = None
            return
        for array in arrays:
            array.open()
        for flat in optimizer.ranges:
            flat.fill = self._fills[id(flat)]

    def withdraw(self, optimizer: Optimizer) -> None:
        """Restore everything as before ``open``: the update was refused before it began."""
        if all(flat.fill is not None for flat in optimizer.ranges):
            for array in self._swapped[id(optimizer)]:
                array.withdraw()

    def prepare(self) -> None:
        """Complete the changes of the step.  Raises ``UsageError`` naming a value that cannot be hashed."""
        values = encode_all(self._fields)
        changed = [array for array in self._arrays.values() if array.is_changed]
        contents = [(array.name, array.latest) for array in changed]
        summing = off_loop(
            partial(_all_checksums, contents),
            nbytes=sum(array.shape.nbytes for array in changed),
        )
        self._prepared = values, asyncio.ensure_future(summing), self._part_sums

    async def prepared_lineage(self) -> Lineage:
        """Return the lineage that a commit of the prepared changes leads to."""
        assert self._prepared is not None
        values, summing, part_sums = self._prepared
        parent = await self.identity()
        sums = {**parent.sums, **await asyncio.shield(summing), **part_sums}
        return parent.lineage.child(self._digest(sums, values))

    async def wait_for_sums(self) -> None:
        """Return when the prepared changes may be committed at once: arrays may change in the next step."""
        assert self._prepared is not None
        summing = self._prepared[1]
        if not summing.done() and self.has_kept_arrays:
            await asyncio.wait({summing})

    async def commit(self) -> None:
        """Keep the prepared changes.  The digest is computed later: see ``lineage``."""
        await self.wait_for_sums()
        assert self._prepared is not None
        values, summing, part_sums = self._prepared
        self._prepared = None
        self._committed = values
        self.step += 1
        for array in self._arrays.values():
            array.commit()
        if self.sharded is not None:
            self.sharded.commit()
        identity = self._identify(self._identity, summing, part_sums, values)
        self._identity = asyncio.create_task(identity, name="asyncpar digest")

    async def _identify(
        self,
        before: asyncio.Task[StateIdentity] | None,
        summing: asyncio.Future[Sums],
        part_sums: Sums,
        values: dict[str, bytes],
    ) -> StateIdentity:
        parent = self._first if before is None else await before
        sums = {**parent.sums, **await summing, **part_sums}
        digest = self._digest(sums, values)
        return StateIdentity(parent.lineage.child(digest), digest, sums)

    async def abort(self) -> None:
        """Restore the committed state."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            await asyncio.wait({prepared[1]})
        await off_loop(partial(_abort_all, self._arrays.values()), nbytes=self._kept_bytes)
        if self.sharded is not None:
            self.sharded.abort()
        for name, field in self._fields.items():
            field.restore(self._committed[name])

    # -- identity ------------------------------------------------------------------------------------------------------

    async def lineage(self) -> Lineage:
        """Return the lineage of the committed state."""
        return (await self.identity()).lineage

    def identity(self) -> Awaitable[StateIdentity]:
        """Return lineage, digest and checksums of the state that is committed at the time of the call."""
        return self.recalled_identity()()

    def recalled_identity(self) -> Callable[[], Awaitable[StateIdentity]]:
        """Return a function that returns ``identity`` of the currently committed state at any later time."""
        known, first = self._identity, self._first

        async def identity() -> StateIdentity:
            return first if known is None else await asyncio.shield(known)

        return identity

    def _digest(self, sums: Sums, values: Mapping[str, bytes]) -> bytes:
        arrays = [(array.shape, sums[name]) for name, array in self._arrays.items()]
        kinds = () if self.sharded is None else self.sharded.parts.kinds.values()
        return state_digest([*arrays, *((kind.shape, sums[kind.name]) for kind in kinds)], values)

    @property
    def _part_sums(self) -> Sums:
        """The checksums of parts that a commit would keep."""
        return {} if self.sharded is None else self.sharded.parts.next_sums

    def _check_part_names(self) -> None:
        for name in self._part_sums:
            if name in self._arrays or name in self._fields:
                raise UsageError(f"{name}: parts of the state have this name already; choose another")

    # -- snapshots -----------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """The arrays of the state, in order."""
        return tuple(array.shape for array in self._arrays.values())

    @property
    def values(self) -> Mapping[str, bytes]:
        """The committed values that are not arrays, encoded."""
        return self._committed

    def latest_array(self, name: str) -> Array:
        """Return the array of that name that a commit would keep."""
        return self._arrays[name].latest

    def committed_array(self, name: str) -> Array:
        """Return the committed array of that name; only the caller of ``adopt`` may write to it."""
        return self._arrays[name].committed

    def lend_all(self) -> dict[str, Array]:
        """Return all committed arrays by name; they are never written to again.

        Call it between two steps or within one, but if the state ``has_kept_arrays``, only within one that is not
        committed yet.
        """
        return {name: array.lend() for name, array in self._arrays.items()}

    @property
    def fresh_arrays(self) -> list[Array]:
        """Memory that may not have been touched yet, and that the next steps write to: see ``memory.populate``."""
        return [array for buffered in self._arrays.values() for array in buffered.fresh]

    @property
    def has_kept_arrays(self) -> bool:
        """Whether the program may change arrays by itself."""
        return any(isinstance(array, KeptArray) for array in self._arrays.values())

    def adopt(self, lineage: Lineage, values: Mapping[str, bytes], sums: Sums) -> bytes:
        """Go on from ``lineage``: its arrays were written into ``committed_array``, these are its other ``values``.

        ``sums`` has the current checksums of these arrays, and those of parts, which others have.  Returns the new
        digest of the state.
        """
        if set(values) != set(self._fields):
            raise UsageError(
                f"state: expected the values {sorted(self._fields)}, the other ranks have {sorted(values)}"
            )
        if self.sharded is not None:
            self.sharded.parts.adopt(sums)
        for name, field in self._fields.items():
            field.restore(values[name])
        self._committed = dict(values)
        sums = {**{name: sums[name] for name in self._arrays}, **self._part_sums}
        self._first = StateIdentity(lineage, self._digest(sums, self._committed), sums)
        self._identity = None
        self.step = lineage.step
        return self._first.digest

    async def close(self) -> None:
        """Undo changes that are not committed, and wait for background work."""
        if any(array.is_changed for array in self._arrays.values() if isinstance(array, SwappedArray)):
            await self.abort()
        if self._identity is not None:
            await asyncio.wait({self._identity})


def _show_no_owner(array: Array) -> None:
    """Do nothing: the array has no other owner to show it to."""


def _fill_all(arrays: Iterable[SwappedArray], part: slice) -> None:
    for array in arrays:
        array.fill(part)


def _abort_all(arrays: Iterable[Buffered]) -> None:
    for array in arrays:
        array.abort()


def _all_checksums(contents: Iterable[tuple[str, Array]]) -> Sums:
    return {name: checksums(content) for name, content in contents}


def _show(flat: FlatRange, kind: str, array: Array) -> None:
    if kind == MASTER:
        flat.master = array
    else:
        flat.states = {**flat.states, kind: array}
