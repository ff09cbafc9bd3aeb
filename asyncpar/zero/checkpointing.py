"""Checkpoints of a gradient flow: values, optimizer states, and the state of reductions between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpar.checkpoint import Piece, Wanted, load_checkpoint, save_checkpoint
from asyncpar.checkpoint.rank_state import describe_state, load_rank_state, pieces_of_rank
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.zero.flow import GradientFlow, ReductionState
from asyncpar.zero.lacking import Lacking, describe_parts, load_lacking, take_over
from asyncpar.zero.share import StatePiece

_RUN, _USER, _REDUCTION, _NUMBER = "run", "user", "reduction", "reductions"
_SKIPPED, _PARTS = "skipped", "parts"
_WHAT = "what the reduction of gradients keeps between steps (residuals of compression, what codecs have learned)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFlow:
    """The requested part of a checkpoint on this rank.

    ``arrays`` are flat, by parameter and kind.  ``run`` and ``extra`` were saved under these names.  ``reduction`` is
    None if ranks reduce in another layout than those that saved: then ``lacking`` is the amount that those lacked,
    summed over all of them.  ``skipped`` are updates in which parameters of any rank were frozen.
    """

    arrays: dict[tuple[str, str], Array]
    run: dict[str, Any]
    extra: dict[str, Any]
    reduction: ReductionState | None
    lacking: Lacking
    skipped: dict[str, int]

    def restore_reduction(self, flow: GradientFlow) -> None:
        """Restore the saved reduction state into ``flow``; warn about parts that it cannot compensate."""
        flow.restore_reduction(self.reduction)
        if self.reduction is None:
            take_over(flow, self.lacking)


async def save_flow(
    folder: Path,
    flow: GradientFlow,
    *,
    step: int,
    run: Mapping[str, Any],
    layout: str,
    model: Mapping[str, Any],
    communicator: Communicator,
    extra: Mapping[str, Any] | None,
    keep: int | None,
) -> Path:
    """Save the state of all ranks of ``communicator``, and return the folder of the checkpoint.

    ``run`` are numbers of the run and ``extra`` is the user's own: JSON values, equal on all ranks.  ``layout``
    describes how gradients are reduced; ``model`` distinguishes the model from others.  See
    ``asyncpar.checkpoint.save_checkpoint``.
    """
    pieces = [
        Piece(name=one.parameter, kind=one.kind, slice=one.slice, flat=one.flat, array=one.array)
        for one in flow.pieces()
    ]
    reduction = flow.reduction_state()
    saved = await save_checkpoint(
        folder,
        step=step,
        pieces=pieces + pieces_of_rank(communicator.rank, reduction.arrays),
        model=model,
        communicator=communicator,
        extra={
            _RUN: {**run, _NUMBER: reduction.number},
            _USER: dict(extra or {}),
            _REDUCTION: describe_state(layout, reduction.arrays),
            _PARTS: describe_parts(flow, reduction),
            _SKIPPED: dict(flow.skipped),
        },
        keep=keep,
    )
    return saved.path


def wanted_by(flow: GradientFlow) -> list[Wanted]:
    """Return the parts of a checkpoint that this rank needs."""
    return [
        Wanted(name=one.parameter, kind=one.kind, slice=one.slice, flat=one.flat, dtype=one.array.dtype)
        for one in flow.pieces()
    ]


async def load_flow(
    folder: Path,
    wanted: Sequence[Wanted],
    parameters: Sequence[Parameter],
    *,
    layout: str,
    model: Mapping[str, Any],
    communicator: Communicator,
) -> LoadedFlow:
    """Load this rank's part of the latest checkpoint in ``folder``, of ``parameters``; all ranks call it.

    Raises, on all of them, the errors of ``asyncpar.checkpoint.load_checkpoint``.
    """
    loaded = await load_checkpoint(folder, wanted, model=model, communicator=communicator)
    run: dict[str, Any] = loaded.extra[_RUN]
    described = [one.get(_REDUCTION) for one in loaded.extras]
    parts = [one[_PARTS] for one in loaded.extras if _PARTS in one]
    has_parts = len(parts) == len(loaded.extras)  # absent from checkpoints of earlier versions
    kept = await load_rank_state(
        loaded,
        described,
        layout=layout,
        model=model,
        communicator=communicator,
        what=_WHAT,
        lost={key for one in parts for key in one["lost"]} if has_parts else None,
    )
    lacking: Lacking = {}
    if kept is None and has_parts:
        arrays = [[] if one is None else one["arrays"] for one in described]
        lacking = await load_lacking(loaded, arrays, parts, parameters, model=model, communicator=communicator)
    return LoadedFlow(
        arrays={(one.name, one.kind): array.reshape(-1) for one, array in zip(wanted, loaded.arrays, strict=True)},
        run=run,
        extra=loaded.extra[_USER],
        skipped={name: count for one in loaded.extras for name, count in one.get(_SKIPPED, {}).items()},
        reduction=None if kept is None else ReductionState(arrays=kept, number=run.get(_NUMBER, 0)),
        lacking=lacking,
    )


async def carry_over(
    held: Sequence[StatePiece], wanted: Sequence[StatePiece], communicator: Communicator
) -> dict[tuple[str, str], Array]:
    """Return the arrays of ``held`` for each of ``wanted``, flat, by parameter and kind; all ranks call it.

    Raises ``UsageError`` on every rank of ``communicator`` if some rank does not hold all that it will hold afterwards.
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
