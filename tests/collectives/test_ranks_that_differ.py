"""Ranks that pass different arguments, or call something else, all hear of it: on every path, at every size.

Generated: operations x arguments that must agree x sizes x who differs x keyed or in order, over each transport, in one
world per transport.  A sample runs by default; ``--soak`` runs every case.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import Name, ReduceOp
from asyncpar.errors import AsyncparError, OperationMismatch, PeerCancelled, UsageError
from asyncpar.testing import local_world, run_virtual
from tests.collectives.conftest import OpenRanks
from tests.soak import chosen, is_soak

SIZES = {"tiny": 3, "arena": 30_000, "large": 400_000}
SAMPLES = {"virtual": 200, "inproc": 20, "shm": 20, "tcp": 15, "grpc": 10, "hosts": 15}
LIMIT = chosen(120, soak=7200)
SECONDS = 2.0
"""Virtual time within which all ranks know."""

PATIENCE = 30.0
"""Seconds after which ranks are taken for hung, on a real clock."""


@dataclass(frozen=True)
class Arguments:
    """What one rank passes."""

    count: int
    dtype: str = "f8"
    shape: tuple[int, ...] = ()
    op: ReduceOp = "sum"
    root: int = 0
    algorithm: Name | None = None
    key: str | None = None
    x: Any = field(default=None, compare=False)
    """Passed instead of an array if it is not None."""

    def array(self, *leading: int) -> Any:
        return np.ones((*leading, self.count, *self.shape), self.dtype) if self.x is None else self.x


Call = Callable[[Communicator, Arguments], Awaitable[Any]]


def _scatter(c: Communicator, a: Arguments) -> Awaitable[Any]:
    is_root = c.rank == a.root
    x = a.array(c.size) if is_root else None
    return c.scatter(x, root=a.root, out=None if is_root else a.array(), algorithm=a.algorithm, key=a.key)


def _all_to_all_v(c: Communicator, a: Arguments) -> Awaitable[Any]:
    counts = [a.count // c.size] * (c.size - 1)
    return c.all_to_all_v(a.array(), [*counts, a.count - sum(counts)], key=a.key)


def _objects(c: Communicator, a: Arguments) -> list[Any] | None:
    return [_value(a)] * c.size if c.rank == a.root else None


def _value(a: Arguments) -> Any:
    return "x" * a.count if a.x is None else a.x


CALLS: dict[str, tuple[Call, str]] = {
    "all_reduce": (lambda c, a: c.all_reduce(a.array(), a.op, algorithm=a.algorithm, key=a.key), "op alg"),
    "all_reduce_many": (
        lambda c, a: c.all_reduce_many([a.array(), np.ones(2)], a.op, algorithm=a.algorithm, key=a.key),
        "op alg",
    ),
    "reduce": (
        lambda c, a: c.reduce(a.array(), a.op, root=a.root, algorithm=a.algorithm, key=a.key),
        "op root alg",
    ),
    "reduce_scatter": (lambda c, a: c.reduce_scatter(a.array(), a.op, algorithm=a.algorithm, key=a.key), "op alg"),
    "all_gather": (lambda c, a: c.all_gather(a.array(), algorithm=a.algorithm, key=a.key), "alg"),
    "all_gather_v": (lambda c, a: c.all_gather_v(a.array(), algorithm=a.algorithm, key=a.key), "any-count"),
    "gather": (lambda c, a: c.gather(a.array(), root=a.root, algorithm=a.algorithm, key=a.key), "root alg"),
    "scatter": (_scatter, "root alg"),
    "broadcast": (lambda c, a: c.broadcast(a.array(), root=a.root, algorithm=a.algorithm, key=a.key), "root alg"),
    "all_to_all": (lambda c, a: c.all_to_all(a.array(c.size), algorithm=a.algorithm, key=a.key), "alg"),
    "all_to_all_v": (_all_to_all_v, "any-count"),
    "barrier": (lambda c, a: c.barrier(algorithm=a.algorithm, key=a.key), "nothing alg"),
    "broadcast_object": (lambda c, a: c.broadcast_object(_value(a), root=a.root, key=a.key), "object root"),
    "gather_object": (lambda c, a: c.gather_object(_value(a), root=a.root, key=a.key), "object root"),
    "scatter_object": (lambda c, a: c.scatter_object(_objects(c, a), root=a.root, key=a.key), "object root"),
    "all_gather_object": (lambda c, a: c.all_gather_object(_value(a), key=a.key), "object"),
}
"""How to call an operation, and what must agree besides dtype, count and shape."""


@dataclass(frozen=True)
class Case:
    """One rank calls ``other`` with ``theirs`` where the others call ``name`` with ``ours``."""

    name: str
    other: str
    ours: Arguments
    theirs: Arguments
    who: int
    is_refused: bool = False
    text: str = ""


def _variants(name: str, ours: Arguments, names: Sequence[str]) -> list[tuple[str, str, Arguments, bool]]:
    """Return what differs, the operation that the other rank calls, what it passes, and whether that is refused."""
    agree = CALLS[name][1].split()
    found: list[tuple[str, str, Arguments, bool]] = []
    if "op" in agree:
        found.append(("op", name, replace(ours, op="max"), False))
        found.append(("unknown op", name, replace(ours, op=Name("median")), True))
    if "root" in agree:
        found.append(("root", name, replace(ours, root=1), False))
        found.append(("other root", name, replace(ours, root=2), False))
        found.append(("unknown root", name, replace(ours, root=99), True))
    if "alg" in agree:
        found += [("algorithm", name, replace(ours, algorithm=Name(other)), False) for other in names if ours.algorithm]
        found.append(("unknown algorithm", name, replace(ours, algorithm=Name("nonsense")), True))
    if not {"object", "nothing"} & set(agree):
        found.append(("dtype", name, replace(ours, dtype="f4"), False))
        found.append(("shape", name, replace(ours, shape=(2,)), False))
        if "any-count" not in agree:
            found.append(("count", name, replace(ours, count=ours.count + 1), False))
        found.append(("a list", name, replace(ours, x=[1.0, 2.0]), True))
    if "object" in agree:
        found.append(("not plain data", name, replace(ours, x=object()), True))
    if ours.algorithm is None:
        found += [("kind", other, ours, False) for other in CALLS if other != name]
    return found


def _cases(communicators: Sequence[Communicator], transport: str) -> list[Case]:
    cases: list[Case] = []
    for name in CALLS:
        for size, count in SIZES.items():
            known = communicators[0].algorithms(name)
            bases = [Arguments(count), *(Arguments(count, algorithm=one) for one in known[1:][-1:])]
            variants = [(ours, *variant) for ours in bases for variant in _variants(name, ours, known[:-1])]
            for ours, what, other, theirs, is_refused in variants:
                for who in range(3):
                    is_silent = theirs.x is not None and "root" in CALLS[name][1] and who != 0 and "object" not in name
                    if (is_silent and name == "scatter") or _passes_no_object(name, theirs, who):
                        continue
                    cases.append(
                        Case(name, other, ours, theirs, who, is_refused, f"{transport}: {name} {size}: {what} on {who}")
                    )
    return cases


def _passes_no_object(name: str, theirs: Arguments, who: int) -> bool:
    return name in ("broadcast_object", "scatter_object") and theirs.x is not None and who != theirs.root


def _chosen(cases: list[Case], transport: str) -> list[Case]:
    if is_soak():
        return cases
    return random.Random(transport).sample(cases, SAMPLES[transport])


async def _outcome(communicator: Communicator, case: Case, key: str | None) -> Any:
    is_other = communicator.rank == case.who
    call, _ = CALLS[case.other if is_other else case.name]
    try:
        return await call(communicator, replace(case.theirs if is_other else case.ours, key=key))
    except AsyncparError as error:
        return error


async def _check(communicators: Sequence[Communicator], case: Case, number: int, seconds: float) -> None:
    key = f"key {number}" if number % 3 == 0 else None
    try:
        async with asyncio.timeout(seconds):
            outcomes = await asyncio.gather(*(_outcome(c, case, key) for c in communicators))
    except TimeoutError as error:
        raise AssertionError(f"{case.text}: it takes more than {seconds} s") from error
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, AsyncparError), f"{case.text}: rank {rank} got {type(outcome).__name__}"
        message = str(outcome)
        if case.is_refused and rank == case.who:
            assert type(outcome) is UsageError, f"{case.text}: {outcome!r}"
        elif case.is_refused:
            assert isinstance(outcome, PeerCancelled), f"{case.text}: {outcome!r}"
            assert f"rank {rank}: " in message, f"{case.text}: {message}"
            assert f"the call was refused on rank {case.who}: {outcomes[case.who]}" in message, (
                f"{case.text}: {message}"
            )
        else:
            assert isinstance(outcome, OperationMismatch), f"{case.text}: {outcome!r}"
            named = re.findall(r"rank (\d+) calls", message)
            assert len(named) == 2, f"{case.text}: {message}"
            assert str(case.who) in named, f"{case.text}: {message}"
    sums = await asyncio.gather(*(c.all_reduce(np.full(3, 1.0)) for c in communicators))
    assert [float(x[0]) for x in sums] == [float(len(communicators))] * len(communicators), case.text


async def _check_all(communicators: Sequence[Communicator], transport: str, seconds: float) -> None:
    for number, case in enumerate(_chosen(_cases(communicators, transport), transport)):
        await _check(communicators, case, number, seconds)


@pytest.mark.timeout(LIMIT)
def test_without_a_network(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            await _check_all(ranks.communicators, "virtual", SECONDS)

    run_virtual(main())


@asynccontextmanager
async def _world(transport: str) -> AsyncIterator[list[Communicator]]:
    hosts = {"hosts": ["a", "b", "a", "b"]} if transport == "hosts" else {}
    size, lane = (4, None) if hosts else (3, transport)
    async with local_world(size, transport=lane, **hosts) as nodes:  # type: ignore[arg-type]
        yield [node.world for node in nodes]


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp", "grpc", "hosts"])
async def test_over_lanes(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.collectives.long_waits.PROBE_AFTER", 0.1)  # virtual time: waits are as long as ever
    async with _world(transport) as communicators:
        await _check_all(communicators, transport, PATIENCE)


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("name", ["broadcast", "scatter"])
async def test_two_ranks_with_two_roots_both_learn_of_it(name: str, transport: str) -> None:
    async with local_world(2, transport=transport) as nodes:
        communicators = [node.world for node in nodes]
        for count in (0, 1):
            case = Case(name, name, Arguments(count), Arguments(count, root=1), 1, text=f"{name} of {count}")
            await _check(communicators, case, 1, PATIENCE)
