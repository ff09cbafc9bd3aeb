"""What a checkpoint must hold of a rank: pieces of values and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncpar.config.slicing import TensorSlice
from asyncpar.errors import UsageError
from asyncpar.nn.optimizers import MASTER
from asyncpar.nn.parameter import Array
from asyncpar.zero.share import VALUE, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """The flat range ``flat`` of this rank's part ``slice`` of the tensor ``kind`` of a parameter.

    ``kind`` is ``value`` or a state's name.  ``array`` is flat, the engine's own, in the dtype that is computed in: of
    parameters in half precision, the values are the master values.
    """

    parameter: str
    kind: str
    slice: TensorSlice
    flat: tuple[int, int]
    array: Array

    def __str__(self) -> str:
        start, stop = self.flat
        return f"{self.kind} of {self.parameter}, values {start} to {stop} of {list(self.slice.local_shape)}"


def pieces_of(shares: Iterable[Share]) -> list[StatePiece]:
    """Return all that must be kept of ``shares``."""
    return [
        StatePiece(
            parameter=share.parameter.name,
            kind=kind,
            slice=share.parameter.slice,
            flat=(share.stretch.start, share.stretch.stop),
            array=array,
        )
        for share in shares
        for kind, array in _arrays(share).items()
    ]


def restore_pieces(shares: Iterable[Share], arrays: Mapping[tuple[str, str], Array]) -> None:
    """Write ``arrays``, by name of the parameter and kind, into ``shares``.

    Raises ``UsageError``, with nothing written, unless there is one for each piece, as long as it and of its dtype.
    """
    by_key = {(share.parameter.name, kind): share for share in shares for kind in _arrays(share)}
    for key, array in arrays.items():
        if key not in by_key:
            raise UsageError(f"arrays: expected pieces of this engine, got {key[1]} of {key[0]}")
        expected = _arrays(by_key[key])[key[1]]
        if array.size != expected.size or array.dtype != expected.dtype:
            raise UsageError(
                f"arrays: expected {expected.size} values of {expected.dtype} as {key[1]} of {key[0]}, "
                f"got {array.size} of {array.dtype}"
            )
    for name, kind in by_key.keys() - arrays.keys():
        raise UsageError(f"arrays: expected {kind} of {name}, which is missing")
    for key, share in by_key.items():
        share.restore(key[1], arrays[key].reshape(-1))


def _arrays(share: Share) -> dict[str, Array]:
    states = {kind: array for kind, array in share.stretch.arrays().items() if kind != MASTER}
    return {VALUE: share.stretch.exact(share.value), **states}
