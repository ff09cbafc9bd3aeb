"""Another configuration for training that runs: what of a rank's state goes over, or why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.zero.pieces import StatePiece

Place: TypeAlias = tuple[str, str]
"""A parameter, and the kind of its state."""


async def carry_over(
    held: Sequence[StatePiece], wanted: Sequence[StatePiece], communicator: Communicator
) -> dict[Place, Array]:
    """Return the arrays of ``held`` for each of ``wanted``, flat; all ranks of ``communicator`` call it.

    Raises ``UsageError``, on every rank, where some rank does not hold all of what it will hold.
    """
    there = {(piece.parameter, piece.kind): piece for piece in held}
    lacking = next((piece for piece in wanted if not _fits(there.get((piece.parameter, piece.kind)), piece)), None)
    reason = "" if lacking is None else f"{lacking.kind} of {lacking.parameter}"
    reasons = await communicator.all_gather_object(reason, key="update_config/reasons", wanted=str)
    for rank, found in enumerate(reasons):
        if found:
            raise UsageError(
                f"config: expected one in which every rank has what it has now, but rank {rank} would need another "
                f"part of {found}, or has none; save a checkpoint and load it in a coordinator of the new configuration"
            )
    return {place: there[place].array.reshape(-1) for place in ((one.parameter, one.kind) for one in wanted)}


def _fits(held: StatePiece | None, wanted: StatePiece) -> bool:
    return held is not None and (held.slice, held.flat) == (wanted.slice, wanted.flat)
