"""State of 3D-parallel training: saved in checkpoints, restored, and carried over to another configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from asyncpar.checkpoint import Piece, Wanted, load_checkpoint, save_checkpoint
from asyncpar.checkpoint.rank_state import describe_state, load_rank_state, pieces_of_rank
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.records import dataclass
from asyncpar.errors import UsageError
from asyncpar.hybrid.assembly import Assembly
from asyncpar.hybrid.model import ParallelModel
from asyncpar.nn.parameter import Array
from asyncpar.zero.share import StatePiece

_RUN, _USER, _REDUCTION = "run", "user", "reduction"
_WHAT = "what the reduction of gradients keeps between steps (residuals of compression, order of buckets)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Numbers of steps and of updates (without skipped steps), and the state of the loss scaler.

    ``reduction`` is what the reduction of gradients keeps on this rank, None in a checkpoint of another layout, and
    ``reductions`` the number of its last step.
    """

    steps: int
    updates: int
    scaler: Mapping[str, float | int]
    reduction: Mapping[str, Array] | None
    reductions: int


async def save(
    folder: Path,
    assembly: Assembly,
    model: ParallelModel,
    state: TrainingState,
    *,
    communicator: Communicator,
    extra: Mapping[str, Any] | None,
    keep: int | None,
) -> Path:
    """Save what all ranks hold, and return the folder of the checkpoint."""
    pieces = [
        Piece(name=one.parameter, kind=one.kind, slice=one.slice, flat=one.flat, array=one.array)
        for one in assembly.flow.pieces()
    ]
    reduction = dict(state.reduction or {})
    pieces += pieces_of_rank(communicator.rank, reduction)
    run = {
        "steps": state.steps,
        "updates": state.updates,
        "scaler": dict(state.scaler),
        "reductions": state.reductions,
    }
    saved = await save_checkpoint(
        folder,
        step=state.steps,
        pieces=pieces,
        model=model.identity,
        communicator=communicator,
        extra={
            _RUN: run,
            _USER: dict(extra or {}),
            _REDUCTION: describe_state(layout_of(assembly), reduction),
        },
        keep=keep,
    )
    return saved.path


def describe(assembly: Assembly) -> list[Wanted]:
    """Return what this rank needs of a checkpoint."""
    return [
        Wanted(name=one.parameter, kind=one.kind, slice=one.slice, flat=one.flat, dtype=one.array.dtype)
        for one in assembly.flow.pieces()
    ]


def layout_of(assembly: Assembly) -> str:
    """Return what must be equal for ranks to go on with what each has kept of the reduction of gradients."""
    return f"{assembly.groups.mapping.config.rank_order()}, {assembly.reduction}"


async def load(
    folder: Path, wanted: Sequence[Wanted], model: ParallelModel, assembly: Assembly, *, communicator: Communicator
) -> tuple[dict[tuple[str, str], Array], TrainingState, dict[str, Any]]:
    """Return arrays for what this rank holds, the state of the run, and what the user has saved with it."""
    loaded = await load_checkpoint(folder, wanted, model=model.identity, communicator=communicator)
    run = loaded.extra[_RUN]
    reduction = await load_rank_state(
        loaded,
        [extra.get(_REDUCTION) for extra in loaded.extras],
        layout=layout_of(assembly),
        model=model.identity,
        communicator=communicator,
        what=_WHAT,
    )
    arrays = {(one.name, one.kind): array.reshape(-1) for one, array in zip(wanted, loaded.arrays, strict=True)}
    state = TrainingState(
        steps=run["steps"],
        updates=run["updates"],
        scaler=run["scaler"],
        reduction=reduction,
        reductions=run.get("reductions", 0),
    )
    return arrays, state, loaded.extra[_USER]


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
