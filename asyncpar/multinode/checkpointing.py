"""Checkpoints: every rank saves what it owns, and any other layout can go on from that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncpar.checkpoint import Piece, Wanted, load_checkpoint, save_checkpoint
from asyncpar.checkpoint.rank_state import describe_state, load_rank_state, pieces_of_rank
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.records import dataclass
from asyncpar.multinode.registration import Registered

_RUN, _USER, _REDUCTION = "run", "user", "reduction"
_WHAT = "what the reduction of gradients keeps between steps (residuals of compression, order of buckets)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """Optimizer steps, and micro-steps in them."""

    steps: int
    micro_steps: int


async def save(
    folder: Path,
    known: Registered,
    state: TrainerProgress,
    *,
    world: Communicator,
    extra: Mapping[str, Any] | None,
    keep: int | None,
) -> Path:
    """Save what all ranks hold, and return the folder of the checkpoint."""
    pieces = [
        Piece(name=one.parameter, kind=one.kind, slice=one.slice, flat=one.flat, array=one.array)
        for one in await known.flow.pieces()
    ]
    reduction = known.flow.reduction_state()
    pieces += pieces_of_rank(world.rank, reduction)
    run = {"steps": state.steps, "micro_steps": state.micro_steps, "reductions": known.flow.reductions}
    saved = await save_checkpoint(
        folder,
        step=state.steps,
        pieces=pieces,
        model=_identity(known),
        communicator=world,
        extra={
            _RUN: run,
            _USER: dict(extra or {}),
            _REDUCTION: describe_state(known.reduction, reduction),
        },
        keep=keep,
    )
    return saved.path


async def load(folder: Path, known: Registered, *, world: Communicator) -> tuple[TrainerProgress, dict[str, Any]]:
    """Restore what all ranks hold; return the rest."""
    wanted = [
        Wanted(name=one.parameter, kind=one.kind, slice=one.slice, flat=one.flat, dtype=one.array.dtype)
        for one in await known.flow.pieces()
    ]
    loaded = await load_checkpoint(folder, wanted, model=_identity(known), communicator=world)
    run: dict[str, int] = loaded.extra[_RUN]
    reduction = await load_rank_state(
        loaded,
        [one.get(_REDUCTION) for one in loaded.extras],
        layout=known.reduction,
        model=_identity(known),
        communicator=world,
        what=_WHAT,
    )
    state = TrainerProgress(steps=run["steps"], micro_steps=run["micro_steps"])
    arrays = {(one.name, one.kind): array.reshape(-1) for one, array in zip(wanted, loaded.arrays, strict=True)}
    await known.flow.restore(arrays, step_count=state.steps)
    known.flow.restore_reduction(reduction, run.get("reductions", 0))
    return state, loaded.extra[_USER]


def _identity(known: Registered) -> dict[str, Any]:
    """Return what the model is known by."""
    return {"parameters": [[parameter.name, list(parameter.shape)] for parameter in known.parameters]}
