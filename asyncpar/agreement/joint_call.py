"""Calls on tensors that all ranks make together, with a check that the calls and tensors match.

Theory of operation.  A call on tensors is two collectives, and both take their places in the order of operations when
it is made: an exchange of each rank's intention, in rows of a fixed size, and the one that moves elements, which is
awaited only if all rows agree.  A rank whose arguments are wrong takes both places, too: its row gives the reason.  So
every rank learns which ranks differ and how, no rank waits for one that has given up, and afterwards all ranks have
used equally many places, so the group stays usable.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.call import WatchedCall
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, OperationMismatch, PeerCancelled, UsageError

R = TypeVar("R")
T = TypeVar("T")

Extent: TypeAlias = tuple[int, int]
"""Two numbers in which ranks may differ, mostly the start and end of a part."""

_HEADER: Final = struct.Struct("<?7x8sqq")
_TEXT_BYTES: Final = 256
_ROW_BYTES: Final = _HEADER.size + _TEXT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint(Generic[R, T]):
    """A call that all ranks make together.

    ``line`` describes it, equal on all ranks; ``extent`` is this rank's part.  ``begin`` starts the collective, and
    must not raise for wrong arguments; ``check`` receives the parts of all ranks and raises ``UsageError`` unless they
    match, with the same outcome on all; ``finish`` makes the result.
    """

    line: str
    begin: Callable[[], Coroutine[Any, Any, R]]
    finish: Callable[[R, Sequence[Extent]], T]
    extent: Extent = (0, 0)
    check: Callable[[Sequence[Extent]], None] = lambda _: None


def join(communicator: Communicator, name: str, make: Callable[[], Joint[R, T]]) -> Coroutine[Any, Any, T]:
    """Start the call ``name`` that ``make`` describes; it runs when the returned coroutine is awaited.

    Raises, on every rank: ``OperationMismatch`` naming two ranks and their calls, and if ``make`` raises ``UsageError``
    on some, that error there and ``PeerCancelled`` with its text on the others.
    """
    try:
        joint = make()
    except UsageError as error:
        return _refuse(communicator, name, error)
    exchange = communicator.all_gather(_row(joint.line, joint.extent))
    try:
        moving = joint.begin()
    except BaseException:
        exchange.close()
        raise

    async def body() -> T:
        try:
            rows = _read_rows(await exchange)
            _check_rows(communicator, name, rows)
            extents = [row.extent for row in rows]
            joint.check(extents)
        except BaseException:
            moving.close()
            raise
        return joint.finish(await moving, extents)

    def give_up() -> None:
        exchange.close()
        moving.close()

    return _named(body(), name, give_up)


def then(call: Coroutine[Any, Any, R], finish: Callable[[R], T]) -> Coroutine[Any, Any, T]:
    """Return ``call``, which has its place in the order of operations, with ``finish`` applied to its result."""

    async def body() -> T:
        return finish(await call)

    return _named(body(), getattr(call, "__qualname__", "call"), call.close)


def _refuse(communicator: Communicator, name: str, error: UsageError) -> Coroutine[Any, Any, Any]:
    """Return a call that notifies the others of ``error``, and raises it."""
    exchange = communicator.all_gather(_row(f"{type(error).__name__}: {error}", is_error=True))
    placeholder = communicator.barrier()

    async def body() -> Any:
        try:
            await exchange
        except AsyncparError as failure:
            error.add_note(f"the other ranks could not be notified: {failure}")
        finally:
            placeholder.close()
        raise error

    def give_up() -> None:
        exchange.close()
        placeholder.close()

    return _named(body(), name, give_up)


def _named(body: Coroutine[Any, Any, T], name: str, give_up: Callable[[], None]) -> Coroutine[Any, Any, T]:
    shown: Any = body
    shown.__qualname__ = name  # the name that Python reports if it is never awaited
    return WatchedCall(body, give_up)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallRow:
    """Description of a rank's call: ``text`` may be cut off, ``digest`` covers all of it."""

    is_error: bool
    digest: bytes
    extent: Extent
    text: str


def _row(line: str, extent: Extent = (0, 0), *, is_error: bool = False) -> Array:
    text = line.encode(errors="replace")
    digest = hashlib.sha256(text).digest()[:8]
    shown = text if len(text) <= _TEXT_BYTES else text[: _TEXT_BYTES - 3] + b"..."
    content = _HEADER.pack(is_error, digest, *extent) + shown
    return np.frombuffer(content.ljust(_ROW_BYTES, b"\0"), np.uint8)


def _read_rows(rows: Array) -> list[_CallRow]:
    found = []
    for row in rows:
        content = row.tobytes()
        is_error, digest, *extent = _HEADER.unpack_from(content)
        text = content[_HEADER.size :].rstrip(b"\0").decode(errors="ignore")
        found.append(_CallRow(is_error=is_error, digest=digest, extent=(extent[0], extent[1]), text=text))
    return found


def _check_rows(communicator: Communicator, name: str, rows: Sequence[_CallRow]) -> None:
    me = f"rank {communicator.ranks[communicator.rank]}: {name}"
    for rank, row in zip(communicator.ranks, rows, strict=True):
        if row.is_error:
            raise PeerCancelled(
                f"{me}: rank {rank} cannot take part: {row.text}", rank=rank, operation=name, cause=row.text
            )
    for rank, row in zip(communicator.ranks, rows, strict=True):
        if row.digest != rows[0].digest:
            raise OperationMismatch(
                f"{me}: expected the same call on all ranks, but where rank {communicator.ranks[0]} has "
                f"{rows[0].text}, rank {rank} has {row.text}",
                call=rows[communicator.rank].text,
            )
