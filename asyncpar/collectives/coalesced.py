"""Many arrays reduced as one: ``all_reduce_many``."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from asyncpar.collectives.algorithms.catalog import ARENA
from asyncpar.collectives.arrays import Array, Reduction, StagingPool, collective_reduction, reduction_for
from asyncpar.collectives.bundle import Bundle, Form, Section, check_arrays, cut, form_of, pack, sections_of, unpack
from asyncpar.collectives.engine import Engine, OperationPlan
from asyncpar.collectives.execute import Region, execute, region_of
from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import AlongBuffer, Plan, packed_segment
from asyncpar.collectives.protocol import Description, describe
from asyncpar.collectives.shared_memory.bundles import AtOnce, InChunks, arrange
from asyncpar.collectives.shared_memory.call import HostedOperation
from asyncpar.collectives.shared_memory.group import StepScratch
from asyncpar.collectives.shared_memory.hierarchical import Route, all_reduce_layout, run_all_reduce
from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.run_queue import Program

_NAME: Final = "all_reduce_many"
_SHOWN: Final = 4
"""Number of arrays that a description names; further ones are distinguished by a digest."""


class _SectionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one section, and its route through the arenas of several hosts."""

    section: Section
    reduction: Reduction
    layout: AlongBuffer
    messages: Plan
    route: Route | None


class AllReduceManyPlan(OperationPlan, frozen=True, kw_only=True):
    """Plans of all sections, and their arrangements in the slots of channels."""

    parts: tuple[Section, ...]
    sections: tuple[_SectionPlan, ...]
    payload: int
    arrangements: dict[Channel, AtOnce | InChunks] = msgspec.field(default_factory=dict)

    def arrangement(self, channel: Channel, scratch: StepScratch) -> AtOnce | InChunks:
        """Return the arrangement of the bundle in ``channel``."""
        found = self.arrangements.get(channel)
        if found is None:
            reductions = [section.reduction for section in self.sections]
            found = self.arrangements[channel] = arrange(channel, self.parts, reductions, scratch)
        return found


def all_reduce_many(
    engine: Engine, arrays: object, *, op: str, algorithm: str | None, key: str | None
) -> Coroutine[Any, Any, Any]:
    listed = check_arrays(arrays)
    form = form_of(listed)
    plan = engine.prepared(
        (_NAME, form.dtypes, tuple(form.shapes), op, algorithm), lambda: _prepare(engine, form, op, algorithm)
    )
    parts = plan.parts

    async def body(operation: Operation) -> list[Array]:
        bundle = Bundle(listed, parts)
        for section, flats in zip(plan.sections, bundle.flats, strict=True):
            workspace = partial(_Packed, operation.context.pool, section, flats, engine.size)
            route, messages, reduction = section.route, section.messages, section.reduction
            if route is None:
                await execute(operation, messages, workspace(True), reduction.combine)
            else:
                await run_all_reduce(operation, route, messages, workspace, reduction, engine.size)
        bundle.close()
        return listed

    def make(turn: Turn) -> Program:
        assert engine.arena is not None
        bundle = Bundle(listed, parts)
        yield from plan.arrangement(turn.channel, engine.arena.host.scratch).program(turn, bundle)
        bundle.close()

    if plan.is_in_arena:
        return engine.start_in_arena(_NAME, plan, make, body, key=key, result=listed, sends=plan.payload)
    kind = Operation if plan.sections[0].route is None else HostedOperation
    return engine.start(_NAME, plan.description, key, body, kind=kind)


class _Packed:
    """Workspace of a section: each piece is packed, sent, finished if needed, and unpacked."""

    def __init__(self, pool: StagingPool, section: _SectionPlan, flats: list[Array], size: int, finishes: bool) -> None:
        self._pool = pool
        self._plan = section
        self._flats = flats
        self._size = size
        self._finishes = finishes

    def open(self, piece: int) -> Sequence[Region]:
        section = self._plan.section
        start, stop = self._plan.layout.bounds(piece)
        memory = self._pool.take(stop - start, section.dtype)
        pack(section.range_of(start, stop).pieces(self._flats), memory)
        self._plan.reduction.load(memory, memory, self._size)
        return (region_of(memory),)

    def close(self, piece: int, regions: Sequence[Region]) -> None:
        section = self._plan.section
        memory = regions[0].array
        if self._finishes:
            self._plan.reduction.finish(memory, self._size)
        chosen = section.range_of(*self._plan.layout.bounds(piece))
        unpack(cut(memory, section.lengths(chosen)), chosen.pieces(self._flats))
        self._pool.give_back(memory)


def _prepare(engine: Engine, form: Form, op: str, wanted: str | None) -> AllReduceManyPlan:
    _check_op(op, form)
    sections = sections_of(form)
    payload = sum(section.nbytes for section in sections)
    algorithm = engine.algorithm("all_reduce", payload, wanted, arena=True)
    by_messages = engine.message_algorithm("all_reduce", payload, algorithm)
    plans = tuple(
        _prepare_section(engine, section, op, algorithm, by_messages, phase) for phase, section in enumerate(sections)
    )
    return AllReduceManyPlan(
        description=_described(form, op, algorithm),
        messages=plans[0].messages,
        parts=sections,
        sections=plans,
        payload=payload,
        is_in_arena=algorithm == ARENA,
    )


def _prepare_section(
    engine: Engine, section: Section, op: str, algorithm: str, by_messages: str, phase: int
) -> _SectionPlan:
    schedule = engine.schedule("all_reduce", by_messages)
    layout = all_reduce_layout(
        by_messages,
        count=section.count,
        chunks=schedule.chunks,
        itemsize=section.dtype.itemsize,
        segment=packed_segment(schedule.chunks),
        is_packed=True,
    )
    return _SectionPlan(
        section=section,
        reduction=collective_reduction(op if section.count else "max", section.dtype),
        layout=layout,
        messages=engine.bind(schedule, layout, phase=phase),
        route=engine.route(algorithm, layout, phase=phase),
    )


def _check_op(op: str, form: Form) -> None:
    """Raise unless every dtype supports ``op``, including those of arrays without elements."""
    dtypes = form.dtypes if isinstance(form.dtypes, tuple) else (form.dtypes,)
    for dtype in dict.fromkeys(dtypes) or (np.dtype(np.float32 if op == "mean" else np.uint8),):
        reduction_for(op, dtype)


def _described(form: Form, op: str, algorithm: str) -> Description:
    """Describe a call: name the first arrays, and distinguish all others by a digest."""
    count = len(form.shapes)
    dtypes = form.dtypes if isinstance(form.dtypes, tuple) else (form.dtypes,) * count
    shown = [
        f"{dtype.name}[{','.join(map(str, shape))}]"
        for dtype, shape in zip(dtypes[:_SHOWN], form.shapes[:_SHOWN], strict=True)
    ]
    if count > _SHOWN:
        digest = hash64([dtype.name for dtype in dtypes], form.shapes)
        shown.append(f"... {count} arrays, {digest:016x}")
    return describe(_NAME, (*shown, op), algorithm)
